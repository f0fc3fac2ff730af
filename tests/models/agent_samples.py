"""Samples as shards give them, small and random but of the true shape: used by the model tests and their workers."""

from __future__ import annotations

from typing import Any

import numpy as np

from agentft.config.schema import FeedbackPositionsConfig, ModelConfig, OptimizerConfig
from agentft.etai import INTENTS
from agentft.models.agent_model import AgentModel, build_agent_model
from agentft.tools import TOOL_INDEX

VOCAB = 512
START = 10000
OWN_POSITIONS = FeedbackPositionsConfig(enabled=True, start=START)


def make_sample(seed: int, length: int, *, vocab: int = VOCAB) -> dict[str, Any]:
    """One session of ``length`` tokens; sessions differ in how many steps and which targets they have."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab, length).astype(np.int32)
    mask = np.zeros(length, dtype=np.uint8)
    positions, plain, own = np.zeros(length, dtype=np.int32), 0, START
    steps = []
    at, step = length // 4, 0
    while at + 16 < length and step < 1 + seed % 3:
        step += 1
        mask[at : at + 8] = seed % 5 != 4  # some sessions train nothing here
        steps.append(
            {
                "step": step,
                "tool_at": at + 2,
                "tool": int(rng.integers(0, len(TOOL_INDEX))),
                "call_start": at + 2,
                "call_end": at + 8,
                "result_at": at + 8,
                "outcome": [1.0, 0.0, None][int(rng.integers(0, 3))],
                "mistake": bool(seed % 4 == 3),
                "runs_code": bool(rng.integers(0, 2)),
            }
        )
        at += 18
    results = {p for s in steps for p in range(s["result_at"], s["result_at"] + 5)}
    for p in range(length):
        if p in results:
            positions[p], own = own, own + 1
        else:
            positions[p], plain = plain, plain + 1
    has_cursor = seed % 2 == 0
    return {
        "session_id": f"session-{seed}",
        "input_ids": ids,
        "loss_mask": mask,
        "position_ids": positions,
        "record": {"session_id": f"session-{seed}"},
        "anchors": {
            "intent_at": length // 4 - 1,
            "intents": None if seed % 3 == 2 else [INTENTS[seed % 12], INTENTS[(seed + 5) % 12]],
            "cursor_at": length - 3 if has_cursor else -1,
            "cursor_target": {"file": "a.py", "line": 12 + seed, "column": 4, "placement": "after"}
            if has_cursor
            else None,
            "viewport": {"scroll_top": 100.0, "zoom": 1.25, "line_height": 20.0, "char_width": 8.0},
            "steps": steps,
        },
    }


def make_samples(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """``count`` sessions of very different lengths."""
    return [make_sample(seed + i, 48 + (i * 37) % 120) for i in range(count)]


def make_agent(preset: str = "tiny-glm", seed: int = 1, **options: Any) -> AgentModel:
    """A tiny agent over a vocabulary of 512."""
    return build_agent_model(
        ModelConfig(preset=preset, **{"feedback_positions": OWN_POSITIONS, **options}),  # type: ignore[arg-type]
        vocab_size=VOCAB,
        tools=list(TOOL_INDEX),
        seed=seed,
        entropy_bonus=0.01,
    )


FAST = OptimizerConfig(backbone_lr=1e-3, intent_lr=1e-3, tool_lr=1e-3, reward_lr=1e-3, cursor_lr=1e-3)


WITHOUT_AGENTFT = """
import json, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("agentft", "composer", "streaming"):
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Absent())
"""
"""How a program for ``python -c`` begins in which agentft and what it stands on cannot be imported."""
