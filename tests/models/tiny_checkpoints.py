"""Tiny random checkpoints of every architecture, in folders, and agents over them: for the tests of models."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from agent_samples import OWN_POSITIONS, VOCAB
from test_backbone import architectures, saved

from agentft.config.schema import LoraConfig, ModelConfig
from agentft.models.agent_model import AgentModel, build_agent_model
from agentft.tools import TOOL_INDEX

KNOWN = VOCAB - 24
"""Ids that the checkpoints know; the 24 behind them are new tokens."""


def checkpoint(folder: Path, name: str, **changes: Any) -> Path:
    """Save a random model of architecture ``name`` with ``KNOWN`` ids; its folder."""
    config = architectures()[name]
    config.update({"vocab_size": KNOWN, **changes})
    return saved(folder / name, config)


def agent_of(folder: Path, *, lora: LoraConfig | None = None, seed: int = 1, **options: Any) -> AgentModel:
    """Return an agent over the checkpoint in ``folder``, with 24 new tokens."""
    return build_agent_model(
        ModelConfig(path=str(folder), lora=lora, **{"feedback_positions": OWN_POSITIONS, **options}),
        vocab_size=VOCAB,
        tools=list(TOOL_INDEX),
        seed=seed,
        entropy_bonus=0.01,
    )


def disturb(parameters: Iterable[torch.nn.Parameter], size: float = 0.05) -> None:
    """Move trained parameters away from where they start, as training would."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
