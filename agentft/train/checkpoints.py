"""Checkpoints of a run (floor 5): written whole, the best and the newest kept, uploaded before they are removed.

``runs/<name>/checkpoints/ba<batch>.safetensors`` (see ``checkpoint_file``) and ``checkpoints.json``, which lists them,
oldest first, and is replaced only when a checkpoint is on disk: whatever is listed is whole, also after a SIGKILL.

With ``upload``, one thread copies each checkpoint, and the records of the run as they were then, to
``<upload>/<run_name>``; a checkpoint is removed here only when the store has confirmed it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer import Trainer
from composer.callbacks import CheckpointSaver
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist, reproducibility
from torch import nn

from agentft.config.checkpoints import CheckpointsConfig
from agentft.errors import AgentFTError
from agentft.train.checkpoint_file import strip_optimizer, write_checkpoint
from agentft.train.checkpoint_list import Kept, file_name, read_list, run_store, to_keep, upload, write_list
from agentft.train.resume import record_sizes

log = logging.getLogger(__name__)


def saved_bytes(model: nn.Module) -> tuple[int, int]:
    """Return (bytes of the weights that a checkpoint holds, bytes of the trained ones)."""
    saved = {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return sum(t.nbytes for t in saved.values()), sum(p.nbytes for p in trained)


class Checkpoints(CheckpointSaver):
    """Saves a run's checkpoints; the last of its callbacks, so that what it writes holds what all others did.

    Args:
        run_folder: ``runs/<name>``.
        config: The section ``train.checkpoints``.
        measured: Gives (batch, losses on eval_split) of the newest evaluation.
    """

    def __init__(
        self, run_folder: Path, config: CheckpointsConfig, *, measured: Callable[[], tuple[int, Mapping[str, float]]]
    ) -> None:
        folder = run_folder / "checkpoints"
        super().__init__(
            folder=str(folder),
            filename=file_name("{batch}"),
            remote_file_name=None,
            latest_filename=None,
            latest_remote_file_name=None,
            save_interval=config.interval,
            overwrite=True,
        )
        self._run_folder, self._folder, self._config, self._measured = run_folder, folder, config, measured
        self._kept: list[Kept] = []
        first = dist.get_global_rank() == 0
        self._uploads = Uploads(run_folder, config.upload) if config.upload and first else None

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the list on disk says what is there."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""

    def _save_checkpoint(self, state: State, logger: Logger) -> None:
        """Save now; a collective call. Composer's interval and ``ExecutionFeedback`` call it."""
        self.last_checkpoint_batch = state.timestamp.batch
        sizes = dist.all_gather_object(record_sizes(self._run_folder, dist.get_global_rank()))
        content = {
            "state": state.state_dict(),
            "rng": reproducibility.get_rng_state(),
            "records": {name: size for part in sizes for name, size in part.items()},
        }
        if dist.get_global_rank() == 0:
            self._write(state.timestamp.batch.value, content)
        dist.barrier()

    def _write(self, batch: int, content: Mapping[str, Any]) -> None:
        for left in self._folder.glob(".*.partial"):
            left.unlink()  # of a process that was killed while it wrote
        file = file_name(batch)
        size_bytes, sha256 = write_checkpoint(self._folder / file, content)
        at, losses = self._measured()
        metric = losses.get(self._config.best_metric) if at == batch else None
        new = Kept(file=file, batch=batch, size_bytes=size_bytes, sha256=sha256, metric=metric)
        self._kept = [entry for entry in read_list(self._folder) if entry.batch < batch] + [new]
        write_list(self._folder, self._kept)
        if self._uploads is not None:
            self._uploads.start(new, content["records"])
        self._clean_up()
        self.saved_checkpoints = [str(self._folder / entry.file) for entry in self._kept]

    def _clean_up(self) -> None:
        """Remove what is not kept, once it is uploaded; strip what is kept and not the newest."""
        if self._uploads is not None:
            self._kept = self._uploads.note(self._kept)
        keep = to_keep(self._kept, self._config)
        for entry in self._kept[:-1]:
            if entry.file in keep and not (self._config.strip_optimizer and entry.optimizer):
                continue
            if self._uploads is not None and entry.uploaded is None:
                entry = self._uploads.wait(entry)
                if entry.uploaded is None:
                    continue  # the store does not take it: it stays here, and is tried again next time
            self._kept = [entry if other.file == entry.file else other for other in self._kept]
            self._reduce(entry, entry.file in keep)
        write_list(self._folder, self._kept)

    def _reduce(self, entry: Kept, keep: bool) -> None:
        """Strip one checkpoint or remove it; the list never names a file that is gone."""
        path = self._folder / entry.file
        if keep:
            size_bytes, sha256 = strip_optimizer(path)
            stripped = replace(entry, size_bytes=size_bytes, sha256=sha256, optimizer=False)
            self._kept = [stripped if other.file == entry.file else other for other in self._kept]
        else:
            self._kept = [other for other in self._kept if other.file != entry.file]
            write_list(self._folder, self._kept)
            path.unlink(missing_ok=True)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Wait until everything is uploaded."""
        self._finish()

    def close(self, state: State, logger: Logger) -> None:
        """Wait for uploads also where training failed. Idempotent."""
        self._finish()
        if self._uploads is not None:
            self._uploads.close()

    def _finish(self) -> None:
        if self._uploads is None or not self._kept:
            return
        self._kept = [self._uploads.wait(entry) for entry in self._kept]
        write_list(self._folder, self._kept)
        missing = [entry.file for entry in self._kept if entry.uploaded is None]
        if missing:
            log.warning("not uploaded: %s; `agentft clean RUN --upload` tries again", ", ".join(missing))


class RandomState(Callback):
    """Puts a checkpoint's random state back when the first batch of a resumed run is there; first of the callbacks.

    Composer does so only for loaders that it winds forward itself, which ours does not need: dropout would go on from
    the seed. Between a checkpoint and the batch after it nothing draws from the global random state.
    """

    def __init__(self) -> None:
        self._saved: list[dict[str, Any]] | None = None

    def take_over(self, trainer: Trainer) -> None:
        """Take the state that ``trainer`` has read from its checkpoint, if it has read one."""
        self._saved, trainer._rng_state = trainer._rng_state, None

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Put it back, once."""
        if self._saved is not None:
            reproducibility.load_rng_state(self._saved)
            self._saved = None


class Uploads:
    """Uploads in the background, one at a time, in order."""

    def __init__(self, run_folder: Path, address: str) -> None:
        self._run_folder = run_folder
        self.store = run_store(address, run_folder.name)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-upload")
        self._running: dict[str, Future[str]] = {}
        self._failed: set[str] = set()

    def start(self, entry: Kept, records: Mapping[str, int]) -> None:
        """Upload a checkpoint and the records that belong to it."""
        heads = {name: (self._run_folder / name).open("rb").read(size) for name, size in records.items() if size}
        self._running[entry.file] = self._pool.submit(upload, self.store, self._run_folder, entry, heads)

    def note(self, kept: Sequence[Kept]) -> list[Kept]:
        """Return the list with what has been uploaded meanwhile; uploads that failed are started again."""
        for entry in kept:
            if entry.file in self._failed:
                self._failed.discard(entry.file)
                self._running[entry.file] = self._pool.submit(upload, self.store, self._run_folder, entry, {})
        return [self.wait(entry) if self._is_done(entry) else entry for entry in kept]

    def wait(self, entry: Kept) -> Kept:
        """Return the entry with the address of its copy, once it is uploaded; without one if that failed."""
        future = self._running.pop(entry.file, None)
        if future is None:
            return entry
        try:
            return replace(entry, uploaded=future.result())
        except AgentFTError as error:
            self._failed.add(entry.file)
            log.warning("a checkpoint was not uploaded and stays here: %s", error)
            return entry

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._pool.shutdown(wait=True)

    def _is_done(self, entry: Kept) -> bool:
        return entry.file in self._running and self._running[entry.file].done()
