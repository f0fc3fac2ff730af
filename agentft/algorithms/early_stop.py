"""Early stop (floor 4): end the run when an evaluation loss has not fallen for ``patience`` evaluations.

Composer's EarlyStopper keeps no state in a checkpoint, so that a resumed run forgets its best value, and takes a NaN
(an evaluation without a target of that kind) for a value that nothing can beat. Here a NaN is no evaluation at all.
The run ends as at its end: the batch is finished, the checkpoint due at the end is saved, the model is exported.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from composer import Callback, Logger, State

from agentft.config.algorithms import EarlyStopConfig

log = logging.getLogger(__name__)


class EarlyStop(Callback):
    """Watches one evaluation loss (lower is better); counts are part of a checkpoint."""

    def __init__(self, config: EarlyStopConfig) -> None:
        self.config = config
        self.best: float | None = None
        self.waited = 0

    def fit_start(self, state: State, logger: Logger) -> None:
        """End a resumed run at once that had been ended before."""
        if self.waited >= self.config.patience:
            state.stop_training()

    def eval_end(self, state: State, logger: Logger) -> None:
        """Compare the evaluation with the best one; stop when patience is at its end."""
        if state.dataloader_label is None or state.dataloader_label not in state.eval_metrics:
            return
        metric = state.eval_metrics[state.dataloader_label].get(str(self.config.metric))
        if metric is None:
            return
        value = float(metric.compute())  # over all ranks, so that all of them stop together
        if math.isnan(value):
            return
        if self.best is None or value < self.best - self.config.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        logger.log_metrics({"early_stop/waited": float(self.waited)})
        if self.waited >= self.config.patience:
            what = "evaluation loss %r has been at %.4g or above for %d evaluations: the run ends here"
            log.warning(what, self.config.metric, self.best, self.waited)
            state.stop_training()

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and how many evaluations have passed since."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of a checkpoint."""
        self.best, self.waited = state["best"], state["waited"]
