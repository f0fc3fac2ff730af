"""Images: what goes into a build, what has no network, and what is said where something is missing."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_engines import LIMITS, make_engine

import docker
from agentft.errors import SandboxError
from agentft.sandbox import images
from agentft.sandbox.base import ExecRequest
from agentft.sandbox.docker import DockerEngine, image_reference

NODE = Path(images.__file__).resolve().parents[2] / "docker" / "node"


def test_the_lock_pins_every_package_and_names_no_registry() -> None:
    lock = json.loads((NODE / "package-lock.json").read_text())
    wanted = json.loads((NODE / "package.json").read_text())["dependencies"]
    assert all(version[0].isdigit() for version in wanted.values())
    packages = {path: about for path, about in lock["packages"].items() if path and not about.get("inBundle")}
    assert all("integrity" in about and "resolved" not in about for about in packages.values())
    assert {name: packages[f"node_modules/{name}"]["version"] for name in wanted} == wanted


def test_a_context_holds_the_folder_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM x\n")
    (tmp_path / "data" / "__pycache__").mkdir(parents=True)
    (tmp_path / "data" / "a.txt").write_text("a")
    context = io.BytesIO()
    images._pack(tmp_path, context, npm=False)
    context.seek(0)
    with tarfile.open(fileobj=context) as archive:
        assert sorted(archive.getnames()) == ["Dockerfile", "data", "data/a.txt"]


def test_without_npm_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="apt-get install -y npm"):
        images._fetch_packages(tmp_path)


@pytest.fixture
def own_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's under docker/, and its image removed at the end."""
    make_engine("docker").close()
    folder = tmp_path / "docker" / "testservice"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "a.txt").write_text("one")
    base = "ARG BASE\nFROM ${BASE}\nUSER root\nCOPY data /srv/data\n"
    (folder / "Dockerfile").write_text(base + "RUN ! getent hosts example.org && cat /proc/net/route > /srv/route\n")
    monkeypatch.setattr(images, "_folder", lambda image: folder if image == "testservice" else NODE.parent / image)
    yield folder
    docker.from_env().api.remove_image(image_reference("testservice"), force=True)


@pytest.mark.engine
def test_a_folder_of_the_user_is_built_on_python_without_network_and_again_when_it_changes(own_image: Path) -> None:
    first = images.ensure_image("testservice")
    assert images.ensure_image("testservice") == first
    engine = DockerEngine(image="testservice", limits=LIMITS, run_name="tests")
    box = engine.start()
    try:
        shown = box.exec(ExecRequest(argv=("sh", "-c", "cat /srv/data/a.txt; wc -l < /srv/route; id -u")))
        assert shown.stdout == "one1\n10001\n"  # the header of an empty table of routes
    finally:
        box.close()
        engine.close()
    (own_image / "data" / "a.txt").write_text("two")
    assert images.ensure_image("testservice") != first
    docker.from_env().api.remove_image(first)
