"""Checks a folder of shards against its own index and meta.json (floor 3): ``verify_shards("shards")``.

Every file's size and checksums, every sample's columns, every count. The first thing that is wrong is one DataError
that names the shard.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from agentft.data.grouping import GROUPS, group_of
from agentft.data.meta import INDEX_NAME, META_NAME, TOKENIZER_NAME, ShardMeta, SplitMeta, load_meta
from agentft.data.progress import track
from agentft.data.read import decode_row, shard_rows
from agentft.data.shards import COLUMNS
from agentft.data.storage import Digest
from agentft.errors import DataError
from agentft.etai import Split

_AGAIN = "write or fetch the shards again"


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What was checked. ``samples`` is 0 when only files were."""

    meta: ShardMeta
    shards: int
    samples: int
    size_bytes: int


def verify_shards(folder: str | Path, *, decode: bool = True, progress: bool = False) -> VerifyReport:
    """Check every shard of every split; with ``decode`` every sample as well, and the tokenizer.

    Raises:
        DataError: Names the shard, what it has and what its index or meta.json says.
    """
    root = Path(folder)
    meta = load_meta(root)
    shards = samples = size = 0
    total = sum(part.shards for part in meta.splits.values())
    with track("verify", total, enabled=progress) as advance:
        for split, part in meta.splits.items():
            found = 0
            for info in read_index(root, split, part):
                size += _check_file(root / split, info)
                found += _check_samples(root / split, info, meta) if decode else info["samples"]
                shards += 1
                advance()
            if found != part.sessions:
                raise DataError(
                    f"split {split!r} does not hold what {META_NAME} says",
                    where=str(root / split),
                    got=f"{found} samples",
                    expected=f"{part.sessions}",
                    hint=_AGAIN,
                )
            samples += found
    if decode:
        _check_tokenizer(root, meta)
    return VerifyReport(meta=meta, shards=shards, samples=samples if decode else 0, size_bytes=size)


def read_index(root: Path, split: Split, part: SplitMeta) -> list[dict[str, Any]]:
    """Return the shard entries of a split's index, after checking that it is the index that meta.json means."""
    path = root / split / INDEX_NAME
    if not path.is_file():
        raise DataError("the split has no index: it was not finished", where=str(path), hint=_AGAIN)
    raw = path.read_bytes()
    if Digest.of_bytes(raw).sha256 != part.index_sha256:
        raise DataError(f"the index is not the one that {META_NAME} means", where=str(path), hint=_AGAIN)
    entries: list[dict[str, Any]] = json.loads(raw)["shards"]
    return entries


def published_files(root: Path, meta: ShardMeta) -> Iterator[str]:
    """Yield the keys of everything that belongs to the shards, in the order of publication: indexes come last."""
    for split, part in meta.splits.items():
        for info in read_index(root, split, part):
            yield f"{split}/{(info['zip_data'] or info['raw_data'])['basename']}"
    for path in sorted((root / TOKENIZER_NAME).rglob("*")):
        if path.is_file():
            yield path.relative_to(root).as_posix()
    yield META_NAME
    for split in meta.splits:
        yield f"{split}/{INDEX_NAME}"


def _check_file(folder: Path, info: dict[str, Any]) -> int:
    """Compare size and checksums of what is there, packed, unpacked or both; return its size."""
    entries = [
        entry for entry in (info["zip_data"], info["raw_data"]) if entry and (folder / entry["basename"]).is_file()
    ]
    if not entries:
        raise DataError("a shard is missing", where=str(folder / info["raw_data"]["basename"]), hint=_AGAIN)
    for entry in entries:
        _check_bytes(folder / entry["basename"], entry)
    return int(entries[0]["bytes"])


def _check_bytes(path: Path, entry: dict[str, Any]) -> None:
    data = path.read_bytes()
    if len(data) != entry["bytes"]:
        got, expected = f"{len(data)} bytes", f"{entry['bytes']}"
        raise DataError("a shard has the wrong size", where=str(path), got=got, expected=expected, hint=_AGAIN)
    for name, value in entry["hashes"].items():
        if _hash(name, data) != value:
            raise DataError(f"a shard is damaged: its {name} differs", where=str(path), hint=_AGAIN)


def _hash(name: str, data: bytes) -> str:
    return xxhash.xxh64_hexdigest(data) if name == "xxh64" else hashlib.new(name, data).hexdigest()


def _check_samples(folder: Path, info: dict[str, Any], meta: ShardMeta) -> int:
    """Decode every sample of one shard and check that its columns belong together; return their number."""
    packed = info["zip_data"] is not None and (folder / info["zip_data"]["basename"]).is_file()
    path = folder / info["zip_data" if packed else "raw_data"]["basename"]
    if dict(zip(info["column_names"], info["column_encodings"], strict=True)) != COLUMNS:
        raise DataError("a shard has other columns", where=str(path), got=info["column_names"], expected=str(COLUMNS))
    rows = shard_rows(folder, info)
    count = len(rows)
    if count != info["samples"]:
        raise DataError("a shard has another number of samples", where=str(path), got=count, expected=info["samples"])
    for number, data in enumerate(rows):
        try:
            _check_sample(decode_row(data, info), meta)
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            got = f"{type(error).__name__}: {error}"
            raise DataError(
                "a sample cannot be used", where=f"{path}, sample {number}", got=got, hint=_AGAIN
            ) from error
    return count


def _check_sample(sample: dict[str, Any], meta: ShardMeta) -> None:
    """Raise ValueError unless the columns of a sample agree with each other and with meta.json."""
    ids, count = sample["input_ids"], len(sample["input_ids"])
    if not (len(sample["loss_mask"]) == len(sample["position_ids"]) == count):
        raise ValueError("input_ids, loss_mask and position_ids differ in length")
    if ids.min() < 0 or ids.max() >= meta.vocab_size:
        raise ValueError(f"a token id is outside of the vocabulary of {meta.vocab_size}")
    anchors = sample["anchors"]
    places = [anchors["intent_at"], anchors["cursor_at"]]
    places += [step[key] for step in anchors["steps"] for key in ("tool_at", "result_at")]
    if any(place >= count for place in places):
        raise ValueError("an anchor is outside of the sequence")
    if json.loads(sample["record"])["session_id"].encode("utf-8", "backslashreplace").decode() != sample["session_id"]:
        raise ValueError("the record has another session_id")
    if not 0 <= sample["group"] < GROUPS or sample["group"] != group_of(json.loads(sample["record"])["session_id"]):
        raise ValueError("the group does not fit the session_id")


def _check_tokenizer(root: Path, meta: ShardMeta) -> None:
    from agentft.text.vocab import load_tokenizer, tokenizer_fingerprint

    found = tokenizer_fingerprint(load_tokenizer(root / TOKENIZER_NAME))
    if found != meta.tokenizer_sha256:
        raise DataError(
            "the tokenizer is not the one that made these shards",
            where=str(root / TOKENIZER_NAME),
            got=found,
            expected=meta.tokenizer_sha256,
            hint=_AGAIN,
        )
