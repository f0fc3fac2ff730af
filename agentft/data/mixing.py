"""Every global batch made of the same parts (floor 3): the order of an epoch under ``data.mix``.

With parts 3 : 1 and a global batch of 8, every batch holds 6 sessions of the first part and 2 of the second, in random
places. An epoch ends with the part that is used up first and repeats nothing. Of a part that has more, an epoch takes
the sessions that follow those of the epoch before, round and round, so that all of them get their turn equally often.

The order is a function of (seed, epoch) over the *global* sequence of samples, shared out afterwards, as that of
``agentft.data.curriculum``: a resumed run and a run on another number of processes get the same global batches. Within
its part the curriculum still decides which sessions come first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentft.config.mixing import MixConfig, quotas
from agentft.data.meta import COMPLEXITY_LETTERS, ShardMeta
from agentft.errors import ConfigError, DataError
from agentft.etai import Split

log = logging.getLogger(__name__)
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mix:
    """The sessions of each part, and how many of them a global batch holds.

    ``members``: part → [n] int64 sample numbers; ``quotas``: part → rows of a global batch, above 0.
    """

    members: Mapping[str, Ids]
    quotas: Mapping[str, int]

    @property
    def batches(self) -> int:
        """Global batches of an epoch."""
        return min(len(self.members[part]) // quota for part, quota in self.quotas.items())

    def order(self, epoch: int, seed: int, arrange: Callable[[Ids], Ids] | None = None) -> Ids:
        """Return [batches · rows of a batch] sample numbers in the order in which they are trained.

        ``arrange`` puts a part's sessions of this epoch in order (a curriculum); without it they are shuffled.
        """
        columns = []
        for number, (part, quota) in enumerate(self.quotas.items()):
            taken = turn(self.members[part], self.batches * quota, epoch, seed=(seed, number))
            ordered = arrange(taken) if arrange else np.random.default_rng((seed, epoch, number)).permutation(taken)
            columns.append(ordered.reshape(self.batches, quota))
        rows = np.concatenate(columns, axis=1)
        chance = np.random.default_rng((seed, epoch, len(columns)))
        return chance.permuted(rows, axis=1).reshape(-1)


def turn(members: Ids, count: int, epoch: int, *, seed: tuple[int, int]) -> Ids:
    """Return the ``count`` of ``members`` whose turn it is in ``epoch``: the next ones of a fixed random circle."""
    circle = np.random.default_rng(seed).permutation(members)
    return np.roll(circle, -(epoch * count % len(circle)))[:count]


def build_mix(config: MixConfig | None, split: Split, meta: ShardMeta, batch_size: int) -> Mix | None:
    """Return the mix of a split, or None where there is none. ``batch_size`` is the global batch.

    Raises:
        ConfigError: A global batch cannot hold the mix in whole sessions.
        DataError: A part is empty or smaller than its share of a batch, or the shards do not say which session is what.
    """
    if config is None:
        return None
    rows = quotas(config.parts, batch_size)
    if rows is None:
        raise ConfigError("a global batch cannot hold this mix", where="data.mix", got=f"batch_size={batch_size}")
    letters = np.array(list(meta.splits[split].session_complexity))
    if len(letters) != meta.sessions(split):
        raise DataError(
            "the shards do not say how complex each session is",
            where="data.mix",
            got=f"{len(letters)} marks for {meta.sessions(split)} sessions in meta.json",
            hint="write the shards again, or leave data.mix null",
        )
    rows = {part: quota for part, quota in rows.items() if quota}
    members = {part: np.flatnonzero(letters == COMPLEXITY_LETTERS[part]).astype(np.int64) for part in rows}
    short = {part: quota for part, quota in rows.items() if len(members[part]) < quota}
    if short:
        raise DataError(
            f"split {split!r} has too few sessions for this mix",
            where="data.mix.parts",
            got=", ".join(f"{len(members[part])} {part}" for part in short),
            expected=", ".join(f"at least {quota} {part} (its share of a batch)" for part, quota in short.items()),
            hint="add sessions, change data.mix.parts, or leave data.mix null",
        )
    rest = len(letters) - sum(map(len, members.values()))
    if rest:
        log.warning("data.mix: %d of %d sessions belong to no part of the mix and are not trained", rest, len(letters))
    return Mix(members, rows)
