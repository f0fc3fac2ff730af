"""Rows of earlier stages in every batch (floor 3), against forgetting: samples to replay, and plain text to model.

``EarlierRows`` is a Composer callback that adds them after a batch was drawn, and after feedback has looked at it
(earlier calls are not executed again), so put it behind ``ExecutionFeedback`` in the list of callbacks:

* **replay**: whole samples with their own targets, in the place of new ones (the loader draws so many fewer);
* **lm**: rows whose every token is a target of the component ``lm``, beside the batch.

Which rows a global batch gets is computed from its number: nothing is remembered, so a resumed run goes on exactly, and
the same rows come on any number of ranks. Every pass over the earlier rows has its own order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from agentft.config.schema import DataConfig, FeedbackPositionsConfig, TextConfig
from agentft.data.batch import Batch, bare_sample, collate, join
from agentft.data.loader import SessionLoader, build_loader, open_shards
from agentft.data.meta import ShardMeta
from agentft.errors import DataError
from agentft.etai import Split

SPLIT: Split = "train"
Sample = dict[str, Any]


class Rows(Protocol):
    """Decoded shard rows by number."""

    num_samples: int

    def __getitem__(self, at: int) -> Any:
        """Return the row ``at``."""


@dataclass(frozen=True, kw_only=True)
class EarlierSource:
    """``count`` rows of every global batch, from ``rows`` in the order that ``seed`` gives."""

    rows: Rows
    count: int
    seed: int

    def take(self, batch: int, rank: int, ranks: int) -> list[Sample]:
        """Return this rank's part of the rows of global batch ``batch`` (from 0)."""
        numbers = row_numbers(self.rows.num_samples, self.count, batch, self.seed)
        share = self.count // ranks
        return [self.rows[number] for number in numbers[rank * share : (rank + 1) * share]]


def row_numbers(total: int, count: int, batch: int, seed: int) -> list[int]:
    """Return the ``count`` rows (of ``total``) of global batch ``batch``: pass by pass, each in its own order."""
    places = range(batch * count, (batch + 1) * count)
    return [int(_order(total, seed, place // total)[place % total]) for place in places]


@functools.lru_cache(maxsize=8)
def _order(total: int, seed: int, number: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, number]).permutation(total)


class EarlierRows(Callback):
    """Adds rows of earlier stages to each batch.

    Args:
        replay: Samples that are trained again, or None.
        lm: Rows for language modelling, or None.
        max_tokens: Longest row for language modelling; of a longer one the beginning is taken.
    """

    def __init__(self, *, replay: EarlierSource | None, lm: EarlierSource | None, max_tokens: int) -> None:
        self.replay, self.lm, self.max_tokens = replay, lm, max_tokens

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Add this rank's rows to the batch that was just drawn."""
        number, rank, ranks = state.timestamp.batch.value, dist.get_global_rank(), dist.get_world_size()
        if self.replay is not None:
            state.batch = join([state.batch, replayed(self.replay.take(number, rank, ranks))])
        if self.lm is not None:
            rows = [lm_sample(sample, self.max_tokens) for sample in self.lm.take(number, rank, ranks)]
            state.batch = with_lm(state.batch, collate(rows))


def replayed(samples: Sequence[Sample]) -> Batch:
    """Return earlier samples as a batch; ``replay/`` before their ids keeps them apart from this stage's sessions."""
    batch = collate(samples)
    batch["session_id"] = [f"replay/{name}" for name in batch["session_id"]]
    return batch


def lm_sample(sample: Mapping[str, Any], max_tokens: int) -> Sample:
    """Return a row without any target of its own, at most ``max_tokens`` long: tokens and positions as they were."""
    ids, positions = (np.asarray(sample[key])[:max_tokens] for key in ("input_ids", "position_ids"))
    return bare_sample(f"lm/{sample['session_id']}", ids, positions)


def with_lm(batch: Batch, rows: Batch) -> Batch:
    """Return the batch with ``rows`` at its end, and ``lm_weight`` [B, T]: 1 on all their real tokens but the first.

    The first has nothing before it that could predict it.
    """
    joined = join([batch, rows])
    columns = torch.arange(joined["input_ids"].shape[1])
    inside = (columns > 0) & (columns < joined["lengths"][:, None])
    inside[: len(batch["lengths"])] = False
    return joined | {"lm_weight": inside.float()}


def open_earlier(
    folder: str, data: DataConfig, *, tokenizer_sha256: str, positions: FeedbackPositionsConfig
) -> tuple[Rows, ShardMeta]:
    """Return the training rows of an earlier stage's shards, and what they are.

    Args:
        folder: Of the shards.
        data: The run's section: how shards are read.
        tokenizer_sha256: Of the run's tokenizer.
        positions: Of the run.

    Raises:
        DataError: No such shards, another tokenizer, or result tokens with other positions.
    """
    earlier = replace(data, shards=folder, remote=None)
    meta = open_shards(earlier)
    _check_same_tokens(meta, folder, tokenizer_sha256, positions)
    loader = build_loader(earlier, SPLIT, meta, shuffle=False, seed=0, train=False).dataloader
    assert isinstance(loader, SessionLoader)
    return loader.dataset, meta


def check_replay(folder: str, meta: ShardMeta, *, text: TextConfig, tools: Sequence[str]) -> None:
    """Refuse to replay rows that are longer than this run's, or whose tools are other rows of the tool head.

    Raises:
        DataError: Says which.
    """
    longest = meta.splits[SPLIT].longest_tokens
    if longest > text.max_tokens:
        raise DataError(
            "the samples to replay are longer than this run's",
            where=folder,
            got=f"{longest} tokens",
            expected=f"at most text.max_tokens = {text.max_tokens}",
            hint="write them again with this run's text section",
        )
    if meta.tools and list(meta.tools) != list(tools):  # a corpus has none
        raise DataError(
            "the samples to replay have other tools",
            where=folder,
            got=", ".join(meta.tools),
            expected=", ".join(tools),
            hint="write them again with this run's tools",
        )


def _check_same_tokens(meta: ShardMeta, folder: str, sha256: str, positions: FeedbackPositionsConfig) -> None:
    if meta.tokenizer_sha256 != sha256:
        raise DataError(
            "these shards were written with another tokenizer",
            where=folder,
            got=meta.tokenizer_sha256[:12],
            expected=sha256[:12],
            hint="write them again with the tokenizer beside data.shards (agentft shards write --tokenizer)",
        )
    theirs, ours = meta.positions, positions
    if theirs.get("enabled") and (not ours.enabled or theirs["start"] != ours.start):  # a corpus has no results
        raise DataError(
            "the results in these shards have other positions",
            where=folder,
            got=f"start={theirs['start']}",
            expected=f"start={ours.start}" if ours.enabled else "plain positions",
            hint="set model.feedback_positions as it was in that stage",
        )
