"""Two small tasks that pull at the same weights, and a tiny agent that learns them one after the other on Composer.

A row is ``[task, x, y]``: y is what the task's own permutation makes of x; only y is trained. What of task A is left is
the mean loss of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from composer import DataSpec, Trainer
from composer.core import Algorithm, Callback
from composer.loggers import InMemoryLogger
from transformers import GlmConfig, GlmForCausalLM

from agentft.algorithms.loss_weights import LossWeights
from agentft.config.schema import LossConfig, ModelConfig, ScheduleConfig
from agentft.data.batch import bare_sample, collate, num_samples, num_tokens, split
from agentft.etai import INTENTS
from agentft.models.agent_model import AgentModel, CompositeLoss
from agentft.models.heads import AgentHeads
from agentft.tools import TOOL_INDEX

VALUES, WIDTH = 24, 32
PLAIN = LossConfig(code=ScheduleConfig(start=1.0))
Sample = dict[str, Any]


class Listed(list[Sample]):
    """A list of samples as a source of rows."""

    @property
    def num_samples(self) -> int:
        return len(self)


def task(number: int, seed: int) -> Listed:
    """Every row of task ``number`` (0 or 1)."""
    made = np.random.default_rng([seed, number]).permutation(VALUES)
    rows = Listed()
    for x in range(VALUES):
        ids = np.array([number, 2 + x, 2 + made[x]], np.int32)
        sample = bare_sample(f"{number}-{x}", ids, np.arange(3, dtype=np.int32))
        rows.append(sample | {"loss_mask": np.array([0, 0, 1], np.uint8)})
    return rows


def tiny_agent(seed: int) -> AgentModel:
    torch.manual_seed(seed)
    config = GlmConfig(
        vocab_size=2 + VALUES, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, pad_token_id=None, eos_token_id=None, bos_token_id=None,
        attention_dropout=0.0,
    )  # fmt: skip
    backbone = GlmForCausalLM(config)
    heads = AgentHeads(WIDTH, len(INTENTS), len(TOOL_INDEX))
    return AgentModel(ModelConfig(preset="tiny-glm"), backbone, heads, tools=tuple(TOOL_INDEX))


def learn(
    model: AgentModel,
    rows: Sequence[Sample],
    *,
    batches: int,
    seed: int,
    batch_size: int = 16,
    loss: LossConfig = PLAIN,
    lm_share: float = 0.0,
    lr: float = 3e-3,
    callbacks: Sequence[Callback] = (),
    algorithms: Sequence[Algorithm] = (),
) -> InMemoryLogger:
    """Train on random batches of ``rows``; return what was logged."""
    order = np.random.default_rng(seed)
    loader = [collate([rows[i] for i in order.integers(0, len(rows), batch_size)]) for _ in range(batches)]
    memory = InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=DataSpec(
            loader, split_batch=split, get_num_samples_in_batch=num_samples, get_num_tokens_in_batch=num_tokens
        ),
        optimizers=torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0),
        max_duration=f"{batches}ba",
        device="cpu",
        device_train_microbatch_size=64,
        callbacks=[LossWeights(CompositeLoss(loss, lm_share=lm_share)), *callbacks],
        algorithms=list(algorithms),
        loggers=[memory],
        progress_bar=False,
        seed=seed,
    )
    trainer.fit()
    trainer.close()
    return memory


@torch.no_grad()
def loss_of(model: AgentModel, rows: Sequence[Sample]) -> float:
    batch = collate(rows)
    return float(model.loss(model(batch), batch)["code"])
