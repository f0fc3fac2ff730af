"""Batches: targets from anchors, rows that keep their targets through any cut, denominators of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agent_samples import make_sample, make_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from agentft.data.batch import (
    ANCHOR_KEYS,
    Batch,
    collate,
    cursor_px,
    join,
    num_samples,
    num_tokens,
    select_rows,
    split,
)
from agentft.etai import INTENTS, Viewport
from agentft.losses import COMPONENTS, NO_TARGET, target_counts


def targets_by_session(batch: Batch) -> dict[str, dict[str, Any]]:
    """Everything that belongs to a session, found through its row: must survive any cut unchanged."""
    found: dict[str, dict[str, Any]] = {}
    for row, session in enumerate(batch["session_id"]):
        length = int(batch["lengths"][row])
        mine: dict[str, Any] = {
            key: batch[key][row, :length].tolist() for key in ("input_ids", "labels", "position_ids", "token_weight")
        }
        assert (batch["labels"][row, length:] == NO_TARGET).all()
        for at, beside in ANCHOR_KEYS.items():
            rows = batch[at][:, 0] == row
            mine[at] = batch[at][rows, 1].tolist()
            mine |= {key: batch[key][rows].tolist() for key in beside}
        mine |= {"record": batch["record"][row], "steps": batch["steps"][row]}
        found[session] = mine
    return found


def test_targets_follow_the_anchors() -> None:
    step = {"step": 1, "tool_at": 3, "tool": 7, "call_start": 3, "call_end": 5, "result_at": 6}
    step |= {"outcome": 0.0, "mistake": False, "runs_code": True}
    sample = make_sample(0, 60)
    sample["anchors"] |= {
        "intents": ["fix_test_failure", "fix_lint"],
        "steps": [
            step,
            step | {"tool_at": 8, "result_at": 9, "mistake": True, "outcome": 1.0},
            step | {"tool_at": 12, "result_at": 13, "runs_code": False},
            step | {"tool_at": 15, "result_at": 16, "outcome": None},
            step | {"tool_at": 20, "result_at": -1, "tool": -1},
        ],
    }
    batch = collate([make_sample(1, 50), sample])
    mine = batch["tool_at"][:, 0] == 1
    assert batch["tool_at"][mine, 1].tolist() == [3, 8, 12, 15, 20]
    assert batch["tool_target"][mine].tolist() == [7, NO_TARGET, 7, 7, NO_TARGET]
    outcomes = batch["outcome_at"][:, 0] == 1
    assert batch["outcome_at"][outcomes, 1].tolist() == [6, 9, 13, 16]
    assert batch["outcome_target"][outcomes].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert batch["outcome_mask"][outcomes].tolist() == [1.0, 1.0, 0.0, 0.0]
    intent = batch["intent_target"][batch["intent_at"][:, 0] == 1][0]
    assert [INTENTS[i] for i in intent.nonzero()[:, 0]] == ["fix_test_failure", "fix_lint"]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["token_weight"].dtype == torch.float32


def test_cursor_pixels_follow_zoom_and_scroll() -> None:
    view = Viewport(scroll_top=100.0, zoom=2.0, line_height=20.0, char_width=8.0)
    assert cursor_px(line=11, column=3, after=True, view=view) == [48.0, 300.0, 1.0]


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 9),
    microbatch=st.integers(1, 10),
    seed=st.integers(0, 50),
)
def test_split_keeps_every_session_whole(count: int, microbatch: int, seed: int) -> None:
    batch = collate(make_samples(count, seed=seed))
    before = targets_by_session(batch)
    parts = split(batch, microbatch)
    after: dict[str, Any] = {}
    for part in parts:
        assert num_samples(part) <= microbatch
        assert part["input_ids"].shape[1] == int(part["lengths"].max()), "trimmed to its own longest row"
        after |= targets_by_session(part)
    assert after == before
    lengths = torch.cat([part["lengths"] for part in parts])
    assert torch.equal(lengths, lengths.sort(descending=True).values)
    assert targets_by_session(join(parts)) == before
    assert sum(num_tokens(part)["total"] for part in parts) == num_tokens(batch)["total"]


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 9), microbatch=st.integers(1, 10), seed=st.integers(0, 50))
def test_denominators_make_the_weighted_mean_exact(count: int, microbatch: int, seed: int) -> None:
    batch = collate(make_samples(count, seed=seed))
    parts, whole = split(batch, microbatch), target_counts(batch)
    for name in COMPONENTS:
        # Composer adds up (sum ÷ denominator) · rows ÷ all rows; with sum = count that must be 1, or 0 without targets.
        mean = sum(target_counts(part)[name] / part["denominators"][name] * num_samples(part) / count for part in parts)
        assert mean == pytest.approx(1.0 if whole[name] else 0.0)


def test_an_edit_before_the_cut_is_counted() -> None:
    batch = collate(make_samples(4))
    batch["outcome_mask"][:] = 1.0
    batch["policy_weight"][2, 30:33] = -0.5
    parts = split(batch, 4)
    assert parts[0]["denominators"]["reward"] == len(batch["outcome_mask"])
    assert parts[0]["denominators"]["policy"] == 3.0
    extra = select_rows(batch, [2])
    grown = split(join([batch, extra]), 8)[0]
    assert num_samples(grown) == 5
    assert grown["denominators"]["policy"] == 6.0


def test_selecting_no_rows_gives_an_empty_batch() -> None:
    empty = select_rows(collate(make_samples(3)), [])
    assert num_samples(empty) == 0
    assert all(len(empty[key]) == 0 for key in ANCHOR_KEYS)
