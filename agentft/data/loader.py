"""Reads shards as batches (floor 3): local or streamed, in an order that resume and the number of ranks cannot change.

    meta = open_shards(config.data)                      # once a process, before any loader
    spec = build_loader(config.data, "train", meta, shuffle=True, seed=17)   # a composer DataSpec
    spec.dataloader.upcoming(4)                          # samples of the next four batches, nothing is consumed

In a job of several processes torch.distributed must be initialised first (``composer.utils.dist.initialize_dist``).

Training draws ``N // batch_size`` whole global batches an epoch (which rows rest changes by epoch). Evaluation reads
every row in order and ends with a smaller batch; with several ranks it repeats fewer than ``ranks`` rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from composer.core import DataSpec
from composer.utils import dist
from streaming import StreamingDataLoader, StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.dataset import _ShardState
from streaming.base.shared import SharedMemory, memory
from streaming.base.world import World

from agentft.config.schema import DataConfig
from agentft.data.batch import collate, num_samples, num_tokens, split
from agentft.data.curriculum import Curriculum, build_curriculum, share_out
from agentft.data.meta import SPLITS, ShardMeta, load_meta
from agentft.data.mixing import Mix, build_mix
from agentft.data.remote import HASH, SessionStream, check_remote, copy_side_files, refuse_shared_copy
from agentft.data.shared_memory import ReleaseWhenUnused, clean_stale, one_job_at_a_time
from agentft.errors import AgentFTError, ConfigError, DataError
from agentft.etai import Split

log = logging.getLogger(__name__)
_DOWNLOAD_TIMEOUT_S, _DOWNLOAD_RETRIES = 60, 2
memory.atexit = ReleaseWhenUnused  # type: ignore[assignment]

Sample = dict[str, Any]
BatchEdit = Callable[[dict[str, Any], int, npt.NDArray[np.int64]], None]
"""Changes a collated batch in place, given the epoch and the numbers [B] of its samples in their split."""
Transform = Callable[[Sample, int], Sample]
"""Gives what a sample is trained as in an epoch (``agentft.data.objectives``): a function of its arguments alone."""


@dataclass(frozen=True, kw_only=True)
class Upcoming:
    """A batch of this rank that has not been drawn yet: ``batch`` counts from 0 in ``epoch``."""

    epoch: int
    batch: int
    samples: list[Sample]


def open_shards(data: DataConfig) -> ShardMeta:
    """Make the shards ready to be read, once a process before any loader; return what they are.

    With ``data.remote``: credentials, bucket and publication are checked (in seconds), and ``meta.json`` and the
    tokenizer are copied beside the local copy. Shared memory that a killed job left for these folders is removed.

    Raises:
        StorageError: The store cannot be reached or refuses.
        DataError: No shards, unfinished upload, or a local copy of other shards.
    """
    folder = Path(data.shards)
    if dist.get_local_rank() == 0:
        parts = [str(folder.absolute() / split) for split in SPLITS]
        clean_stale(parts)
        if data.remote is not None:
            refuse_shared_copy(folder, parts)
            copy_side_files(check_remote(data.remote), folder)
    if dist.get_world_size() > 1:
        dist.barrier()
    return load_meta(folder)


def build_loader(
    data: DataConfig,
    split_name: Split,
    meta: ShardMeta,
    *,
    shuffle: bool,
    seed: int,
    train: bool = True,
    edit: BatchEdit | None = None,
    transform: Transform | None = None,
) -> DataSpec:
    """Return the composer ``DataSpec`` of one split for this rank; call ``open_shards`` first.

    Args:
        data: Where the shards are; ``batch_size`` is the global batch.
        split_name: Which split.
        meta: What ``open_shards`` returned.
        shuffle: New order every epoch (of ``seed`` and the epoch's number) or the order of the shards.
        seed: Of the order.
        train: Whole global batches only; False reads every row.
        edit: Changes each collated batch in place, given the epoch and the samples' numbers [B].
        transform: Changes each sample as it is drawn.

    Raises:
        ConfigError: Ranks, nodes and batch size do not divide.
        DataError: The split is empty, smaller than a batch, or its local copy is in use by another job.
    """
    device_batch = _device_batch(data)
    total = _check_size(data, split_name, meta, train=train)
    mix = build_mix(data.mix, split_name, meta, data.batch_size) if train and shuffle else None
    if mix is not None:
        total = mix.batches * data.batch_size
    stream = SessionStream(
        remote=data.remote,
        local=data.shards,
        split=split_name,
        validate_hash=HASH,
        download_retry=_DOWNLOAD_RETRIES,
        download_timeout=_DOWNLOAD_TIMEOUT_S,
    )
    with one_job_at_a_time(), _start_errors(data):
        dataset = SessionDataset(
            streams=[stream],
            epoch_size=total,
            batch_size=device_batch,
            num_canonical_nodes=data.num_canonical_nodes,
            shuffle=shuffle,
            shuffle_seed=seed,
            shuffle_block_size=max(4_000_000 // data.num_canonical_nodes, 1 << 18),
        )
    dataset.transform = transform
    if train and shuffle:
        dataset.curriculum, dataset.mix = build_curriculum(data.curriculum, split_name, meta), mix
    loader = SessionLoader(
        dataset,
        edit,
        batch_size=device_batch,
        num_workers=data.num_workers,
        collate_fn=collate,
        drop_last=train,
        generator=torch.Generator(),  # its own: a new epoch shall not move the random state that dropout draws from
    )
    return DataSpec(
        loader,
        num_samples=total,
        split_batch=partial(split, packing=data.packing, pack_tokens=data.pack_tokens or meta.text["max_tokens"]),
        get_num_samples_in_batch=num_samples,
        get_num_tokens_in_batch=num_tokens,
    )


class SessionDataset(StreamingDataset):
    """Decoded samples (docs/design.md, "Shards") in Streaming's order.

    Over its base: ends with the cause when a background download failed (the base just ends the epoch early, or waits
    for ever in another process), gives writable arrays, and knows, when Composer saves a checkpoint between two epochs,
    that the next one is due.
    """

    epoch_consumed = False  # set by the loader: every batch of the current epoch has been drawn
    curriculum: Curriculum | None = None  # orders an epoch instead of Streaming's shuffle
    mix: Mix | None = None  # so does this; both together: the curriculum orders each part
    transform: Transform | None = None  # changes a sample as it is drawn
    _epoch = 0  # of the iteration that is under way
    _cause: BaseException | None = None
    _places: tuple[SharedMemory, ...] = ()  # every place that was loaded, as long as the dataset is there

    def get_item(self, sample_id: int, retry: int = 7) -> Sample:
        """Return one decoded sample by its number in the split."""
        sample = dict(super().get_item(int(sample_id), retry))
        for key in ("input_ids", "loss_mask", "position_ids"):
            sample[key] = np.array(sample[key])
        return sample

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Fetch and unpack a shard. After a failure other processes try for themselves (the base lets them wait)."""
        try:
            super().prepare_shard(shard_id, blocking)
        except BaseException:
            self._shard_states[shard_id] = _ShardState.LOCAL  # readers then miss the file, and fetch it or fail too
            raise

    def on_exception(self, future: Future[Any]) -> None:
        """Keep the cause of a failed background thread, and tell the other threads to stop."""
        cause = future.exception()
        if cause is not None:
            self._cause = cause
            self._event.set()

    def _prepare_thread(self, it: Any) -> None:
        with _counted_out(it):
            super()._prepare_thread(it)

    def _ready_thread(self, it: Any) -> None:
        with _counted_out(it):
            super()._ready_thread(it)

    def __iter__(self) -> Iterator[Sample]:
        try:
            for sample in super().__iter__():
                yield self.changed(sample, self._epoch)
        except (AgentFTError, OSError, RuntimeError, ValueError) as error:
            raise self._failure(error) from error
        if hasattr(self, "_event") and self._event.is_set():
            raise self._failure(None) from self._cause

    def changed(self, sample: Sample, epoch: int) -> Sample:
        """Return what ``sample`` is trained as in ``epoch``."""
        return sample if self.transform is None else self.transform(sample, epoch)

    def _resume_incr_epoch(self) -> tuple[int, int]:
        epoch, samples = super()._resume_incr_epoch()
        self._epoch = int(epoch)
        return epoch, samples

    def position(self) -> tuple[int, int]:
        """Return (epoch, samples of it already consumed over all ranks) at which the next iteration starts."""
        epoch, samples = self._resume(self._parallel_rank_world, self.next_epoch)
        return int(epoch), int(samples)

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return [batches, device batch] sample numbers of this rank in ``epoch``, −1 where a batch is not full."""
        rank_world = self._parallel_rank_world
        world = World(rank_world.num_nodes, rank_world.ranks_per_node, 1, rank_world.rank)
        return self._work(world, epoch, 0)[world.node, world.rank_of_node, 0]

    def _get_work(self, epoch: int, sample_in_epoch: int) -> npt.NDArray[np.int64]:
        if self.curriculum is None and self.mix is None:
            return super()._get_work(epoch, sample_in_epoch)
        world = self._parallel_worker_world  # cheap enough for every worker to do: nothing is shared
        work = self._work(world, epoch, sample_in_epoch)
        return work[world.node, world.rank_of_node, world.worker_of_rank].flatten()

    def _work(self, world: World, epoch: int, sample_in_epoch: int) -> npt.NDArray[np.int64]:
        """Return [nodes, ranks, workers, batches of a worker, device batch] sample numbers from a place in an epoch."""
        curriculum = self.curriculum if self.curriculum and self.curriculum.width(epoch) < 1 else None
        arrange = partial(curriculum.order, epoch=epoch, seed=self.shuffle_seed) if curriculum else None
        if self.mix is not None:
            order = self.mix.order(epoch, self.shuffle_seed, arrange)
        elif arrange is not None:
            order = arrange(self.resample_streams(epoch)[1])
        else:
            return generate_work(self.batching_method, self, world, epoch, sample_in_epoch)
        assert isinstance(self.batch_size, int)
        return share_out(order[sample_in_epoch:], world, self.batch_size)

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Return the place in the order; between two epochs (0 samples, all consumed) it is the next epoch's start."""
        state = super().state_dict(num_samples, from_beginning)
        if from_beginning and num_samples == 0 and self.epoch_consumed:
            state["epoch"] += 1
        return state

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Continue from a place in the order; later calls replace it."""
        super().load_state_dict(obj)
        self._places = (*self._places, self._resume_shm)  # the first one made the segment, and would take it along

    def _failure(self, error: BaseException | None) -> AgentFTError:
        cause = self._cause or error
        if isinstance(cause, AgentFTError):
            return cause
        stream = self.streams[0]
        hint = "check the store and the disk; `agentft doctor` looks at both"
        return DataError(
            "a shard cannot be read",
            where=str(stream.remote or stream.local),
            got=f"{type(cause).__name__}: {cause}",
            hint=hint,
        )


@contextmanager
def _counted_out(it: Any) -> Iterator[None]:
    """Count a background thread as ended when it fails, too: the base waits for ever for threads that are not."""
    try:
        yield
    except BaseException:
        it.on_exit()
        raise


class SessionLoader(StreamingDataLoader):
    """Batches of this rank, and a look ahead that consumes nothing."""

    dataset: SessionDataset

    def __init__(self, dataset: SessionDataset, edit: BatchEdit | None = None, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self._edit = edit
        self._place: tuple[int, int] | None = None  # (epoch, batches of it drawn), None before the first iteration
        self._orders: dict[int, npt.NDArray[np.int64]] = {}
        self._samples: dict[tuple[int, int], list[Sample]] = {}

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch, drawn = self._start()
        self.dataset.epoch_consumed = False
        self._place = (epoch, drawn)
        for batch in super().__iter__():
            if self._edit is not None:
                self._edit(batch, epoch, self._order(epoch)[drawn])
            drawn += 1
            self._place = (epoch, drawn)
            self.dataset.epoch_consumed = drawn >= len(self)
            yield batch
        self.dataset.epoch_consumed = True

    def upcoming(self, count: int) -> list[Upcoming]:
        """Return the next ``count`` batches after the one drawn last, across the ends of epochs.

        Samples are read from the shards (and downloaded where needed), kept until their batch has passed. It does not
        know when training ends: batches beyond the last one are given all the same.
        """
        epoch, batch = self._place or self._start()
        result: list[Upcoming] = []
        while len(result) < count:
            ids = self._order(epoch)
            if batch >= len(self):
                epoch, batch = epoch + 1, 0
                continue
            key = (epoch, batch)
            if key not in self._samples:
                self._samples[key] = [self.dataset.changed(self.dataset[int(i)], epoch) for i in ids[batch] if i >= 0]
            result.append(Upcoming(epoch=epoch, batch=batch, samples=self._samples[key]))
            batch += 1
        self._forget()
        return result

    def _start(self) -> tuple[int, int]:
        epoch, samples = self.dataset.position()
        ranks = self.dataset._parallel_rank_world.num_ranks
        assert self.batch_size is not None
        return epoch, samples // (self.batch_size * ranks)

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._orders:
            self._orders[epoch] = self.dataset.order(epoch)
        return self._orders[epoch]

    def _forget(self) -> None:
        now = self._place or self._start()
        self._samples = {key: samples for key, samples in self._samples.items() if key >= now}
        self._orders = {epoch: order for epoch, order in self._orders.items() if epoch >= now[0]}


def _device_batch(data: DataConfig) -> int:
    ranks, nodes = dist.get_world_size(), dist.get_world_size() // dist.get_local_world_size()
    if data.batch_size % ranks:
        raise ConfigError(
            "the global batch cannot be shared out evenly",
            where="data.batch_size",
            got=data.batch_size,
            expected=f"a multiple of {ranks} (processes)",
        )
    canonical = data.num_canonical_nodes
    if canonical < 1 or (canonical % nodes and nodes % canonical):
        raise ConfigError(
            "canonical and real nodes do not divide",
            where="data.num_canonical_nodes",
            got=canonical,
            expected=f"a multiple or a divisor of {nodes} (nodes)",
        )
    return data.batch_size // ranks


def _check_size(data: DataConfig, split_name: Split, meta: ShardMeta, *, train: bool) -> int:
    """Return the rows of an epoch: all of them, or for training the largest multiple of the global batch."""
    rows = meta.sessions(split_name)
    if rows == 0:
        raise DataError(
            f"the split {split_name!r} is empty",
            where=data.shards,
            expected="one of " + ", ".join(f"{name} ({part.sessions} sessions)" for name, part in meta.splits.items()),
            hint="set data.train_split or data.eval_split, or write the shards with another --holdout",
        )
    if train and rows < data.batch_size:
        raise DataError(
            f"the split {split_name!r} is smaller than one global batch",
            where="data.batch_size",
            got=f"batch of {data.batch_size}, {rows} sessions",
            hint=f"set data.batch_size to at most {rows}",
        )
    return rows // data.batch_size * data.batch_size if train else rows


@contextmanager
def _start_errors(data: DataConfig) -> Iterator[None]:
    """Say plainly what Streaming says in its own terms when a dataset cannot be opened."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(
            "cannot open the shards", where=data.remote or data.shards, got=f"{type(error).__name__}: {error}"
        ) from error
