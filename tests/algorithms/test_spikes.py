"""Losses that are not finite or jump: named with their sessions, skipped without a trace, stopped before the step."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import Callback
from support_algorithms import train

from agentft.algorithms.spikes import LossSpikes, spread
from agentft.config.algorithms import SpikesConfig
from agentft.errors import ModelError


class Poison(Callback):
    """Makes the losses of chosen batches NaN, or their code loss large, through the weights of their tokens."""

    def __init__(self, at: dict[int, float]) -> None:
        self.at = at

    def after_dataloader(self, state: Any, logger: Any) -> None:
        factor = self.at.get(state.timestamp.batch.value)
        if factor is not None:
            state.batch["outcome_target"] = state.batch["outcome_target"] + factor


def watched(config: SpikesConfig, at: dict[int, float]) -> Any:
    return lambda _: ([], [Poison(at), LossSpikes(config)])


NAN = float("nan")


def test_the_spread_is_not_moved_by_a_spike() -> None:
    calm = [1.0, 1.1, 0.9, 1.05, 0.95]
    assert spread([*calm, 1.0, 90.0])[1] == pytest.approx(spread(calm)[1], rel=0.5)
    assert spread([2.0] * 5) == (2.0, pytest.approx(0.02)), "at least one percent of the median"


def test_what_counts_as_a_spike() -> None:
    watch = LossSpikes(SpikesConfig(window=10, factor=5.0))
    watch.window.extend([1.0, 1.1, 0.9, 1.0])
    assert watch.judge(50.0, 1.0) is None, "half a window is not there yet"
    watch.window.append(1.0)
    assert watch.judge(50.0, 1.0) == "spike"
    assert watch.judge(0.01, 1.0) is None, "a fall is no spike"
    assert watch.judge(NAN, 1.0) == watch.judge(1.0, float("inf")) == "not finite"


def test_watching_changes_no_loss(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", batches=3)
    seen = train(tmp_path / "seen", watched(SpikesConfig(on_nan="stop", on_spike="log"), {}), batches=3)
    assert seen.curve == plain.curve
    assert all(torch.equal(seen.weights[name], tensor) for name, tensor in plain.weights.items())


def test_stop_names_the_sessions_and_saves_the_state_before_the_step(tmp_path: Path) -> None:
    before = train(tmp_path / "before", batches=2)
    with pytest.raises(ModelError, match="not finite") as caught:
        train(tmp_path / "run", watched(SpikesConfig(on_nan="stop"), {2: NAN}), batches=4, save_every=100)
    message = str(caught.value)
    assert "batch 2" in message
    assert "reward nan" in message
    assert "calc/8, calc/9, calc/10, calc/11" in message
    assert "algorithms.spikes.on_nan=skip" in message
    saved = torch.load(tmp_path / "run" / "checkpoints" / "ba2.pt", weights_only=False)["state"]["model"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.weights.items())


def test_skip_changes_nothing_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run with one poisoned batch equals, weight for weight, a run whose optimiser took no step there."""
    config = SpikesConfig(on_nan="skip")
    two = train(tmp_path / "two", watched(config, {}), batches=2)
    with caplog.at_level(logging.WARNING):
        three = train(tmp_path / "three", watched(config, {2: NAN}), batches=3)
    assert all(torch.equal(three.weights[name], tensor) for name, tensor in two.weights.items())
    assert three.logged["spikes/skipped"] == [1.0]
    assert any("batch 2: not finite" in r.message and "calc/8" in r.message for r in caplog.records)


def test_too_many_skips_stop_the_run(tmp_path: Path) -> None:
    config = SpikesConfig(on_nan="skip", most_skips=2)
    with pytest.raises(ModelError, match="2 batches before it were skipped"):
        train(tmp_path, watched(config, dict.fromkeys(range(1, 9), NAN)), batches=6)


def test_a_spike_is_found_and_the_window_survives_a_resume(tmp_path: Path) -> None:
    config = SpikesConfig(on_spike="skip", window=4, factor=6.0)
    whole = train(tmp_path / "whole", watched(config, {4: 40.0}), batches=6, save_every=3)
    assert whole.logged["spikes/skipped"] == [1.0]
    again = train(
        tmp_path / "again",
        watched(config, {4: 40.0}),
        batches=6,
        load=tmp_path / "whole" / "checkpoints" / "ba3.pt",
    )
    assert again.logged["spikes/skipped"] == [1.0]
    assert again.curve == whole.curve[3:]
