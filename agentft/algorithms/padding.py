"""How much of what the backbone computes is padding (floor 4): a Composer callback.

``PaddingShare()`` logs ``padding/share`` and ``padding/passes`` (forward passes) of every batch, over all ranks, and
``summary()`` gives both for the whole run, across resumes. Counts come from ``agentft.data.batch.split``.
"""

from __future__ import annotations

from typing import Any

import torch
from composer import Callback, Logger, State
from composer.utils import dist


class PaddingShare(Callback):
    """Counts real and computed tokens of every forward pass in training."""

    def __init__(self) -> None:
        self._batch = [0.0, 0.0, 0.0]  # real tokens, computed tokens, passes of this rank
        self._run = [0.0, 0.0, 0.0]  # of all ranks

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Start counting anew (also when Composer repeats a batch with smaller microbatches)."""
        self._batch = [0.0, 0.0, 0.0]

    def before_forward(self, state: State, logger: Logger) -> None:
        """Count a microbatch."""
        for place, count in enumerate((state.batch["real_tokens"], state.batch["computed_tokens"], 1)):
            self._batch[place] += count

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log this batch."""
        total = state.device.tensor_to_device(torch.tensor(self._batch, dtype=torch.float64))
        dist.all_reduce(total, reduce_operation="SUM")
        real, computed, passes = total.tolist()
        self._run = [before + now for before, now in zip(self._run, (real, computed, passes), strict=True)]
        logger.log_metrics({"padding/share": 1 - real / computed, "padding/passes": passes})

    def summary(self) -> dict[str, float]:
        """Return ``share`` (of the computed tokens), ``passes``, and ``tokens_per_pass``, real ones."""
        real, computed, passes = self._run
        return {
            "share": 1 - real / computed if computed else 0.0,
            "passes": passes,
            "tokens_per_pass": real / passes if passes else 0.0,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of the run so far."""
        return {"run": list(self._run)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self._run = list(state["run"])
