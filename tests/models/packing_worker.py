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
from composer.utils import dist
from one_step import one_step

from agentft.algorithms.padding import PaddingShare
from agentft.data.batch import Batch, collate, select_rows, split
from agentft.data.packing import Packing

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
    """Take one step on packed (or padded) rows; return what ``one_step`` does, and the padding and the passes."""
    model, padding = make_agent(preset), PaddingShare()
    model.unpadded = packing == "pack"
    found = one_step(model, batch, partial(split, packing=packing, pack_tokens=tokens), 8, padding)
    return {**found, **padding.summary()}


if __name__ == "__main__":
    main(sys.argv[1])
