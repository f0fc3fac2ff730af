from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentft.config.schema import RewardConfig
from agentft.feedback.reward import advantages, credit, credits_of_session, shaped_reward, standing
from agentft.losses import LET_GO, policy_sum
from agentft.sandbox.base import ExecResult, Status

CONFIG = RewardConfig()
PASSED = ExecResult(status="ok", exit_code=0)
FAILED = ExecResult(status="nonzero", exit_code=1)
LOST = ExecResult(status="infra", exit_code=None)


@pytest.mark.parametrize("status", ["timeout", "oom", "pids", "output_limit"])
def test_what_the_program_did_to_itself_is_a_failure(status: Status) -> None:
    outcome = shaped_reward(ExecResult(status=status, exit_code=None), CONFIG)
    assert (outcome.reward, outcome.target, outcome.mask) == (-0.5, 0.0, 1.0)


def test_the_three_rewards() -> None:
    assert shaped_reward(PASSED, CONFIG).reward == 1.0
    assert shaped_reward(FAILED, CONFIG).reward == -0.5
    assert shaped_reward(None, CONFIG).reward == -0.5
    lost = shaped_reward(LOST, CONFIG)
    assert (lost.reward, lost.mask) == (0.0, 0.0)


def test_an_unknown_exit_code_never_counts_as_a_pass() -> None:
    assert standing(ExecResult(status="ok", exit_code=None)) == "failed"


def test_credit_of_a_repair_session() -> None:
    """A failing first run is information; a wrong edit is judged by the failing run, the right one by the passing."""
    tools = ["pytest_run", "file_read", "file_edit", "pytest_run", "file_edit", "pytest_run"]
    results = [FAILED, PASSED, PASSED, FAILED, PASSED, PASSED]
    assert credits_of_session(tools, results, CONFIG) == [None, 1.0, -0.5, None, 1.0, 1.0]


def test_calls_that_could_not_do_their_work_are_failed() -> None:
    assert credits_of_session(["file_read", "file_edit", "pytest_run"], [FAILED, FAILED, PASSED], CONFIG) == [
        -0.5,
        -0.5,
        1.0,
    ]
    assert credit("file_edit", None, None, CONFIG) == -0.5


@pytest.mark.parametrize(("exit_code", "expected"), [(1, None), (2, None), (4, -0.5), (5, -0.5)])
def test_a_test_run_is_blamed_only_for_running_nothing(exit_code: int, expected: float | None) -> None:
    result = ExecResult(status="nonzero", exit_code=exit_code)
    assert credit("pytest_run", result, None, CONFIG) == expected


def test_what_was_lost_is_silent() -> None:
    assert credits_of_session(["file_read", "file_edit", "pytest_run"], [LOST, PASSED, LOST], CONFIG) == [None] * 3
    assert credit("file_edit", PASSED, None, CONFIG) is None


@given(st.lists(st.sampled_from([1.0, -0.5]), min_size=2, max_size=30))
def test_leave_one_out_advantages_sum_to_zero_and_ignore_the_split_over_ranks(rewards: list[float]) -> None:
    whole = advantages(rewards)
    assert abs(float(whole.sum())) < 1e-4
    for index, reward in enumerate(rewards):
        others = rewards[:index] + rewards[index + 1 :]
        assert whole[index] == pytest.approx(reward - np.mean(others), abs=1e-6)
    cut = len(rewards) // 2
    parts = [advantages(part, total=sum(rewards), count=len(rewards)) for part in (rewards[:cut], rewards[cut:])]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-6)


def test_one_reward_alone_has_no_advantage() -> None:
    assert advantages([1.0]).tolist() == [0.0]
    assert advantages([]).shape == (0,)


def test_a_token_that_has_become_unlikely_is_pushed_down_no_further() -> None:
    """Recorded mistakes come again every epoch: without a floor their log-probability and the loss fall for ever."""
    logits = torch.tensor([[0.0, 0.0], [9.0, 0.0]], requires_grad=True)  # token 1: even odds, then one in 8,000
    loss = policy_sum(logits, torch.tensor([1, 1]), torch.tensor([-1.2, -1.2]), 0.0)
    loss.backward()
    assert float(loss) == pytest.approx(1.2 * (np.log(0.5) + LET_GO), abs=1e-5)
    assert logits.grad is not None
    assert logits.grad[0, 1] > 0  # descent lowers it
    assert logits.grad[1].abs().sum() == 0
    praised = policy_sum(logits, torch.tensor([1, 1]), torch.tensor([0.0, 1.0]), 0.0)
    assert float(praised) > 9  # praise reaches down to any depth
