"""The list of a run's checkpoints, and how one travels to a store (floor 5). Light: no torch, no Composer.

``checkpoints/checkpoints.json`` names every checkpoint of a run folder that is whole, oldest first; the same file in
the store names those that were uploaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from agentft.config.checkpoints import CheckpointsConfig
from agentft.data.storage import Digest, LocalStore, Store, open_store
from agentft.errors import CheckpointError

LIST_NAME = "checkpoints.json"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One checkpoint of the list: ``metric`` is the best_metric at its batch (lower is better), where it was measured.

    ``optimizer`` is false where its state was stripped; ``uploaded`` is the address of the copy, if there is one.
    """

    file: str
    batch: int
    size_bytes: int
    sha256: str
    metric: float | None = None
    optimizer: bool = True
    uploaded: str | None = None


def file_name(batch: int | str) -> str:
    """Return the name of the checkpoint after ``batch`` batches."""
    return f"ba{batch}.safetensors"


def read_list(folder: Path) -> list[Kept]:
    """Return the checkpoints listed in a ``checkpoints`` folder, oldest first; none if there is no list.

    Raises:
        CheckpointError: The list is damaged.
    """
    path = folder / LIST_NAME
    if not path.is_file():
        return []
    return parse_list(path.read_bytes(), str(path))


def batch_of(name: str) -> int:
    """Return the batch of a checkpoint's name."""
    return int("".join(filter(str.isdigit, name)))


def parse_list(raw: bytes, where: str) -> list[Kept]:
    """Return the checkpoints of a list."""
    try:
        return [Kept(**entry) for entry in json.loads(raw)["checkpoints"]]
    except (ValueError, KeyError, TypeError) as cause:
        raise CheckpointError("the list of checkpoints is damaged", where=where, got=str(cause)) from None


def write_list(folder: Path, kept: Sequence[Kept]) -> None:
    """Replace the list."""
    LocalStore(folder).put(LIST_NAME, list_bytes(kept))


def list_bytes(kept: Sequence[Kept]) -> bytes:
    """Return the list as it is written."""
    return (json.dumps({"checkpoints": [asdict(entry) for entry in kept]}, indent=2) + "\n").encode()


def to_keep(kept: Sequence[Kept], config: CheckpointsConfig) -> set[str]:
    """Return the files that ``keep_last`` and ``keep_best`` keep, of checkpoints in the order of their batches."""
    newest = kept[-config.keep_last :]
    measured = sorted((entry for entry in kept if entry.metric is not None), key=lambda e: (e.metric, e.batch))
    return {entry.file for entry in (*newest, *measured[: config.keep_best])}


def run_store(address: str, run_name: str) -> Store:
    """Return the store of a run below ``address``, after checking that it answers.

    Raises:
        StorageError: It cannot be reached or refuses.
    """
    store = open_store(f"{address.rstrip('/')}/{run_name}")
    store.check()
    return store


def listed(store: Store) -> list[Kept]:
    """Return the checkpoints that the store's own list names."""
    raw = store.read(f"checkpoints/{LIST_NAME}")
    return parse_list(raw, f"{store.uri}/checkpoints/{LIST_NAME}") if raw is not None else []


def upload(store: Store, run_folder: Path, entry: Kept, records: Mapping[str, bytes]) -> str:
    """Copy a checkpoint, then records, then the list of what is there, which is last; return the copy's address."""
    key = f"checkpoints/{entry.file}"
    store.put_file(key, run_folder / key, entry.sha256)
    config = run_folder / "config.yaml"
    side = {**records, **({"config.yaml": config.read_bytes()} if config.is_file() else {})}
    for name, data in side.items():
        store.put(name, data, Digest.of_bytes(data))
    done = replace(entry, uploaded=f"{store.uri}/{key}")
    names = list_bytes(sorted([*(e for e in listed(store) if e.file != entry.file), done], key=lambda e: e.batch))
    store.put(f"checkpoints/{LIST_NAME}", names, Digest.of_bytes(names))
    return f"{store.uri}/{key}"
