"""Shaped reward, credit and advantage of executed calls (floor 4): pure functions.

Three questions, one function each:

* ``shaped_reward``: what is one execution worth? +1.0 passed, −0.5 failed, nothing (mask 0) when the sandbox lost it.
  A timeout, an out-of-memory kill or endless output is a failure of the program; a call that does not parse is a
  failed call. Every trace line carries this number.
* ``credit``: what does the policy gradient hold a call responsible for? The exit code of a test run is a verdict on
  the edit before it, not on the decision to run the tests. See the function for the four rules.
* ``advantages``: REINFORCE with a leave-one-out baseline, A_i = r_i − mean(r_j, j ≠ i), over the credited calls of one
  source in one global batch. Subtracting what *other* calls earned leaves the gradient unbiased (Williams 1992;
  Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free"; Ahmadian et al. 2024, RLOO).

The policy term of the loss is −A · log p(call tokens) minus the entropy bonus; both live in the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from agentft.config.schema import RewardConfig
from agentft.sandbox.base import ExecResult
from agentft.tools import TOOLS

EDIT_TOOLS = frozenset({"file_edit", "file_write"})
"""Tools whose worth shows only when code runs afterwards."""

_RAN_NOTHING = frozenset({("pytest_run", 4), ("pytest_run", 5)})
"""Exit codes of pytest that blame the call: wrong use (such as a target that is not there), and no test found."""

Standing = Literal["passed", "failed", "lost"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One judged execution: ``target`` for the reward head (1 passed, 0 failed), ``mask`` 0.0 where it was lost."""

    reward: float
    target: float
    mask: float


def standing(result: ExecResult) -> Standing:
    """Say how an execution ended: only ``infra`` is lost, only exit code 0 of a program that ended itself passed.

    A verdict over a session that tampered with what judges it (``sandbox.grader``) has failed, whatever its exit code.
    """
    if result.status == "infra":
        return "lost"
    if result.fields.get("tampered"):
        return "failed"
    return "passed" if result.status == "ok" and result.exit_code == 0 else "failed"


def shaped_reward(result: ExecResult | None, config: RewardConfig) -> Outcome:
    """Return the reward of one execution; ``None`` stands for a call that could not be parsed (a failed call)."""
    how = "failed" if result is None else standing(result)
    if how == "lost":
        return Outcome(reward=0.0, target=0.0, mask=0.0)
    passed = how == "passed"
    return Outcome(reward=config.passed if passed else config.failed, target=float(passed), mask=1.0)


def credit(tool: str, result: ExecResult | None, verdict: ExecResult | None, config: RewardConfig) -> float | None:
    """Return what the policy gradient credits a call with; ``None`` where it must stay silent.

    Args:
        tool: Name of the tool that was called.
        result: What the call itself did; ``None`` if it did not parse.
        verdict: The next run of code after the call in the same workspace, if there was one.
        config: Values of passed and failed.

    The rules:

    1. A call that could not do its work (no parse, bad path, no match, usage error, no test found) is ``failed``.
    2. An edit that was applied is worth the reward of the run that judges it; without a verdict it is silent.
    3. A run of code that passed is worth ``passed``; one that failed is information, not fault: silent.
    4. Any other call that did its work (reading, searching) is worth ``passed``.

    Whatever the sandbox lost is silent.
    """
    if result is None:
        return config.failed
    own = standing(result)
    if own == "lost":
        return None
    if own == "failed":
        ran = tool in TOOLS and TOOLS[tool].runs_code and (tool, result.exit_code) not in _RAN_NOTHING
        return None if ran else config.failed
    if tool not in EDIT_TOOLS:
        return config.passed
    if verdict is None or standing(verdict) == "lost":
        return None
    return shaped_reward(verdict, config).reward


def credits_of_session(tools: Sequence[str], results: Sequence[ExecResult], config: RewardConfig) -> list[float | None]:
    """Return the credit of each call of one executed session, each edit judged by the next run of code after it."""
    credits: list[float | None] = [None] * len(tools)
    verdict: ExecResult | None = None
    for index in range(len(tools) - 1, -1, -1):
        tool, result = tools[index], results[index]
        credits[index] = credit(tool, result, verdict, config)
        if tool in TOOLS and TOOLS[tool].runs_code:
            verdict = result
    return credits


def advantages(
    rewards: Sequence[float], *, total: float | None = None, count: int | None = None
) -> npt.NDArray[np.float32]:
    """Return A_i = r_i − mean of the other rewards, [N] float32.

    ``total`` and ``count`` are the sum and number over the global batch when ``rewards`` is one rank's share of it;
    left out, ``rewards`` is all there is. A single reward has nothing to be compared with: its advantage is 0.
    """
    values = np.asarray(rewards, dtype=np.float64)
    total = float(values.sum()) if total is None else total
    count = len(values) if count is None else count
    if count < 2:
        return np.zeros(len(values), dtype=np.float32)
    return (values - (total - values) / (count - 1)).astype(np.float32)
