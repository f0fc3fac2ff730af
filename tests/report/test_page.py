"""The page that ends the demo, and the joining of its summary."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from agentft.errors import AgentFTError
from agentft.report.page import CALLS, HEADS, calls_table, print_page
from agentft.train.demo import keep_previous, merge_summary


def _metric(value: float | None, baseline: float, better: str = "higher") -> dict:
    return {"value": value, "baseline": baseline, "baselines": {"rule": baseline}, "better": better, "count": 9}


def _summary() -> dict:
    heads = {name: _metric(0.9, 0.5) for name, _ in HEADS}
    heads["cursor_error_lines"] = _metric(7.0, 3.0, "lower")
    heads["outcome_auc_after_edit"] = _metric(None, 0.5)
    return {
        "sessions": {"kept": 3, "by_split": {"train": 2, "test": 1}, "by_package": {"toolz": 3}},
        "tokens": {"trained": 1234, "context": 5678},
        "loss": {
            "code": {"first": 8.0, "last": 2.0, "weight_first": 0.8, "weight_last": 0.6},
            "policy": {"first": None, "last": None, "weight_first": 0.05, "weight_last": 0.05},
        },
        "sandbox": {"executions": 4, "by_status": {"ok": 3, "nonzero": 1}, "median_ms": 12.0, "cache_hits": 2},
        "probe": {"calls": 0, "parse_ok": 0, "exit0": 0},
        "heads": heads,
        "path_accuracy": {"steps": 3, "count": 5, "value": 0.2, "edits": 1, "calls": 15, "parse_ok": 14},
    }


def _printed(summary: dict) -> str:
    console = Console(file=io.StringIO(), width=140)
    print_page(summary, Path("runs/demo"), console)
    return console.file.getvalue()


def test_page_says_what_was_not_learnt():
    text = _printed(_summary())
    note = next(line for line in text.splitlines() if "Not better than a baseline" in line)
    assert "caret after the repair" in note
    assert "first run after an edit" in note
    assert "next tool" not in note
    assert "-75%" in text
    assert "agentft traces runs/demo --failed" in text
    assert "Path Accuracy@3 on 5 held-out sessions: 0.20" in text


def test_page_without_calls_or_medians_does_not_divide_by_zero():
    summary = _summary()
    summary["sandbox"] |= {"median_ms": None, "executions": 0, "by_status": {}}
    del summary["path_accuracy"]
    assert "none well-formed" in _printed(summary)


def test_an_earlier_run_is_kept_aside(tmp_path: Path):
    run = tmp_path / "demo"
    run.mkdir()
    (run / "summary.json").write_text("{}")
    keep_previous(run, Console(file=io.StringIO()))
    assert not run.exists()
    (aside,) = tmp_path.iterdir()
    assert aside.name.startswith("demo-")
    assert (aside / "summary.json").read_text() == "{}"
    keep_previous(run, Console(file=io.StringIO()))
    assert list(tmp_path.iterdir()) == [aside], "nothing to keep is no error"


def test_summary_joins_three_reports(tmp_path: Path):
    run, shards = tmp_path / "runs" / "demo", tmp_path / "data" / "shards"
    run.mkdir(parents=True)
    shards.mkdir(parents=True)
    sessions = tmp_path / "data" / "sessions.jsonl"
    (run / "summary.json").write_text(json.dumps({"loss": {}, "seconds": {"fit": 1.0}}))
    (shards / "meta.json").write_text(json.dumps({"splits": {"train": {"sessions": 2}, "test": {"sessions": 1}}}))
    with pytest.raises(AgentFTError, match="left no report"):
        merge_summary(run, sessions, {})
    sessions.with_name("sessions.report.json").write_text(json.dumps({"kept": 3, "by_package": {"toolz": 3}}))
    merged = merge_summary(run, sessions, {"synth": 2.04})
    assert merged["sessions"] == {"kept": 3, "by_split": {"train": 2, "test": 1}, "by_package": {"toolz": 3}}
    assert merged["seconds"] == {"fit": 1.0, "synth": 2.0}
    assert json.loads((run / "summary.json").read_text()) == merged


def test_calls_stand_beside_their_baselines_by_themselves_and_in_the_grammar():
    free = {name: _metric(0.25, 0.5) for name, _ in CALLS}
    held = {name: _metric(0.75, 0.5) for name, _ in CALLS} | {"parsed": _metric(None, 0.5)}
    console = Console(file=io.StringIO(), width=140)
    console.print(calls_table({"free": free, "grammar": held}))
    lines = console.file.getvalue().splitlines()
    assert "at 9 recorded ones" in lines[0]
    row = next(line for line in lines if "the recorded tool" in line)
    assert [cell.strip() for cell in row.split("│")[2:6]] == ["0.250", "0.750", "0.500", "rule 0.500"]
    assert "–" in next(line for line in lines if "well-formed calls" in line)
