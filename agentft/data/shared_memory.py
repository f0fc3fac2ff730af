"""Shared memory of Streaming (floor 3): start one job at a time, and remove what a killed job left behind.

Streaming numbers its segments per dataset (``000007_locals``, ``000007_barrier``…) in ``/dev/shm`` and its lock files
in the temporary folder, machine-wide for all jobs. A job killed with SIGKILL leaves them; the next job that streams
into the same folder is then refused. Streaming's own ``clean_stale_shared_memory`` unlinks every job's segments, also
those of living ones. Here a segment goes only if

- it names one of the folders that this job is about to read (or its owner's folder list is gone), and
- no living process maps it, and it belongs to this user.

Call ``clean_stale`` at start-up only, never between two loaders of one job. On systems without ``/dev/shm`` and
``/proc`` it does nothing. A job in another PID namespace that shares ``/dev/shm`` cannot be seen: give such jobs their
own folders.
"""

from __future__ import annotations

import os
import re
import struct
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from filelock import FileLock

_SEGMENT = re.compile(
    r"(\d{6})_(locals|barrier|next_epoch|cache_usage|shard_states|shard_access_times|resume|epoch_shape|epoch_data)"
)
_LOCK = re.compile(r"(\d{6})_(barrier_filelock|cache_filelock)")


@contextmanager
def one_job_at_a_time() -> Iterator[None]:
    """Hold a machine-wide lock while all ranks of a job open a dataset: two jobs must not claim the same number."""
    from composer.utils import dist

    lock = FileLock(Path(tempfile.gettempdir()) / f"agentft-streaming-{os.getuid()}.lock")
    several = dist.get_world_size() > 1
    if dist.get_local_rank() == 0:
        lock.acquire()
    try:
        if several:
            dist.barrier()
        yield
        if several:
            dist.barrier()
    finally:
        if lock.is_locked:
            lock.release()


class ReleaseWhenUnused:
    """Stands in for ``atexit`` where Streaming registers the release of a segment for the end of the process.

    Its own way keeps every segment open until then, with two file descriptors each: a process that opens many datasets,
    one after the other, runs out of them. Here a segment goes once nothing refers to it, at the end at the latest.
    """

    @staticmethod
    def register(cleanup: Callable[[], None]) -> None:
        """Take ``SharedMemory.cleanup`` of one of Streaming's segments."""
        owner: Any = cleanup.__self__  # type: ignore[attr-defined]
        weakref.finalize(owner, _release, owner.created_shms, owner.opened_shms, os.getpid())


def _release(created: list[SharedMemory], opened: list[SharedMemory], pid: int) -> None:
    """Close a process's segments, and remove those that it made; a forked process has them on loan."""
    if os.getpid() != pid:
        return
    for segment in created + opened:
        with suppress(BufferError):  # an array still looks into it; it is closed with the array
            segment.close()
    for segment in created:
        with suppress(FileNotFoundError):
            segment.unlink()


def clean_stale(folders: Sequence[str], *, shm: Path = Path("/dev/shm")) -> list[str]:
    """Remove segments and locks that dead jobs left for ``folders`` (absolute paths); return their names."""
    if not shm.is_dir() or not Path("/proc").is_dir():
        return []
    segments = [path for path in shm.iterdir() if _SEGMENT.fullmatch(path.name) and _is_mine(path)]
    mapped = {name[:6] for name in _mapped_by()}
    stale = {
        number
        for number in {path.name[:6] for path in segments} - mapped
        if _names(shm / f"{number}_locals", folders, when_empty=True)
    }
    removed = [path.name for path in segments if path.name[:6] in stale]
    for name in removed:
        (shm / name).unlink(missing_ok=True)
    return sorted(removed) + _remove_locks(stale, shm)


def living_readers(folders: Sequence[str], *, shm: Path = Path("/dev/shm")) -> set[int]:
    """Return the processes of other jobs that have one of ``folders`` (absolute paths) open at this moment.

    A segment that this process maps as well is of its own job, whoever else maps it (other ranks, loader processes).
    """
    readers: set[int] = set()
    for name, pids in _mapped_by().items():
        if name.endswith("_locals") and os.getpid() not in pids and _names(shm / name, folders, when_empty=False):
            readers |= pids
    return readers


def folders_of(locals_segment: Path) -> list[str]:
    """Return the folders that ``NNNNNN_locals`` says its job reads; none where it is not there (any more)."""
    try:
        content = locals_segment.read_bytes()
    except FileNotFoundError:
        return []
    (size,) = struct.unpack("<i", content[:4])
    return content[4:size].decode("utf-8", "replace").split("\0")[:-1]  # the last entry is the number


def _names(locals_segment: Path, folders: Sequence[str], *, when_empty: bool) -> bool:
    """Whether the folder list in ``NNNNNN_locals`` names one of ``folders``; ``when_empty`` if there is no list."""
    names = folders_of(locals_segment)
    return any(name in folders for name in names) if names else when_empty


def _is_mine(path: Path) -> bool:
    """Whether a file is this user's; one that another job has just removed is nobody's."""
    try:
        return path.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _remove_locks(stale: set[str], shm: Path) -> list[str]:
    """Remove lock files of ``stale`` numbers, and those whose number has no segment at all."""
    removed = []
    for path in Path(tempfile.gettempdir()).iterdir():
        match = _LOCK.fullmatch(path.name)
        if match is None or not _is_mine(path):
            continue
        if match[1] in stale or not (shm / f"{match[1]}_locals").exists():
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return sorted(removed)


def _mapped_by() -> dict[str, set[int]]:
    """Return the processes that map each of Streaming's segments."""
    found: dict[str, set[int]] = {}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except OSError:  # the process ended, or is another user's, whose segments are not ours
            continue
        for name in re.findall(r"/dev/shm/(\d{6}_\w+)", text):
            found.setdefault(name, set()).add(int(maps.parent.name))
    return found
