from __future__ import annotations

from pathlib import Path

import pytest

from agentft.errors import AgentFTError
from agentft.etai import InlineWorkspace
from agentft.feedback.trace import TraceLine, TraceWriter
from agentft.sandbox.base import ExecResult
from agentft.sandbox.replay import ReplayExecutor
from agentft.tools import ToolCall

FILES = InlineWorkspace(files={})
CALLS = (ToolCall("file_read", {"path": "a.py"}), ToolCall("pytest_run", {"targets": "t.py"}))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with TraceWriter(tmp_path / "traces" / "rank0.jsonl") as writer:
        for step, call in enumerate(CALLS, 1):
            writer.write(
                TraceLine(
                    run="r",
                    key=f"recorded/3/owner/name/{step}",
                    batch=3,
                    source="recorded",
                    session_id="owner/name",
                    step=step,
                    tool=call.name,
                    args=dict(call.args),
                    status="infra" if step == 2 else "ok",
                    exit_code=None if step == 2 else 0,
                    stdout=f"out {step}",
                    fields={"failed": [step]},
                )
            )
    return tmp_path


def test_a_replay_gives_what_the_run_saw_lost_executions_too(run: Path) -> None:
    executor = ReplayExecutor(run)
    results = executor.submit(FILES, CALLS, key="recorded/3/owner/name/2").result(timeout=0)
    assert results == [
        ExecResult(status="ok", exit_code=0, stdout="out 1", fields={"failed": [1]}),
        ExecResult(status="infra", exit_code=None, stdout="out 2", fields={"failed": [2]}),
    ]
    assert executor.stats() == {"replayed": 2}


def test_a_missing_key_is_named(run: Path) -> None:
    with pytest.raises(AgentFTError, match=r"recorded/4/owner/name/2"):
        ReplayExecutor(run).submit(FILES, CALLS, key="recorded/4/owner/name/2")


def test_a_run_that_left_the_path_is_told_where(run: Path) -> None:
    other = (CALLS[0], ToolCall("pytest_run", {"targets": "u.py"}))
    with pytest.raises(AgentFTError, match=r"call 2 of recorded/3/owner/name/2"):
        ReplayExecutor(run).submit(FILES, other, key="recorded/3/owner/name/2")
    longer = (*CALLS, CALLS[0])
    with pytest.raises(AgentFTError, match=r"expected: 2 calls"):
        ReplayExecutor(run).submit(FILES, longer, key="recorded/3/owner/name/3")


def test_no_trace_and_an_empty_trace_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(AgentFTError, match=r"replay_from"):
        ReplayExecutor(tmp_path)
    TraceWriter(tmp_path / "rank0.jsonl").close()
    with pytest.raises(AgentFTError, match=r"holds no execution"):
        ReplayExecutor(tmp_path)


def test_a_torn_line_and_the_rank_are_respected(run: Path) -> None:
    with (run / "traces" / "rank0.jsonl").open("ab") as file:
        file.write(b'{"run":"r","key":"reco')
    (run / "traces" / "rank1.jsonl").write_bytes(b"")
    assert len(ReplayExecutor(run, rank=0).submit(FILES, CALLS, key="recorded/3/owner/name/2").result()) == 2
    with pytest.raises(AgentFTError, match="no execution"):
        ReplayExecutor(run, rank=1)
