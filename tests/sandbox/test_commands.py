"""The verbs ``agentft sandbox build|run|clean``, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sandbox_engines import BACKENDS, make_engine

from agentft.cli import main
from agentft.errors import SandboxError
from agentft.sandbox import images


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    make_engine(request.param).close()
    return str(request.param)


def test_run_prints_one_object(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_bytes(b"hello\xff")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_text("no")
    (tmp_path / "link").symlink_to("/etc/passwd")
    verb = ["sandbox", "run", "--backend", backend, "--dir", str(tmp_path), "--json"]
    assert main([*verb, "--", "sh", "-c", "find . -type f; cat deep/a.txt; exit 5"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["stdout"] == "./deep/a.txt\nhello\ufffd"
    assert (found["status"], found["exit_code"], found["timed_out"], found["truncated"]) == ("nonzero", 5, False, False)
    assert found["duration_s"] > 0
    assert main([*verb[:4], "--timeout", "0.2", "--json", "--", "sleep", "9"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["exit_code"], found["timed_out"]) == ("timeout", None, True)


def test_run_passes_output_through(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "run", "--backend", backend, "--", "sh", "-c", "echo out; echo err >&2"]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("out\n", "err\n")


def test_run_refuses_a_folder_that_is_not_there(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "run", "--backend", backend, "--dir", "/nowhere", "--", "true"]) == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.engine
def test_build_does_nothing_when_the_image_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine("docker")
    assert main(["sandbox", "build", "python", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["digest"] == engine.image_digest
    assert found["seconds"] < 20
    engine.close()


@pytest.mark.engine
def test_an_image_without_dockerfile_is_refused() -> None:
    make_engine("docker").close()
    with pytest.raises(SandboxError, match="python"):
        images.ensure_image("cobol")


@pytest.mark.engine
def test_clean_removes_only_what_is_dead(capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine("docker")
    box = engine.start()
    try:
        assert main(["sandbox", "clean", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert box.name.split()[1] not in found["removed"]
        assert found["left"] >= 1
        assert main(["sandbox", "clean", "--all"]) == 2  # no terminal to ask on
        assert "--yes" in capsys.readouterr().err
    finally:
        box.close()
        engine.close()


def test_the_debian_system_needs_root_and_debootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="debootstrap is not installed"):
        images.ensure_rootfs()
    folder = tmp_path / "agentft" / "rootfs"
    (folder / "etc").mkdir(parents=True)
    (folder / images.MARKER).write_text(images._base_recipe(images.RECIPES["python"]) + "\n")
    assert images.ensure_rootfs() == folder
