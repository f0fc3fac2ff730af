"""Calibration of the outcome head (floor 4): Platt scaling on sessions that were not trained on.

    calibration = calibrate_outcome(model, samples, sessions)  # None if there are too few runs to go by
    print(calibration.as_dict())                        # {"runs": 44, "scale": 0.71, "shift": -0.8, ...}

A head that has seen its training sessions several times is too sure of itself on others. Two numbers mend that without
touching the order of its predictions (its AUC): logit' = scale * logit + shift, fitted with smoothed targets (Platt
1999, "Probabilistic outputs for support vector machines"; for networks: Guo et al. 2017) and a normal prior around the
head as it is, because a few dozen runs say little about other repositories. Both are folded into the head's last linear
layer, so that everything that reads the head reads calibrated logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from agentft.etai import Session
from agentft.evals.facts import known_runs, session_facts
from agentft.evals.heads import predict
from agentft.models.agent_model import AgentModel

FEWEST_RUNS = 20
MOST_EXTREME_LOGIT = 15.0
SCALE_SD, SHIFT_SD = 1.0, 0.2
"""Standard deviations of scale around 1 and of shift around 0 before any run is seen; hundreds of runs outweigh them.

How sure a head may be holds on other repositories too; how many runs pass belongs to the repository, so a shift needs
more evidence.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was fitted, on how many runs of code, and the Brier score there before and after."""

    runs: int
    scale: float
    shift: float
    brier_before: float
    brier_after: float

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for a report."""
        return dataclasses.asdict(self)


def calibrate_outcome(
    model: AgentModel, samples: Sequence[Mapping[str, Any]], sessions: Sequence[Session]
) -> Calibration | None:
    """Fit on ``samples`` (decoded shard rows of ``sessions``, not trained on) and change the model's head in place.

    Returns None, and changes nothing, where fewer than ``FEWEST_RUNS`` runs of code with a known result are there, or
    all of them ended alike. Predictions are made in the weights' own precision.
    """
    rounded, model.cpu_bfloat16 = model.cpu_bfloat16, False
    try:
        said = predict(model, samples).outcomes
    finally:
        model.cpu_bfloat16 = rounded
    known = known_runs(session_facts(session) for session in sessions)
    runs = [run for run in known if (run.session_id, run.step) in said]
    passed = torch.tensor([float(bool(run.passed)) for run in runs], dtype=torch.float64)
    if len(runs) < FEWEST_RUNS or passed.min() == passed.max():
        return None
    probabilities = torch.tensor([said[run.session_id, run.step] for run in runs], dtype=torch.float64)
    logits = torch.logit(probabilities).clamp(-MOST_EXTREME_LOGIT, MOST_EXTREME_LOGIT)
    scale, shift = fit_platt(logits, passed)
    last = model.heads.reward.mlp[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight.mul_(scale)
        last.bias.mul_(scale).add_(shift)
    calibrated = torch.sigmoid(scale * logits + shift)
    return Calibration(
        runs=len(runs),
        scale=scale,
        shift=shift,
        brier_before=float((probabilities - passed).square().mean()),
        brier_after=float((calibrated - passed).square().mean()),
    )


def fit_platt(logits: Tensor, passed: Tensor) -> tuple[float, float]:
    """Return (scale, shift) of the most likely sigmoid(scale * logit + shift) given the prior; ``scale`` is at least 0.

    Args:
        logits: [N] float64, finite.
        passed: [N] float64, 1 passed, 0 failed; both occur. They are smoothed to (N₁ + 1) / (N₁ + 2) and 1 / (N₀ + 2),
            N₁ and N₀ being how many of each there are, which keeps the answer finite where the logits separate them.
    """
    ones = float(passed.sum())
    zeros = len(passed) - ones
    targets = torch.where(passed > 0, (ones + 1) / (ones + 2), 1 / (zeros + 2))
    identity = torch.tensor([1.0, 0.0], dtype=torch.float64)
    spread = torch.tensor([SCALE_SD, SHIFT_SD], dtype=torch.float64)
    parameters = identity.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([parameters], max_iter=200, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        line = parameters[0] * logits + parameters[1]
        prior = ((parameters - identity) / spread).square().sum() / 2
        loss = (binary_cross_entropy_with_logits(line, targets, reduction="sum") + prior) / len(logits)
        loss.backward()
        return loss

    optimiser.step(closure)
    scale, shift = parameters.detach().tolist()
    if scale >= 0:
        return scale, shift
    rate = float(targets.mean())  # worse than a constant: the most likely sigmoid that does not turn the order round
    return 0.0, float(torch.logit(torch.tensor(rate, dtype=torch.float64)))
