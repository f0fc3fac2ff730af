"""The sandbox's seam (floor 2): limits, one command and its result, and the protocols that every engine meets.

A program that fails is data (an ``ExecResult``). A sandbox that fails is ``status="infra"`` or a
``SandboxError``; it never becomes an exit code.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from agentft.errors import SandboxError
from agentft.etai import ExecutionResult, Workspace
from agentft.tools import ToolCall

Status = Literal["ok", "nonzero", "timeout", "oom", "pids", "output_limit", "infra"]
"""``ok``/``nonzero``: the program ended by itself. ``infra``: the sandbox failed, the program is not to blame."""


class HostAwayError(SandboxError):
    """An engine or a host does not answer now; it may later. Any other ``SandboxError`` needs a person."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one container may use. Sizes in bytes or MiB as named, times in seconds."""

    timeout_s: float = 20.0
    grace_s: float = 3.0
    memory_mib: int = 512
    pids: int = 128
    cpus: float = 1.0
    workspace_mib: int = 64
    tmp_mib: int = 64
    shm_mib: int = 16
    output_bytes: int = 1_000_000
    file_mib: int = 32
    open_files: int = 512


@dataclass(frozen=True, kw_only=True)
class ExecRequest:
    """One command: ``argv`` is run without a shell, in ``cwd`` relative to the workspace."""

    argv: tuple[str, ...]
    cwd: str = "."
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    timeout_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ExecResult:
    """What happened. ``exit_code`` is None unless the program ended by itself (a signal gives 128 + its number)."""

    status: Status
    exit_code: int | None
    stdout: str = ""
    stderr: str = ""
    duration_s: float = 0.0
    truncated: bool = False
    total_bytes: int = 0
    cached: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def timed_out(self) -> bool:
        """Whether the wall-clock limit ended the program."""
        return self.status == "timeout"

    def to_record(self) -> ExecutionResult:
        """Return the result as it is stored in a session (parsed fields flattened beside the fixed ones)."""
        fixed: dict[str, Any] = {
            "status": self.status,
            "exit_code": self.exit_code,
            "stdout": self.stdout,
            "stderr": self.stderr,
            "duration_s": round(self.duration_s, 4),
            "truncated": self.truncated,
            "total_bytes": self.total_bytes,
        }
        return ExecutionResult.model_validate({**self.fields, **fixed})


@dataclass(frozen=True)
class Verdict:
    """A run of code that judges what a session's calls leave, with the session's own tests (``grader``).

    The calls before ``agent_from`` are the session's own: what they do to the tests is no tampering.
    """

    call: ToolCall
    agent_from: int = 0


class Lease(Protocol):
    """One container (or bubblewrap process) held by one session; calls inside are serial."""

    def exec(self, request: ExecRequest) -> ExecResult:
        """Run one command; never raises for what the program does."""

    def read_file(self, path: str, max_bytes: int = 1_000_000) -> bytes:
        """Return a regular file of the workspace. Raises ``FileNotFoundError``, ``PermissionError`` or ``OSError``."""

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Create or replace regular files of the workspace; no path leaves it. Raises ``OSError`` subclasses."""

    def reset(self) -> None:
        """Kill everything, wipe workspace, temporary folder and shared memory."""

    def retire(self) -> None:
        """Let no other session have this container: it is replaced when it is given back."""

    def close(self) -> None:
        """End the container now, from any thread; a call that runs gives ``infra``. Idempotent."""


class Sandbox(Protocol):
    """A pool of leases on one image."""

    image_digest: str
    limits: Limits

    def lease(self) -> AbstractContextManager[Lease]:
        """Hold one clean container; it is reset (or replaced, if tainted) when given back."""

    def close(self) -> None:
        """Remove every container of this pool. Idempotent."""


class Executor(Protocol):
    """Runs the calls of a session from its start; live in a sandbox, or replayed from a trace."""

    def submit(
        self, workspace: Workspace, calls: tuple[ToolCall, ...], *, key: str, verdict: Verdict | None = None
    ) -> Future[list[ExecResult]]:
        """Run ``calls`` in order on a fresh copy of ``workspace``; one result per call, and the verdict's last.

        ``key`` names the request (session, batch, purpose) so that a replay finds it again. The verdict is run in
        a container where the agent never was; ``fields["tampered"]`` of its result lists what was tampered with, and
        then it has not passed.
        """

    def stats(self) -> dict[str, Any]:
        """Return what there is to say about the work done so far."""

    def close(self) -> None:
        """Cancel what waits, end what runs, release everything. Idempotent."""
