"""The live executor (floor 2): runs the calls of a session from its start, in the background, on a pool of sandboxes.

    executor = LiveExecutor(open_sandbox("docker", workers=2, limits=Limits(), run_name="demo"), workers=2)
    future = executor.submit(session.workspace, calls, key="recorded/3/session-7/2")
    results = future.result()          # one per call, in order
    executor.close()

**Answers.** Every request is answered exactly once, with one result per call. Nothing that goes wrong in here is an
exception of the future: a sandbox that fails gives results with ``infra``, after one more try from the session's start
on another container.

**Order and backpressure.** Requests wait in a queue of at most ``max_waiting``; ``submit`` blocks while it is full
(nothing is lost by waiting, and looking ahead cannot grow without limit) and gives up with ``SandboxError`` after
``submit_wait_s``. They run in the order in which they came.

**Cancelling.** ``future.cancel()`` works at any time before the answer: a request that waits is dropped, one that runs
has its container ended at once (and replaced), and its later calls are never begun. Whoever grades, does so in another
container: nothing that was cancelled can reach it.

**Checks.** Hits of the cache that are due for a second run get it when nothing else waits, one at a time; a check stops
at the next border of a call as soon as a request comes in.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from agentft.errors import SandboxError
from agentft.etai import InlineWorkspace, Workspace
from agentft.sandbox.base import ExecResult, Sandbox, Verdict
from agentft.sandbox.cache import ResultCache
from agentft.sandbox.container import infra
from agentft.sandbox.session_run import SessionRun
from agentft.tools import ToolCall

MAX_WAITING = 2048
SUBMIT_WAIT_S = 120.0
MOST_CHECKS = 64
"""Checks that may wait; what comes on top is counted and not done."""


class _Answer(Future[list[ExecResult]]):
    """The future of a request. It stays pending while the session runs, so that ``cancel`` works to the end."""

    started = False

    def running(self) -> bool:
        """Whether the session has begun and has no answer yet."""
        return self.started and not self.done()


@dataclass(eq=False)
class _Request:
    """One submitted session: what runs it (or its results, where nothing can run), and its future."""

    run: SessionRun | list[ExecResult]
    answer: _Answer = field(default_factory=_Answer)


class LiveExecutor:
    """Implements ``base.Executor`` on a ``Sandbox``, which it owns from here on (``close`` closes it), as its cache."""

    def __init__(
        self,
        sandbox: Sandbox,
        workers: int,
        *,
        cache: ResultCache | None = None,
        max_waiting: int = MAX_WAITING,
        submit_wait_s: float = SUBMIT_WAIT_S,
    ) -> None:
        """``workers``: sessions at a time; more than the sandbox has containers only waits."""
        self._sandbox, self._cache = sandbox, cache or ResultCache()
        self._max_waiting, self._submit_wait_s = max_waiting, submit_wait_s
        self._changed = threading.Condition()
        self._queue: deque[_Request] = deque()
        self._checks: deque[tuple[SessionRun, int, ExecResult]] = deque()
        self._checking = False
        self._idle = threading.Event()  # set while no request waits
        self._idle.set()
        self._counts: Counter[str] = Counter()
        self._statuses: Counter[str] = Counter()
        self._durations_s: list[float] = []
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"execute-{number}", daemon=True) for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, workspace: Workspace, calls: tuple[ToolCall, ...], *, key: str, verdict: Verdict | None = None
    ) -> Future[list[ExecResult]]:
        """Run ``calls`` in order on a fresh copy of ``workspace``; one result per call, and the verdict's last.

        The verdict is run on what the calls leave, in a container of its own and with the session's own tests:
        ``grader`` says how; ``fields["tampered"]`` of its result lists what was tampered with.
        ``key`` only names the request (live results depend on the lineage alone). A workspace that is not inline
        files cannot be run here: every result is ``infra`` and says so.

        Raises:
            SandboxError: the executor is closed, or the queue stayed full for ``submit_wait_s``.
        """
        run: SessionRun | list[ExecResult]
        if isinstance(workspace, InlineWorkspace):
            run = SessionRun(self._sandbox, self._cache, workspace, calls, verdict)
        else:
            reason = SandboxError(
                f"a workspace of kind {workspace.kind!r} cannot be executed", expected="a workspace of inline files"
            )
            run = [infra(reason)] * (len(calls) + (verdict is not None))
        request = _Request(run)
        with self._changed:
            deadline = time.monotonic() + self._submit_wait_s
            while len(self._queue) >= self._max_waiting and not self._closed:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise SandboxError(
                        "the sandbox's queue stays full", got=f"{len(self._queue)} sessions wait",
                        hint="raise sandbox.workers, or lower feedback.recorded.prefetch_batches",
                    )  # fmt: skip
            if self._closed:
                raise SandboxError("the executor is closed")
            self._queue.append(request)
            self._idle.clear()
            self._changed.notify_all()
        request.answer.add_done_callback(lambda answer: self._ended(request))
        return request.answer

    def stats(self) -> dict[str, Any]:
        """Return counts so far and what the cache says of itself.

        {executions, by_status, median_ms, p95_ms, cache_hits, retries, cancelled, waiting, checks_left, cache}. Hits
        and checks are no executions. ``cancelled``: sessions that were ended while they ran. ``checks_left``: checks
        that were due and not done (yet). ``cache``: see ``ResultCache.stats``.
        """
        with self._changed:
            durations = sorted(self._durations_s)
            found = {
                "executions": sum(self._statuses.values()),
                "by_status": dict(self._statuses),
                "median_ms": round(statistics.median(durations) * 1000, 2) if durations else None,
                "p95_ms": round(durations[int(len(durations) * 0.95)] * 1000, 2) if durations else None,
                "cache_hits": self._counts["hits"],
                "retries": self._counts["retries"],
                "cancelled": self._counts["cancelled"],
                "waiting": len(self._queue),
                "checks_left": self._counts["checks_dropped"] + len(self._checks),
            }
        return {**found, "cache": self._cache.stats()}

    def close(self) -> None:
        """Cancel what waits, end what runs (its results are ``infra``), close sandbox and cache. Idempotent."""
        with self._changed:
            self._closed = True
            waiting = list(self._queue)
            self._idle.clear()
            self._changed.notify_all()
        for request in waiting:
            request.answer.cancel()
        self._sandbox.close()
        for thread in self._threads:
            thread.join()
        self._cache.close()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job()

    def _next(self) -> Callable[[], None] | None:
        """Wait for something to do: a request first, else a check; None when the executor is closed."""
        with self._changed:
            while not self._closed:
                if self._queue:
                    request = self._queue.popleft()
                    request.answer.started = True
                    self._queue_changed()
                    return lambda: self._answer(request)
                if self._checks and not self._checking:
                    self._checking = True
                    run, row, kept = self._checks.popleft()
                    return lambda: self._check(run, row, kept)
                self._changed.wait()
            return None

    def _queue_changed(self) -> None:
        if not self._queue and not self._closed:
            self._idle.set()
        self._changed.notify_all()

    def _ended(self, request: _Request) -> None:
        """Whatever ended the future: if it was cancelled, end the session too."""
        if not request.answer.cancelled():
            return
        with self._changed:
            if not request.answer.started:
                self._queue.remove(request)
                self._queue_changed()
                return
            self._counts["cancelled"] += 1
        if isinstance(request.run, SessionRun):
            request.run.cancel()

    def _answer(self, request: _Request) -> None:
        """Run a request and answer it, unless it was cancelled meanwhile (the future stays pending until the end)."""
        try:
            results = self._results(request)
        except BaseException as error:
            if request.answer.set_running_or_notify_cancel():
                request.answer.set_exception(error)
            return
        if not request.answer.set_running_or_notify_cancel():
            return
        for row, result in enumerate(results):
            self._count(result)
            self._draw_check(request.run, row, result)
        request.answer.set_result(results)

    def _results(self, request: _Request) -> list[ExecResult]:
        if isinstance(request.run, list):
            return request.run
        if request.answer.cancelled():
            return []
        results = request.run.attempt()
        if any(result.status == "infra" for result in results) and not self._closed and not request.answer.cancelled():
            with self._changed:
                self._counts["retries"] += 1
            results = request.run.attempt()
        return results

    def _count(self, result: ExecResult) -> None:
        with self._changed:
            if result.cached:
                self._counts["hits"] += 1
            else:
                self._statuses[result.status] += 1
                if result.status != "infra":
                    self._durations_s.append(result.duration_s)

    def _draw_check(self, run: SessionRun | list[ExecResult], row: int, result: ExecResult) -> None:
        """Put a hit that is due for a second run in line."""
        if not result.cached or not isinstance(run, SessionRun) or not self._cache.due(str(run.keys[row])):
            return
        with self._changed:
            if len(self._checks) < MOST_CHECKS:
                self._checks.append((run, row, result))
                self._changed.notify_all()
            else:
                self._counts["checks_dropped"] += 1

    def _check(self, run: SessionRun, row: int, kept: ExecResult) -> None:
        """Run a hit again; one that had to make room is put back in line."""
        how = "lost"
        try:
            how = run.check(row, kept, self._idle)
        finally:
            with self._changed:
                self._checking = False
                if how == "stopped":
                    self._checks.appendleft((run, row, kept))
                self._counts["checks_dropped"] += how == "lost"
                self._changed.notify_all()
