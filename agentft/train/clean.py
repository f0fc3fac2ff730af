"""``agentft clean RUN`` (floor 5): make room on the local disk, only of what is safe in a store.

Removes a run's checkpoints and kept results; with ``--everything`` the whole folder. Refuses, and touches nothing,
while the run trains, and unless the store holds every file of it (``--upload`` brings it there first).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentft.config.load import load
from agentft.data.storage import Store, file_sha256
from agentft.errors import EXIT_OK, CheckpointError, ConfigError, DataError
from agentft.train.checkpoint_list import Kept, batch_of, listed, read_list, run_store, upload, write_list
from agentft.train.resume import LOCK_NAME, alone

NOT_UPLOADED = ("cache", "tensorboard", "checkpoints", LOCK_NAME)
"""Entries of a run folder that ``--everything`` does not look for in the store: made again at will, or listed."""


def command(arguments: argparse.Namespace) -> int:
    """Run ``agentft clean``."""
    run = Path(arguments.run)
    if not (run / "config.yaml").is_file():
        raise DataError("no run here", where=str(run), expected="a folder that `composer train.py` has written")
    with alone(run):
        done = clean(run, upload_to=arguments.upload, everything=arguments.everything, yes=arguments.yes)
    if arguments.everything and done["removed"]:
        shutil.rmtree(run, ignore_errors=True)
    if arguments.json:
        print(json.dumps(done))
    elif done["removed"]:
        print(f"{run}: {done['freed_bytes'] / 1e6:.1f} MB removed; safe in {done['store']}")
    return EXIT_OK


def clean(run: Path, *, upload_to: str | None, everything: bool, yes: bool) -> dict[str, Any]:
    """Remove what ``command`` says and return {store, removed, freed_bytes}.

    Raises:
        CheckpointError: The store does not hold everything, or the removal was not confirmed.
        ConfigError: There is no store.
        StorageError: The store cannot be reached.
    """
    store = _store(run, upload_to)
    kept = _checkpoints(run)
    if upload_to is not None:
        safe = _safe(store, kept)
        kept = [e if e.file in safe else replace(e, uploaded=upload(store, run, e, {})) for e in kept]
        if kept:
            write_list(run / "checkpoints", kept)
        for key, path in _files(run) if everything else ():
            store.put_file(key, path, file_sha256(path))
    safe = _safe(store, kept)
    missing = [f"checkpoints/{entry.file}" for entry in kept if entry.file not in safe]
    missing += [key for key, path in (_files(run) if everything else ()) if not _holds(store, key, path)]
    if missing:
        raise CheckpointError(
            "not everything is in the store, so nothing was removed",
            where=store.uri,
            got=f"missing there: {', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}",
            hint=f"agentft clean {run} --upload {upload_to or _address(run) or 's3://BUCKET/PREFIX'} --yes",
        )
    doomed = [run] if everything else [path for path in (run / "checkpoints", run / "cache") if path.exists()]
    size = sum(path.stat().st_size for top in doomed for path in top.rglob("*") if path.is_file())
    if not yes and not _confirmed(doomed, size):
        raise CheckpointError("nothing was removed", hint="say --yes to remove without being asked")
    for top in doomed:
        for path in top.iterdir() if top == run else (top,):
            if path.name == LOCK_NAME:
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {"store": store.uri, "removed": [str(path) for path in doomed], "freed_bytes": size}


def _checkpoints(run: Path) -> list[Kept]:
    """Return the listed checkpoints and those that lie there unlisted."""
    listed = read_list(run / "checkpoints")
    names = {entry.file for entry in listed}
    found = [path for path in sorted((run / "checkpoints").glob("ba*.safetensors")) if path.name not in names]
    more = [
        Kept(file=p.name, batch=batch_of(p.name), size_bytes=p.stat().st_size, sha256=file_sha256(p)) for p in found
    ]
    return sorted([*listed, *more], key=lambda entry: entry.batch)


def _store(run: Path, upload_to: str | None) -> Store:
    address = upload_to or _address(run)
    if address is None:
        raise ConfigError(
            "this run was not uploaded anywhere",
            where=str(run / "config.yaml"),
            expected="train.checkpoints.upload, or --upload",
            hint=f"agentft clean {run} --upload s3://BUCKET/PREFIX --yes",
        )
    return run_store(address, run.resolve().name)


def _address(run: Path) -> str | None:
    return load(run / "config.yaml").train.checkpoints.upload


def _safe(store: Store, kept: list[Kept]) -> set[str]:
    """Return those that the store lists and holds, as they were when they were uploaded (before they were stripped)."""
    names = {entry.file for entry in kept}
    copies = [copy for copy in listed(store) if copy.file in names]
    return {c.file for c in copies if store.holds_file(f"checkpoints/{c.file}", c.size_bytes, c.sha256)}


def _files(run: Path) -> list[tuple[str, Path]]:
    """Return (key, path) of everything in the run folder that cannot be made again, checkpoints apart."""
    found = [path for path in sorted(run.rglob("*")) if path.is_file()]
    keys = [(path.relative_to(run).as_posix(), path) for path in found]
    return [(key, path) for key, path in keys if key.partition("/")[0] not in NOT_UPLOADED]


def _holds(store: Store, key: str, path: Path) -> bool:
    return store.holds_file(key, path.stat().st_size, file_sha256(path))


def _confirmed(doomed: list[Path], size: int) -> bool:
    print(f"remove {', '.join(map(str, doomed))} ({size / 1e6:.1f} MB)? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.isatty() and sys.stdin.readline().strip().lower() in ("y", "yes")
