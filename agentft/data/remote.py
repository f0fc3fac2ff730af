"""Shards in an object store, as a run meets them (floor 3): is the publication whole, its side files, its stream.

``check_remote("s3://…")`` says in seconds why a publication cannot be streamed. ``agentft.data.loader`` calls it before
the first loader of a process, copies ``meta.json`` and the tokenizer to the local copy, and reads a ``SessionStream``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streaming import Stream

from agentft.data.meta import INDEX_NAME, META_NAME, TOKENIZER_NAME, parse_meta
from agentft.data.shared_memory import living_readers
from agentft.data.storage import Digest, LocalStore, Store, open_store
from agentft.errors import DataError

HASH = "xxh64"


def check_remote(uri: str) -> Store:
    """Return the store of a finished publication, or say in seconds why it cannot be streamed.

    Streaming itself answers some refusals by retrying without credentials, over and over: so this comes first.
    """
    store = open_store(uri)
    store.check()
    raw = store.read(META_NAME)
    if raw is None:
        raise DataError("no shards here", where=uri, hint="publish them: `agentft shards upload FOLDER " + uri + "`")
    meta = parse_meta(raw, where=f"{uri}/{META_NAME}")
    for name, part in meta.splits.items():
        index = store.read(f"{name}/{INDEX_NAME}")
        if index is None or Digest.of_bytes(index).sha256 != part.index_sha256:
            got = "no index" if index is None else "an index of other shards"
            hint = "repeat `agentft shards upload`: it goes on where it stopped"
            raise DataError(f"split {name!r} is not published completely", where=uri, got=got, hint=hint)
    return store


def copy_side_files(store: Store, folder: Path) -> None:
    """Copy ``meta.json`` and the tokenizer of a publication to the local copy, unless they are there already."""
    raw = store.read(META_NAME)
    assert raw is not None, "check_remote has read it"
    local = LocalStore(folder)
    mine = local.read(META_NAME)
    if mine is not None and mine != raw:
        raise DataError(
            "the local copy belongs to other shards",
            where=str(folder),
            got=f"{META_NAME} differs from the one in {store.uri}",
            hint=f"remove {folder} or set data.shards to another folder",
        )
    for key in [*store.keys(f"{TOKENIZER_NAME}/"), META_NAME]:
        content = raw if key == META_NAME else store.read(key)
        if content is not None and local.read(key) != content:
            local.put(key, content)


def refuse_shared_copy(folder: Path, parts: list[str]) -> None:
    """Two jobs that download into one folder take each other's files away.

    Raises:
        DataError: Another job that is alive reads ``parts``, the folders of the splits.
    """
    readers = living_readers(parts)
    if readers:
        raise DataError(
            "another job that is alive streams into the same folder",
            where=str(folder),
            got="process " + ", ".join(map(str, sorted(readers))),
            hint="give this run its own data.shards folder, or wait for the other job",
        )


class SessionStream(Stream):
    """A stream whose shards are unpacked under a name of this process: two jobs may share a local folder."""

    def _decompress_shard_part(self, zip_info: Any, zip_filename: str, raw_filename: str, compression: Any) -> None:
        from streaming.base.compression import decompress
        from streaming.base.hashing import get_hash

        packed = Path(zip_filename).read_bytes()
        if get_hash(HASH, packed) != zip_info.hashes.get(HASH):
            hint = "fetch or write this shard again; `agentft shards verify` names every damaged one"
            raise DataError("shard is damaged: its checksum is not the one of its index", where=zip_filename, hint=hint)
        LocalStore(Path(raw_filename).parent).put(Path(raw_filename).name, decompress(compression, packed))
        if not self.safe_keep_zip:
            Path(zip_filename).unlink(missing_ok=True)
