"""One session's calls from start to end (floor 2): what is known of their results, and the container for the rest.

Used by ``executor.LiveExecutor``; serial, except for ``cancel``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from agentft.errors import SandboxError
from agentft.etai import InlineWorkspace
from agentft.sandbox.base import ExecResult, Lease, Sandbox, Verdict
from agentft.sandbox.cache import CACHEABLE_STATUSES, ResultCache, lineage_keys
from agentft.sandbox.calls import start_files
from agentft.sandbox.container import infra
from agentft.sandbox.execute import READ_ONLY_TOOLS, run_tool
from agentft.sandbox.grader import Left, grade_left, what_is_left
from agentft.tools import ToolCall

CheckEnd = Literal["done", "stopped", "lost"]
CANCELLED = SandboxError("the session was cancelled: nobody waits for it any more")


class SessionRun:
    """A session's calls and, if asked for, the verdict on what they leave (see ``grader``), which comes last."""

    def __init__(
        self,
        sandbox: Sandbox,
        cache: ResultCache,
        workspace: InlineWorkspace,
        calls: tuple[ToolCall, ...],
        verdict: Verdict | None = None,
    ) -> None:
        self._sandbox, self._cache, self._calls, self._verdict = sandbox, cache, calls, verdict
        self._files = start_files(workspace)
        self._judged_by = self._files  # the session's own files, as the agent found them
        self.keys = lineage_keys(
            sandbox.image_digest, sandbox.limits, workspace, calls, verdict=verdict, disabled=cache.disabled
        )
        self.tools = [call.name for call in (*calls, *(() if verdict is None else (verdict.call,)))]
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        self._cancelled = False

    def attempt(self) -> list[ExecResult]:
        """Return one result per call (and the verdict's): from the cache as far as it goes, then from a container.

        Whatever the sandbox loses makes that result and all after it ``infra``. A second attempt begins anew, on
        another container, from the session's start.
        """
        known, claimed = self._known()
        if len(known) == len(self.keys):
            return known
        results = list(known)
        try:
            self._run_from(len(known), results)
        except (SandboxError, OSError) as error:
            results += [infra(error)] * (len(self.keys) - len(results))
        finally:
            for key in claimed:
                self._cache.settle(key, None)  # does nothing to what has been settled
        return results

    def check(self, row: int, kept: ExecResult, go_on: threading.Event) -> CheckEnd:
        """Run call ``row`` again on a container, and tell the cache what came out.

        ``go_on``: cleared by whoever needs the worker, which stops the check at the next border of a call.
        """
        key = self.keys[row]
        assert key is not None, "only what was in the cache is checked"
        try:
            with self._held() as lease:
                lease.write_files(self._files)
                for number, call in enumerate(self._calls[:row]):
                    if not go_on.is_set():
                        return "stopped"
                    self._note_own_files(lease, number)
                    if call.name not in READ_ONLY_TOOLS and run_tool(lease, call).status == "infra":
                        return "lost"
                again = run_tool(lease, self._calls[row]) if row < len(self._calls) else None
                left = None if again is not None else self._what_is_left(lease)
            if left is not None:
                again = self._grade(left)
        except (SandboxError, OSError):
            return "lost"
        assert again is not None
        self._cache.compare(key, self.tools[row], kept, again)
        return "lost" if again.status == "infra" else "done"

    def cancel(self) -> None:
        """End the session at once, from any thread: its container is ended, its next call is not begun."""
        self._cancelled = True
        threading.Thread(target=self._end, name="sandbox-cancel", daemon=True).start()

    def _end(self) -> None:
        with self._lock:  # so long the lease cannot be given back and become another session's
            if self._lease is not None:
                self._lease.close()

    def _known(self) -> tuple[list[ExecResult], list[str]]:
        """Return the results of the first calls that the cache knows, and the keys that are now ours to compute.

        Waits for results that are being computed. It does so only before it holds a key or a container, and whoever
        holds a key never waits for another: no two sessions can wait for each other.
        """
        known: list[ExecResult] = []
        for row, (key, tool) in enumerate(zip(self.keys, self.tools, strict=True)):
            found = self._cache.get(key, tool) if key is not None else None
            if key is not None and found is None:
                flight = self._cache.claim(key)
                if flight is None:
                    later = [other for other in self.keys[row + 1 :] if other is not None]
                    return known, [key, *(other for other in later if self._cache.claim(other) is None)]
                flight.result()
                found = self._cache.get(key, tool)
            if found is None:
                break
            known.append(found)
        return known, []

    def _run_from(self, first: int, results: list[ExecResult]) -> None:
        """Rebuild the state before call ``first``, then run it and all later ones; ``results`` grows with each.

        Raises:
            SandboxError: the sandbox was lost.
        """
        with self._held() as lease:
            lease.write_files(self._files)
            self._rebuild(lease, results[:first])
            repeatable = True  # so far every call ended by itself
            for row in range(first, len(self._calls)):
                self._note_own_files(lease, row)
                result = self._call(lease, self._calls[row])
                key = self.keys[row]
                if key is not None and repeatable:
                    self._cache.settle(key, result, self.tools[row])
                repeatable = repeatable and result.status in CACHEABLE_STATUSES
                results.append(result)
            if self._verdict is None:
                return
            left = self._what_is_left(lease)
        result = self._grade(left)
        if result.status != "infra" and self.keys[-1] is not None and repeatable:
            self._cache.settle(self.keys[-1], result, self.tools[-1])
        results.append(result)

    def _rebuild(self, lease: Lease, known: Sequence[ExecResult]) -> None:
        """Repeat the calls whose results are known, but for those that change nothing; a check that costs nothing."""
        for row, call in enumerate(self._calls[: len(known)]):
            self._note_own_files(lease, row)
            if call.name not in READ_ONLY_TOOLS:
                again, key = self._call(lease, call), self.keys[row]
                if key is not None:
                    self._cache.compare(key, call.name, known[row], again)

    def _call(self, lease: Lease, call: ToolCall) -> ExecResult:
        """Run one call. Raises ``SandboxError`` if the sandbox lost it, or if nobody waits for it any more."""
        if self._cancelled:
            raise CANCELLED
        result = run_tool(lease, call)
        if result.status == "infra":
            raise SandboxError(result.stderr or "the sandbox failed and gave no reason")
        return result

    def _note_own_files(self, lease: Lease, row: int) -> None:
        """Before the agent's first call: its session's own calls may have changed the files, tests among them."""
        if self._verdict is None or row == 0 or row != self._verdict.agent_from:
            return
        left = what_is_left(lease, self._files)
        if isinstance(left, ExecResult):
            raise SandboxError("the session's own files cannot be read", got=left.stderr)
        after = {path: left.get(path, content) for path, content in {**self._files, **left}.items()}
        self._judged_by = {path: content for path, content in after.items() if content is not None}

    def _what_is_left(self, lease: Lease) -> Left | ExecResult:
        """Return the files that the session leaves; the container is not used again, by nobody."""
        left = what_is_left(lease, self._judged_by)
        lease.retire()
        return left

    def _grade(self, left: Left | ExecResult) -> ExecResult:
        assert self._verdict is not None
        if isinstance(left, ExecResult):
            return left
        if self._cancelled:
            raise CANCELLED
        with self._held() as lease:
            return grade_left(lease, self._judged_by, left, self._verdict.call).result

    @contextmanager
    def _held(self) -> Iterator[Lease]:
        """Hold a container that ``cancel`` can end."""
        with self._sandbox.lease() as lease:
            with self._lock:
                self._lease = lease
            try:
                if self._cancelled:
                    raise CANCELLED
                yield lease
            finally:
                with self._lock:
                    self._lease = None
