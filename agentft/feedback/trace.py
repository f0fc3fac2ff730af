"""The reward trace (floor 4): every executed call as one JSON line, append-only, readable while training.

``runs/<name>/traces/rank<k>.jsonl``: one file per rank, one ``write`` per line, flushed at once. After a crash the last
line may be torn; the reader leaves it out, and the writer starts a fresh line after it.

    for line in read_traces("runs/demo"):
        print(line.key, line.tool, line.reward)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from agentft.errors import AgentFTError, DataError
from agentft.sandbox.base import ExecResult, Status

Source = Literal["recorded", "policy", "probe"]
Role = Literal["call", "setup", "verdict"]

OUTPUT_CHARS = 4000
"""Longest stdout or stderr in a trace, in characters; the middle is cut. Whatever is rendered uses this cut."""


@dataclass(frozen=True, kw_only=True)
class TraceLine:
    """One executed call.

    ``key`` is ``source/batch/session_id/step`` and what a replay looks up. ``role`` tells the judged ``call`` from the
    recorded calls that led to it (``setup``) and the run that judged it (``verdict``). ``exit_code`` is None unless the
    program ended by itself; ``status`` is None for a call that did not parse and so never ran. ``reward`` is the call's
    own shaped reward (None if the sandbox lost it), ``advantage`` what its tokens carried in the loss (None: silent).
    ``predicted_reward``, ``intents`` and ``tool_probs`` are the heads' probabilities before the result was read.
    ``span`` is the half-open token span of the call in its row. ``duration_s`` is in seconds.
    """

    run: str
    key: str
    batch: int
    source: Source
    role: Role = "call"
    session_id: str
    step: int
    tool: str
    args: dict[str, Any] = field(default_factory=dict)
    parse_ok: bool = True
    exit_code: int | None = None
    status: Status | None = None
    stdout: str = ""
    stderr: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    duration_s: float = 0.0
    truncated: bool = False
    total_bytes: int = 0
    cached: bool = False
    reward: float | None = None
    advantage: float | None = None
    predicted_reward: float | None = None
    intents: dict[str, float] | None = None
    tool_probs: dict[str, float] | None = None
    span: tuple[int, int] | None = None

    def result(self) -> ExecResult | None:
        """Return the execution as the executor gave it, or None for a call that did not parse."""
        if self.status is None:
            return None
        return ExecResult(
            status=self.status,
            exit_code=self.exit_code,
            stdout=self.stdout,
            stderr=self.stderr,
            duration_s=self.duration_s,
            truncated=self.truncated,
            total_bytes=self.total_bytes,
            cached=self.cached,
            fields=self.fields,
        )


_NAMES = frozenset(f.name for f in fields(TraceLine))


class TraceWriter:
    """Appends lines to one file; a context manager, and safe to close twice."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.lines = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _drop_torn_line(self._fd)

    def write(self, line: TraceLine) -> None:
        """Append one line with one system call. Raises ``DataError`` when the disk does not take it."""
        if self._fd is None:
            raise DataError("the trace is closed", where=str(self.path))
        data = json.dumps(vars(line), separators=(",", ":")).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as cause:
            raise DataError(
                "cannot write the reward trace", where=str(self.path), got=cause, hint="free disk space and resume"
            ) from cause
        self.lines += 1

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def trace_files(run_or_file: Path | str) -> list[Path]:
    """Return the trace files of a run folder, of its ``traces`` folder, or the file itself, sorted by rank.

    Raises:
        AgentFTError: There is none.
    """
    path = Path(run_or_file)
    if path.is_file():
        return [path]
    found = [p for folder in (path / "traces", path) for p in folder.glob("rank*.jsonl")]
    if not found:
        raise AgentFTError(
            "no reward trace here",
            where=str(path),
            expected="a run folder with traces/rank0.jsonl, or a trace file",
            hint="train with feedback.backend docker or local first",
        )
    return sorted(found, key=lambda p: (len(p.name), p.name))


def read_traces(run_or_file: Path | str) -> Iterator[TraceLine]:
    """Yield the lines of a run or file, rank by rank, in the order in which they were written.

    A torn line at the end is left out; unknown fields of newer versions are ignored.

    Raises:
        AgentFTError: There is no trace.
        DataError: A whole line is not a trace line; says which.
    """
    for path in trace_files(run_or_file):
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    break  # being written, or torn by a crash
                line = _parse(raw)
                if line is None:
                    raise DataError(
                        "not a line of a reward trace",
                        where=f"{path}:{number}",
                        got=raw[:80].decode(errors="replace"),
                        expected="one JSON object with run, key, batch, source, session_id, step, tool",
                    )
                yield line


def _drop_torn_line(fd: int) -> None:
    """Cut the file behind its last whole line: what a crash left unfinished is no line."""
    size = end = os.fstat(fd).st_size
    while end:
        start = max(0, end - 65536)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)


def _parse(raw: bytes) -> TraceLine | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    known = {name: item for name, item in value.items() if name in _NAMES}
    if known.get("span") is not None:
        known["span"] = tuple(known["span"])
    try:
        return TraceLine(**known)
    except TypeError:
        return None


def cut_output(result: ExecResult, limit: int = OUTPUT_CHARS) -> ExecResult:
    """Return ``result`` with stdout and stderr cut in the middle to at most ``limit`` characters each."""
    stdout, stderr = _cut(result.stdout, limit), _cut(result.stderr, limit)
    if stdout is result.stdout and stderr is result.stderr:
        return result
    size = len(result.stdout.encode("utf-8", "surrogatepass")) + len(result.stderr.encode("utf-8", "surrogatepass"))
    return replace(result, stdout=stdout, stderr=stderr, truncated=True, total_bytes=max(result.total_bytes, size))


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    marker = f"\n… {len(text)} characters, middle left out …\n"
    keep = limit - len(marker)
    return text[: keep - keep // 2] + marker + text[len(text) - keep // 2 :]
