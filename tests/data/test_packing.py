"""The cut into forward passes: nothing is lost, split or too long, few passes, true counts, exact resume."""

from __future__ import annotations

import math
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composer import Callback, Trainer
from composer.core import State
from composer.loggers import InMemoryLogger, Logger
from hypothesis import given, settings
from hypothesis import strategies as st

from agentft.algorithms.loss_weights import LossWeights
from agentft.algorithms.padding import PaddingShare
from agentft.config.load import InvalidConfigError, load
from agentft.config.schema import DataConfig, LossConfig, ModelConfig
from agentft.data.batch import Batch, bare_sample, collate, join, num_samples, num_tokens, split
from agentft.data.loader import SessionLoader, build_loader, open_shards
from agentft.data.packing import cut, first_fit_decreasing, spread
from agentft.data.shards import ShardReport
from agentft.losses import COMPONENTS
from agentft.models.agent_model import AgentModel, CompositeLoss, build_agent_model
from agentft.tools import TOOL_INDEX

YAML = Path(__file__).resolve().parents[2] / "yamls" / "agent" / "tiny-glm.yaml"
CAPACITY = 20
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=30)


@given(LENGTHS)
def test_every_session_is_in_one_pass_whole_and_no_pass_is_too_long(lengths: list[int]) -> None:
    bins = first_fit_decreasing(lengths, CAPACITY)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(rows and sum(lengths[row] for row in rows) <= CAPACITY for rows in bins)


@settings(deadline=None)
@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=8))
def test_passes_are_at_most_eleven_ninths_of_the_fewest_and_a_bit(lengths: list[int]) -> None:
    assert len(first_fit_decreasing(lengths, CAPACITY)) <= 11 / 9 * fewest(lengths) + 6 / 9


def fewest(lengths: list[int]) -> int:
    """Return the fewest bins, by trying."""

    def fits(room: list[int], rest: list[int]) -> bool:
        if not rest:
            return True
        for place, left in enumerate(room):
            if left >= rest[0] and fits([*room[:place], left - rest[0], *room[place + 1 :]], rest[1:]):
                return True
        return False

    return next(bins for bins in count(math.ceil(sum(lengths) / CAPACITY)) if fits([CAPACITY] * bins, lengths))


def test_a_session_longer_than_a_pass_has_one_of_its_own() -> None:
    assert first_fit_decreasing([5, 90, 5, 10], CAPACITY) == [[1], [3, 0, 2]]


@given(LENGTHS, st.integers(1, 12))
def test_spread_gives_as_many_passes_as_there_are_rows_for(lengths: list[int], passes: int) -> None:
    bins = first_fit_decreasing(lengths, CAPACITY)
    more = spread(bins, lengths, passes)
    assert len(more) == max(len(bins), min(passes, len(lengths)))
    assert sorted(row for rows in more for row in rows) == list(range(len(lengths)))
    assert all(more)


@given(LENGTHS, st.integers(1, 9))
def test_buckets_and_none_are_rows_by_length_and_as_drawn(lengths: list[int], rows: int) -> None:
    by_length = torch.argsort(torch.tensor(lengths, dtype=torch.int64), descending=True, stable=True)
    expected = [part.tolist() for part in by_length.split(rows)] if lengths else []
    assert cut(lengths, "buckets", rows=rows, tokens=0) == expected
    drawn = cut(lengths, "none", rows=rows, tokens=0)
    assert [row for part in drawn for row in part] == list(range(len(lengths)))


def samples(written: ShardReport, number: int = 16) -> list[dict[str, Any]]:
    data = DataConfig(shards=str(written.folder), batch_size=8)
    loader = build_loader(data, "train", open_shards(data), shuffle=False, seed=1).dataloader
    assert isinstance(loader, SessionLoader)
    return [loader.dataset[row] for row in range(number)]


def test_packed_microbatches_hold_what_the_batch_holds_and_count_true_samples(written: ShardReport) -> None:
    batch = collate(samples(written))
    batch["policy_weight"][:, 40:44] = 1.0
    sampled = collate([bare_sample("recorded/3/x/2", np.arange(30), np.arange(30))])
    sampled["policy_weight"][0, 20:25] = -0.5
    batch = join([batch, sampled])
    parts = split(batch, 1, packing="pack", pack_tokens=512)
    assert len(parts) < num_samples(batch), "sessions share passes"
    assert sum(map(num_samples, parts)) == num_samples(batch) == 17
    assert sum(num_tokens(part)["total"] for part in parts) == num_tokens(batch)["total"]
    for part in parts:
        assert part["real_tokens"] == part["computed_tokens"] == int(part["lengths"].sum()) <= 512
    assert sorted(content(batch)) == sorted(row for part in parts for row in content(part))
    whole = split(batch, 99)[0]["denominators"]
    for part in parts:  # Composer weighs a microbatch by its rows ÷ the batch's: what is left is one global count
        weight = num_samples(part) / num_samples(batch)
        for name in COMPONENTS:
            assert part["denominators"][name] / weight == pytest.approx(whole[name], rel=1e-9), name


def content(batch: Batch) -> list[str]:
    """Return all that a row holds, for each row: tokens, weights, and the tokens at its anchors with their targets."""
    rows = []
    for row, length in enumerate(batch["lengths"].tolist()):
        anchors = [
            (at, batch["input_ids"][row, column].item(), [batch[key][place].tolist() for key in beside])
            for at, beside in (("tool_at", ["tool_target"]), ("outcome_at", ["outcome_target", "outcome_mask"]))
            for place, (owner, column) in enumerate(batch[at].tolist())
            if owner == row
        ]
        tokens = [batch[key][row, :length].tolist() for key in ("input_ids", "labels", "position_ids", "policy_weight")]
        rows.append(repr((batch["session_id"][row], tokens, anchors)))
    return rows


class Counts(Callback):
    """Notes samples, rows and losses of each batch; may stop the run after one."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        self.samples: list[int] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        self.rows.append(list(state.batch["session_id"]))

    def batch_end(self, state: State, logger: Logger) -> None:
        self.samples.append(int(state.timestamp.sample.value))


def train(
    written: ShardReport, packing: str, duration: str, **more: Any
) -> tuple[Counts, dict[str, list[float]], AgentModel, PaddingShare]:
    data = DataConfig(shards=str(written.folder), batch_size=8, packing=packing, microbatch_size=4)  # type: ignore[arg-type]
    meta = open_shards(data)
    model = build_agent_model(
        ModelConfig(preset="tiny-glm"), vocab_size=meta.vocab_size, tools=list(TOOL_INDEX), seed=3
    )
    model.unpadded = packing == "pack"
    counts, memory, padding = Counts(), InMemoryLogger(), PaddingShare()
    trainer = Trainer(
        model=model,
        train_dataloader=build_loader(data, "train", meta, shuffle=True, seed=17),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        max_duration=duration,
        callbacks=[LossWeights(CompositeLoss(LossConfig())), counts, padding],
        loggers=[memory],
        device="cpu",
        device_train_microbatch_size=4,
        progress_bar=False,
        seed=5,
        **more,
    )
    trainer.fit()
    trainer.close()
    logged = {name: [float(v) for _, v in values] for name, values in memory.data.items() if name.startswith("loss/")}
    logged["padding/share"] = [float(v) for _, v in memory.data["padding/share"]]
    return counts, logged, model, padding


def test_packing_changes_neither_order_nor_counts_nor_losses_and_resumes_exactly(
    written: ShardReport, tmp_path: Path
) -> None:
    plain, plain_losses, _, plain_padding = train(written, "buckets", "4ba")
    packed, losses, model, padding = train(written, "pack", "6ba")
    assert packed.rows[:4] == plain.rows
    assert packed.samples == [8, 16, 24, 32, 40, 48], "rows of tokens are not samples"
    for name, values in plain_losses.items():
        if name.startswith("loss/train"):
            assert losses[name][:4] == pytest.approx(values, rel=1e-4, abs=1e-5), name
    assert set(losses["padding/share"]) == {0.0}
    assert padding.summary()["share"] == 0
    assert 0 < plain_padding.summary()["share"] < 0.5
    first, _, _, _ = train(written, "pack", "3ba", save_folder=str(tmp_path), save_interval="1ba")
    second, tail, resumed, whole = train(written, "pack", "6ba", load_path=str(tmp_path / "latest-rank0.pt"))
    assert first.rows + second.rows == packed.rows
    for name, values in losses.items():
        assert tail[name] == values[3:], name
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
    assert whole.summary() == padding.summary(), "counts go on where they stopped"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.packing=buckets", "data.pack_tokens=2048"], "data.pack_tokens has no effect"),
        (["data.pack_tokens=512"], "does not fit into one forward pass"),
        (["model.attention=flash_attention_2"], "train.device=gpu or auto"),
        (["model.attention=flash_attention_2", "train.device=gpu", "data.packing=none"], "data.packing=pack"),
    ],
)
def test_settings_that_cannot_take_effect_are_errors(overrides: list[str], said: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        load(YAML, overrides)
    assert said in str(caught.value)


def test_more_sessions_in_a_pass_than_in_the_batch_are_no_error_when_packing() -> None:
    assert load(YAML, ["data.microbatch_size=64"]).data.packing == "pack"
    with pytest.raises(InvalidConfigError):
        load(YAML, ["data.microbatch_size=64", "data.packing=buckets"])
