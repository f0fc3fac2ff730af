"""One sandbox process and the operations on it (floor 2): the ``Lease`` that every engine hands out.

An engine (``docker.py``, ``local.py``) starts the process and gives a ``Wire`` and a way to kill it; everything else
is here and the same for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from agentft.errors import SandboxError
from agentft.sandbox.base import ExecRequest, ExecResult, Limits
from agentft.sandbox.wire import Wire

WORKSPACE = "/workspace"
WIPED = (WORKSPACE, "/tmp", "/dev/shm", "/dev/mqueue")
BASE_ENV: Mapping[str, str] = MappingProxyType(
    {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",  # a .pyc is keyed by size and second: an edit of equal size would run stale
    }
)
MAX_OPERATION_S = 10.0
MAX_USES = 500


class Engine(Protocol):
    """Starts containers of one image under one set of limits."""

    image_digest: str
    limits: Limits

    def start(self) -> Container:
        """Return a running, clean container. Raises ``SandboxError``."""

    def close(self) -> None:
        """Release the engine's own connections. Idempotent."""


class Container:
    """A running sandbox; implements ``Lease``. Serial use only, by whoever holds the lease."""

    def __init__(
        self,
        wire: Wire,
        limits: Limits,
        kill: Callable[[], None],
        *,
        name: str,
        env: Mapping[str, str] = BASE_ENV,
        ended_for_memory: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take over a started sandbox.

        Args:
            wire: the stream to its runner.
            limits: what it may use.
            kill: ends the process from outside, whatever state it is in; it must be idempotent.
            name: for messages.
            env: of every call.
            ended_for_memory: whether the engine saw the kernel end the whole sandbox because memory ran out.
        """
        self._wire, self._kill, self._env, self.limits, self.name = wire, kill, env, limits, name
        self._ended_for_memory = ended_for_memory
        self.uses = 0  # sessions that had it
        self.companions: list[Container] = []  # end with this one (services that it talks to)
        self.broken: str | None = None  # why no further call is possible
        self.hit_limits = False  # memory or processes ran out: this session may go on, the next gets another container

    def exec(self, request: ExecRequest) -> ExecResult:
        """Run one command. A sandbox that fails gives ``status="infra"`` with the reason in ``stderr``.

        Many small processes can make the kernel end the runner as well when memory runs out: that is the program's
        doing (``oom``) and costs the sandbox.
        """
        timeout_s = self.limits.timeout_s if request.timeout_s is None else request.timeout_s
        header = {
            "op": "exec",
            "argv": tuple(request.argv),
            "cwd": request.cwd,
            "env": {**self._env, **request.env},
            "timeout_s": timeout_s,
            "output_bytes": self.limits.output_bytes,
        }
        started = time.monotonic()
        try:
            answer, payload = self._request(header, request.stdin, timeout_s, 2 * self.limits.output_bytes)
            return self._result(answer, payload)
        except SandboxError as error:
            duration_s = time.monotonic() - started
            if self._wire.ended and self._ended_for_memory():
                self.hit_limits = True
                return ExecResult(status="oom", exit_code=None, stderr=str(error), duration_s=duration_s)
            return infra(error, duration_s)

    def read_file(self, path: str, max_bytes: int = 1_000_000) -> bytes:
        """Return a regular file of the workspace (``OSError`` subclasses; ``SandboxError`` if the sandbox fails)."""
        _, payload = self._request({"op": "read", "path": path, "max_bytes": max_bytes}, max_body=max_bytes)
        return payload

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Create or replace files of the workspace (``OSError`` subclasses; ``SandboxError`` if the sandbox fails)."""
        sizes = tuple((path, len(content)) for path, content in files.items())
        self._request({"op": "write", "files": sizes}, b"".join(files.values()))

    def reset(self) -> None:
        """Kill everything and wipe every writable folder. A container that cannot be cleaned is broken."""
        try:
            self._request({"op": "reset"})
        except (OSError, SandboxError) as error:
            self.broken = self.broken or f"reset failed: {error}"

    def retire(self) -> None:
        """Let no other session have this sandbox."""
        self.hit_limits = True

    def close(self) -> None:
        """End the sandbox: hang up, then kill. Idempotent."""
        self.broken = self.broken or "closed"
        self._wire.close()
        self._kill()
        for companion in self.companions:
            companion.close()

    def hung_up(self) -> bool:
        """Whether the sandbox ended while nobody used it."""
        return self.broken is not None or self._wire.hung_up()

    @property
    def reusable(self) -> bool:
        """Whether another session may have this container."""
        return self.broken is None and not self.hit_limits and self.uses < MAX_USES

    def _request(
        self, header: dict[str, Any], body: bytes = b"", timeout_s: float = MAX_OPERATION_S, max_body: int = 0
    ) -> tuple[dict[str, Any], bytes]:
        if self.broken:
            raise SandboxError("this sandbox is no longer usable", where=self.name, got=self.broken)
        deadline = time.monotonic() + timeout_s + self.limits.grace_s
        try:
            answer, payload = self._wire.request(header, body, deadline=deadline, max_body=max_body)
        except SandboxError as error:
            self.broken = self.broken or error.what  # closed from another thread: that stays the reason
            self._kill()
            raise SandboxError(error.what, where=self.name, got=error.got) from error
        if "error" in answer:
            number, message, path = answer["error"]
            raise OSError(number, message, path)
        return answer, payload

    def _result(self, answer: dict[str, Any], payload: bytes) -> ExecResult:
        out, err = payload[: answer["out"]], payload[answer["out"] :]
        self.hit_limits = self.hit_limits or bool(answer["hits"])
        return ExecResult(
            status=answer["status"],
            exit_code=answer["exit_code"],
            stdout=out.decode("utf-8", "replace"),
            stderr=err.decode("utf-8", "replace"),
            duration_s=answer["duration_s"],
            truncated=answer["truncated"],
            total_bytes=answer["total_bytes"],
        )


def infra(error: Exception, duration_s: float = 0.0) -> ExecResult:
    """Return the result that says: the sandbox failed, the program is not to blame."""
    return ExecResult(status="infra", exit_code=None, stderr=str(error), duration_s=duration_s)
