"""One real Composer training step on a batch, for the workers that compare cuts, packings and numbers of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from composer import Callback, DataSpec, Trainer
from composer.loggers import InMemoryLogger

from agentft.algorithms.loss_weights import GradientNorms, LossWeights
from agentft.config.schema import LossConfig
from agentft.data.batch import Batch, num_samples, num_tokens
from agentft.models.agent_model import AgentModel, CompositeLoss


def one_step(
    model: AgentModel, batch: Batch, split_batch: Callable[..., Any], microbatch: int, *callbacks: Callback
) -> dict[str, Any]:
    """Take one step of plain gradient descent; return the new parameters, what was logged, and the samples counted."""
    memory = InMemoryLogger()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD([{"name": "all", "params": list(model.parameters())}], lr=0.1),
        train_dataloader=DataSpec(
            dataloader=[batch],
            split_batch=split_batch,
            get_num_samples_in_batch=num_samples,
            get_num_tokens_in_batch=num_tokens,
        ),
        device="cpu",
        device_train_microbatch_size=microbatch,
        max_duration="1ba",
        callbacks=[LossWeights(CompositeLoss(LossConfig())), *callbacks],
        algorithms=[GradientNorms()],
        loggers=[memory],
        progress_bar=False,
        log_to_console=False,
    )
    trainer.fit()
    wanted = ("loss/", "gradnorm/")
    logged = {name: float(values[-1][1]) for name, values in memory.data.items() if name.startswith(wanted)}
    samples = int(trainer.state.timestamp.sample.value)
    trainer.close()
    return {"state": model.state_dict(), "logged": logged, "samples": samples}
