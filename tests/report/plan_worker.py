"""Trains a tiny agent for three steps in a process of its own and prints its peak memory and what the plan says.

python tests/report/plan_worker.py '{"preset": "tiny-glm", "tokens": 2048, …}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.optim import DecoupledAdamW

from agentft.config.schema import ModelConfig, OptimizerConfig
from agentft.data.batch import bare_sample, collate
from agentft.losses import trained_places
from agentft.models.agent_model import build_agent_model, parameter_groups
from agentft.models.backbone import checkpoint_activations
from agentft.report.plan_memory import Setup, step_memory
from agentft.report.plan_models import model_shape
from agentft.tools import TOOL_INDEX

STATUS = Path("/proc/self/status")
STEPS = 3


def resident(name: str) -> float:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def batch_of(rows: int, tokens: int, vocab: int, trained: int, seed: int) -> dict[str, Any]:
    """A batch of ``rows`` equal rows, ``tokens`` in all, ``trained`` of them with a label."""
    rng = np.random.default_rng(seed)
    samples = []
    for row in range(rows):
        length = tokens // rows
        ids = rng.integers(0, vocab, length).astype(np.int32)
        sample = bare_sample(f"{seed}/{row}", ids, np.arange(length, dtype=np.int32))
        sample["loss_mask"][1 : 1 + trained // rows] = 1
        samples.append(sample)
    batch = collate(samples)
    batch["next_at"] = trained_places(batch)
    return batch


def main() -> None:
    asked = json.loads(sys.argv[1])
    rows, tokens, vocab, trained = asked["rows"], asked["tokens"], asked["vocab"], asked["trained"]
    torch.set_num_threads(1)
    torch.nn.Linear(64, 64)(torch.randn(8, 64)).sum().backward()  # what the libraries need for themselves
    config = ModelConfig(preset=asked["preset"])
    before = resident("VmRSS")
    agent = build_agent_model(config, vocab_size=vocab, tools=list(TOOL_INDEX), seed=1)
    agent.vocab_chunk_tokens, agent.unpadded = asked["chunk"], asked["packed"]
    agent.cpu_bfloat16 = asked["amp"]
    if asked["recompute"]:
        checkpoint_activations(agent.backbone)
    agent.train()
    optimizer = DecoupledAdamW(parameter_groups(agent, OptimizerConfig()), lr=1e-4)
    for step in range(STEPS):
        for part in range(asked["passes"]):
            batch = batch_of(rows, tokens, vocab, trained, step * 10 + part)
            agent.loss(agent(batch), batch)["total"].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    shape = model_shape(config, vocab_size=vocab)
    setup = Setup(
        tokens=tokens,
        longest=tokens // rows,
        trained=trained,
        passes=asked["passes"],
        amp=asked["amp"],
        recompute=asked["recompute"],
        packed=asked["packed"],
        chunk=asked["chunk"],
    )
    memory = step_memory(shape, setup)
    planned = {name: size / 2**20 for name, size in memory.phases().items()}
    counted = sum(p.numel() for p in agent.parameters())
    print(
        json.dumps(
            {
                "measured_mib": resident("VmHWM") - before,
                "planned_mib": max(planned.values()),
                "phases": planned,
                "parameters": counted,
                "planned_parameters": memory.trained_parameters,
            }
        )
    )


if __name__ == "__main__":
    main()
