"""Results that need not be computed again (floor 2): keyed by lineage, bounded, one computation per key at a time.

The key of a call is the digest of everything its result depends on: image, runner, limits, the workspace before the
first call, every earlier call, and the call itself. Only results of deterministic tools whose whole lineage is
deterministic, and that ended by themselves (``ok``, ``nonzero``), are kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

from agentft.etai import InlineWorkspace
from agentft.sandbox.base import ExecResult, Limits
from agentft.sandbox.wire import runner_version
from agentft.tools import TOOLS, ToolCall

CACHEABLE_STATUSES = frozenset({"ok", "nonzero"})


def lineage_keys(
    image_digest: str, limits: Limits, workspace: InlineWorkspace, calls: Sequence[ToolCall]
) -> list[str | None]:
    """Return one key per call; None from the first call of a tool that is unknown or not deterministic on."""
    base = [image_digest, runner_version(), dataclasses.asdict(limits), sorted(workspace.files.items())]
    digest = hashlib.sha256(json.dumps(base).encode())
    keys: list[str | None] = []
    deterministic = True
    for call in calls:
        deterministic = deterministic and call.name in TOOLS and TOOLS[call.name].deterministic
        digest.update(b"\0" + call.canonical().encode())
        keys.append(digest.hexdigest() if deterministic else None)
    return keys


class ResultCache:
    """Bounded map from key to result, in memory, oldest use dropped first. Thread-safe.

    Single flight: ``claim`` gives a key to one caller, who must ``settle`` it; others get the future of its result.
    """

    def __init__(self, max_results: int = 20_000) -> None:
        self._max, self._lock = max_results, threading.Lock()
        self._kept: OrderedDict[str, ExecResult] = OrderedDict()
        self._flights: dict[str, Future[ExecResult | None]] = {}
        self.hits = 0

    def get(self, key: str) -> ExecResult | None:
        """Return the kept result, marked ``cached``; None if there is none."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                self.hits += 1
        return None if found is None else dataclasses.replace(found, cached=True)

    def claim(self, key: str) -> Future[ExecResult | None] | None:
        """Return None if the caller now has to compute ``key``, else the future of whoever does."""
        with self._lock:
            flight = self._flights.get(key)
            if flight is None and key not in self._kept:
                self._flights[key] = Future()
            elif flight is None:
                flight = Future()
                flight.set_result(None)
            return flight

    def settle(self, key: str, result: ExecResult | None) -> None:
        """End a claim; keep the result if it may be kept. None: it could not be computed."""
        with self._lock:
            if result is not None and result.status in CACHEABLE_STATUSES and not result.truncated:
                self._kept[key] = result
                while len(self._kept) > self._max:
                    self._kept.popitem(last=False)
            flight = self._flights.pop(key, None)
        if flight is not None:
            flight.set_result(result)
