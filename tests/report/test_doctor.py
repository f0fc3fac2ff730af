"""``agentft doctor`` says what is there and what to do about what is not."""

from __future__ import annotations

import json
import shutil

import pytest

from agentft.cli import main
from agentft.report import doctor


def test_every_row_has_a_state_and_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["rows"]}
    assert {"docker engine", "sandbox image", "bubblewrap", "disk", "memory", "cpu", "gpu", "versions"} <= set(rows)
    assert [row for row in rows.values() if row["state"] != "ok" and not row["hint"]] == []
    assert code == (0 if found["ok"] else 3)
    assert rows["versions"]["state"] == "ok", rows["versions"]


def test_without_any_sandbox_it_fails_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert shutil.which("bwrap") is None
    assert main(["doctor"]) == 3
    output = capsys.readouterr().out
    assert "none answers" in output
    assert "apt-get install docker.io bubblewrap" in output


def test_a_store_that_does_not_answer_is_a_row_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    row = doctor.check_object_store()
    assert row.state == "fail"
    assert "127.0.0.1:9" in row.found
    assert row.hint


def test_too_many_threads_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    assert doctor.check_cpu().state == "warn"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert doctor.check_cpu().state == "ok"
