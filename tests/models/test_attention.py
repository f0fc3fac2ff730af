"""Rows without padding: sessions end to end in one row cannot see each other, and nothing but the speed changes."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from agent_samples import make_agent, make_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config
from transformers.models.glm4_moe import Glm4MoeConfig

from agentft.config.schema import FeedbackPositionsConfig, ModelConfig
from agentft.data.batch import Batch, collate
from agentft.errors import ModelError
from agentft.models import attention
from agentft.models.backbone import build_backbone, checkpoint_activations, decoder_of, hidden_states

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def make_batch() -> Batch:
    """Eight sessions with feedback positions, anchors of every head and policy weights."""
    batch = collate(make_samples(8))
    batch["policy_weight"][:, 30:34] = torch.linspace(-1, 2, 8)[:, None]
    return batch


@given(LENGTHS)
def test_block_mask_shows_a_token_its_own_session_up_to_itself(lengths: list[int]) -> None:
    mask = attention.block_mask(lengths, torch.float32, torch.device("cpu"))
    owner = [session for session, length in enumerate(lengths) for _ in range(length)]
    for query, of_query in enumerate(owner):
        for key, of_key in enumerate(owner):
            seen = of_query == of_key and key <= query
            assert mask[0, 0, query, key] == (0 if seen else torch.finfo(torch.float32).min)


@settings(deadline=None, max_examples=40)
@given(LENGTHS, st.sampled_from([1, 2]), st.sampled_from([None, 1, 3]), st.integers(0, 1000))
def test_attention_by_segment_is_attention_with_the_block_mask(
    lengths: list[int], groups: int, window: int | None, seed: int
) -> None:
    torch.manual_seed(seed)
    total, module = sum(lengths), torch.nn.Module()
    module.num_key_value_groups = groups  # type: ignore[assignment]
    query = torch.randn(1, 2 * groups, total, 8, requires_grad=True)
    key, value = (torch.randn(1, 2, total, width, requires_grad=True) for width in (8, 4))
    mask = attention.block_mask(lengths, torch.float32, torch.device("cpu"))
    if window is not None:
        place = torch.arange(total)
        mask = mask.masked_fill(place <= place[:, None] - window, torch.finfo(torch.float32).min)
    keys, values = (states.repeat_interleave(groups, 1) for states in (key, value))
    dense = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=0.3).transpose(1, 2)
    got, _ = attention.sdpa_by_segment(
        module, query, key, value, None, scaling=0.3, segment_lengths=lengths, sliding_window=window
    )
    torch.testing.assert_close(got, dense, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(got)
    for ours, theirs in zip(
        torch.autograd.grad((got * weights).sum(), (query, key, value)),
        torch.autograd.grad((dense * weights).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("changed", [0, 3, 7])
def test_changing_one_session_leaves_the_logits_of_the_others_bit_for_bit(implementation: Any, changed: int) -> None:
    agent, batch = make_agent("tiny-glm", attention=implementation), make_batch()
    agent.unpadded = True
    with torch.no_grad():
        before = agent.vocabulary_logits(agent(batch)["hidden"])
        batch["input_ids"][changed] = (batch["input_ids"][changed] + 7) % 512
        after = agent.vocabulary_logits(agent(batch)["hidden"])
    for row, length in enumerate(batch["lengths"].tolist()):
        same = torch.equal(before[row, :length], after[row, :length])
        assert same == (row != changed), row


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("preset", ["tiny-glm", "tiny-kimi"])
def test_losses_and_gradients_are_those_of_padded_rows(preset: str, implementation: Any) -> None:
    agent, batch = make_agent(preset, attention=implementation), make_batch()
    results = []
    for unpadded in (False, True):
        agent.unpadded = unpadded
        agent.zero_grad(set_to_none=True)
        loss = agent.loss(agent(batch), batch)
        loss["total"].backward()
        results.append((loss, {name: p.grad for name, p in agent.named_parameters()}))
    (padded, gradients), (loss, own) = results
    for name, value in padded.items():
        assert value != 0, name
        torch.testing.assert_close(loss[name], value, atol=1e-5, rtol=1e-5, msg=name)
    for name, gradient in gradients.items():
        assert gradient is not None, name
        torch.testing.assert_close(own[name], gradient, atol=1e-5, rtol=0, msg=name)


def test_checkpointed_layers_know_their_segments_in_backward_too() -> None:
    batch, gradients = make_batch(), []
    for checkpointed in (False, True):
        agent = make_agent("tiny-glm")
        agent.unpadded = True
        if checkpointed:
            checkpoint_activations(agent.backbone)
            agent.train()
        agent.loss(agent(batch), batch)["total"].backward()
        gradients.append([p.grad for p in agent.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_bfloat16_on_a_cpu_is_as_close_as_it_is_with_padding() -> None:
    agent, batch = make_agent("tiny-glm"), make_batch()
    with torch.no_grad():
        exact = agent.loss(agent(batch), batch)["total"]
        agent.cpu_bfloat16, agent.unpadded = True, True
        got = agent.loss(agent(batch), batch)["total"]
    assert got == pytest.approx(float(exact), rel=5e-3)


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
ARCHITECTURES = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL),
    "glm4_moe": Glm4MoeConfig(**SMALL, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "mistral, window 8": MistralConfig(**SMALL, sliding_window=8),
    "gemma3, window 8": Gemma3TextConfig(
        **SMALL, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_hands_segments_on(name: str, tmp_path: Any) -> None:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(ARCHITECTURES[name]).save_pretrained(tmp_path)
    positions = FeedbackPositionsConfig(enabled=False)
    backbone = build_backbone(ModelConfig(path=str(tmp_path), feedback_positions=positions), 64, 0).eval()
    lengths = torch.tensor([20, 11, 3])
    ids = torch.randint(0, 64, (3, 20))
    places = torch.arange(20).expand(3, 20)
    with torch.no_grad():
        padded = hidden_states(backbone, ids, places)
        got = hidden_states(backbone, ids, places, lengths)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(got[row, :length], padded[row, :length], atol=2e-5, rtol=1e-4)
        assert not got[row, length:].any(), "padding is not computed"


def test_a_decoder_that_does_not_hand_segments_on_fails_instead_of_mixing_sessions() -> None:
    backbone = make_agent("tiny-glm").backbone
    inputs = attention.segments(backbone, [3, 5], torch.device("cpu"))
    del inputs["segment_lengths"]
    with pytest.raises(RuntimeError, match="mask"):
        decoder_of(backbone)(input_ids=torch.zeros(1, 8, dtype=torch.int64), use_cache=False, **inputs)


def test_flash_attention_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(ModelError, match="flash_attention_2 cannot run here") as caught:
        build_backbone(ModelConfig(preset="tiny-glm", attention="flash_attention_2"), 64, 0)
    assert "model.attention=sdpa" in str(caught.value)


def varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor, max_seqlen_q: int, **options: Any
) -> torch.Tensor:
    """What flash_attn_varlen_func computes, [N, heads, D], by its documentation; in half precision as it must be."""
    assert {q.dtype, k.dtype, v.dtype} <= {torch.float16, torch.bfloat16}
    assert q.shape[-1] == v.shape[-1]
    assert cu_seqlens_q.dtype == torch.int32
    ends = cu_seqlens_q.tolist()
    assert max_seqlen_q == max(b - a for a, b in itertools.pairwise(ends))
    assert options["causal"]
    out = []
    for start, end in itertools.pairwise(ends):
        length, (left, right) = end - start, options["window_size"]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        if left >= 0:
            assert right == 0
            hidden |= torch.ones(length, length, dtype=torch.bool).tril(-left - 1)
        mask = torch.zeros(length, length, dtype=q.dtype).masked_fill_(hidden, float("-inf"))
        queries, keys, values = (states[start:end].transpose(0, 1)[None] for states in (q, k, v))
        part = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=options["softmax_scale"], enable_gqa=True
        )
        out.append(part[0].transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 4])
def test_the_variable_length_kernel_is_called_as_its_documentation_says(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """With a stand-in that computes the same: here is no GPU. Values narrower than keys are those of DeepSeek-V3."""
    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = varlen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    torch.manual_seed(1)
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    query, key, value = (torch.randn(1, *shape) for shape in ((4, 17, 8), (2, 17, 8), (2, 17, 6)))
    options: dict[str, Any] = {"scaling": 0.4, "segment_lengths": (9, 1, 7), "sliding_window": window}
    got, _ = attention.flash_by_segment(module, query, key, value, None, **options)
    expected, _ = attention.sdpa_by_segment(module, query, key, value, None, **options)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=3e-2, rtol=3e-2)
