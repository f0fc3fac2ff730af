"""Loss weights and gradient norms in the log (floor 4): a Composer callback and a Composer algorithm.

``LossWeights(CompositeLoss(config.loss))`` sets the weight of each component before a batch and logs
``loss/<component>/raw``, ``/weight`` and ``/count`` after it, exact over microbatches and ranks.
``GradientNorms()`` logs ``gradnorm/<group>`` before clipping; put it *last* in the list of algorithms, because Composer
runs the list backwards after a batch.
"""

from __future__ import annotations

import torch
from composer import Algorithm, Callback, Event, Logger, State
from composer.utils import dist
from torch.distributed.tensor import DTensor

from agentft.models.agent_model import CompositeLoss, agent_of
from agentft.schedules import TrainTime


class LossWeights(Callback):
    """Sets and logs the weight of every loss component."""

    def __init__(self, composite: CompositeLoss) -> None:
        self.composite = composite

    def batch_start(self, state: State, logger: Logger) -> None:
        """Set the weights for this batch."""
        agent_of(state).loss_weights = self.composite.weights(train_time(state))

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Start counting anew (also when Composer repeats a batch with smaller microbatches)."""
        agent_of(state).reset_statistics()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log raw value, weight and count of every component."""
        agent = agent_of(state)
        seen = torch.stack([agent.statistics[name] for name in agent.loss_weights])  # [components, 2]
        dist.all_reduce(seen, reduce_operation="SUM")
        metrics: dict[str, float] = {}
        for name, (total, count) in zip(agent.loss_weights, seen.tolist(), strict=True):
            metrics[f"loss/{name}/raw"] = total / count if count else 0.0
            metrics[f"loss/{name}/weight"] = agent.loss_weights[name]
            metrics[f"loss/{name}/count"] = count
        logger.log_metrics(metrics)


class GradientNorms(Algorithm):
    """Logs the gradient norm of every optimiser group that has a name."""

    def match(self, event: Event, state: State) -> bool:
        """Run once the gradients of a batch are complete."""
        return event == Event.AFTER_TRAIN_BATCH

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Log the norms."""
        norms: dict[str, torch.Tensor] = {}
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                grads = [p.grad for p in group["params"] if p.grad is not None]
                if "name" in group and grads:
                    norm = torch.nn.utils.get_total_norm(grads)
                    norms[f"gradnorm/{group['name']}"] = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if norms:
            values = torch.stack(list(norms.values())).tolist()
            logger.log_metrics(dict(zip(norms, values, strict=True)))


def train_time(state: State) -> TrainTime:
    """Return the moment of a trainer's state."""
    return TrainTime(batch=int(state.timestamp.batch), batches_per_epoch=int(state.dataloader_len or 1))
