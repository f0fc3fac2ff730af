"""A run that goes on (floor 5): ``train.checkpoints.autoresume`` continues its folder instead of refusing it.

What is there is cut back to what it was when the newest checkpoint was saved, byte for byte: losses, metrics, log and
traces. The resumed run then writes what the uninterrupted one would have written, except for times.

Light until ``resume_point``: no torch, no Composer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from agentft.config.load import load
from agentft.config.schema import RunConfig
from agentft.data.storage import Store
from agentft.errors import CheckpointError, ConfigError
from agentft.train.checkpoint_list import Kept, listed, read_list, run_store, write_list

LOCK_NAME = "run.lock"
RECORDS = ("losses.jsonl", "metrics.jsonl", "train.log", "samples.txt", "samples.jsonl")
"""Files of the run folder, beside its traces, that only grow and are cut back when the run goes on."""

MAY_CHANGE = (
    "runs_dir", "overwrite", "loggers", "data.shards", "data.remote", "data.microbatch_size", "data.num_workers",
    "sandbox.hosts", "sandbox.tls", "sandbox.runtime", "sandbox.workers", "sandbox.reuse", "sandbox.cache",
    "feedback.wait_s", "feedback.max_infra_share", "feedback.replay_from", "train.device", "train.threads",
    "train.eval_interval", "train.checkpoints", "train.distributed",
    "algorithms.spikes", "algorithms.early_stop", "algorithms.diversity", "algorithms.monitors", "algorithms.samples",
)  # fmt: skip
"""Keys that decide nothing about what is learned; every other key must be what it was."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Where a run goes on: the checkpoint and the sizes in bytes of the records when it was saved."""

    checkpoint: Path
    batch: int
    records: Mapping[str, int]


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the run folder for this process; the lock ends with the process, however that ends.

    Raises:
        ConfigError: Another process trains this run.
    """
    lock = FileLock(folder / LOCK_NAME)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            "another process is training this run", where=str(folder), hint="wait for it, or choose another run_name"
        ) from None
    try:
        yield
    finally:
        lock.release()


def is_finished(folder: Path) -> bool:
    """Return whether the run has written its summary, which is the last thing it does."""
    return (folder / "summary.json").is_file()


def check_same(config: RunConfig, folder: Path) -> None:
    """Refuse to go on with a run under other settings than it began with.

    Raises:
        ConfigError: Says which, with both values.
    """
    began, now = asdict(load(folder / "config.yaml")), asdict(config)
    other = [
        key for key in _differing(began, now, "") if not any(key == k or key.startswith(f"{k}.") for k in MAY_CHANGE)
    ]
    if other:
        shown = ", ".join(f"{key}: {_at(began, key)!r} -> {_at(now, key)!r}" for key in other[:8])
        raise ConfigError(
            "the run began with other settings, so it cannot go on as the same run",
            where=str(folder / "config.yaml"),
            got=shown,
            hint="take the settings back, or choose another run_name",
        )


def resume_point(config: RunConfig, folder: Path) -> ResumePoint | None:
    """Return where the run goes on, None where it starts from the beginning; a collective call.

    The newest checkpoint of the first rank decides. A node whose disk does not have it (another machine, or a machine
    that was set up anew) fetches it from ``train.checkpoints.upload``.

    Raises:
        CheckpointError: The checkpoint is damaged, or not there and not uploaded.
    """
    from composer.utils import dist

    from agentft.train.checkpoint_file import read_plain

    newest = [_newest(config, folder) if dist.get_global_rank() == 0 else None]
    dist.broadcast_object_list(newest, src=0)
    entry = newest[0]
    if entry is None:
        return None
    path = folder / "checkpoints" / entry.file
    if dist.get_local_rank() == 0 and not path.is_file():
        _fetch(config, folder, entry)
    if dist.get_world_size() > 1:
        dist.barrier()
    return ResumePoint(checkpoint=path, batch=entry.batch, records=read_plain(path, "records"))


def record_sizes(folder: Path, rank: int) -> dict[str, int]:
    """Return name → size in bytes of the records that ``rank`` writes."""
    names = [f"traces/rank{rank}.jsonl", *(RECORDS if rank == 0 else ())]
    return {name: (folder / name).stat().st_size for name in names if (folder / name).is_file()}


def cut_records(folder: Path, records: Mapping[str, int], *, rank: int, ranks: int) -> None:
    """Cut the records back to ``records``; each rank its own, the first also those of ranks that are no more.

    Raises:
        CheckpointError: A record is shorter than it was when the checkpoint was saved.
    """
    traces = [f"traces/{path.name}" for path in (folder / "traces").glob("rank*.jsonl")]
    mine = {f"traces/rank{rank}.jsonl"}
    if rank == 0:
        alive = {f"traces/rank{other}.jsonl" for other in range(1, ranks)}
        mine |= {*RECORDS, *traces} - alive
    for name in sorted(mine):
        path, size = folder / name, records.get(name, 0)
        have = path.stat().st_size if path.is_file() else 0
        if have < size:
            raise CheckpointError(
                "a record of the run is shorter than when its checkpoint was saved",
                where=str(path),
                got=f"{have} bytes",
                expected=f"{size} bytes",
                hint="put the file back, or start anew with overwrite=true",
            )
        if have:
            os.truncate(path, size)


def forget_failure(folder: Path) -> None:
    """Remove what an earlier attempt left behind to say why it failed."""
    for path in folder.glob("failed*.txt"):
        path.unlink()


def _newest(config: RunConfig, folder: Path) -> Kept | None:
    """Return the newest checkpoint that can be gone on from, of the folder or else of the store."""
    kept = read_list(folder / "checkpoints")
    if not kept and config.train.checkpoints.upload:
        kept = listed(_store(config))
    whole = [entry for entry in kept if entry.optimizer]
    return whole[-1] if whole else None


def _fetch(config: RunConfig, folder: Path, entry: Kept) -> None:
    if not config.train.checkpoints.upload:
        raise CheckpointError(
            "the newest checkpoint is not on this machine",
            where=str(folder / "checkpoints" / entry.file),
            hint="let all nodes share runs_dir, or set train.checkpoints.upload from the start",
        )
    store = _store(config)
    store.fetch(f"checkpoints/{entry.file}", folder / "checkpoints" / entry.file)
    if not read_list(folder / "checkpoints"):
        write_list(folder / "checkpoints", [entry])
    for name in store.keys("traces/") + list(RECORDS):
        if not (folder / name).is_file() and (data := store.read(name)) is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)


def _store(config: RunConfig) -> Store:
    return run_store(str(config.train.checkpoints.upload), config.run_name)


def _differing(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key in one.keys() | other.keys():
        mine, theirs = one.get(key), other.get(key)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            yield from _differing(mine, theirs, f"{prefix}{key}.")
        elif mine != theirs:
            yield f"{prefix}{key}"


def _at(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
