"""Feedback over a real sandbox: programs really run, twice the same losses, and once more from the trace alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support_agent import make_renderer, repair_session
from support_training import train_agent

from agentft.config.schema import FeedbackConfig, PolicyConfig, ProbeConfig
from agentft.etai import Session
from agentft.feedback.trace import read_traces
from agentft.sandbox.base import Limits
from agentft.sandbox.calls import session_calls
from agentft.sandbox.executor import LiveExecutor
from agentft.sandbox.pool import open_sandbox
from agentft.sandbox.replay import ReplayExecutor

CONFIG = FeedbackConfig(policy=PolicyConfig(every=2, calls=2), probe=ProbeConfig(every=2, calls=2))
BACKENDS = [
    pytest.param("local", marks=pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is missing")),
    pytest.param("docker", marks=pytest.mark.engine),
]


def live(backend: str) -> LiveExecutor:
    sandbox = open_sandbox(backend, workers=2, limits=Limits(), run_name="test-feedback")  # type: ignore[arg-type]
    return LiveExecutor(sandbox, workers=2)


def really_executed(session: Session, executor: LiveExecutor) -> Session:
    """Return the session with the results of a real execution of its calls."""
    plan = session_calls(session)
    assert plan is not None
    results = executor.submit(plan.workspace, plan.calls, key="record").result()
    steps = [
        step.model_copy(update={"execution_result": result.to_record()})
        for step, result in zip(session.execution_trace, results, strict=True)
    ]
    return session.model_copy(update={"execution_trace": steps})


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_runs_and_a_replay_are_equal_bit_for_bit(backend: str, tmp_path: Path) -> None:
    first = live(backend)
    known = [really_executed(repair_session(number, mistake=number == 2), first) for number in range(4)]
    codes = [step.execution_result.exit_code for step in known[2].execution_trace if step.execution_result]
    assert codes == [1, 0, 0, 1, 0, 0, 0]
    renderer = make_renderer(known)

    def train(name: str, executor: LiveExecutor | ReplayExecutor) -> list[float]:
        seen, feedback, _ = train_agent(
            tmp_path / name, executor, CONFIG, renderer=renderer, known=known, batches=4, batch_size=2
        )
        statuses = feedback.summary()["sandbox"]["by_status"]
        assert set(statuses) == {"ok", "nonzero"}
        return seen.losses

    losses = train("a", first)
    assert train("b", live(backend)) == losses
    assert train("c", ReplayExecutor(tmp_path / "b")) == losses
    lines = [line for line in read_traces(tmp_path / "a") if line.source == "recorded"]
    runs = [line for line in lines if line.tool == "pytest_run"]
    assert any(line.cached for line in lines)  # the second epoch runs nothing twice
    assert {line.exit_code for line in runs} == {0, 1}
    assert all("calc.py" in line.stdout or line.exit_code == 0 for line in runs)
