"""Short rows first (floor 4): rows are cut at a length that grows from ``start`` to ``end`` until ``until``.

Composer's SeqLengthWarmup takes batches of nothing but [B, T] tensors; ours have anchors, lists and counts. A cut keeps
the beginning of a row, so what stays is predicted from exactly what it was predicted from before. What goes: tokens and
labels behind the cut, anchors behind it, and the policy weight of a call that the cut runs through (half a call says
nothing about the call's worth). ``lengths`` are the new ones.

It acts on BATCH_START: feedback has by then written its targets into whole rows, and ``data.batch.split``, which counts
the denominators, comes after. So every component stays the exact mean over what is left of the global batch. Sessions
are still executed whole by feedback, and advantages compare all their calls.

The length hangs on the number of the batch alone: resume needs no state, and all ranks agree.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from composer import Algorithm, Event, Logger, State
from composer.utils import dist

from agentft.algorithms.loss_weights import train_time
from agentft.config.algorithms import LengthWarmupConfig
from agentft.data.batch import ANCHOR_KEYS, EXTRA_ANCHOR_KEYS, EXTRA_TOKEN_KEYS, TOKEN_KEYS, Batch
from agentft.losses import target_counts
from agentft.schedules import TrainTime, parse_time

log = logging.getLogger(__name__)
STEP = 8
"""Lengths grow in steps of so many tokens."""


def length_at(config: LengthWarmupConfig, time: TrainTime) -> int | None:
    """Return the longest row at ``time`` in tokens; None once the warm-up is over."""
    until = parse_time(config.until, time.batches_per_epoch)
    if time.batch >= until:
        return None
    grown = config.start + (config.end - config.start) * time.batch / until
    return max(config.start, int(grown) // STEP * STEP)


def cut_rows(batch: Batch, length: int) -> Batch:
    """Return the batch with every row cut to its first ``length`` tokens; the same object if none is longer."""
    if int(batch["lengths"].max()) <= length:
        return batch
    cut = dict(batch)
    cut["lengths"] = batch["lengths"].clamp(max=length)
    for key in (*TOKEN_KEYS, *EXTRA_TOKEN_KEYS):
        if key in batch:
            cut[key] = batch[key][:, :length]
    cut["policy_weight"] = cut["policy_weight"].clone()
    for row in (batch["policy_weight"][:, length] != 0).nonzero()[:, 0].tolist():
        silent = (cut["policy_weight"][row] == 0).nonzero()[:, 0]
        cut["policy_weight"][row, int(silent[-1]) + 1 if len(silent) else 0 :] = 0.0
    for at, beside in (ANCHOR_KEYS | EXTRA_ANCHOR_KEYS).items():
        if at in batch:
            keep = batch[at][:, 1] < length
            cut |= {key: batch[key][keep] for key in (at, *beside)}
    cut["steps"] = [[_cut_step(step, length) for step in steps if step["tool_at"] < length] for steps in batch["steps"]]
    return cut


def _cut_step(step: dict[str, Any], length: int) -> dict[str, Any]:
    """Return a step whose places lie in the row: a result behind the cut is none, a call ends at the cut."""
    result_at = step["result_at"] if step["result_at"] < length else -1
    return step | {"result_at": result_at, "call_end": min(step["call_end"], length)}


class LengthWarmup(Algorithm):
    """Cuts the rows of early batches, and says what it cut."""

    def __init__(self, config: LengthWarmupConfig) -> None:
        self.config = config

    def match(self, event: Event, state: State) -> bool:
        """Run when the batch is complete and not yet split."""
        return event == Event.BATCH_START

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Cut the batch of this rank; count over all ranks."""
        length = length_at(self.config, train_time(state))
        if length is None:
            return
        whole = state.batch
        state.batch = cut_rows(whole, length)
        removed = whole["lengths"] - state.batch["lengths"]
        counts = [float((removed > 0).sum()), float(removed.sum()), sum(target_counts(state.batch).values())]
        seen = state.device.tensor_to_device(torch.tensor(counts, dtype=torch.float64))
        dist.all_reduce(seen, reduce_operation="SUM")
        rows, tokens, targets = seen.tolist()
        logger.log_metrics(
            {
                "length_warmup/length": float(length),
                "length_warmup/cut_rows": rows,
                "length_warmup/cut_tokens": tokens,
                "length_warmup/nothing_trained": float(targets == 0),
            }
        )
        if targets == 0:
            number, sessions = state.timestamp.batch.value, ", ".join(whole["session_id"])
            advice = "raise algorithms.length_warmup.start"
            log.warning("batch %d trains nothing at %d tokens (%s); %s", number, length, sessions, advice)
