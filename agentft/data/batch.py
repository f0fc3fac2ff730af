"""Batches (floor 3): collate samples, pick rows, join batches, cut microbatches. Contract: docs/design.md.

``collate`` makes one batch of decoded shard rows. ``split`` is what Composer calls once a batch, on every rank: it
sorts rows by length, cuts them, trims each microbatch to its own longest row and writes ``denominators``, which make
every component an exact mean over the global batch. Feedback edits the batch before that: the counts include its edits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from composer.utils import dist
from torch import Tensor

from agentft.data.packing import Packing, cut, spread
from agentft.etai import INTENTS, Viewport
from agentft.losses import NO_TARGET, target_counts, trained_places

Batch = dict[str, Any]

TOKEN_KEYS = ("input_ids", "labels", "position_ids", "token_weight", "policy_weight")
"""[B, T] entries, padded with the value of ``_PAD``."""

ANCHOR_KEYS: dict[str, tuple[str, ...]] = {
    "intent_at": ("intent_target",),
    "tool_at": ("tool_target",),
    "outcome_at": ("outcome_target", "outcome_mask"),
    "cursor_at": ("cursor_target", "cursor_view"),
}
"""[N, 2] (row, column) entries and the entries that run beside them."""

EXTRA_TOKEN_KEYS = ("lm_weight",)
EXTRA_ANCHOR_KEYS = {"distill_at": ("distill_hidden",), "suppressed_at": ("suppressed",)}
"""Entries that some runs add to a finished batch (``models.extra_losses``, ``algorithms.raspberry``); ``join`` does not
know them."""

LIST_KEYS = ("session_id", "record", "steps")
"""Lists of length B."""

_PAD = {"input_ids": 0, "labels": NO_TARGET, "position_ids": 0, "token_weight": 0.0, "policy_weight": 0.0}


def collate(samples: Sequence[Mapping[str, Any]]) -> Batch:
    """Return the batch of decoded shard rows (columns: docs/design.md, "Shards").

    Every step has a tool anchor and, if it has a result, an outcome anchor. No tool target (``NO_TARGET``): steps
    marked as mistakes and unknown tools. No outcome target (mask 0): unknown exit codes, and tools that do not run the
    program, because the exit code of a file read is no news and would drown the signal.
    """
    lengths = [len(sample["input_ids"]) for sample in samples]
    batch: Batch = {"lengths": torch.tensor(lengths, dtype=torch.int64)}
    rows = [_token_rows(sample) for sample in samples]
    for key in TOKEN_KEYS:
        batch[key] = torch.nn.utils.rnn.pad_sequence(
            [row[key] for row in rows], batch_first=True, padding_value=_PAD[key]
        )
    anchors = [_anchors(sample) for sample in samples]
    batch |= _intents(anchors) | _steps(anchors) | _cursors(anchors)
    batch["session_id"] = [str(sample["session_id"]) for sample in samples]
    batch["record"] = [_json_text(sample["record"]) for sample in samples]
    batch["steps"] = [list(anchor["steps"]) for anchor in anchors]
    return batch


def bare_sample(session_id: str, input_ids: Any, position_ids: Any) -> dict[str, Any]:
    """Return a sample for ``collate`` that has tokens and positions [T], but nothing to train on."""
    return {
        "session_id": session_id,
        "input_ids": input_ids,
        "loss_mask": np.zeros(len(input_ids), np.uint8),
        "position_ids": position_ids,
        "anchors": {
            "intent_at": -1,
            "intents": None,
            "cursor_at": -1,
            "cursor_target": None,
            "viewport": None,
            "steps": [],
        },
        "record": "",
    }


def split(
    batch: Batch, microbatch_size: int | float, *, packing: Packing = "buckets", pack_tokens: int = 0
) -> list[Batch]:
    """Cut a rank's batch into microbatches, as ``agentft.data.packing`` says.

    A collective call: every rank must make it the same number of times (one or two all-reduces a batch).

    Args:
        batch: What ``collate`` or ``join`` made.
        microbatch_size: Most rows of a microbatch (``none`` and ``buckets``).
        packing: How rows are cut.
        pack_tokens: Most tokens of a microbatch (``pack``).
    """
    denominators = _global_counts(batch)
    lengths = batch["lengths"].tolist()
    cuts = cut(lengths, packing, rows=max(int(microbatch_size), 1), tokens=pack_tokens)
    if packing == "pack" and dist.get_world_size() > 1:
        cuts = spread(cuts, lengths, int(_over_ranks([float(len(cuts))], "MAX")[0]))
    microbatches = []
    for rows in cuts:
        part = select_rows(batch, rows)
        share = len(rows) / denominators["rows"]
        part["denominators"] = {name: count * share or 1.0 for name, count in denominators.items() if name != "rows"}
        part |= {"counts": target_counts(part), "next_at": trained_places(part)}  # here no GPU has to wait for them
        part["real_tokens"] = sum(lengths[row] for row in rows)
        part["computed_tokens"] = part["real_tokens"] if packing == "pack" else part["input_ids"].numel()
        microbatches.append(part)
    return microbatches


def select_rows(batch: Batch, rows: Tensor | Sequence[int]) -> Batch:
    """Return the batch of ``rows`` (in that order), trimmed to its longest row, anchors renumbered."""
    rows = torch.as_tensor(rows, dtype=torch.int64)
    lengths = batch["lengths"][rows]
    longest = int(lengths.max()) if len(rows) else 0
    part: Batch = {"lengths": lengths}
    for key in (*TOKEN_KEYS, *(key for key in EXTRA_TOKEN_KEYS if key in batch)):
        part[key] = batch[key][rows, :longest]
    new_row = torch.full((len(batch["lengths"]),), -1, dtype=torch.int64)
    new_row[rows] = torch.arange(len(rows))
    for at, beside in (ANCHOR_KEYS | EXTRA_ANCHOR_KEYS).items():
        if at not in batch:
            continue
        moved = new_row[batch[at][:, 0]]
        keep = moved >= 0
        part[at] = torch.stack((moved[keep], batch[at][keep, 1]), dim=1)
        part |= {key: batch[key][keep] for key in beside}
    for key in LIST_KEYS:
        part[key] = [batch[key][int(row)] for row in rows]
    return part


def join(batches: Sequence[Batch]) -> Batch:
    """Return one batch of all rows, padded to the longest, anchors renumbered."""
    longest = max(part["input_ids"].shape[1] for part in batches)
    joined: Batch = {"lengths": torch.cat([part["lengths"] for part in batches])}
    for key in TOKEN_KEYS:
        joined[key] = torch.cat(
            [torch.nn.functional.pad(part[key], (0, longest - part[key].shape[1]), value=_PAD[key]) for part in batches]
        )
    first_row = np.cumsum([0, *(len(part["lengths"]) for part in batches)]).tolist()
    for at, beside in ANCHOR_KEYS.items():
        joined[at] = torch.cat(
            [part[at] + torch.tensor([[row, 0]]) for part, row in zip(batches, first_row, strict=False)]
        )
        joined |= {key: torch.cat([part[key] for part in batches]) for key in beside}
    for key in LIST_KEYS:
        joined[key] = [item for part in batches for item in part[key]]
    return joined


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on ``device``."""
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def num_samples(batch: Batch) -> int:
    """Return the rows of a batch (Composer's ``get_num_samples_in_batch``)."""
    return len(batch["lengths"])


def num_tokens(batch: Batch) -> dict[str, int]:
    """Return real tokens and trained tokens of a batch (Composer's ``get_num_tokens_in_batch``)."""
    trained = int((batch["labels"][:, 1:] != NO_TARGET).sum())
    return {"total": int(batch["lengths"].sum()), "loss_generating": trained}


def _global_counts(batch: Batch) -> dict[str, float]:
    counts = target_counts(batch) | {"rows": float(num_samples(batch))}
    return dict(zip(counts, _over_ranks(list(counts.values()), "SUM"), strict=True))


def _over_ranks(values: list[float], operation: str) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl":
        total = total.cuda()
    dist.all_reduce(total, reduce_operation=operation)
    return total.tolist()


def _token_rows(sample: Mapping[str, Any]) -> dict[str, Tensor]:
    ids = torch.from_numpy(np.asarray(sample["input_ids"], dtype=np.int64))
    trained = torch.from_numpy(np.asarray(sample["loss_mask"]).astype(bool))
    weight = trained.float()
    if "token_weight" in sample:
        weight = weight * torch.from_numpy(np.asarray(sample["token_weight"], dtype=np.float32))
    return {
        "input_ids": ids,
        "labels": torch.where(trained, ids, NO_TARGET),
        "position_ids": torch.from_numpy(np.asarray(sample["position_ids"], dtype=np.int64)),
        "token_weight": weight,
        "policy_weight": torch.zeros(len(ids)),
    }


def _anchors(sample: Mapping[str, Any]) -> dict[str, Any]:
    anchors = sample["anchors"]
    return json.loads(anchors) if isinstance(anchors, str) else dict(anchors)


def _json_text(record: Any) -> str:
    return record if isinstance(record, str) else json.dumps(record, ensure_ascii=False)


def _intents(anchors: Sequence[Mapping[str, Any]]) -> Batch:
    at, targets = [], []
    for row, anchor in enumerate(anchors):
        if anchor["intents"] is not None and anchor["intent_at"] >= 0:
            at.append((row, anchor["intent_at"]))
            targets.append([float(name in anchor["intents"]) for name in INTENTS])
    return {"intent_at": _places(at), "intent_target": _floats(targets, len(INTENTS))}


def _steps(anchors: Sequence[Mapping[str, Any]]) -> Batch:
    tool_at, tools, outcome_at, outcomes, masks = [], [], [], [], []
    for row, anchor in enumerate(anchors):
        for step in anchor["steps"]:
            tool_at.append((row, step["tool_at"]))
            tools.append(NO_TARGET if step["mistake"] or step["tool"] < 0 else step["tool"])
            if step["result_at"] < 0:
                continue
            outcome = step["outcome"]
            known = outcome is not None and not math.isnan(outcome)
            outcome_at.append((row, step["result_at"]))
            outcomes.append(float(outcome) if known else 0.0)
            masks.append(float(known and step["runs_code"]))
    return {
        "tool_at": _places(tool_at),
        "tool_target": torch.tensor(tools, dtype=torch.int64),
        "outcome_at": _places(outcome_at),
        "outcome_target": torch.tensor(outcomes, dtype=torch.float32),
        "outcome_mask": torch.tensor(masks, dtype=torch.float32),
    }


def _cursors(anchors: Sequence[Mapping[str, Any]]) -> Batch:
    at, targets, views = [], [], []
    for row, anchor in enumerate(anchors):
        target = anchor["cursor_target"]
        if target is None or anchor["cursor_at"] < 0:
            continue
        view = Viewport.model_validate(anchor["viewport"] or {})
        at.append((row, anchor["cursor_at"]))
        targets.append(cursor_px(target["line"], target["column"], target["placement"] == "after", view))
        views.append([view.scroll_top, view.zoom, view.line_height, view.char_width])
    return {"cursor_at": _places(at), "cursor_target": _floats(targets, 3), "cursor_view": _floats(views, 4)}


def cursor_px(line: int, column: int, after: bool, view: Viewport) -> list[float]:
    """Return [x px, y px, after] of a place in a file, relative to the top left corner of the editor window.

    x = column·char_width·zoom and y = (line − 1)·line_height·zoom − scroll_top; scroll_top counts zoomed px.
    """
    x_px = column * view.char_width * view.zoom
    y_px = (line - 1) * view.line_height * view.zoom - view.scroll_top
    return [x_px, y_px, float(after)]


def _places(at: Sequence[tuple[int, int]]) -> Tensor:
    return torch.tensor(at, dtype=torch.int64).reshape(-1, 2)


def _floats(rows: Sequence[Sequence[float]], width: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, width)
