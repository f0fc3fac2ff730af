"""One real Composer training step on a fixed global batch, for each stage, preset and cut; rank 0 saves the outcome.

    python invariance_worker.py OUT.pt
    python -m composer.cli.launcher -n 2 invariance_worker.py OUT.pt

With two ranks the eight sessions of the batch are dealt five and three: unequal on purpose.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from agent_samples import VOCAB, make_agent, make_samples
from composer.utils import dist
from one_step import one_step

from agentft.config.objectives import ObjectivesConfig
from agentft.data.batch import Batch, collate, select_rows, split
from agentft.data.objectives import Objectives

sys.path.insert(0, str(Path(__file__).parents[1]))
import support_chats
import support_corpus

ROWS = {1: [range(8)], 2: [range(5), range(5, 8)]}
CUTS = {("agent", "tiny-glm"): (1, 2, 4, 8), ("agent", "tiny-kimi"): (2, 8), ("pretrain", "tiny-glm"): (2, 8)}
CUTS |= {("sft", "tiny-glm"): (2, 8)}


def agent_batch() -> Batch:
    """Return the global batch of stage agent: sessions of very different lengths, with policy weights."""
    whole = collate(make_samples(8))
    whole["policy_weight"][:, 30:34] = torch.linspace(-1, 2, 8)[:, None]
    return whole


def pretrain_batch() -> Batch:
    """Return the global batch of stage pretrain: rows of a corpus, two of each objective, code weighing more."""
    assert support_corpus.vocab().size <= VOCAB
    objectives = Objectives(
        ObjectivesConfig(causal=1, fim=1, masked=1, denoise=1),
        support_corpus.vocab(),
        support_corpus.marks(),
        max_tokens=160,
        seed=3,
    )
    rows = support_corpus.samples(support_corpus.MODULE * 3, max_tokens=100)[:8]
    names = ("causal", "fim", "masked", "denoise") * 2
    return collate([objectives(row, 0, only=name) for row, name in zip(rows, names, strict=True)])


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.initialize_dist("cpu", timeout=120)
    rank, ranks = dist.get_global_rank(), dist.get_world_size()
    batches = {"agent": agent_batch(), "pretrain": pretrain_batch(), "sft": collate(support_chats.chat_rows(8))}
    mine = {stage: select_rows(whole, list(ROWS[ranks][rank])) for stage, whole in batches.items()}
    results = {
        f"{stage}/{preset}/{microbatch}": one_step(make_agent(preset), mine[stage], split, microbatch)
        for (stage, preset), cuts in CUTS.items()
        for microbatch in cuts
    }
    if rank == 0:
        torch.save(results, out)


if __name__ == "__main__":
    main(sys.argv[1])
