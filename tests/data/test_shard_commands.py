"""``agentft shards …`` and the scripts in ``data_prep``: what they print and return."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from agentft import cli
from agentft.data.meta import load_meta
from agentft.data.shards import ShardReport

REPO = Path(__file__).resolve().parents[2]


def test_write_prints_a_table_with_every_split(
    sessions_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "shards"
    arguments = ["shards", "write", str(sessions_file), "-o", str(output), "--vocab-size", "600"]
    assert cli.main([*arguments, "--holdout", "iniconfig", "--holdout", "toolz"]) == 0
    printed = capsys.readouterr().out
    assert "train" in printed
    assert "test" in printed
    meta = load_meta(output)
    assert (meta.sessions("train"), meta.sessions("test")) == (23, 46)
    assert meta.text["max_tokens"] == 1024


def test_write_takes_text_and_positions_from_a_yaml(
    sessions_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "run_name: x\nmodel: {preset: tiny-glm, feedback_positions: {enabled: true, start: 5000}}\n"
        "data: {shards: s}\ntext: {max_tokens: 300, handles: false}\ntrain: {duration: 1ep}\n"
    )
    arguments = ["shards", "write", str(sessions_file), "-o", str(tmp_path / "s"), "--config", str(config), "--json"]
    assert cli.main([*arguments, "--vocab-size", "600"]) == 0
    meta = json.loads(capsys.readouterr().out)["meta"]
    assert (meta["text"]["max_tokens"], meta["text"]["handles"]) == (300, False)
    assert (meta["positions"]["enabled"], meta["positions"]["start"]) == (True, 5000)


def test_verify_answers_in_text_and_json(written: ShardReport, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["shards", "verify", str(written.folder)]) == 0
    assert "2 shards, 69 samples" in capsys.readouterr().out
    assert cli.main(["shards", "verify", str(written.folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["samples"], report["shards"]) == (True, 69, 2)


def test_verify_fails_with_one_message(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shards / "train" / "shard.00000.mds.zstd"
    path.write_bytes(path.read_bytes()[:-1])
    assert cli.main(["shards", "verify", str(shards)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("agentft: ")
    assert "shard.00000.mds.zstd: a shard has the wrong size" in error


def test_data_prep_scripts_run_by_themselves(
    sessions_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, published = str(tmp_path / "shards"), str(tmp_path / "published")
    write = ["write_shards.py", str(sessions_file), "-o", output, "--vocab-size", "600"]
    for command in ([*write, "--holdout", "iniconfig", "--val-share", "0.2"], ["upload_shards.py", output, published]):
        monkeypatch.setattr(sys, "argv", command)
        runpy.run_path(str(REPO / "data_prep" / command[0]), run_name="__main__")
    assert "0 sessions left out, 0 lines unreadable" in capsys.readouterr().out
    assert load_meta(published) == load_meta(output)
    assert load_meta(output).sessions("val") > 0
