"""One real Composer training step on packed rows, for each preset; rank 0 saves what came out.

    python packing_worker.py OUT.pt
    python -m composer.cli.launcher -n 2 packing_worker.py OUT.pt

With two ranks the eight sessions of the batch are dealt six and two: the second rank has fewer passes of its own.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from agent_samples import make_agent, make_samples
from composer import DataSpec, Trainer
from composer.loggers import InMemoryLogger
from composer.utils import dist

from agentft.algorithms.loss_weights import GradientNorms, LossWeights
from agentft.algorithms.padding import PaddingShare
from agentft.config.schema import LossConfig
from agentft.data.batch import Batch, collate, num_samples, num_tokens, select_rows, split
from agentft.data.packing import Packing
from agentft.models.agent_model import CompositeLoss

ROWS = {1: [range(8)], 2: [range(6), range(6, 8)]}
CASES: dict[int, dict[str, tuple[str, Packing, int]]] = {  # processes → name → preset, packing, tokens of a pass
    1: {
        "tiny-glm/padded": ("tiny-glm", "buckets", 0),
        "tiny-glm/170": ("tiny-glm", "pack", 170),
        "tiny-glm/400": ("tiny-glm", "pack", 400),
        "tiny-kimi/padded": ("tiny-kimi", "buckets", 0),
        "tiny-kimi/170": ("tiny-kimi", "pack", 170),
    },
    2: {"tiny-glm/400": ("tiny-glm", "pack", 400), "tiny-kimi/170": ("tiny-kimi", "pack", 170)},
}


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.initialize_dist("cpu", timeout=120)
    whole = collate(make_samples(8))
    whole["policy_weight"][:, 30:34] = torch.linspace(-1, 2, 8)[:, None]
    mine = select_rows(whole, list(ROWS[dist.get_world_size()][dist.get_global_rank()]))
    results = {name: step(mine, *case) for name, case in CASES[dist.get_world_size()].items()}
    if dist.get_global_rank() == 0:
        torch.save(results, out)


def step(batch: Batch, preset: str, packing: Packing, tokens: int) -> dict[str, Any]:
    """Take one step of plain gradient descent; return the new parameters, what was logged, samples and passes."""
    model = make_agent(preset)
    model.unpadded = packing == "pack"
    memory, padding = InMemoryLogger(), PaddingShare()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD([{"name": "all", "params": list(model.parameters())}], lr=0.1),
        train_dataloader=DataSpec(
            dataloader=[batch],
            split_batch=partial(split, packing=packing, pack_tokens=tokens),
            get_num_samples_in_batch=num_samples,
            get_num_tokens_in_batch=num_tokens,
        ),
        device="cpu",
        device_train_microbatch_size=8,
        max_duration="1ba",
        callbacks=[LossWeights(CompositeLoss(LossConfig())), padding],
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
    return {"state": model.state_dict(), "logged": logged, "samples": samples, **padding.summary()}


if __name__ == "__main__":
    main(sys.argv[1])
