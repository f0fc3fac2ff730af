"""One real Composer training step on a fixed global batch, for each preset and cut; rank 0 saves what came out.

    python invariance_worker.py OUT.pt
    python -m composer.cli.launcher -n 2 invariance_worker.py OUT.pt

With two ranks the eight sessions of the batch are dealt five and three: unequal on purpose.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from agent_samples import make_agent, make_samples
from composer import DataSpec, Trainer
from composer.loggers import InMemoryLogger
from composer.utils import dist

from agentft.algorithms.loss_weights import GradientNorms, LossWeights
from agentft.config.schema import LossConfig
from agentft.data.batch import Batch, collate, num_samples, num_tokens, select_rows, split
from agentft.models.agent_model import CompositeLoss

ROWS = {1: [range(8)], 2: [range(5), range(5, 8)]}
CUTS = {"tiny-glm": (1, 2, 4, 8), "tiny-kimi": (2, 8)}


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.initialize_dist("cpu", timeout=120)
    rank, ranks = dist.get_global_rank(), dist.get_world_size()
    whole = collate(make_samples(8))
    whole["policy_weight"][:, 30:34] = torch.linspace(-1, 2, 8)[:, None]
    mine = select_rows(whole, list(ROWS[ranks][rank]))
    results = {
        f"{preset}/{microbatch}": step(mine, preset, microbatch) for preset, cuts in CUTS.items() for microbatch in cuts
    }
    if rank == 0:
        torch.save(results, out)


def step(batch: Batch, preset: str, microbatch: int) -> dict[str, Any]:
    """Take one step of plain gradient descent; return the new parameters and what was logged."""
    model = make_agent(preset)
    memory = InMemoryLogger()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD([{"name": "all", "params": list(model.parameters())}], lr=0.1),
        train_dataloader=DataSpec(
            dataloader=[batch],
            split_batch=split,
            get_num_samples_in_batch=num_samples,
            get_num_tokens_in_batch=num_tokens,
        ),
        device="cpu",
        device_train_microbatch_size=microbatch,
        max_duration="1ba",
        callbacks=[LossWeights(CompositeLoss(LossConfig()))],
        algorithms=[GradientNorms()],
        loggers=[memory],
        progress_bar=False,
        log_to_console=False,
    )
    trainer.fit()
    wanted = ("loss/", "gradnorm/")
    logged = {name: float(values[-1][1]) for name, values in memory.data.items() if name.startswith(wanted)}
    trainer.close()
    return {"state": model.state_dict(), "logged": logged}


if __name__ == "__main__":
    main(sys.argv[1])
