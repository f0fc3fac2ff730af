"""The live executor (floor 2): runs the calls of a session from its start, in the background, on a pool of sandboxes.

    executor = LiveExecutor(open_sandbox("docker", workers=2, limits=Limits(), run_name="demo"), workers=2)
    future = executor.submit(session.workspace, calls, key="recorded/3/session-7/2")
    results = future.result()          # one per call, in order
    executor.close()

Nothing that goes wrong in here is an exception of the future: a sandbox that fails gives results with ``infra``,
after one more try on a fresh container.
"""

from __future__ import annotations

import statistics
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from agentft.errors import SandboxError
from agentft.etai import InlineWorkspace, Workspace
from agentft.sandbox.base import ExecResult, Lease, Sandbox
from agentft.sandbox.cache import CACHEABLE_STATUSES, ResultCache, lineage_keys
from agentft.sandbox.container import infra
from agentft.sandbox.execute import READ_ONLY_TOOLS, run_tool
from agentft.tools import ToolCall


class LiveExecutor:
    """Implements ``base.Executor`` on a ``Sandbox``, which it owns from here on (``close`` closes it)."""

    def __init__(self, sandbox: Sandbox, workers: int, *, cache: ResultCache | None = None) -> None:
        """``workers``: sessions at a time; more than the sandbox has containers only waits."""
        self._sandbox, self._cache = sandbox, cache or ResultCache()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="execute")
        self._lock = threading.Lock()
        self._statuses: Counter[str] = Counter()
        self._durations_s: list[float] = []
        self._retries, self._hits, self._closed = 0, 0, False

    def submit(self, workspace: Workspace, calls: tuple[ToolCall, ...], *, key: str) -> Future[list[ExecResult]]:
        """Run ``calls`` in order on a fresh copy of ``workspace``; one result per call.

        ``key`` only names the request (live results depend on the lineage alone). A workspace that is not inline
        files cannot be run here: every result is ``infra`` and says so.
        """
        return self._threads.submit(self._session, workspace, calls)

    def stats(self) -> dict[str, Any]:
        """Return {executions, by_status, median_ms, p95_ms, cache_hits, retries} so far; hits are no executions."""
        with self._lock:
            durations = sorted(self._durations_s)
            return {
                "executions": sum(self._statuses.values()),
                "by_status": dict(self._statuses),
                "median_ms": round(statistics.median(durations) * 1000, 2) if durations else None,
                "p95_ms": round(durations[int(len(durations) * 0.95)] * 1000, 2) if durations else None,
                "cache_hits": self._hits,
                "retries": self._retries,
            }

    def close(self) -> None:
        """Cancel what waits, end what runs (its results are ``infra``), close the sandbox. Idempotent."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._sandbox.close()
        self._threads.shutdown(wait=True)

    def _session(self, workspace: Workspace, calls: tuple[ToolCall, ...]) -> list[ExecResult]:
        if not isinstance(workspace, InlineWorkspace):
            reason = SandboxError(
                f"a workspace of kind {workspace.kind!r} cannot be executed", expected="a workspace of inline files"
            )
            return [self._counted(infra(reason)) for _ in calls]
        run = _SessionRun(self._sandbox, self._cache, workspace, calls)
        results = run.attempt()
        if any(result.status == "infra" for result in results) and not self._closed:
            with self._lock:
                self._retries += 1
            results = run.attempt()
        return [self._counted(result) for result in results]

    def _counted(self, result: ExecResult) -> ExecResult:
        with self._lock:
            if result.cached:
                self._hits += 1
            else:
                self._statuses[result.status] += 1
                if result.status != "infra":
                    self._durations_s.append(result.duration_s)
        return result


class _SessionRun:
    """One session's calls, what is known of their results, and the container they run on (from the first miss on)."""

    def __init__(
        self, sandbox: Sandbox, cache: ResultCache, workspace: InlineWorkspace, calls: tuple[ToolCall, ...]
    ) -> None:
        self._sandbox, self._cache, self._workspace, self._calls = sandbox, cache, workspace, calls
        self._keys = lineage_keys(sandbox.image_digest, sandbox.limits, workspace, calls)

    def attempt(self) -> list[ExecResult]:
        """Return one result per call: from the cache as far as it goes, then from one container."""
        known, claimed = self._known()
        if len(known) == len(self._calls):
            return known
        files = {path: text.encode("utf-8", "replace") for path, text in self._workspace.files.items()}
        try:
            with self._sandbox.lease() as lease:
                lease.write_files(files)
                return known + self._run_from(lease, len(known))
        except (SandboxError, OSError) as error:
            return known + [infra(error)] * (len(self._calls) - len(known))
        finally:
            for key in claimed:
                self._cache.settle(key, None)  # does nothing to what has been settled

    def _known(self) -> tuple[list[ExecResult], list[str]]:
        """Return the results of the first calls that the cache knows, and the keys that are now ours to compute.

        Waits for results that are being computed. It does so only before it holds a key or a container, and whoever
        holds a key never waits for another: no two sessions can wait for each other.
        """
        known: list[ExecResult] = []
        for row, key in enumerate(self._keys):
            found = self._cache.get(key) if key is not None else None
            if key is not None and found is None:
                flight = self._cache.claim(key)
                if flight is None:
                    later = [other for other in self._keys[row + 1 :] if other is not None]
                    return known, [key, *(other for other in later if self._cache.claim(other) is None)]
                flight.result()
                found = self._cache.get(key)
            if found is None:
                break
            known.append(found)
        return known, []

    def _run_from(self, lease: Lease, first: int) -> list[ExecResult]:
        """Rebuild the state before call ``first``, then run it and all later ones."""
        for call in self._calls[:first]:
            if call.name not in READ_ONLY_TOOLS:
                run_tool(lease, call)
        results: list[ExecResult] = []
        repeatable = True  # so far every call ended by itself
        for call, key in zip(self._calls[first:], self._keys[first:], strict=True):
            result = run_tool(lease, call)
            if result.status == "infra":
                return results + [result] * (len(self._calls) - first - len(results))
            if key is not None and repeatable:
                self._cache.settle(key, result)
            repeatable = repeatable and result.status in CACHEABLE_STATUSES
            results.append(result)
        return results
