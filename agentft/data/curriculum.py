"""Sessions with few steps first (floor 3): the order of an epoch under ``data.curriculum.by: steps``.

An epoch begins with the easiest ``width`` of its sessions and widens evenly until all are open at its end; within what
is open, sessions are drawn at random. Every session still comes exactly once an epoch: nothing is repeated for being
easy and nothing is left out for being hard, so a run with the curriculum sees what a run without it sees. Widths are
given per epoch and rise; at 1.0 the order is Streaming's own, bit for bit. (Opening the training set from easy to hard
by a share that grows with time: Platanios et al. 2019, "Competence-based curriculum learning", arXiv:1903.09848. They
draw with replacement; drawing without is ours.)

The order is a function of (seed, epoch) over the *global* sequence of samples, shared out afterwards: a resumed run and
a run on another number of processes get the same global batches. It pays no heed to which shard a session lies in, so
streamed shards are all needed early in the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from streaming.base.world import World

from agentft.config.algorithms import CurriculumConfig
from agentft.data.meta import ShardMeta
from agentft.errors import DataError
from agentft.etai import Split

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Curriculum:
    """Which sessions come when: ``steps`` [sessions of the split] int64, ``widths`` one an epoch, the last stays."""

    steps: Ids
    widths: Sequence[float]

    def width(self, epoch: int) -> float:
        """Return the share of the sessions that ``epoch`` begins with."""
        return self.widths[min(epoch, len(self.widths) - 1)]

    def order(self, ids: Ids, epoch: int, seed: int) -> Ids:
        """Return ``ids`` [N] (the samples of an epoch, in any order) as they are trained."""
        return widening_order(np.sort(ids), self.steps, self.width(epoch), np.random.default_rng((seed, epoch)))


def build_curriculum(config: CurriculumConfig, split: Split, meta: ShardMeta) -> Curriculum | None:
    """Return the curriculum of a split, or None where there is none.

    Raises:
        DataError: The shards were written before they kept how many steps each session has.
    """
    if config.by == "none":
        return None
    steps = np.array(meta.splits[split].session_steps.split(), np.int64)
    if len(steps) != meta.sessions(split):
        raise DataError(
            "the shards do not say how many steps each session has",
            where="data.curriculum",
            got=f"{len(steps)} numbers for {meta.sessions(split)} sessions in meta.json",
            hint="write the shards again, or set data.curriculum.by=none",
        )
    return Curriculum(steps, tuple(config.widths))


def open_count(position: int, total: int, width: float) -> int:
    """Return how many of ``total`` sessions, easiest first, are open when the one at ``position`` (from 0) is drawn."""
    share = width + (1 - width) * position / total
    return min(total, max(position + 1, math.ceil(share * total)))


def widening_order(ids: Ids, steps: Ids, width: float, chance: np.random.Generator) -> Ids:
    """Return ``ids`` [N] in an order that begins with the easiest ``width`` of them and widens evenly to all.

    ``steps`` is indexed by id; sessions with equal steps are in random order among themselves.
    """
    total = len(ids)
    easiest_first = ids[np.lexsort((chance.random(total), steps[ids]))]
    draws = chance.random(total)
    pool: list[int] = []
    order = np.empty(total, np.int64)
    opened = 0
    for position in range(total):
        now = open_count(position, total, width)
        pool.extend(easiest_first[opened:now].tolist())
        opened = now
        place = int(draws[position] * len(pool))
        pool[place], pool[-1] = pool[-1], pool[place]
        order[position] = pool.pop()
    return order


def share_out(order: Ids, world: World, batch_size: int) -> Ids:
    """Share a global order out: [nodes, ranks of a node, workers of a rank, batches of a worker, batch_size].

    Each run of ``batch_size · ranks`` samples is one global batch. Workers take the batches of their rank in turn; a
    worker with one batch less ends with −1, which is what Streaming skips.
    """
    nodes, ranks, workers = world.num_nodes, world.ranks_per_node, world.workers_per_rank
    batches = len(order) // (nodes * ranks * batch_size)
    rounds = -(-batches // workers)
    work = np.full((rounds * workers, nodes, ranks, batch_size), -1, np.int64)
    work[:batches] = order.reshape(batches, nodes, ranks, batch_size)
    return work.reshape(rounds, workers, nodes, ranks, batch_size).transpose(2, 3, 1, 0, 4)
