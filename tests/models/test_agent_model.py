"""The agent: one pass, heads at their anchors, loss by hand, nothing learned from nothing, and it does learn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from agent_samples import FAST, make_agent, make_samples
from torch import Tensor

from agentft.config.schema import LossConfig, OptimizerConfig
from agentft.data.batch import Batch, collate, split
from agentft.losses import COMPONENTS, NO_TARGET
from agentft.models.agent_model import CompositeLoss, parameter_groups
from agentft.models.heads import HEADS
from agentft.schedules import TrainTime


def batch_of(count: int = 4) -> Batch:
    batch = collate(make_samples(count))
    batch["policy_weight"][0, 20:24] = 0.5
    return batch


@pytest.fixture(scope="module")
def agent():
    return make_agent()


def test_logits_are_those_of_the_backbone_at_trained_positions(agent) -> None:
    batch = batch_of()
    outputs = agent(batch)
    full = agent.vocabulary_logits(outputs["hidden"])
    rows, columns = outputs["next_at"].unbind(1)
    torch.testing.assert_close(outputs["logits"], full[rows, columns - 1])
    trained = (batch["labels"][:, 1:] != NO_TARGET) | (batch["policy_weight"][:, 1:] != 0)
    assert len(rows) == int(trained.sum())


def test_code_loss_is_the_plain_next_token_loss(agent) -> None:
    batch = batch_of()
    outputs = agent(batch)
    full = agent.vocabulary_logits(outputs["hidden"])[:, :-1]
    expected = F.cross_entropy(full.reshape(-1, full.shape[-1]), batch["labels"][:, 1:].reshape(-1))
    torch.testing.assert_close(agent.loss(outputs, batch)["code"], expected)


def test_heads_read_their_own_anchor(agent) -> None:
    batch = batch_of()
    outputs = agent(batch)
    row, column = batch["outcome_at"][2].tolist()
    torch.testing.assert_close(outputs["reward"][2:3], agent.heads.reward(outputs["hidden"][row, column][None]))
    row, column = batch["tool_at"][1].tolist()
    torch.testing.assert_close(outputs["tool"][1:2], agent.heads.tool(outputs["hidden"][row, column][None]))


def test_total_is_the_weighted_sum(agent) -> None:
    batch = batch_of()
    agent.loss_weights = CompositeLoss(LossConfig()).weights(TrainTime(batch=60, batches_per_epoch=10))
    parts = agent.loss(agent(batch), batch)
    expected = sum(agent.loss_weights[name] * parts[name] for name in COMPONENTS)
    torch.testing.assert_close(parts["total"], expected)
    assert agent.loss_weights["code"] == pytest.approx(0.68)


@pytest.mark.parametrize("preset", ["tiny-glm", "tiny-kimi"])
def test_a_batch_without_any_target_gives_zero_everywhere_and_touches_every_parameter(preset: str) -> None:
    agent, batch = make_agent(preset), batch_of()
    batch["labels"][:] = NO_TARGET
    batch["policy_weight"][:] = 0
    batch["tool_target"][:] = NO_TARGET
    batch["outcome_mask"][:] = 0
    for at, *beside in (("intent_at", "intent_target"), ("cursor_at", "cursor_target", "cursor_view")):
        for key in (at, *beside):
            batch[key] = batch[key][:0]
    (part,) = split(batch, 8)
    losses = agent.loss(agent(part), part)
    losses["total"].backward()
    assert all(value.item() == 0.0 for value in losses.values())
    for name, parameter in agent.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, torch.zeros_like(parameter.grad)), name


def test_policy_gradient_reaches_call_tokens_only(agent) -> None:
    batch = batch_of()
    outputs = agent(batch)
    outputs["logits"].retain_grad()
    losses = agent.loss(outputs, batch)
    (gradient,) = torch.autograd.grad(losses["policy"], outputs["logits"])
    touched = gradient.abs().sum(-1) > 0
    at = outputs["next_at"]
    assert torch.equal(touched, batch["policy_weight"][at[:, 0], at[:, 1]] != 0)
    assert int(touched.sum()) == 4


def test_the_policy_target_is_what_was_written_even_where_nothing_is_imitated(agent) -> None:
    batch = batch_of()
    batch["labels"][:] = NO_TARGET
    agent.entropy_bonus, bonus = 0.0, agent.entropy_bonus
    outputs = agent(batch)
    at = outputs["next_at"]
    assert at.tolist() == [[0, 20], [0, 21], [0, 22], [0, 23]]
    chosen = outputs["logits"].log_softmax(-1).gather(1, batch["input_ids"][0, 20:24, None])
    torch.testing.assert_close(agent.loss(outputs, batch)["policy"], -(0.5 * chosen).sum() / 4)
    agent.entropy_bonus = bonus


def test_statistics_add_up_over_microbatches(agent) -> None:
    batch = batch_of(6)
    agent.reset_statistics()
    whole = agent.loss(agent(batch), batch)
    agent.reset_statistics()
    for part in split(batch, 2):
        agent.loss(agent(part), part)
    for name in COMPONENTS:
        total, count = agent.statistics[name].tolist()
        assert total / count == pytest.approx(whole[name].item(), rel=1e-4), name
    agent.reset_statistics()


def test_evaluation_metrics_are_exact_means(agent) -> None:
    batch = batch_of(5)
    metrics = agent.get_metrics(is_train=False)
    assert agent.get_metrics(is_train=True) == {}
    with torch.no_grad():
        expected = agent.loss(agent(batch), batch)
        for part in split(batch, 2):
            outputs = agent.eval_forward(part)
            for metric in metrics.values():
                agent.update_metric(part, outputs, metric)
    for name, metric in metrics.items():
        assert metric.compute().item() == pytest.approx(expected[name].item(), rel=1e-4), name


def test_predictions_are_probabilities_and_pixels(agent) -> None:
    batch = batch_of()
    said = agent.predictions(agent(batch))
    torch.testing.assert_close(said["tool_probs"].sum(-1), torch.ones(len(batch["tool_at"])))
    for name in ("intent_probs", "outcome"):
        assert ((said[name] >= 0) & (said[name] <= 1)).all(), name
    assert said["cursor"].shape == (len(batch["cursor_at"]), 3)


def test_groups_hold_every_parameter_once_with_its_own_rate(agent) -> None:
    config = OptimizerConfig()
    groups = {group["name"]: group for group in parameter_groups(agent, config)}
    listed = [id(p) for group in groups.values() for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in agent.parameters())
    assert {name: groups[name]["lr"] for name in HEADS} == {
        "intent": 1e-4,
        "tool": 5e-5,
        "reward": 2e-5,
        "cursor": 3e-5,
    }
    assert groups["backbone"]["lr"] == 5e-5
    assert groups["backbone_no_decay"]["weight_decay"] == 0.0
    assert all(p.ndim == 1 for p in groups["backbone_no_decay"]["params"])


def test_weight_decay_means_what_it_means_for_adamw() -> None:
    from composer.optim import DecoupledAdamW

    config = OptimizerConfig(backbone_lr=0.01, weight_decay=0.5)
    agent = make_agent()
    optimizer = DecoupledAdamW(parameter_groups(agent, config))
    weight = agent.backbone.lm_head.weight
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before * (1 - 0.01 * 0.5))


@pytest.mark.parametrize("preset", ["tiny-glm", "tiny-kimi"])
def test_bfloat16_on_a_cpu_stays_close_and_keeps_float32_gradients(preset: str) -> None:
    agent, batch = make_agent(preset), batch_of()
    with torch.no_grad():
        expected = agent.loss(agent(batch), batch)
    agent.cpu_bfloat16 = True
    outputs = agent(batch)
    losses = agent.loss(outputs, batch)
    losses["total"].backward()
    assert outputs["logits"].dtype == torch.bfloat16
    assert losses["total"].dtype == torch.float32
    assert agent.backbone.lm_head.weight.grad.dtype == torch.float32
    for name in COMPONENTS:
        assert losses[name].item() == pytest.approx(expected[name].item(), rel=0.02, abs=0.02), name


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny-glm", "tiny-kimi"])
def test_it_learns_a_handful_of_sessions_by_heart(preset: str) -> None:
    torch.manual_seed(0)
    agent = make_agent(preset)
    optimizer = torch.optim.AdamW(parameter_groups(agent, FAST))
    (batch,) = split(collate(make_samples(4)), 8)
    first: dict[str, Tensor] = {}
    for _ in range(30):
        losses = agent.loss(agent(batch), batch)
        first = first or losses
        optimizer.zero_grad()
        losses["total"].backward()
        optimizer.step()
    for name in ("code", "intent", "tool", "cursor", "reward"):
        assert losses[name].item() < 0.35 * first[name].item(), (name, first[name].item(), losses[name].item())
