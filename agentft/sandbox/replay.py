"""Executions looked up in a reward trace instead of run (floor 2): a training run repeated with no sandbox at all.

``ReplayExecutor("runs/demo")`` meets the ``Executor`` protocol. A request's key is ``source/batch/session_id/step``;
the trace holds one line per call of the request, ``source/batch/session_id/<its own step>``. The answer is exactly what
the first run saw, lost executions included, so that the losses are equal bit for bit.

Only the JSON of the trace is read here: its typed form lives above, in ``agentft.feedback.trace``.
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from agentft.errors import AgentFTError, DataError
from agentft.etai import Workspace
from agentft.sandbox.base import ExecResult, Verdict
from agentft.tools import ToolCall

_RESULT_FIELDS = (
    "status", "exit_code", "stdout", "stderr", "duration_s", "truncated", "total_bytes", "cached", "fields"
)  # fmt: skip


class ReplayExecutor:
    """Answers each request from the lines of a trace file (or of a run folder's files, one of them per rank)."""

    def __init__(self, trace: Path | str, *, rank: int | None = None) -> None:
        """Read the trace. With ``rank`` and a run folder, only that rank's file is read if there is one."""
        self.trace = Path(trace)
        self._calls: dict[str, dict[int, dict[str, Any]]] = {}
        self._answered = 0
        for path in _files(self.trace, rank):
            for raw in path.read_bytes().splitlines(keepends=True):
                self._add(raw)
        if not self._calls:
            raise AgentFTError(
                "the trace holds no execution",
                where=str(self.trace),
                hint="name the folder of a run that was trained with feedback.backend docker or local",
            )

    def submit(
        self, workspace: Workspace, calls: tuple[ToolCall, ...], *, key: str, verdict: Verdict | None = None
    ) -> Future[list[ExecResult]]:
        """Return the traced results of ``calls`` and of the verdict, already done.

        Raises:
            AgentFTError: The trace does not know the key, or the calls differ from the traced ones.
        """
        calls = calls if verdict is None else (*calls, verdict.call)
        group, _, _ = key.rpartition("/")
        traced = [line for _, line in sorted(self._calls.get(group, {}).items())]
        if not traced:
            raise AgentFTError(
                "the trace has no execution for this key",
                where=str(self.trace),
                got=key,
                expected="the run's own seed, shards, batch size, ranks and feedback settings",
                hint="replay with the config.yaml of the traced run, or train with feedback.backend=local",
            )
        asked = [call.canonical() for call in calls]
        known = [ToolCall(line["tool"], line["args"]).canonical() for line in traced[: len(calls)]]
        if asked != known:
            at = next((i for i, pair in enumerate(zip(asked, known, strict=False)) if pair[0] != pair[1]), len(known))
            raise AgentFTError(
                f"call {at + 1} of {key} is not the traced one: this run has left the path of the traced run",
                where=str(self.trace),
                got=asked[at],
                expected=known[at] if at < len(known) else f"{len(known)} calls",
                hint="replay with the same model, seed, threads and configuration as the traced run",
            )
        future: Future[list[ExecResult]] = Future()
        future.set_result([ExecResult(**{f: line[f] for f in _RESULT_FIELDS}) for line in traced[: len(calls)]])
        self._answered += len(calls)
        return future

    def stats(self) -> dict[str, Any]:
        """Return how many calls were answered."""
        return {"replayed": self._answered}

    def close(self) -> None:
        """Nothing to release. Idempotent."""

    def _add(self, raw: bytes) -> None:
        if not raw.endswith(b"\n"):
            return  # torn by a crash
        try:
            line = json.loads(raw)
            group, _, step = line["key"].rpartition("/")
            if line["status"] is not None:  # a call that did not parse was never executed
                self._calls.setdefault(group, {})[int(step)] = line
        except ValueError:
            if not raw.startswith(b"{"):
                raise DataError(
                    "not a line of a reward trace", where=str(self.trace), got=raw[:80].decode(errors="replace")
                ) from None


def _files(trace: Path, rank: int | None) -> list[Path]:
    if trace.is_file():
        return [trace]
    folder = trace / "traces" if (trace / "traces").is_dir() else trace
    own = folder / f"rank{rank}.jsonl"
    files = [own] if rank is not None and own.is_file() else sorted(folder.glob("rank*.jsonl"))
    if not files:
        raise AgentFTError(
            "no reward trace to replay",
            where=str(trace),
            expected="a run folder with traces/rank0.jsonl, or a trace file",
            hint="set feedback.replay_from to the folder of a run with feedback.backend docker or local",
        )
    return files
