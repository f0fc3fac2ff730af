"""Our own engines as subjects of the suite (floor 2), with what only their operator can do: freeze, kill, count.

with open_subject("docker", image="python", host=None) as subject:
    stage = Stage(subject)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentft.errors import SandboxError
from agentft.sandbox.base import Limits
from agentft.sandbox.conformance.check import NotRunError, Stage
from agentft.sandbox.container import Container, Engine
from agentft.sandbox.direct import PREFIX

LIMITS = Limits(timeout_s=10, memory_mib=256, pids=64, workspace_mib=16, tmp_mib=16, shm_mib=4, file_mib=8)
RUN_LABEL = "agentft.run"
WITHOUT_CONTROL_GROUPS = " without control groups"
FIRST_USER_ID = 10001  # sandboxes run as this user or one with a higher number


def open_engine(
    backend: str, *, image: str, run_name: str, host: str | None = None, runtime: str | None = None
) -> Engine:
    """Return an engine under the suite's limits. Raises ``SandboxError`` with what is missing."""
    if backend == "local":
        from agentft.sandbox.local import LocalEngine

        return LocalEngine(limits=LIMITS)
    from agentft.sandbox.docker import DockerEngine

    return DockerEngine(image=image, limits=LIMITS, run_name=run_name, host=host, runtime=runtime)


class EngineSubject:
    """One of our engines under test. Meets ``check.Subject``."""

    def __init__(self, backend: str, *, image: str, host: str | None, runtime: str | None = None) -> None:
        """Connect. Raises ``SandboxError``: the engine or the image is missing."""
        self.backend, self.image, self.host, self.runtime = backend, image, host, runtime
        self.run_name, self.limits = f"check-{secrets.token_hex(4)}", LIMITS
        self.engine = open_engine(backend, image=image, run_name=self.run_name, host=host, runtime=runtime)
        self._client: Any = None
        if backend == "docker":
            from agentft.sandbox.docker import connect

            self._client = connect(host)
        parts = self._client.version().get("Components") or () if self._client else ()
        self.name = "podman" if any("Podman" in part["Name"] for part in parts) else backend
        if getattr(self.engine, "gaps", ()):  # it said what it cannot enforce
            self.name += WITHOUT_CONTROL_GROUPS
        self.before = self.traces()

    def start(self) -> Container:
        """Return a running, clean container."""
        return self.engine.start()

    def freeze(self, box: Container) -> None:
        """Stop process 1 of a sandbox from outside, as a host in trouble would."""
        self._signal(box, signal.SIGSTOP)

    def kill(self, box: Container) -> None:
        """End a sandbox from outside, without a word to its owner."""
        self._signal(box, signal.SIGKILL)

    def _signal(self, box: Container, number: signal.Signals) -> None:
        if self._client is not None:
            self._client.kill(box.name.split()[1], number.name)
            return
        os.kill(descendants(int(box.name.split()[-1]))[0], number)  # of bubblewrap: the runner

    def containers(self, run_name: str | None = None) -> list[str]:
        """Return the ids of this run's containers, running or not (none for the local engine)."""
        if self._client is None:
            return []
        from agentft.sandbox.docker import list_containers

        wanted = run_name or self.run_name
        entries = list_containers(self._client)
        return [entry["Id"][:12] for entry in entries if entry["Labels"].get(RUN_LABEL, "").startswith(wanted)]

    def objects(self) -> set[str]:
        """Return the engine's volumes and networks, except those that another run of ours has labelled."""
        if self._client is None:
            return set()
        volumes = self._client.volumes().get("Volumes") or []
        found = [("volume", entry["Name"], entry) for entry in volumes]
        found += [("network", entry["Name"], entry) for entry in self._client.networks()]
        return {f"{kind} {name}" for kind, name, entry in found if RUN_LABEL not in (entry.get("Labels") or {})}

    def traces(self) -> dict[str, set[str]]:
        """Return what a run could leave on this machine and on the engine, by kind."""
        found = {"containers": set(self.containers()), "volumes and networks": self.objects()}
        found["processes"] = {f"{pid} {_name(pid)}" for pid in descendants(os.getpid())}
        found["mounts"] = {
            line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if "agentft-dockerd-" in line
        }
        found["bridges"] = {name for name in os.listdir("/sys/class/net") if name.startswith("docker")}
        for folder in ("/dev/shm", "/tmp", "/var/tmp"):
            found[f"files in {folder}"] = {entry.name for entry in os.scandir(folder) if _is_ours(entry)}
        return found

    def close(self) -> None:
        """Release connections. Idempotent."""
        self.engine.close()
        if self._client is not None:
            with contextlib.suppress(Exception):
                self._client.close()


@contextmanager
def open_subject(backend: str, *, image: str, host: str | None, runtime: str | None = None) -> Iterator[EngineSubject]:
    """Open an engine for the suite and release it at the end."""
    subject = EngineSubject(backend, image=image, host=host, runtime=runtime)
    try:
        yield subject
    finally:
        subject.close()


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on; zombies included."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found + [below for child in found for below in descendants(child)]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Whether a file was made by a sandbox's user or by the suite."""
    try:
        owner = entry.stat(follow_symlinks=False).st_uid
    except OSError:
        return False
    return owner >= FIRST_USER_ID or entry.name.startswith(("agentft-dockerd-", "agentft-check-", PREFIX))


def engine_of(stage: Stage) -> EngineSubject:
    """Return the stage's engine. Raises ``NotRunError`` where the subject is not one of ours."""
    if not isinstance(stage.subject, EngineSubject):
        raise NotRunError("not an engine of ours")
    return stage.subject


def remove_leftovers_of(subject: EngineSubject) -> None:
    """Do what the next start of a trainer does: open the engine again."""
    with contextlib.suppress(SandboxError):
        open_engine(
            subject.backend, image=subject.image, run_name=f"{subject.run_name}-next", host=subject.host
        ).close()
