from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentft.errors import AgentFTError, DataError
from agentft.feedback.trace import TraceLine, TraceWriter, cut_output, read_traces, trace_files
from agentft.sandbox.base import ExecResult


def line(step: int, **changes: object) -> TraceLine:
    values: dict[str, object] = {
        "run": "r",
        "key": f"recorded/0/s/{step}",
        "batch": 0,
        "source": "recorded",
        "session_id": "s",
        "step": step,
        "tool": "pytest_run",
        "args": {"targets": "a\ud800b"},
        "status": "ok",
        "exit_code": 0,
        "stdout": "ü\x00\n",
        "span": (3, 9),
        "tool_probs": {"pytest_run": 0.75},
    }
    return TraceLine(**{**values, **changes})  # type: ignore[arg-type]


def test_lines_come_back_as_written_and_while_the_file_is_open(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "traces" / "rank0.jsonl") as writer:
        for step in (1, 2):
            writer.write(line(step))
            assert [entry.step for entry in read_traces(tmp_path)] == list(range(1, step + 1))
        assert next(read_traces(tmp_path)) == line(1)
        assert writer.lines == 2


def test_a_torn_last_line_is_left_out_and_removed_by_a_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    with TraceWriter(path) as writer:
        writer.write(line(1))
        writer.write(line(2))
    whole = path.read_bytes()
    second = whole.index(b"\n") + 1
    for cut in (second + 1, second + 12, len(whole) - 1, second):
        path.write_bytes(whole[:cut])
        assert [entry.step for entry in read_traces(path)] == [1]
        with TraceWriter(path) as writer:
            writer.write(line(3))
        assert [entry.step for entry in read_traces(path)] == [1, 3]


def test_a_line_that_is_no_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text("hello\n")
    with pytest.raises(DataError, match=r"rank0.jsonl:1"):
        list(read_traces(path))


def test_no_trace_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(AgentFTError, match=r"traces/rank0.jsonl"):
        list(read_traces(tmp_path))


def test_ranks_are_read_in_number_order(tmp_path: Path) -> None:
    for rank in (0, 2, 10):
        with TraceWriter(tmp_path / "traces" / f"rank{rank}.jsonl") as writer:
            writer.write(line(rank))
    assert [path.name for path in trace_files(tmp_path)] == ["rank0.jsonl", "rank2.jsonl", "rank10.jsonl"]
    assert [entry.step for entry in read_traces(tmp_path)] == [0, 2, 10]


def test_fields_of_a_newer_version_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    with TraceWriter(path) as writer:
        writer.write(line(1))
    value = {**json.loads(path.read_text()), "mood": "good"}
    path.write_text(json.dumps(value) + "\n")
    assert next(read_traces(path)) == line(1)


def test_a_closed_writer_refuses(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "rank0.jsonl")
    writer.close()
    writer.close()
    with pytest.raises(DataError, match="closed"):
        writer.write(line(1))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    writer = TraceWriter("/dev/full")
    with pytest.raises(DataError, match="cannot write the reward trace"):
        writer.write(line(1))
    writer.close()


@given(st.text(max_size=200), st.integers(80, 120))
def test_cut_output_keeps_both_ends_and_says_so(text: str, limit: int) -> None:
    result = ExecResult(status="ok", exit_code=0, stdout=text)
    cut = cut_output(result, limit)
    if len(text) <= limit:
        assert cut is result
    else:
        assert len(cut.stdout) == limit
        assert cut.truncated
        assert cut.stdout.startswith(text[:10])
        assert cut.stdout.endswith(text[-10:])
        assert cut_output(cut, limit) is cut


def test_result_of_a_line_is_the_execution() -> None:
    assert line(1).result() == ExecResult(status="ok", exit_code=0, stdout="ü\x00\n")
    assert line(1, status=None, parse_ok=False).result() is None
