"""Results kept on disk (floor 2): one SQLite file, bounded, shared by the processes of a machine, safe to kill.

    store = DiskStore(Path("runs/demo/cache"), mib=512)
    store.put(key, "pytest_run", result)
    store.get(key)                        # the result as it was, or None
    store.close()

SQLite in WAL mode from the standard library: a process that is killed in the middle of a write leaves the last
committed state, several processes may read and write (the last writer of a key wins), and the oldest use goes first
when the file would grow beyond its limit. (The library `diskcache` does the same, but is no longer maintained and
unpickles what it finds.) Every entry carries a digest over key, tool and content: one that does not fit is removed
and counted, never returned. A file that is no longer a database is put aside and begun anew.

Nothing in here raises for the sake of a disk: an error costs the entry, a disk that is full or gone switches the store
off for the rest of the run, with one warning. WAL needs a disk of this machine; on a network file system it is off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from agentft.sandbox.base import ExecResult

FILE_NAME = "results-1.sqlite"
"""The number is the format of the file: another format is another file."""

BUSY_TIMEOUT_S = 2.0
MOST_ERRORS = 5
KEPT_AFTER_EVICTION = 0.95
MIB = 1 << 20

_SCHEMA = """
CREATE TABLE IF NOT EXISTS results (
    key TEXT PRIMARY KEY, tool TEXT NOT NULL, used INTEGER NOT NULL, digest BLOB NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS results_by_use ON results (used);
"""
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_NETWORK = ("nfs", "cifs", "smb", "9p", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "fuse.sshfs", "fuse.gluster")

T = TypeVar("T")
log = logging.getLogger(__name__)


class _LostError(Exception):
    """An index is damaged in a way that SQLite does not notice."""


_UNREADABLE = (_LostError, UnicodeDecodeError, MemoryError)  # these two: what sqlite3 makes of damaged text and sizes
_FAILURES = (sqlite3.Error, OSError, *_UNREADABLE)


class DiskStore:
    """Results by key in ``folder``, at most ``mib`` of them on disk. Thread-safe; not to be used across a fork."""

    def __init__(self, folder: Path, *, mib: int) -> None:
        """Open or create the store; a folder that cannot be used is a warning and a store that keeps nothing."""
        self.path, self._max_bytes = folder / FILE_NAME, mib * MIB
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self._touched: dict[str, int] = {}  # key → last use, written with the next put
        self._errors, self._damaged, self._rebuilt = 0, 0, 0
        kind = file_system(folder)
        if kind.startswith(_NETWORK):
            log.warning("results are not kept in %s: a shared database needs a local disk, this is %s", folder, kind)
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open()
        except _FAILURES as error:
            self._handle(error)

    def get(self, key: str) -> ExecResult | None:
        """Return the kept result, or None. An entry that is not as it was written is removed."""

        def read(connection: sqlite3.Connection) -> ExecResult | None:
            row = connection.execute("SELECT tool, digest, body FROM results WHERE key = ?", (key,)).fetchone()
            if row is None:
                return None
            found = _unpack(key, *row)
            if found is None:
                self._damaged += 1
                connection.execute("DELETE FROM results WHERE key = ?", (key,))
                return None
            self._touched[key] = _now()
            return found

        return self._do(read)

    def put(self, key: str, tool: str, result: ExecResult) -> None:
        """Keep a result (in the place of an older one of the key); what cannot come back as it is, is not kept."""
        body = _pack(result)
        if body is None or len(body) > self._max_bytes // 8:
            return

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            self._write_touched(connection)
            connection.execute(
                "INSERT OR REPLACE INTO results (key, tool, used, digest, body) VALUES (?, ?, ?, ?, ?)",
                (key, tool, _now(), _digest(key, tool.encode(), body), body),
            )
            if connection.execute("SELECT 1 FROM results WHERE key = ?", (key,)).fetchone() is None:
                raise _LostError("what was written is not found")
            self._evict(connection)
            connection.execute("COMMIT")

        self._do(write)

    def remove(self, key: str) -> None:
        """Forget one result."""
        self._do(lambda connection: connection.execute("DELETE FROM results WHERE key = ?", (key,)))

    def drop_tool(self, tool: str) -> None:
        """Forget every result of a tool."""
        self._do(lambda connection: connection.execute("DELETE FROM results WHERE tool = ?", (tool,)))

    def stats(self) -> dict[str, Any]:
        """Return {entries, mib, damaged, rebuilt, errors}; entries and MiB of all processes that share the file."""

        def read(connection: sqlite3.Connection) -> tuple[int, int]:
            count = connection.execute("SELECT count(*) FROM results").fetchone()[0]
            return int(count), self._used_bytes(connection)

        entries, size = self._do(read) or (0, 0)
        found = {"damaged": self._damaged, "rebuilt": self._rebuilt, "errors": self._errors}
        return {"entries": entries, "mib": round(size / MIB, 3), **found}

    def close(self) -> None:
        """Write down what was used last, and close. Idempotent."""
        if self._touched:
            self._do(self._write_touched)
        with self._lock:
            self._shut()

    def _do(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Run ``work`` on the database; a damaged one is begun anew and asked once more. None if it failed."""
        with self._lock:
            for _ in range(2):
                if self._connection is None:
                    return None
                try:
                    return work(self._connection)
                except _FAILURES as error:
                    with contextlib.suppress(*_FAILURES):
                        if self._connection.in_transaction:
                            self._connection.execute("ROLLBACK")
                    if not self._handle(error):
                        return None
        return None

    def _handle(self, error: BaseException) -> bool:
        """Deal with a failure; whether it makes sense to try again."""
        code = getattr(error, "sqlite_errorcode", None)
        code = None if code is None else code & 0xFF
        if code in _BUSY:
            self._errors += 1
            return False
        if (code in _DAMAGED or isinstance(error, _UNREADABLE)) and self._rebuilt < 2:
            self._rebuilt += 1
            log.warning("%s is damaged (%s): begun anew, its results will be computed again", self.path, error)
            try:
                self._rebuild()
                return True
            except _FAILURES as second:
                error = second
        self._errors += 1
        if self._errors >= MOST_ERRORS or code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, None):
            log.warning("results are no longer kept in %s: %s", self.path, error)
            self._shut()
        return False

    def _open(self) -> None:
        connection = sqlite3.connect(
            self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=32
        )
        self._connection = connection
        connection.text_factory = bytes  # damaged text is one damaged entry, not a failure of the query
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")  # a lost machine may cost the newest results, not the file
        connection.execute(f"PRAGMA journal_size_limit = {4 * MIB}")
        connection.executescript(_SCHEMA)
        self._inode = os.stat(self.path).st_ino
        if self._used_bytes(connection) > self._max_bytes:  # the limit was lowered
            connection.execute("BEGIN IMMEDIATE")
            self._evict(connection)
            connection.execute("COMMIT")
            connection.executescript("PRAGMA incremental_vacuum")  # `execute` would free one page

    def _rebuild(self) -> None:
        """Remove the file and begin anew, unless another process has just done so."""
        self._shut()
        with open(self.path.parent / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self.path).st_ino == self._inode or self._inode == 0:
                    for ending in ("", "-wal", "-shm"):
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(f"{self.path}{ending}")
            self._open()

    def _shut(self) -> None:
        self._touched.clear()
        if self._connection is not None:
            with contextlib.suppress(*_FAILURES):
                self._connection.close()
            self._connection = None

    def _write_touched(self, connection: sqlite3.Connection) -> None:
        rows = [(used, key) for key, used in self._touched.items()]
        connection.executemany("UPDATE results SET used = ? WHERE key = ?", rows)
        self._touched.clear()

    def _evict(self, connection: sqlite3.Connection) -> None:
        """Within a transaction: drop the oldest use until there is room again."""
        if self._used_bytes(connection) <= self._max_bytes:
            return
        oldest = "DELETE FROM results WHERE rowid IN (SELECT rowid FROM results ORDER BY used, rowid LIMIT 32)"
        while self._used_bytes(connection) > KEPT_AFTER_EVICTION * self._max_bytes:
            if connection.execute(oldest).rowcount == 0:
                return

    def _used_bytes(self, connection: sqlite3.Connection) -> int:
        """Return the size of the file less its free pages (which are used before it grows)."""
        size, free, page = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        return int((size - free) * page)


def clear(folder: Path) -> int:
    """Remove the results kept in a folder; return the bytes that were freed. Processes that use it begin anew."""
    freed = 0
    for path in folder.glob("results-*.sqlite*"):
        freed += path.stat().st_size
        path.unlink(missing_ok=True)
    (folder / "lock").unlink(missing_ok=True)
    return freed


def file_system(folder: Path) -> str:
    """Return the type of the file system that holds ``folder`` (existing or not), such as ext4 or nfs4; "" unknown."""
    place, best, kind = os.path.realpath(folder), -1, ""
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            point = before.split()[4].replace("\\040", " ")
            if len(point) > best and (place + "/").startswith(point.rstrip("/") + "/"):
                best, kind = len(point), after.split()[0]
    return kind


def _now() -> int:
    return time.time_ns() // 1_000_000


def _pack(result: ExecResult) -> bytes | None:
    """Return the result as compressed JSON, or None if JSON would not give it back as it is."""
    value = {field.name: getattr(result, field.name) for field in dataclasses.fields(result) if field.name != "cached"}
    value["fields"] = dict(result.fields)
    try:
        text = json.dumps(value)
        if json.loads(text) != value:
            return None
    except (TypeError, ValueError):
        return None
    return zlib.compress(text.encode("ascii"), 1)


def _unpack(key: str, tool: bytes, digest: bytes, body: bytes) -> ExecResult | None:
    try:
        if digest != _digest(key, tool, body):
            return None
        return ExecResult(**json.loads(zlib.decompress(body)))
    except (TypeError, ValueError, AttributeError, zlib.error):
        return None


def _digest(key: str, tool: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(b"\0".join((key.encode(), tool, body)), digest_size=16).digest()
