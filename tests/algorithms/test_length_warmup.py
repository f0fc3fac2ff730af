"""Rows that are cut short: what stays is as it was, the mean stays exact, and the end is the whole row."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support_agent import make_renderer, sessions
from support_algorithms import train

from agentft.algorithms.length_warmup import STEP, LengthWarmup, cut_rows, length_at
from agentft.config.algorithms import LengthWarmupConfig
from agentft.data.batch import ANCHOR_KEYS, TOKEN_KEYS, Batch, collate, select_rows
from agentft.data.shards import sample_of
from agentft.losses import target_counts
from agentft.schedules import TrainTime

SHORT = LengthWarmupConfig(enabled=True, start=96, end=400, until="3ba")


@functools.cache
def whole_batch() -> Batch:
    known = sessions(6)
    renderer = make_renderer(known)
    batch = collate([sample_of(session, renderer.render(session)) for session in known])
    for row, steps in enumerate(batch["steps"]):
        for step in steps:
            batch["policy_weight"][row, step["call_start"] : step["call_end"]] = 0.5 - row % 2
    return batch


def anchors(batch: Batch) -> dict[str, list[Any]]:
    """Every anchor with what is beside it, by session and column."""
    return {
        at: [
            (batch["session_id"][row], column, *(batch[key][number].tolist() for key in beside))
            for number, (row, column) in enumerate(batch[at].tolist())
        ]
        for at, beside in ANCHOR_KEYS.items()
    }


@given(st.integers(1, 420), st.permutations(range(6)))
def test_what_stays_is_as_it_was(length: int, rows: list[int]) -> None:
    whole = select_rows(whole_batch(), rows)
    cut = cut_rows(whole, length)
    assert cut["lengths"].tolist() == [min(int(n), length) for n in whole["lengths"]]
    for key in TOKEN_KEYS:
        if key != "policy_weight":
            assert torch.equal(cut[key], whole[key][:, :length]), key
    before = anchors(whole)
    for at, found in anchors(cut).items():
        assert found == [anchor for anchor in before[at] if anchor[1] < length], at
    for row, steps in enumerate(whole["steps"]):
        for step in steps:
            span = cut["policy_weight"][row, step["call_start"] : step["call_end"]]
            assert (span != 0).all() if step["call_end"] <= length else (span == 0).all()
    kept = {(row, step["step"]) for row, steps in enumerate(cut["steps"]) for step in steps}
    shown = {(row, s["step"]) for row, steps in enumerate(whole["steps"]) for s in steps if s["tool_at"] < length}
    assert kept == shown
    places = [p for steps in cut["steps"] for s in steps for p in (s["tool_at"], s["result_at"], s["call_end"] - 1)]
    assert all(place < length for place in places)
    assert select_rows(cut, range(6))["input_ids"].shape[1] == min(length, int(whole["lengths"].max()))


def test_a_batch_without_long_rows_is_left_alone() -> None:
    whole = whole_batch()
    assert cut_rows(whole, int(whole["lengths"].max())) is whole


@given(st.integers(1, 600), st.integers(0, 3000), st.integers(1, 50), st.integers(1, 9))
def test_the_length_grows_to_its_end_and_then_nothing_is_cut(
    start: int, more: int, per_epoch: int, epochs: int
) -> None:
    config = LengthWarmupConfig(enabled=True, start=start, end=start + more, until=f"{epochs}ep")
    found = [length_at(config, TrainTime(batch=b, batches_per_epoch=per_epoch)) for b in range(per_epoch * epochs)]
    assert found[0] == start
    lengths = [length for length in found if length is not None]
    assert len(lengths) == len(found)
    assert sorted(lengths) == lengths
    assert all(length == start or length % STEP == 0 for length in lengths)
    assert lengths[-1] <= start + more
    assert length_at(config, TrainTime(batch=per_epoch * epochs, batches_per_epoch=per_epoch)) is None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int | str, Any]:
    folder = tmp_path_factory.mktemp("warmup")
    found: dict[int | str, Any] = {"plain": train(folder / "plain")}
    for size in (1, 3, 4):
        found[size] = train(folder / str(size), lambda _: ([LengthWarmup(SHORT)], []), microbatch=size)
    return found


def test_the_losses_do_not_depend_on_the_cut_into_microbatches(runs: dict[int | str, Any]) -> None:
    for size in (1, 3):
        for got, expected in zip(runs[size].curve, runs[4].curve, strict=True):
            assert got == pytest.approx(expected, abs=1e-5)


def test_rows_are_cut_and_at_the_end_whole(runs: dict[int | str, Any]) -> None:
    logged, plain = runs[4].logged, runs["plain"].logged
    assert logged["length_warmup/length"] == [96.0, 192.0, 296.0]
    assert logged["length_warmup/cut_rows"][0] == 4
    counts = logged["loss/code/count"]
    assert counts[0] < counts[3] == plain["loss/code/count"][3]
    assert logged["loss/tool/count"][0] < plain["loss/tool/count"][0]


def test_a_batch_that_trains_nothing_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = LengthWarmupConfig(enabled=True, start=2, end=2000, until="2ba")
    with caplog.at_level(logging.WARNING):
        result = train(tmp_path, lambda _: ([LengthWarmup(config)], []), batches=2)
    assert result.logged["length_warmup/nothing_trained"] == [1.0, 0.0]
    assert [record.message for record in caplog.records if "trains nothing at 2 tokens (calc/0" in record.message]
    assert result.curve[0]["loss/train/total"] == 0.0
    assert target_counts(cut_rows(whole_batch(), 2))["code"] == 0
