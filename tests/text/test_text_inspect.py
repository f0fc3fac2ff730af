"""``agentft inspect``: what it shows, in a pipe, as JSON and as a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from text_samples import SOURCE

from agentft.cli import main
from agentft.config.schema import FeedbackPositionsConfig, TextConfig
from agentft.data.shards import write_shards
from agentft.etai import CursorTarget, ErrorLocation, ExecutionResult, IdeContext, Session, TraceStep
from agentft.text.vocab import save_tokenizer, train_tokenizer


def session(session_id: str = "one") -> Session:
    failing = ExecutionResult(
        exit_code=1, stdout="E   assert 1 == 2\n", error_location=ErrorLocation(file="src/a.py", line=2), failed=1
    )
    trace = [
        TraceStep(step=1, thought="Run it.", tool_called="pytest_run", execution_result=failing),
        TraceStep(
            step=2,
            mistake=True,
            tool_called="file_edit",
            tool_args={"path": "src/a.py", "old": "[red]x", "new": "y"},
            execution_result=ExecutionResult(),
        ),
        TraceStep(step=3, tool_called="own_tool"),
    ]
    return Session(
        session_id=session_id,
        user_instruction="Fix f\r\nsoon",
        ide_context=IdeContext(open_files=["src/a.py"]),
        execution_trace=trace,
        final_output="Done.",
        intents=["fix_test_failure"],
        cursor_target=CursorTarget(file="src/a.py", line=2),
    )


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    path = tmp_path / "sessions.jsonl"
    path.write_text("".join(s.model_dump_json() + "\n" for s in (session(), session("two"))))
    save_tokenizer(train_tokenizer([SOURCE] * 3, 480), tmp_path / "tokenizer")
    return path


def test_the_terminal_view_says_everything_without_colour(sessions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(sessions)]) == 0
    text = capsys.readouterr().out
    lines = [line.strip() for line in text.splitlines()]
    assert text.startswith("one  tokenizer: ")
    assert any(line.endswith("<|trace_start|>   ◆ intent: fix_test_failure") for line in lines)
    assert any(
        "+   <|tool_start|>pytest_run<|args|>" in line and "◆ tool, step 1: pytest_run" in line for line in lines
    )
    assert any("<|result|>exit 1 failed 1<|cursor|><F0><L00>2   ◆ outcome, step 1: failed" in line for line in lines)
    assert any("x   <|tool_start|>file_edit" in line for line in lines)
    assert any("<|val|>[red]x" in line for line in lines)
    assert any("◆ outcome, step 2: not known" in line for line in lines)
    assert any("◆ tool, step 3: not a built-in tool: no target" in line for line in lines)
    assert any("<|output|>Done.<|eot|>   ◆ cursor: after src/a.py:2:0" in line for line in lines)
    assert "Fix f␍\n" in text
    assert "left out: nothing" in lines
    assert "handles: <F0> src/a.py  and 1 lines" in lines


def test_ids_give_one_line_a_token(sessions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(sessions), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert main(["inspect", str(sessions), "--ids"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if " id " in line and " pos " in line]
    assert len(rows) == shown["counts"]["tokens"] == len(shown["tokens"])
    assert [int(row.split(" pos ")[1].split()[0]) for row in rows] == list(range(len(rows)))


def test_positions_are_those_of_the_shards_that_the_tokenizer_is_from(
    sessions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards, positions = tmp_path / "shards", FeedbackPositionsConfig(enabled=True, start=20000)
    write_shards([sessions], shards, text=TextConfig(), positions=positions, vocab_size=520)
    assert main(["inspect", str(sessions), "--ids", "--tokenizer", str(shards / "tokenizer")]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert "  pos  20000  <|result|>" in next(row for row in rows if "<|result|>" in row)


def test_json_agrees_with_itself(sessions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(sessions), "--id", "two", "--json", "--no-handles"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["session_id"] == "two"
    assert shown["handles"] == {}
    assert shown["counts"]["trained"] == sum(token["trained"] for token in shown["tokens"])
    assert sum(shown["counts"]["by_kind"].values()) == shown["counts"]["tokens"]
    assert [shown["tokens"][anchor["at"]]["text"] for anchor in shown["anchors"]] == [
        "<|trace_start|>",
        *("<|tool_start|>", "<|result|>") * 2,
        "<|tool_start|>",
        "<|output|>",
    ]


def test_the_page_holds_the_same_text(sessions: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["inspect", str(sessions), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "&lt;|trace_start|&gt;" in page
    assert "color:" in page
    assert "http" not in page


def test_without_a_tokenizer_one_is_learned_with_a_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "sessions.jsonl"
    path.write_text(session().model_dump_json() + "\n")
    assert main(["inspect", str(path), "--json"]) == 0
    captured = capsys.readouterr()
    assert "no tokenizer beside" in captured.err
    assert json.loads(captured.out)["tokenizer"] == f"learned from {path}"


def test_shards_beside_the_file_decide_how_it_is_shown(sessions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = sessions.parent / "shards"
    shards.mkdir()
    (sessions.parent / "tokenizer").rename(shards / "tokenizer")
    meta = {"text": {"handles": False}, "positions": {"enabled": True, "start": 5000}}
    (shards / "meta.json").write_text(json.dumps(meta))
    assert main(["inspect", str(sessions), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["handles"] == {}
    assert 5000 in [token["position"] for token in shown["tokens"]]


def test_what_is_missing_or_broken_is_said(sessions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(sessions), "--id", "three"]) == 1
    assert "expected: one of one, two" in capsys.readouterr().err
    assert main(["inspect", str(sessions.with_name("none.jsonl"))]) == 1
    assert "none.jsonl" in capsys.readouterr().err
    assert main(["inspect", str(sessions), "--tokenizer", str(sessions.parent / "nowhere")]) == 1
    assert "cannot load a tokenizer" in capsys.readouterr().err
    sessions.write_text('{"session_id": 3}\n')
    assert main(["inspect", str(sessions)]) == 1
    assert "sessions.jsonl:1" in capsys.readouterr().err
