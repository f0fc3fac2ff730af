"""The vocabulary head in chunks: the sums and gradients of plain autograd, in every shape, and through the agent."""

from __future__ import annotations

import pytest
import torch
from agent_samples import make_agent, make_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from agentft import losses
from agentft.data.batch import Batch, collate, split
from agentft.errors import ModelError
from agentft.losses import COMPONENTS, NO_TARGET
from agentft.models.vocab_head import VocabTargets, VocabTerms, checkpointed_terms, plain_head, vocab_terms

SCALES = (0.7, 0.3)


def case(
    seed: int, n: int, vocab: int, call_tokens: int, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor, Tensor], VocabTargets]:
    """Random hidden states, weight, bias and targets; some labels are missing, some advantages are below the floor."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()

    labels = torch.randint(0, vocab, (n,), generator=generator)
    labels[torch.rand(n, generator=generator) < 0.2] = NO_TARGET
    advantages = torch.zeros(n)
    at = torch.randperm(n, generator=generator)[:call_tokens]
    advantages[at] = torch.randn(len(at), generator=generator) + 0.01
    targets = VocabTargets(
        labels=labels,
        weights=torch.rand(n, generator=generator),
        tokens=torch.randint(0, vocab, (n,), generator=generator),
        advantages=advantages,
        entropy_bonus=0.1,
    )
    return (draw(n, 12), draw(vocab, 12, scale=1.5), draw(vocab)), targets


def largest(tensor: Tensor) -> float:
    """The largest magnitude, at least 1: what float32 tolerances are relative to."""
    return max([1.0, *tensor.abs().reshape(-1).tolist()])


def whole(tensors: tuple[Tensor, Tensor, Tensor], targets: VocabTargets, cap: float | None) -> VocabTerms:
    """The same with all logits at once, by the loss functions themselves."""
    hidden, weight, bias = tensors
    logits = hidden @ weight.t() + bias
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    code = losses.code_sum(logits, targets.labels, targets.weights * (targets.labels != NO_TARGET))
    policy = losses.policy_sum(logits, targets.tokens, targets.advantages, targets.entropy_bonus)
    return VocabTerms(total=SCALES[0] * code + SCALES[1] * policy, code=code, policy=policy)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(0, 40),
    vocab=st.integers(2, 70),
    calls=st.integers(0, 40),
    chunk=st.integers(1, 50),
    cap=st.sampled_from([None, 3.0, 30.0]),
)
def test_sums_and_gradients_are_those_of_all_logits_at_once(
    seed: int, n: int, vocab: int, calls: int, chunk: int, cap: float | None
) -> None:
    tensors, targets = case(seed, n, vocab, min(calls, n), torch.float32)
    expected = whole(tensors, targets, cap)
    found = vocab_terms(*tensors, targets, scales=SCALES, cap=cap, chunk_tokens=chunk)
    for name in ("total", "code", "policy"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-6, atol=2e-5)
    gradients = torch.autograd.grad(found.total, tensors)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected.total, tensors), strict=True):
        torch.testing.assert_close(
            ours,
            theirs,
            rtol=1e-5,
            atol=1e-6
            * max(
                1.0,
                float(
                    theirs.abs().max(),
                ),
            )
            if theirs.numel()
            else 0,
        )


@pytest.mark.parametrize("cap", [None, 4.0])
@pytest.mark.parametrize("calls", [0, 4, 9])
def test_gradients_in_double_precision_are_the_slopes(cap: float | None, calls: int) -> None:
    tensors, targets = case(3, 9, 17, calls, torch.float64)

    def total() -> Tensor:
        return vocab_terms(*tensors, targets, scales=SCALES, cap=cap, chunk_tokens=4).total

    gradients = torch.autograd.grad(total(), tensors)
    step = 1e-6
    for tensor, gradient in zip(tensors, gradients, strict=True):
        flat, slopes = tensor.data.view(-1), []
        for i in range(flat.numel()):
            flat[i] += step
            up = total().item()
            flat[i] -= 2 * step
            slopes.append((up - total().item()) / (2 * step))
            flat[i] += step
        torch.testing.assert_close(
            gradient.reshape(-1), torch.tensor(slopes, dtype=torch.float64), rtol=1e-5, atol=1e-7
        )


def test_the_recomputed_form_gives_the_same() -> None:
    tensors, targets = case(5, 23, 31, 6, torch.float32)
    hidden, weight, bias = tensors
    expected = whole(tensors, targets, None)
    found = checkpointed_terms(lambda rows: rows @ weight.t() + bias, hidden, targets, scales=SCALES, chunk_tokens=5)
    torch.testing.assert_close(found.total, expected.total)
    gradients = torch.autograd.grad(found.total, tensors)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected.total, tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_upstream_factors_scale_the_gradient_and_a_second_backward_is_refused() -> None:
    tensors, targets = case(7, 11, 19, 3, torch.float32)
    plain = torch.autograd.grad(vocab_terms(*tensors, targets, chunk_tokens=4).total, tensors)
    total = vocab_terms(*tensors, targets, chunk_tokens=4).total
    for ours, once in zip(torch.autograd.grad(total * 0.25, tensors, retain_graph=True), plain, strict=True):
        torch.testing.assert_close(ours, 0.25 * once)
    with pytest.raises(ModelError, match="twice"):
        torch.autograd.grad(total, tensors)


def test_without_gradients_nothing_is_kept() -> None:
    tensors, targets = case(9, 11, 19, 3, torch.float32)
    expected = whole(tensors, targets, None)
    with torch.no_grad():
        found = vocab_terms(*tensors, targets, scales=SCALES, chunk_tokens=4)
    torch.testing.assert_close(found.total, expected.total.detach())
    assert not found.total.requires_grad
    frozen = vocab_terms(tensors[0], tensors[1].detach(), None, targets, scales=SCALES, chunk_tokens=4)
    (gradient,) = torch.autograd.grad(frozen.total, tensors[:1])  # a frozen head: hidden states only
    logits = tensors[0] @ tensors[1].detach().t()
    code = losses.code_sum(logits, targets.labels, targets.weights * (targets.labels != NO_TARGET))
    policy = losses.policy_sum(logits, targets.tokens, targets.advantages, targets.entropy_bonus)
    (theirs,) = torch.autograd.grad(SCALES[0] * code + SCALES[1] * policy, tensors[:1])
    torch.testing.assert_close(gradient, theirs, rtol=1e-5, atol=1e-6)


def test_bfloat16_autocast_is_as_close_as_bfloat16_is() -> None:
    tensors, targets = case(11, 37, 53, 8, torch.float32)
    expected = torch.autograd.grad(whole(tensors, targets, None).total, tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = vocab_terms(*tensors, targets, scales=SCALES, chunk_tokens=8)
    assert found.total.dtype == torch.float32
    for ours, theirs in zip(torch.autograd.grad(found.total, tensors), expected, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - theirs).norm() / theirs.norm()) < 0.02


def test_only_a_bare_matrix_is_multiplied_past_its_module() -> None:
    head = nn.Linear(4, 9)
    assert plain_head(head)
    head.register_forward_hook(lambda module, inputs, output: output)
    assert not plain_head(head)
    assert not plain_head(nn.Sequential(nn.Linear(4, 9)))


def batch_of(count: int) -> Batch:
    batch = collate(make_samples(count))
    batch["policy_weight"][0, 20:24] = 0.5
    batch["policy_weight"][1, 12:20] = -0.7
    return batch


@pytest.mark.parametrize("preset", ["tiny-glm", "tiny-kimi"])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_agent_has_the_same_losses_and_gradients(preset: str, hooked: bool, tied: bool) -> None:
    agent = make_agent(preset)
    head = agent.backbone.get_output_embeddings()
    if tied:
        head.weight = agent.backbone.get_input_embeddings().weight
    if hooked:
        head.register_forward_hook(lambda module, inputs, output: output * 1.5)
    agent.loss_weights = {name: 0.2 + 0.1 * i for i, name in enumerate(COMPONENTS)}
    seen = []
    for chunk in (0, 7, 4096):
        agent.vocab_chunk_tokens = chunk
        agent.zero_grad(set_to_none=True)
        parts: dict[str, float] = dict.fromkeys((*COMPONENTS, "total"), 0.0)
        for part in split(batch_of(5), 2):
            outputs = agent(part)
            assert ("logits" in outputs) == (chunk == 0)
            found = agent.loss(outputs, part)
            found["total"].backward()
            parts = {name: value + found[name].item() for name, value in parts.items()}
        seen.append((parts, {name: p.grad.clone() for name, p in agent.named_parameters() if p.grad is not None}))
    (parts, gradients), *others = seen
    for other_parts, other_gradients in others:
        assert other_parts == pytest.approx(parts, rel=2e-6, abs=2e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                other_gradients[name], gradient, rtol=1e-5, atol=1e-6 * largest(gradient), msg=name
            )


def test_nothing_trained_still_touches_the_head() -> None:
    agent, batch = make_agent(), batch_of(3)
    agent.vocab_chunk_tokens = 16
    batch["labels"][:] = NO_TARGET
    batch["policy_weight"][:] = 0
    (part,) = split(batch, 8)
    agent.loss(agent(part), part)["total"].backward()
    gradient = agent.backbone.get_output_embeddings().weight.grad
    assert gradient is not None
    assert not gradient.any()
