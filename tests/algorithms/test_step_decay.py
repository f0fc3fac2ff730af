"""Step decay of the learning rate: one factor after each epoch, from the epoch's first batch on."""

from __future__ import annotations

import pytest
import torch
from composer.core import State, Time
from composer.devices import DeviceCPU

from agentft.algorithms.step_decay import StepPerEpoch


def test_the_rate_falls_with_the_first_batch_of_each_epoch_after_the_warm_up() -> None:
    state = State(
        model=torch.nn.Linear(1, 1),
        rank_zero_seed=0,
        device=DeviceCPU(),
        run_name="decay",
        max_duration="3ep",
        dataloader=[0] * 4,
        dataloader_label="train",
    )
    state.set_dataloader([0] * 4, "train", 4)
    rate, found = StepPerEpoch(t_warmup="2ba", per_epoch=0.5), []
    for batch in range(12):
        found.append(rate(state))  # as Composer steps it: after a batch, before the epoch is counted
        state.timestamp = state.timestamp.to_next_batch(samples=Time.from_input(1, "sp"))
        if batch % 4 == 3:
            state.timestamp = state.timestamp.to_next_epoch()
    assert found == pytest.approx([0.0, 0.5, 1.0, 1.0, *[0.5] * 4, *[0.25] * 4])
