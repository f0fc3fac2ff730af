"""``agentft traces`` on a trace that a real writer wrote: table, filters, one session, JSON, while it grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentft.cli import main
from agentft.feedback.trace import TraceLine, TraceWriter
from agentft.report.traces import find_session, how, select, totals
from agentft.sandbox.base import Status


def _line(step: int, tool: str, status: Status | None, exit_code: int | None, **more: object) -> TraceLine:
    source = str(more.pop("source", "recorded"))
    session = str(more.pop("session_id", "toolz/0001"))
    values = {
        "run": "r",
        "key": f"{source}/3/{session}/{step}",
        "batch": 3,
        "source": source,
        "session_id": session,
        "step": step,
        "tool": tool,
        "status": status,
        "exit_code": exit_code,
        "duration_s": 0.25,
        "reward": 1.0 if exit_code == 0 else -0.5,
    }
    return TraceLine(**{**values, **more})  # type: ignore[arg-type]


LINES = (
    _line(1, "pytest_run", "nonzero", 1, stdout="FAILED test_x\n" * 40, predicted_reward=0.25),
    _line(2, "file_edit", "ok", 0, args={"path": "a.py", "new": "[red]x[/red]\ny = 1"}, cached=True, duration_s=9.0),
    _line(3, "pytest_run", "ok", 0, tool_probs={"pytest_run": 0.9, "file_read": 0.1}, intents={"fix_lint": 0.7}),
    _line(1, "pytest_run", "infra", None, session_id="toolz/0002", reward=None, stderr="engine gone"),
    _line(2, "format_error", None, None, session_id="toolz/0002", source="probe", parse_ok=False),
    _line(2, "pytest_run", "timeout", None, session_id="more/0012", source="probe"),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with TraceWriter(tmp_path / "demo" / "traces" / "rank0.jsonl") as writer:
        for line in LINES:
            writer.write(line)
    return tmp_path / "demo"


def test_every_ending_has_a_name() -> None:
    assert [how(line) for line in LINES] == ["failed", "passed", "passed", "lost", "no parse", "failed"]


def test_a_verdict_over_tampered_tests_has_failed_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tampered = {"tampered": [{"path": "tests/test_a.py", "kind": "edited_test"}]}
    with TraceWriter(tmp_path / "traces" / "rank0.jsonl") as writer:
        writer.write(_line(1, "pytest_run", "ok", 0, fields=tampered, role="verdict"))
        writer.write(_line(2, "pytest_run", "ok", 0, fields={"tampered": []}, role="verdict"))
    assert main(["traces", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count(" tampered ") == 1
    assert main(["traces", str(tmp_path), "--session", "toolz/0001"]) == 0
    assert "tampered: tests/test_a.py (edited test)" in capsys.readouterr().out
    assert main(["traces", str(tmp_path), "--failed", "--json"]) == 0
    assert '"matching": 1' in capsys.readouterr().out


def test_totals_leave_out_what_did_not_run() -> None:
    found = totals(LINES)
    assert (found["passed"], found["failed"], found["lost"], found["no_parse"]) == (2, 2, 1, 1)
    assert found["median_ms"] == 250.0  # neither the cached nine seconds nor the call that never ran
    assert found["by_tool"]["pytest_run"]["lines"] == 4
    assert list(found["by_source"]) == ["recorded", "probe"]
    assert found["by_source"]["recorded"]["mean_reward"] == 0.5


def test_filters_combine() -> None:
    assert [line.step for line in select(LINES, failed=True, tool="pytest_run", source="recorded")] == [1, 1]
    assert [line.session_id for line in select(LINES, step=2, source="probe")] == ["toolz/0002", "more/0012"]


def test_the_table_shows_the_newest_and_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["traces", str(run), "--limit", "2"]) == 0
    output = capsys.readouterr().out
    assert "6 executions" in output
    assert "newest 2 of 6 lines" in output
    assert "timeout" in output
    assert "exit 1" not in output
    assert main(["traces", str(run), "--failed", "--tool", "pytest_run"]) == 0
    output = capsys.readouterr().out
    assert "exit 1" in output
    assert "0.25" in output
    assert "infra" in output


def test_one_session_step_by_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["traces", str(run), "--session", "0001"]) == 0
    output = capsys.readouterr().out
    assert [output.index(f"step {n}") for n in (1, 2, 3)] == sorted(output.index(f"step {n}") for n in (1, 2, 3))
    assert "[red]x[/red]" in output  # output of programs is text, never markup
    assert "24 lines left out" in output
    assert "tools: pytest_run 0.90, file_read 0.10" in output
    assert "intents: fix_lint 0.70" in output


def test_json_holds_whole_lines(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["traces", str(run), "--json", "--source", "probe"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["matching"] == 2
    assert found["totals"]["lines"] == 6
    assert [line["tool"] for line in found["lines"]] == ["format_error", "pytest_run"]


def test_a_run_under_way_is_read_up_to_its_last_whole_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "traces" / "rank0.jsonl").open("a") as file:
        file.write('{"run": "r", "key": "rec')
    assert main(["traces", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["matching"] == 6


def test_what_is_not_there_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["traces", str(tmp_path / "nothing")]) == 1
    assert "no reward trace here" in capsys.readouterr().err
    assert main(["traces", str(run), "--session", "toolz"]) == 1
    error = capsys.readouterr().err
    assert "2 sessions fit" in error
    assert "toolz/0001" in error
    assert find_session("more", LINES, run) == "more/0012"
