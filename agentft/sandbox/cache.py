"""Results that need not be computed again (floor 2): keyed by lineage, bounded, one computation per key at a time.

The key of a call is the digest of everything its result depends on: image, runner, our own code, limits, the workspace
before the first call, every earlier call, and the call itself. Only results of deterministic tools whose whole lineage
is deterministic, and that ended by themselves (``ok``, ``nonzero``), are kept: in memory, and with a ``DiskStore``
beside it also for the next process.

Whether a tool keeps its promise is checked: about ``verify_share`` of the hits are run again, by whoever asks
``due`` (never before the hit is answered), and ``compare`` is told what came out. One difference in status, exit code
or text ends the caching of that tool for the rest of the run, drops what is kept of it, and is said once, loudly.

Several processes may share the folder of a store. They do not wait for each other: two that miss the same key at the
same time both compute it, which costs time and changes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

from agentft import tools
from agentft.etai import InlineWorkspace
from agentft.sandbox.base import ExecResult, Limits, Verdict
from agentft.sandbox.cache_disk import DiskStore
from agentft.sandbox.wire import runner_version
from agentft.tools import TOOLS, ToolCall
from agentft.tools.parse import normalise

CACHEABLE_STATUSES = frozenset({"ok", "nonzero"})
FORMAT = 2
"""Version of keys and kept results."""

ENTRY_BYTES = 1024
"""What an entry in memory takes beside its text, about."""

log = logging.getLogger(__name__)


@cache
def code_version() -> str:
    """Return a digest of the code that turns calls into results: the source of ``agentft.tools`` and of the sandbox."""
    digest = hashlib.sha256(f"{FORMAT} {runner_version()}".encode())
    for folder in (Path(tools.__file__).parent, Path(__file__).parent):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def lineage_keys(
    image_digest: str,
    limits: Limits,
    workspace: InlineWorkspace,
    calls: Sequence[ToolCall],
    *,
    verdict: Verdict | None = None,
    disabled: Collection[str] = (),
) -> list[str | None]:
    """Return one key per call, and one for the verdict if there is one.

    None from the first call of a tool that is unknown, not deterministic or ``disabled`` on.
    """
    base = [image_digest, code_version(), dataclasses.asdict(limits), sorted(workspace.files.items())]
    digest = hashlib.sha256(json.dumps(base).encode())
    keys: list[str | None] = []
    deterministic = True
    marked = [(b"\0", call) for call in calls]
    if verdict is not None:
        marked.append((b"\0verdict %d\0" % verdict.agent_from, verdict.call))
    for mark, call in marked:
        known = call.name in TOOLS and TOOLS[call.name].deterministic and call.name not in disabled
        deterministic = deterministic and known
        digest.update(mark + call.canonical().encode())
        keys.append(digest.hexdigest() if deterministic else None)
    return keys


class ResultCache:
    """Bounded map from key to result, oldest use dropped first, in memory and if wanted on disk. Thread-safe.

    Single flight: ``claim`` gives a key to one caller, who must ``settle`` it; others get the future of its result.
    """

    def __init__(
        self, *, memory_mib: float = 64, disk: DiskStore | None = None, verify_share: float = 0.0, seed: int = 0
    ) -> None:
        """``verify_share``: share of the hits that are ``due`` for a check; which ones, key and ``seed`` decide."""
        self._max_bytes, self._disk = int(memory_mib * (1 << 20)), disk
        self._share, self._seed = verify_share, seed
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[str, ExecResult, int]] = OrderedDict()  # key → (tool, result, size)
        self._size = 0
        self._served: dict[str, int] = {}  # hits of a key that is in memory
        self._flights: dict[str, Future[ExecResult | None]] = {}
        self._disabled: set[str] = set()
        self._from_disk, self._verified, self._mismatches = 0, 0, 0

    @property
    def disabled(self) -> frozenset[str]:
        """Tools whose results are no longer kept, because one of them did not repeat."""
        with self._lock:
            return frozenset(self._disabled)

    def get(self, key: str, tool: str = "") -> ExecResult | None:
        """Return the kept result, marked ``cached``; None if there is none."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
        found = None if kept is None else kept[1]
        if found is None and self._disk is not None and (found := self._disk.get(key)) is not None:
            with self._lock:
                self._from_disk += 1
                self._remember(key, tool, found)
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

    def settle(self, key: str, result: ExecResult | None, tool: str = "") -> None:
        """End a claim; keep the result if it may be kept. None: it could not be computed."""
        keep = result is not None and result.status in CACHEABLE_STATUSES and not result.truncated
        with self._lock:
            keep = keep and tool not in self._disabled
            if keep and result is not None:
                self._remember(key, tool, result)
            flight = self._flights.pop(key, None)
        if keep and result is not None and self._disk is not None:
            self._disk.put(key, tool, result)
        if flight is not None:
            flight.set_result(result)

    def due(self, key: str) -> bool:
        """Count one hit of ``key`` that was answered; whether this one is to be run again and ``compare``d."""
        if not self._share:
            return False
        with self._lock:
            number = self._served.get(key, 0) + 1
            if key in self._kept:
                self._served[key] = number
        drawn = hashlib.sha256(f"{self._seed}/{key}/{number}".encode()).digest()
        return int.from_bytes(drawn[:7], "big") < self._share * 2**56

    def compare(self, key: str, tool: str, kept: ExecResult, again: ExecResult) -> None:
        """Note what a hit's second run gave. What the sandbox lost says nothing."""
        if again.status == "infra":
            return
        difference = first_difference(kept, again)
        with self._lock:
            self._verified += 1
            if difference is None:
                return
            self._mismatches += 1
            known = tool in self._disabled
            self._disabled.add(tool)
            for other in [other for other, entry in self._kept.items() if entry[0] == tool]:
                self._forget(other)
        if self._disk is not None:
            self._disk.remove(key)
            self._disk.drop_tool(tool)
        if not known:
            log.warning(
                "%s does not repeat: its results are no longer reused in this run (call %s; %s). "
                "A test that depends on time, chance or order does this.", tool, key[:12], difference,
            )  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """Return {entries, mib, from_disk, verified, mismatches, disabled, disk}; ``disk`` is the store's own."""
        with self._lock:
            found = {
                "entries": len(self._kept),
                "mib": round(self._size / (1 << 20), 3),
                "from_disk": self._from_disk,
                "verified": self._verified,
                "mismatches": self._mismatches,
                "disabled": sorted(self._disabled),
            }
        return {**found, "disk": None if self._disk is None else self._disk.stats()}

    def close(self) -> None:
        """Close the store. Idempotent."""
        if self._disk is not None:
            self._disk.close()

    def _remember(self, key: str, tool: str, result: ExecResult) -> None:
        """Put an entry into memory (the lock is held)."""
        size = ENTRY_BYTES + len(result.stdout) + len(result.stderr)
        if key in self._kept:
            self._size -= self._kept[key][2]
        self._kept[key] = (tool, result, size)
        self._kept.move_to_end(key)
        self._size += size
        while self._size > self._max_bytes:
            self._forget(next(iter(self._kept)))

    def _forget(self, key: str) -> None:
        self._size -= self._kept.pop(key)[2]
        self._served.pop(key, None)


def first_difference(kept: ExecResult, again: ExecResult) -> str | None:
    """Say where two results of one call differ in status, exit code or text; None if they do not. Time never counts."""
    for name in ("status", "exit_code"):
        before, after = getattr(kept, name), getattr(again, name)
        if before != after:
            return f"{name} was {before}, now {after}"
    for name in ("stdout", "stderr"):
        before, after = (normalise(getattr(result, name)).splitlines() for result in (kept, again))
        for number, (old, new) in enumerate(zip(before, after, strict=False), 1):
            if old != new:
                return f"line {number} of {name} was {old[:200]!r}, now {new[:200]!r}"
        if len(before) != len(after):
            return f"{name} had {len(before)} lines, now {len(after)}"
    return None
