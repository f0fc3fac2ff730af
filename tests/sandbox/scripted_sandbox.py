"""A sandbox in this process with real files and a few real programs, which fails where a test wants it to."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from agentft.errors import SandboxError
from agentft.sandbox.base import ExecRequest, ExecResult, Limits


class ScriptedLease:
    """Files in a dict; a linter counts the files, ``sh -c 'append NAME TEXT'`` adds to a file."""

    def __init__(self, sandbox: ScriptedSandbox) -> None:
        self.sandbox = sandbox
        self.files: dict[str, bytes] = {}
        self.dead = self.retired = False
        self.ran: list[tuple[str, ...]] = []

    def exec(self, request: ExecRequest) -> ExecResult:
        try:
            self._step("exec")
            deadline = time.monotonic() + self.sandbox.pause_s
            while time.monotonic() < deadline:
                self._alive()
                time.sleep(0.005)
        except SandboxError as error:
            return ExecResult(status="infra", exit_code=None, stderr=str(error))
        self.ran.append(request.argv)
        program = {"flake8": "lint", "ruff": "lint"}.get(request.argv[0], request.argv[0])
        with self.sandbox.lock:
            self.sandbox.runs[program] += 1
            number = self.sandbox.runs[program]
        if program == "lint":
            shown = f"run {number}\n" if program in self.sandbox.drifting else f"{len(self.files)} files\n"
            return ExecResult(status="ok", exit_code=0, stdout=shown, duration_s=0.001)
        if program == "sh":
            _, name, text = request.argv[2].split(" ", 2)
            self.files[name] = self.files.get(name, b"") + text.encode() + b"\n"
            return ExecResult(status="ok", exit_code=0, stdout=f"{name} {len(self.files[name])}\n", duration_s=0.001)
        return ExecResult(status="nonzero", exit_code=127, stderr=f"{program}: not found")

    def read_file(self, path: str, max_bytes: int = 1_000_000) -> bytes:
        self._step("read")
        if path not in self.files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self.files[path]

    def write_files(self, files: Mapping[str, bytes]) -> None:
        self._step("write")
        self.files.update(files)

    def reset(self) -> None:
        self.files.clear()

    def retire(self) -> None:
        self.retired = True

    def close(self) -> None:
        self.dead = True

    def _step(self, what: str) -> None:
        self._alive()
        if self.sandbox.breaks(what):
            self.dead = True
            self._alive()

    def _alive(self) -> None:
        if self.dead:
            raise SandboxError("the sandbox ended")


class ScriptedSandbox:
    """``workers`` leases. ``breaks`` decides at every operation whether the sandbox dies there."""

    image_digest = "scripted"
    limits = Limits()

    def __init__(self, *, workers: int, breaks: Callable[[str], bool] | None = None) -> None:
        self._free, self._breaks = threading.Semaphore(workers), breaks
        self.lock = threading.Lock()
        self.runs: Counter[str] = Counter()
        self.drifting: set[str] = set()
        self.pause_s = 0.0
        self.fail_next = 0
        self.leases: list[ScriptedLease] = []
        self.closed = False

    def breaks(self, what: str) -> bool:
        with self.lock:
            if self.fail_next:
                self.fail_next -= 1
                return True
            return self._breaks is not None and self._breaks(what)

    @contextmanager
    def lease(self) -> Iterator[ScriptedLease]:
        with self._free:
            if self.closed or self.breaks("lease"):
                raise SandboxError("no sandbox could be started")
            lease = ScriptedLease(self)
            with self.lock:
                self.leases.append(lease)
            yield lease

    def close(self) -> None:
        self.closed = True
        for lease in self.leases:
            lease.close()
