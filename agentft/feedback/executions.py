"""Requests to the executor and their answers (floor 4): nothing that happens in there can end a training run.

``Executions`` submits the calls of a session under a key, hands the results back when they are needed, and turns every
way in which a sandbox can fail (a refused request, an exception in a worker, no answer in time) into results with
status ``infra``. Errors of ours that are no fault of a sandbox, such as a replay that has left its trace, pass through.

Requests run in the order in which they were submitted, except those inside ``with executions.at_once():``, which go
before all that has not started. When training has to wait, it is noted for what: requests that had not even started
(too few workers) or that were still running (submitted too late).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from agentft.errors import AgentFTError, SandboxError
from agentft.etai import Workspace
from agentft.feedback.trace import cut_output
from agentft.sandbox.base import ExecResult, Executor, Verdict
from agentft.tools import ToolCall

WINDOW = 200
"""How many of the newest executions the share of lost ones is taken over."""
WATCHED_BATCHES, MOST_WAITING = 20, 0.05
"""Over how many batches, and from which share of their time on, waiting for recorded calls is worth a word."""


@dataclass(frozen=True)
class _Request:
    """A submitted request and what will answer it: a future, or the reason why the sandbox refused it."""

    workspace: Workspace
    calls: tuple[ToolCall, ...]
    verdict: Verdict | None
    answer: Future[list[ExecResult]] | str

    @property
    def count(self) -> int:
        """How many results answer it."""
        return len(self.calls) + (self.verdict is not None)


class Executions:
    """Requests in flight, by key, and counts over the whole run.

    Attributes:
        by_status: Executions answered, by status.
        cache_hits: How many of them came from the cache.
        wait_s: Seconds that training has waited for answers.
        queued_s: How many of them for requests that had not started when the wait began.
        last_loss: Why the newest lost execution was lost, or None.
    """

    def __init__(self, executor: Executor, *, wait_s: float) -> None:
        self._executor, self._limit_s = executor, wait_s
        self._flying: dict[str, _Request] = {}
        self._durations_ms: list[float] = []
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self.by_status: Counter[str] = Counter()
        self.cache_hits = 0
        self.wait_s, self.queued_s = 0.0, 0.0
        self.last_loss: str | None = None

    def submit(self, key: str, workspace: Workspace, calls: Sequence[ToolCall], verdict: Verdict | None = None) -> None:
        """Start a request unless one with this key is in flight. A sandbox that refuses is no error here.

        The verdict's result comes last.
        """
        if key not in self._flying:
            self._flying[key] = self._started(key, workspace, tuple(calls), verdict)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let what is submitted inside run before everything that has been submitted earlier and has not started."""
        waiting = [key for key, request in self._flying.items() if _withdraw(request)]
        try:
            yield
        finally:
            for key in waiting:
                request = self._flying.pop(key)
                self._flying[key] = self._started(key, request.workspace, request.calls, request.verdict)

    def take(self, keys: Iterable[str]) -> dict[str, list[ExecResult]]:
        """Return the results of submitted requests, waiting at most ``wait_s`` for all of them together."""
        started, keys = time.monotonic(), list(keys)
        queued = any(_not_started(self._flying[key]) for key in keys)
        answers = {key: self._take(key, started + self._limit_s) for key in keys}
        waited = time.monotonic() - started
        self.wait_s += waited
        self.queued_s += waited if queued else 0.0
        return answers

    def drop(self) -> None:
        """Forget what is in flight (results that nothing will use)."""
        for request in self._flying.values():
            if isinstance(request.answer, Future):
                request.answer.cancel()
        self._flying.clear()

    def lost(self) -> tuple[int, int]:
        """Return how many of the newest executions were lost, and of how many."""
        return sum(self._recent), len(self._recent)

    def summary(self) -> dict[str, Any]:
        """Return {executions, by_status, median_ms, cache_hits}; the median is over what really ran."""
        return {
            "executions": self.by_status.total(),
            "by_status": dict(sorted(self.by_status.items())),
            "median_ms": round(median(self._durations_ms), 3) if self._durations_ms else None,
            "cache_hits": self.cache_hits,
        }

    def counts(self) -> dict[str, Any]:
        """Return what a run that goes on needs to know of the executions so far."""
        return {"by_status": dict(self.by_status), "cache_hits": self.cache_hits, "recent": list(self._recent)}

    def add_counts(self, counts: dict[str, Any]) -> None:
        """Count what ``counts`` says as well."""
        self.by_status.update(counts["by_status"])
        self.cache_hits += counts["cache_hits"]
        self._recent.extend(counts["recent"])

    def _started(
        self, key: str, workspace: Workspace, calls: tuple[ToolCall, ...], verdict: Verdict | None
    ) -> _Request:
        answer: Future[list[ExecResult]] | str
        try:
            answer = self._executor.submit(workspace, calls, key=key, verdict=verdict)
        except SandboxError as error:
            answer = str(error)
        return _Request(workspace, calls, verdict, answer)

    def _take(self, key: str, deadline: float) -> list[ExecResult]:
        request = self._flying.pop(key)
        count, answer = request.count, request.answer
        if isinstance(answer, str):
            results = _lost(answer, count)
        else:
            results = self._await(answer, count, max(0.0, deadline - time.monotonic()))
        results = [cut_output(result) for result in results]
        for result in results:
            self._count(result)
        return results

    def _await(self, answer: Future[list[ExecResult]], count: int, seconds: float) -> list[ExecResult]:
        try:
            results = answer.result(timeout=seconds)
        except FutureTimeout:
            answer.cancel()
            return _lost(f"no result within {self._limit_s:g} s", count)
        except CancelledError:
            return _lost("the executor was closed", count)
        except SandboxError as error:
            return _lost(str(error), count)
        except AgentFTError:
            raise
        except Exception as error:
            return _lost(f"{type(error).__name__}: {error}", count)
        if len(results) != count:
            return _lost(f"{len(results)} results for {count} calls", count)
        return list(results)

    def _count(self, result: ExecResult) -> None:
        self.by_status[result.status] += 1
        self._recent.append(result.status == "infra")
        if result.status == "infra":
            self.last_loss = result.stderr or None
        elif result.cached:
            self.cache_hits += 1
        else:
            self._durations_ms.append(result.duration_s * 1000)


class WaitWatch:
    """Watches what share of its time training waits for recorded calls, and says once what would help."""

    def __init__(self, prefetch_batches: int) -> None:
        self._skip = 1 + prefetch_batches  # the first batches were not submitted ahead of time
        self._active = prefetch_batches > 0  # without prefetching, waiting is what was asked for
        self._ended: float | None = None
        self._batches: deque[tuple[float, float, float]] = deque(maxlen=WATCHED_BATCHES)

    def batch(self, waited_s: float, queued_s: float) -> str | None:
        """Note the waits of one more batch; return advice when it is due."""
        now = time.monotonic()
        if self._skip:
            self._skip -= 1
        elif self._ended is not None:
            self._batches.append((now - self._ended, waited_s, queued_s))
        self._ended = now
        if not self._active or len(self._batches) < WATCHED_BATCHES:
            return None
        total_s, waited, queued = (sum(column) for column in zip(*self._batches, strict=True))
        if waited <= MOST_WAITING * total_s:
            return None
        self._active = False
        if queued > waited / 2:
            help_ = "they had not started: raise sandbox.workers (or lower feedback.recorded.share)"
        else:
            help_ = "they were still running: raise feedback.recorded.prefetch_batches"
        return f"training waited {waited:.1f} s of the last {total_s:.1f} s for recorded calls; {help_}"


def _not_started(request: _Request) -> bool:
    return isinstance(request.answer, Future) and not request.answer.running() and not request.answer.done()


def _withdraw(request: _Request) -> bool:
    """Take a request back if it has not started; whether it was."""
    return _not_started(request) and isinstance(request.answer, Future) and request.answer.cancel()


def _lost(why: str, count: int) -> list[ExecResult]:
    return [ExecResult(status="infra", exit_code=None, stderr=why)] * count
