"""Other sandboxes, each in an environment of its own under ``~/.cache/agentft/peers`` (made on demand).

    with Peer("llm-sandbox", image="agentft/python") as peer:
        seconds = peer.call("execute_command", ("true",))

A peer that cannot be installed or started raises ``PeerError`` with its own words: reported, never dropped.
SWE-ReX talks to a server inside the container. Its image is the benchmark's image plus that server's packages, built
without network and removed at the end. Both run with their own defaults, which lock down less than ours.
"""

from __future__ import annotations

import io
import json
import os
import select
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import docker

ANSWER_TIMEOUT_S = 60.0
SWE_REX_IMAGE = "agentft/bench-swe-rex"
SWE_REX_SERVER = """#!/usr/bin/env python3
import sys
sys.path.insert(0, "/opt/swe-rex")
from swerex.server import main
main()
"""


class PeerError(Exception):
    """A peer cannot be installed, started or used here; the text says why."""


@dataclass(frozen=True)
class Package:
    """What is installed for a peer, and which of its calls are measured."""

    requirements: tuple[str, ...]
    paths: tuple[str, ...]
    documented: str  # the call that its documentation shows for a command in an open session


PEERS = {
    "SWE-ReX": Package(("swe-rex==1.4.0", "aiohttp"), ("session", "execute"), "session"),
    "llm-sandbox": Package(("llm-sandbox[docker]==0.3.46",), ("execute_command", "run"), "execute_command"),
}


def environment(name: str, requirements: Sequence[str]) -> Path:
    """Return the interpreter of a peer's environment; make it if it is not there. Raises ``PeerError``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "agentft" / "peers" / name.lower()
    python, wanted = folder / "bin" / "python", "\n".join(requirements)
    marker = folder / "requirements.txt"
    if python.exists() and marker.exists() and marker.read_text() == wanted:
        return python
    if uv := shutil.which("uv"):
        steps = [
            [uv, "venv", "-q", "--clear", "--python", sys.executable, str(folder)],
            [uv, "pip", "install", "-q", "--link-mode", "hardlink", "--python", str(python), *requirements],
        ]
    else:
        steps = [
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(python), "-m", "pip", "install", "-q", *requirements],
        ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PeerError(f"{name} cannot be installed: {' '.join(step)}: {done.stderr.strip()[-600:]}")
    marker.write_text(wanted)
    return python


class Peer:
    """A running peer: one open session in one container, driven by a script in the peer's environment."""

    def __init__(self, name: str, image: str) -> None:
        """Install (if need be) and start ``name`` on ``image``. Raises ``PeerError``."""
        self.name, self._derived = name, None
        python = environment(name, PEERS[name].requirements)
        if name == "SWE-ReX":
            self._derived = image = _image_with_server(python, image)
        script = Path(__file__).parent / f"peer_{name.lower().replace('-', '_')}.py"
        self._process = subprocess.Popen(
            [str(python), str(script), image],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            self._answer()
        except PeerError:
            self.close()
            raise

    def call(self, path: str, argv: tuple[str, ...]) -> float:
        """Run a program by one of the peer's calls; return the seconds it took. Raises ``PeerError``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"path": path, "argv": argv}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if answer["exit_code"] != 0:
            raise PeerError(f"{self.name} {path}: {argv} gave {answer['exit_code']} {answer['error']}")
        return float(answer["seconds"])

    def close(self) -> None:
        """End the session, its container, and the derived image."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._derived is not None:
            docker.from_env().images.remove(self._derived, force=True)
            self._derived = None

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_TIMEOUT_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self._process.kill()
            last = self._process.stderr.read().strip()[-800:]
            raise PeerError(f"{self.name} {'ended' if ready else 'does not answer'}: {last}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _image_with_server(python: Path, image: str) -> str:
    """Build ``image`` + SWE-ReX's server from the packages of its environment; return the new image's name."""
    packages = next(python.parents[1].glob("lib/python3.*/site-packages"))
    dockerfile = f"FROM {image}\nCOPY packages /opt/swe-rex\nCOPY swerex-remote /usr/local/bin/\n"
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        archive.add(packages, "packages")
        for name, text, mode in (("Dockerfile", dockerfile, 0o644), ("swerex-remote", SWE_REX_SERVER, 0o755)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), mode
            archive.addfile(entry, io.BytesIO(text.encode()))
    context.seek(0)
    try:
        docker.from_env().images.build(
            fileobj=context, custom_context=True, tag=SWE_REX_IMAGE, network_mode="none", rm=True
        )
    except docker.errors.DockerException as error:
        raise PeerError(f"SWE-ReX's image cannot be built: {error}") from error
    return SWE_REX_IMAGE
