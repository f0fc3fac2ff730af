"""Requests to the executor and their answers (floor 4): nothing that happens in there can end a training run.

``Executions`` submits the calls of a session under a key, hands the results back when they are needed, and turns every
way in which a sandbox can fail (a refused request, an exception in a worker, no answer in time) into results with
status ``infra``. Errors of ours that are no fault of a sandbox, such as a replay that has left its trace, pass through.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from statistics import median
from typing import Any

from agentft.errors import AgentFTError, SandboxError
from agentft.etai import Workspace
from agentft.feedback.trace import cut_output
from agentft.sandbox.base import ExecResult, Executor
from agentft.tools import ToolCall

WINDOW = 200
"""How many of the newest executions the share of lost ones is taken over."""


class Executions:
    """Requests in flight, by key, and counts over the whole run.

    Attributes:
        by_status: Executions answered, by status.
        cache_hits: How many of them came from the cache.
        wait_s: Seconds that training has waited for answers.
        last_loss: Why the newest lost execution was lost, or None.
    """

    def __init__(self, executor: Executor, *, wait_s: float) -> None:
        self._executor, self._limit_s = executor, wait_s
        self._flying: dict[str, tuple[int, Future[list[ExecResult]] | str]] = {}
        self._durations_ms: list[float] = []
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self.by_status: Counter[str] = Counter()
        self.cache_hits = 0
        self.wait_s = 0.0
        self.last_loss: str | None = None

    def submit(self, key: str, workspace: Workspace, calls: Sequence[ToolCall]) -> None:
        """Start a request unless one with this key is in flight. A sandbox that refuses is no error here."""
        if key in self._flying:
            return
        answer: Future[list[ExecResult]] | str
        try:
            answer = self._executor.submit(workspace, tuple(calls), key=key)
        except SandboxError as error:
            answer = str(error)
        self._flying[key] = (len(calls), answer)

    def take(self, keys: Iterable[str]) -> dict[str, list[ExecResult]]:
        """Return the results of submitted requests, waiting at most ``wait_s`` for all of them together."""
        started = time.monotonic()
        answers = {key: self._take(key, started + self._limit_s) for key in keys}
        self.wait_s += time.monotonic() - started
        return answers

    def drop(self) -> None:
        """Forget what is in flight (results that nothing will use)."""
        for _, answer in self._flying.values():
            if isinstance(answer, Future):
                answer.cancel()
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

    def _take(self, key: str, deadline: float) -> list[ExecResult]:
        count, answer = self._flying.pop(key)
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


def _lost(why: str, count: int) -> list[ExecResult]:
    return [ExecResult(status="infra", exit_code=None, stderr=why)] * count
