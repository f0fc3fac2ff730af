"""Batches whose loss is not finite or jumps (floor 4): name them, and skip their step or stop the run before it.

After the gradients of a batch are complete and before the optimiser's step, the weighted loss of the whole global batch
is looked at: the sum of weight · component, each component exact over microbatches and ranks. A batch is

* *not finite* when a component or the norm of the gradient is NaN or infinite;
* a *spike* when its loss lies more than ``factor`` robust standard deviations above the median of the newest ``window``
  batches: 1.4826 · median |x − median|, which equals the standard deviation for normal x and is not moved by the
  spikes themselves; at least 1 % of the median, so that a flat curve does not make every wiggle a spike. Nothing is a
  spike before half a window is there.

``skip`` drops the gradients, so that the step changes nothing (no decay, no momentum); time and data go on. ``stop``
saves a checkpoint of the state *before* the step and raises ``ModelError`` with the sessions of the batch. A run that
goes on from there draws the same batch again: change the data, or set the action to skip. After ``most_skips`` batches
in a row, skipping stops the run too.

All ranks see the same numbers and do the same. One small reduction a batch; the window is part of a checkpoint.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

import torch
from composer import Callback, Logger, State
from composer.callbacks import CheckpointSaver
from composer.utils import dist

from agentft.config.algorithms import SpikesConfig
from agentft.errors import ModelError
from agentft.models.agent_model import agent_of

log = logging.getLogger(__name__)
NORMAL, LEAST_SHARE = 1.4826, 0.01
"""Standard deviations in a median deviation of normal values; least deviation as a share of the median."""

Finding = Literal["not finite", "spike"]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return median and robust standard deviation of some losses."""
    middle = median(values)
    return middle, max(NORMAL * median(abs(value - middle) for value in values), LEAST_SHARE * abs(middle))


class LossSpikes(Callback):
    """Watches the loss of every batch; see the module."""

    def __init__(self, config: SpikesConfig) -> None:
        self.config = config
        self.window: deque[float] = deque(maxlen=config.window)
        self.skips, self.skips_in_a_row = 0, 0

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Look at the batch, and act before the optimiser does."""
        parts, grad_norm = global_losses(state)
        loss = sum(agent_of(state).loss_weights[name] * value for name, value in parts.items())
        finding = self.judge(loss, grad_norm)
        action = {None: "ignore", "not finite": self.config.on_nan, "spike": self.config.on_spike}[finding]
        if action == "skip" and self.skips_in_a_row >= self.config.most_skips:
            action = "stop"
        if action in ("ignore", "log"):
            self.skips_in_a_row = 0
            if math.isfinite(loss):
                self.window.append(loss)
        if action == "ignore":
            return
        number = state.timestamp.batch.value
        sessions = [name for part in dist.all_gather_object(list(state.batch["session_id"])) for name in part]
        got = f"loss {loss:.4g} ({_listed(parts)}), gradient norm {grad_norm:.4g}"
        if action == "stop":
            self._stop(state, logger, finding, number, got, sessions)
        log.warning("batch %d: %s; %s; sessions %s", number, finding, got, ", ".join(sessions))
        if action == "skip":
            self._skip(state, logger)

    def judge(self, loss: float, grad_norm: float) -> Finding | None:
        """Say what is wrong with a batch, given the losses before it."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return "not finite"
        if len(self.window) < max(2, self.config.window // 2):
            return None
        middle, deviation = spread(self.window)
        return "spike" if loss - middle > self.config.factor * deviation else None

    def _skip(self, state: State, logger: Logger) -> None:
        for parameter in state.model.parameters():
            parameter.grad = None
        self.skips, self.skips_in_a_row = self.skips + 1, self.skips_in_a_row + 1
        logger.log_metrics({"spikes/skipped": float(self.skips)})

    def _stop(
        self, state: State, logger: Logger, finding: Finding | None, number: int, got: str, sessions: list[str]
    ) -> None:
        savers = [callback for callback in state.callbacks if isinstance(callback, CheckpointSaver)]
        for saver in savers:
            saver._save_checkpoint(state, logger)
        key = "on_nan" if finding == "not finite" else "on_spike"
        saved = "a checkpoint from before its step was saved; " if savers else ""
        raise ModelError(
            f"the loss of a batch is {finding if finding == 'not finite' else 'a spike'}",
            where=f"batch {number}",
            got=f"{got}; sessions: {', '.join(sessions)}",
            expected=f"as configured in algorithms.spikes ({self.skips_in_a_row} batches before it were skipped)",
            hint=f"{saved}look at the sessions, lower the learning rate, or go on with algorithms.spikes.{key}=skip",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the window and the counts; the same on every rank."""
        return {"window": list(self.window), "skips": self.skips, "skips_in_a_row": self.skips_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of a checkpoint."""
        self.window = deque(state["window"], maxlen=self.config.window)
        self.skips, self.skips_in_a_row = state["skips"], state["skips_in_a_row"]


def global_losses(state: State) -> tuple[dict[str, float], float]:
    """Return the mean of each component over the global batch, and the gradient's norm (a collective call)."""
    agent = agent_of(state)
    norm = torch.nn.utils.get_total_norm([p.grad for p in state.model.parameters() if p.grad is not None])
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    seen = torch.stack([agent.statistics[name] for name in agent.loss_weights])
    lost = (~torch.isfinite(norm)).double().expand(1, 2)
    seen = torch.cat((seen, lost.to(seen.device), norm.double().expand(1, 2).to(seen.device)))
    dist.all_reduce(seen, reduce_operation="SUM")
    *components, (bad, _), (total_norm, _) = seen.tolist()
    parts = {
        name: total / count if count else 0.0
        for name, (total, count) in zip(agent.loss_weights, components, strict=True)
    }
    return parts, math.nan if bad else total_norm / dist.get_world_size()


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in parts.items())
