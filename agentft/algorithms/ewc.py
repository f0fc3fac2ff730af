"""Elastic weight consolidation (floor 4): a Composer algorithm that holds back weights which earlier data depends on.

Penalty P = λ/2·Σ_i F_i·(w_i − w*_i)² (Kirkpatrick et al. 2017, eq. 3), w* the weights that the run starts from and F
the diagonal that was measured there (``agentft.models.fisher``). Its gradient λ·F·(w − w*) is added to the gradients of
a batch when they are complete: no second graph, no pass over data, and the same on every rank, because data parallelism
has averaged before. Put it *last* in the list of algorithms: Composer runs the list backwards after a batch, so that
norms and clipping see the whole gradient.

The penalty is in no loss that Composer sums up; ``ewc/penalty`` (P, with λ) and ``ewc/gradnorm`` are logged. It keeps
two tensors of float32 beside each weight, whole (weights that are shared out are refused by a check of the
configuration), and no state that a checkpoint would need: a resumed run builds from the same ``model.path``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from composer import Algorithm, Event, Logger, State
from torch import Tensor, nn

from agentft.errors import ModelError
from agentft.models.agent_model import agent_of


class ElasticWeightConsolidation(Algorithm):
    """Adds the gradient of the penalty.

    Args:
        backbone: With the weights as they are at the start: w*.
        diagonal: F by name of the weight; rows that a weight has gained since (new tokens) are not held.
        weight: λ.

    Raises:
        ModelError: F has no entry for a trained weight, or one of another shape.
    """

    def __init__(self, backbone: nn.Module, diagonal: Mapping[str, Tensor], *, weight: float) -> None:
        self.weight = weight
        trained = {name: p for name, p in backbone.named_parameters() if p.requires_grad}
        missing = sorted(trained.keys() - diagonal.keys())
        if missing or not trained:
            raise ModelError(
                "the Fisher information does not cover the weights that are trained",
                where="forgetting.ewc.fisher",
                got=f"nothing for {len(missing)} of {len(trained)} weights, such as {missing[:2]}",
                expected="a file measured on this model, trained whole (no adapters)",
            )
        self._start = {name: p.detach().float().clone() for name, p in trained.items()}
        self._fisher = {name: _fitted(name, diagonal[name], p) for name, p in trained.items()}

    def match(self, event: Event, state: State) -> bool:
        """Run at the start, when weights are where they will be trained, and once a batch's gradients are complete."""
        return event in (Event.FIT_START, Event.AFTER_TRAIN_BATCH)

    @torch.no_grad()
    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Add λ·F·(w − w*) to the gradients, and log the penalty."""
        weights = {name: p for name, p in agent_of(state).backbone.named_parameters() if p.requires_grad}
        if event == Event.FIT_START:
            for kept in (self._start, self._fisher):
                kept.update({name: tensor.to(weights[name].device) for name, tensor in kept.items()})
            return
        penalty, square = [], []
        for name, start in self._start.items():
            parameter = weights[name]
            moved = parameter.float() - start
            pull = self._fisher[name] * moved * self.weight
            penalty.append((moved * pull).sum())
            square.append((pull * pull).sum())
            if parameter.grad is None:
                parameter.grad = pull.to(parameter.dtype)
            else:
                parameter.grad.add_(pull)
        values = torch.stack((torch.stack(penalty).sum() / 2, torch.stack(square).sum().sqrt())).tolist()
        logger.log_metrics(dict(zip(("ewc/penalty", "ewc/gradnorm"), values, strict=True)))


def _fitted(name: str, fisher: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return F in the weight's shape; rows that the weight has gained are 0."""
    if fisher.shape == parameter.shape:
        return fisher.float()
    if fisher.shape[1:] != parameter.shape[1:] or len(fisher) > len(parameter):
        raise ModelError(
            f"the Fisher information of {name} has another shape",
            where="forgetting.ewc.fisher",
            got=list(fisher.shape),
            expected=str(list(parameter.shape)),
        )
    grown = torch.zeros_like(parameter, dtype=torch.float32)
    grown[: len(fisher)] = fisher
    return grown.detach()
