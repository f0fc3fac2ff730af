"""Reads a split's samples straight from its files (floor 3): in shard order, without Streaming's shared memory.

For one-process readers (evaluation, probes, verification). Training reads through ``agentft.data.loader``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from agentft.data.meta import INDEX_NAME
from agentft.errors import DataError
from agentft.etai import Split


def read_samples(folder: str | Path, split: Split) -> Iterator[dict[str, Any]]:
    """Yield the decoded samples of a split (columns: docs/design.md, "Shards").

    Raises:
        DataError: The split has no index, or a shard is missing.
    """
    root = Path(folder) / split
    index = root / INDEX_NAME
    if not index.is_file():
        there = sorted(path.parent.name for path in Path(folder).glob(f"*/{INDEX_NAME}"))
        raise DataError(f"there is no split {split!r} here", where=str(folder), got=", ".join(there) or "no split")
    for info in json.loads(index.read_text())["shards"]:
        for data in shard_rows(root, info):
            yield decode_row(data, info)


def shard_rows(root: Path, info: dict[str, Any]) -> list[bytes]:
    """Return the encoded samples of one shard, from its packed file or, where that is gone, the unpacked one."""
    from streaming.base.compression import decompress

    raw = root / info["raw_data"]["basename"]
    packed = root / info["zip_data"]["basename"] if info["zip_data"] else None
    if packed is not None and packed.is_file():
        data = decompress(info["compression"], packed.read_bytes())
    elif raw.is_file():
        data = raw.read_bytes()
    else:
        raise DataError("a shard is missing", where=str(raw), hint="write or fetch the shards again")
    count = int(np.frombuffer(data[:4], np.uint32)[0])
    offsets = np.frombuffer(data[4 : 8 + 4 * count], np.uint32).tolist()
    return [data[start:end] for start, end in itertools.pairwise(offsets)]


def decode_row(data: bytes, info: dict[str, Any]) -> dict[str, Any]:
    """Return one sample's columns: sizes of the variable ones first, then the values (the MDS layout)."""
    from streaming.base.format.mds.encodings import mds_decode

    variable = sum(1 for size in info["column_sizes"] if size is None)
    sizes = iter(np.frombuffer(data[: 4 * variable], np.uint32).tolist())
    at, sample = 4 * variable, {}
    for name, encoding, fixed in zip(info["column_names"], info["column_encodings"], info["column_sizes"], strict=True):
        size = fixed or next(sizes)
        sample[name] = mds_decode(encoding, data[at : at + size])
        at += size
    return sample
