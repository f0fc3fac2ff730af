"""What a check is, and the stage that runs it (floor 2).

A check is a function that makes something hostile happen and returns what was seen; its docstring is what must happen.
It works on a ``Box``, so that any sandbox can be measured: ours, or a peer behind a small adapter.

    stage = Stage(subject)          # subject: name, limits, start() -> Box
    outcome = stage.run(CHECKS[0])  # verdict: held, BROKEN, not promised, not run
    stage.close()
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from agentft.errors import AgentFTError
from agentft.sandbox.base import ExecRequest, ExecResult, Limits

Verdict = Literal["held", "BROKEN", "not promised", "not run"]
SECRET_VARIABLE = "AGENTFT_CHECK_SECRET"
DEFAULT_TIMEOUT_S = 15.0


class Box(Protocol):
    """One sandbox, as far as the suite needs it (``base.Lease`` says what each operation is)."""

    @property
    def reusable(self) -> bool:
        """Whether ``reset`` is enough for the next session."""

    def exec(self, request: ExecRequest) -> ExecResult:
        """Run one command; never raises for what the program does."""

    def read_file(self, path: str, max_bytes: int = 1_000_000) -> bytes:
        """Return a regular file of the workspace; ``OSError`` if it is refused or longer."""

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Create or replace files of the workspace; ``OSError`` if one is refused."""

    def reset(self) -> None:
        """Make it clean for the next session."""

    def close(self) -> None:
        """End it. Idempotent."""


class Subject(Protocol):
    """A kind of sandbox under test."""

    @property
    def name(self) -> str:
        """``docker``, ``podman``, ``local``, or a peer's name; promises are looked up by it."""

    @property
    def limits(self) -> Limits:
        """What every box may use."""

    def start(self) -> Box:
        """Return a running, clean box. Raises ``SandboxError``."""


@dataclass(frozen=True)
class Seen:
    """What happened: whether the promise held, and a line that says what was seen."""

    held: bool
    text: str


class NotRunError(Exception):
    """A check cannot be made here; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the table."""

    name: str
    group: str
    must: str
    see: Callable[[Stage], Seen]
    not_promised: Mapping[str, str] = field(default_factory=dict)  # subject → why
    engines_only: bool = False  # acts on one of our engines from outside: says nothing about a peer


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A check's result on one subject."""

    check: Check
    verdict: Verdict
    seen: str
    seconds: float


def check(
    group: str, *, not_promised: Mapping[str, str] | None = None, engines_only: bool = False
) -> Callable[[Callable[[Stage], Seen]], Check]:
    """Make a ``Check`` of a function: its name names it, its docstring says what must happen."""

    def make(see: Callable[[Stage], Seen]) -> Check:
        must = " ".join((see.__doc__ or "").split())
        name = see.__name__.replace("_", "-")
        return Check(
            name=name, group=group, must=must, see=see, not_promised=not_promised or {}, engines_only=engines_only
        )

    return make


class Stage:
    """A subject, one shared box that every check finds clean, and a secret that nothing inside may ever learn."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.limits = subject, subject.limits
        self.secret = secrets.token_hex(16)
        self._held: Box | None = None
        self._used = False
        self.held: dict[str, Any] = {}  # what several checks share; closed at the end
        os.environ[SECRET_VARIABLE] = self.secret

    @property
    def box(self) -> Box:
        """A clean box, shared with later checks."""
        self._used = True
        if self._held is None:
            self._held = self.subject.start()
        return self._held

    @contextmanager
    def fresh(self) -> Iterator[Box]:
        """A box of its own, for checks that use it up."""
        box = self.subject.start()
        try:
            yield box
        finally:
            box.close()

    def next_session(self) -> Box:
        """Return what the next session gets: the same box after a reset, or another one if it is used up."""
        if self._held is not None and self._held.reusable:
            self._held.reset()
        if self._held is not None and not self._held.reusable:
            self._held.close()
            self._held = None
        return self.box

    def python(
        self, code: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, stdin: bytes = b"", box: Box | None = None
    ) -> ExecResult:
        """Run a Python program in the shared box, or in ``box``."""
        request = ExecRequest(argv=("python3", "-c", code), timeout_s=timeout_s, stdin=stdin)
        return (box or self.box).exec(request)

    def sh(
        self, command: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, stdin: bytes = b"", box: Box | None = None
    ) -> ExecResult:
        """Run a shell command in the shared box, or in ``box``."""
        return (box or self.box).exec(ExecRequest(argv=("bash", "-c", command), timeout_s=timeout_s, stdin=stdin))

    def run(self, one: Check) -> Outcome:
        """Make one check; whatever it does, the next one finds a clean box."""
        started = time.monotonic()
        self._used = False
        try:
            seen = one.see(self)
            if self._used and not self._answers():
                seen = Seen(False, f"{seen.text}; the next call was not answered")
            verdict: Verdict = "held" if seen.held else "BROKEN"
        except NotRunError as error:
            verdict, seen = "not run", Seen(False, str(error))
        except Exception as error:  # a boundary: an engine or a peer may fail in any way
            what = error.what if isinstance(error, AgentFTError) else str(error)
            verdict, seen = "BROKEN", Seen(False, f"{type(error).__name__}: {what}")
        if reason := one.not_promised.get(self.subject.name):
            seen = Seen(seen.held, reason if verdict == "not run" else f"{reason} (seen: {seen.text})")
            verdict = "not promised"
        self._clean_up()
        return Outcome(check=one, verdict=verdict, seen=seen.text, seconds=round(time.monotonic() - started, 2))

    def end(self) -> None:
        """End everything that this stage holds; the next check starts anew. Idempotent."""
        if self._held is not None:
            self._held.close()
            self._held = None
        while self.held:
            self.held.popitem()[1].close()

    def close(self) -> None:
        """End everything and forget the secret. Idempotent."""
        self.end()
        os.environ.pop(SECRET_VARIABLE, None)

    def _answers(self) -> bool:
        return self._held is None or self.sh("echo alive").stdout == "alive\n"

    def _clean_up(self) -> None:
        if not self._used or self._held is None:
            return
        try:
            self.next_session()
        except Exception:  # the next check starts another box and says what is wrong
            self._held = None


def brief(result: ExecResult) -> str:
    """Return a result in a few words: status, exit code, beginning of its output."""
    words = [result.status if result.exit_code is None else f"{result.status} {result.exit_code}"]
    for text in (result.stdout, result.stderr):
        if text.strip():
            words.append(ascii(text.strip()[:80]))
    return ", ".join(words)


def expect(condition: bool, result: ExecResult, text: str = "") -> Seen:
    """Return ``text`` if the condition holds, else the result as it was."""
    return Seen(condition, text if condition and text else brief(result))


ATTEMPTS = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
tried, granted = 0, []
here = ("x86_64", "aarch64").index(os.uname().machine)
def attempt(name, function):
    global tried
    tried += 1
    try:
        function()
    except OSError:
        return
    granted.append(name)
def call(name, got, reached=False):
    # by number or by libc; if `reached`, an error of the work itself (EINVAL, EFAULT) means that the kernel did it
    global tried
    tried += 1
    if got >= 0 or (reached and ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS, errno.EACCES)):
        granted.append(name)
def done():
    print("granted:", *granted) if granted else print("refused", tried)
"""


def refused(result: ExecResult, attempts: int) -> Seen:
    """Judge a program written with ``ATTEMPTS``: everything that it tried must have been refused."""
    held = result.stdout.strip() == f"refused {attempts}"
    return Seen(held, f"{attempts} of {attempts} refused" if held else brief(result))
