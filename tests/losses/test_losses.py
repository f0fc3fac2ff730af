"""Loss components: values against hand-computed ones, and no NaN where nothing is to be learned."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from agentft import losses


def empty_sums(width: int = 7) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Each component without a single target: (sum, the prediction it touches)."""

    def fresh(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, requires_grad=True)

    none = torch.full((3,), losses.NO_TARGET)
    code, policy, tool_none = fresh(3, width), fresh(3, width), fresh(3, width)
    intent, tool, cursor, reward, masked = fresh(0, 12), fresh(0, 18), fresh(0, 3), fresh(0), fresh(3)
    return {
        "code": (losses.code_sum(code, none, torch.zeros(3)), code),
        "policy": (losses.policy_sum(policy, torch.zeros(3, dtype=torch.int64), torch.zeros(3), 0.01), policy),
        "intent": (losses.intent_sum(intent, torch.zeros(0, 12)), intent),
        "tool": (losses.tool_sum(tool, torch.zeros(0, dtype=torch.int64)), tool),
        "tool, none known": (losses.tool_sum(tool_none, none), tool_none),
        "cursor": (losses.cursor_sum(cursor, torch.zeros(0, 3), torch.ones(0, 4)), cursor),
        "reward": (losses.reward_sum(reward, torch.zeros(0), torch.zeros(0)), reward),
        "reward, all masked": (losses.reward_sum(masked, torch.zeros(3), torch.zeros(3)), masked),
    }


@pytest.mark.parametrize("name", list(empty_sums()))
def test_no_target_adds_exactly_zero(name: str) -> None:
    total, prediction = empty_sums()[name]
    total.backward()
    assert total.item() == 0.0
    assert prediction.grad is not None
    assert torch.equal(prediction.grad, torch.zeros_like(prediction.grad))


def test_code_weights_each_token() -> None:
    logits, labels = torch.randn(4, 9), torch.tensor([1, 2, losses.NO_TARGET, 5])
    each = F.cross_entropy(logits[[0, 1, 3]], labels[[0, 1, 3]], reduction="none")
    total = losses.code_sum(logits, labels, torch.tensor([1.0, 1.2, 9.0, 0.5]))
    assert torch.allclose(total, each[0] + 1.2 * each[1] + 0.5 * each[2])


def test_policy_raises_rewarded_tokens_and_lowers_punished_ones() -> None:
    logits = torch.zeros(3, 5, requires_grad=True)
    losses.policy_sum(logits, torch.tensor([1, 2, 3]), torch.tensor([1.0, -0.5, 0.0]), 0.0).backward()
    assert logits.grad is not None
    assert logits.grad[0, 1] < 0 < logits.grad[1, 2], "descending raises the first and lowers the second"
    assert torch.equal(logits.grad[2], torch.zeros(5)), "a token without advantage is left alone"


def test_policy_entropy_counts_call_tokens_only() -> None:
    logits = torch.zeros(2, 8)
    advantages = torch.tensor([1.0, 0.0])
    plain = losses.policy_sum(logits, torch.tensor([0, 0]), advantages, 0.0)
    with_bonus = losses.policy_sum(logits, torch.tensor([0, 0]), advantages, 0.5)
    assert with_bonus.item() == pytest.approx(plain.item() - 0.5 * math.log(8), rel=1e-6)


def test_cursor_is_measured_in_cells_whatever_the_zoom() -> None:
    def loss(zoom: float) -> float:
        view = torch.tensor([[40.0, zoom, 20.0, 8.0]])
        target = torch.tensor([[80.0 * zoom, 200.0 * zoom, 1.0]])
        four_lines_below = target + torch.tensor([[0.0, 4 * 20.0 * zoom, 0.0]])
        four_lines_below[:, 2] = 50.0  # sure of "after"
        return losses.cursor_sum(four_lines_below, target, view).item()

    assert loss(1.0) == pytest.approx(0.5 * (4 / losses.CELLS_PER_UNIT) ** 2, rel=1e-5)
    assert loss(2.5) == pytest.approx(loss(1.0), rel=1e-5)


def test_cursor_is_linear_beyond_one_unit() -> None:
    view, target = torch.tensor([[0.0, 1.0, 20.0, 8.0]]), torch.tensor([[0.0, 0.0, 1.0]])
    far = torch.tensor([[0.0, 3 * losses.CELLS_PER_UNIT * 20.0, 50.0]])
    assert losses.cursor_sum(far, target, view).item() == pytest.approx(2.5, rel=1e-5)


def test_reward_is_the_squared_error_of_a_probability() -> None:
    logits, targets = torch.tensor([0.0, 2.0, 9.0]), torch.tensor([1.0, 0.0, 0.0])
    expected = 0.25 + torch.sigmoid(torch.tensor(2.0)).item() ** 2
    assert losses.reward_sum(logits, targets, torch.tensor([1.0, 1.0, 0.0])).item() == pytest.approx(expected)


def test_intent_is_averaged_over_intents() -> None:
    logits, targets = torch.randn(5, 12), torch.randint(0, 2, (5, 12)).float()
    expected = F.binary_cross_entropy_with_logits(logits, targets) * 5
    assert torch.allclose(losses.intent_sum(logits, targets), expected)
