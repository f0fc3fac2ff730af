"""What a suite leaves on its machine: containers, volumes, networks, shared memory, processes, before and after.

    before = Machine()
    ...
    for line in before.left_behind():
        print(line)

Processes are those with this suite's mark in their environment, which they inherit, whoever their parent is by then.
The segments of Streaming that killed jobs leave go the way they go for a user: the next start on the same folder
removes them (``clean_stale``); those that this process still maps go when it ends. What other programs start in the
meantime counts too: a verdict needs a quiet machine.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from agentft.data.shared_memory import clean_stale, folders_of

SHM = Path("/dev/shm")
MARK = "AGENTFT_SUITE"
WAIT_S = 10.0


class Machine:
    """The state before the suite; ``engine`` is asked only if it says that it answers."""

    def __init__(self, engine_answers: Callable[[], bool]) -> None:
        self._mark = uuid.uuid4().hex
        os.environ[MARK] = self._mark
        self._engine = engine_answers()
        self._before = self._now()

    def left_behind(self) -> list[str]:
        """Return one line for each thing that was not there before; what is about to end gets a while."""
        clean_stale([folder for path in SHM.glob("??????_locals") for folder in folders_of(path)])
        until = time.monotonic() + WAIT_S
        while (found := self._new()) and time.monotonic() < until:
            time.sleep(0.5)
        return found

    def _new(self) -> list[str]:
        now = self._now()
        return [f"{kind}: {name}" for kind in now for name in sorted(now[kind] - self._before[kind])]

    def _now(self) -> dict[str, set[str]]:
        found = {"processes": set(self._processes())}
        found["shared memory"] = _segments()
        if self._engine:
            import docker

            client = docker.from_env(timeout=30)
            found["containers"] = {one["Names"][0] for one in client.api.containers(all=True)}
            found["volumes"] = {one.name for one in client.volumes.list()}
            found["networks"] = {one.name for one in client.networks.list()}
            client.close()
        return found

    def _processes(self) -> list[str]:
        """Return the marked processes but this one and multiprocessing's helper, which ends with it."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
            own = int(folder.name) == os.getpid() or "multiprocessing.resource_tracker" in command
            if not own and f"{MARK}={self._mark}".encode() in environment and command:
                found.append(f"{folder.name} {command[:160]}")
        return found


def _segments() -> set[str]:
    """Return what lies in shared memory, without what this process maps and all with its number: it goes with it."""
    if not SHM.is_dir():
        return set()
    mine = set(re.findall(rf"{SHM}/(\S+)", Path("/proc/self/maps").read_text(errors="replace")))
    numbers = {name[:7] for name in mine if re.match(r"\d{6}_", name)}
    return {path.name for path in SHM.iterdir() if path.name not in mine and path.name[:7] not in numbers}
