"""Publishes shards to an object store or another folder (floor 3): parallel, resumable, checked, indexes last.

    upload_shards("shards", "s3://bucket/prefix", workers=8)

Nothing half-published: readers need ``meta.json`` and the index of each split, which go up only when everything else is
there and checked. An upload that was cut goes on where it stopped. A prefix that holds other shards is refused: running
jobs may be reading them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from agentft.data.meta import INDEX_NAME, META_NAME
from agentft.data.progress import track
from agentft.data.storage import Digest, StorageError, Store, open_store
from agentft.data.verify import published_files, verify_shards
from agentft.errors import DataError


@dataclass(frozen=True, kw_only=True)
class UploadReport:
    """What was done. ``skipped`` objects were there already, with the right bytes."""

    remote: str
    uploaded: int
    skipped: int
    size_bytes: int
    seconds: float


def upload_shards(folder: str | Path, remote: str, *, workers: int = 8, progress: bool = False) -> UploadReport:
    """Publish ``folder`` under ``remote`` (``s3://bucket/prefix`` or a folder).

    Raises:
        DataError: The shards are not whole, or the place holds other shards.
        StorageError: The store is unreachable, refuses, or returns other bytes than it was given.
    """
    started = time.monotonic()
    root = Path(folder)
    store = open_store(remote)
    store.check()
    keys = list(published_files(root, verify_shards(root, decode=False).meta))
    last = [key for key in keys if _is_index(key)]
    _refuse_other_shards(store, root, last)
    with track("upload", len(keys), enabled=progress) as advance:

        def publish(key: str) -> int:
            size = _publish(store, root, key)
            advance()
            return size

        sizes = _parallel(publish, [key for key in keys if not _is_index(key)], workers)
        sizes += [publish(key) for key in last]  # one after the other: meta.json, then each index
    return UploadReport(
        remote=store.uri,
        uploaded=sum(size > 0 for size in sizes),
        skipped=sum(size == 0 for size in sizes),
        size_bytes=sum(sizes),
        seconds=time.monotonic() - started,
    )


def _is_index(key: str) -> bool:
    return key == META_NAME or key.endswith(f"/{INDEX_NAME}")


def _publish(store: Store, root: Path, key: str) -> int:
    """Put one file unless it is there; check it afterwards. Returns the bytes sent (0: it was there)."""
    data = (root / key).read_bytes()
    digest = Digest.of_bytes(data)
    if store.holds(key, digest):
        return 0
    store.put(key, data, digest)
    if not store.holds(key, digest):
        raise StorageError(
            "the object store holds other bytes than it was given",
            where=f"{store.uri}/{key}",
            expected=f"{digest.size_bytes} bytes, sha256 {digest.sha256}",
            hint="repeat the upload; if it happens again, the store is not to be trusted",
        )
    return digest.size_bytes


def _parallel(publish: object, keys: Sequence[str], workers: int) -> list[int]:
    """Run ``publish`` over ``keys``; the first failure stops the rest and is raised."""
    assert callable(publish)
    with ThreadPoolExecutor(max_workers=max(workers, 1), thread_name_prefix="upload") as pool:
        futures = [pool.submit(publish, key) for key in keys]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = next((future for future in done if future.exception() is not None), None)
            if failed is not None:
                raise failed.exception()  # type: ignore[misc]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _refuse_other_shards(store: Store, root: Path, last: Sequence[str]) -> None:
    mine = {key: (root / key).read_bytes() for key in last}
    for key in store.keys(""):
        if _is_index(key) and key.count("/") <= 1 and store.read(key) != mine.get(key):
            raise DataError(
                "other shards are published here",
                where=f"{store.uri}/{key}",
                hint="choose another prefix, or remove what is there once no job reads it",
            )
