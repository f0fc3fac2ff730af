"""Learning rates that fall by one factor an epoch (floor 4): a Composer scheduler with a linear warm-up.

StepPerEpoch(t_warmup="50ba", per_epoch=0.95)  # lr, 0.95 lr, 0.9025 lr, ... after the warm-up
"""

from __future__ import annotations

from composer.core import State
from composer.optim import ComposerScheduler, ConstantWithWarmupScheduler

from agentft.algorithms.loss_weights import train_time


class StepPerEpoch(ComposerScheduler):
    """Multiplies the learning rate by ``per_epoch`` after each whole epoch.

    Epochs are counted in batches: Composer's own epoch count, by which its ``StepScheduler`` goes, rises one batch
    after the learning rate of an epoch's first batch has been set.

    Args:
        t_warmup: Time of the linear rise from 0, such as ``50ba``.
        per_epoch: Factor.
    """

    def __init__(self, t_warmup: str, per_epoch: float) -> None:
        self.warmup, self.per_epoch = ConstantWithWarmupScheduler(t_warmup=t_warmup), per_epoch

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor of the learning rate for the coming batch."""
        time = train_time(state)
        return self.warmup(state, ssr) * self.per_epoch ** (time.batch // time.batches_per_epoch)
