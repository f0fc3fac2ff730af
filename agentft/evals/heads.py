"""What the heads of a trained model say about sessions (floor 4): one pass over collated shard rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from agentft import losses
from agentft.data.batch import collate, to_device
from agentft.evals.metrics import Predictions
from agentft.models.agent_model import AgentModel
from agentft.models.generate import evaluating


@torch.no_grad()
def predict(model: AgentModel, samples: Sequence[Mapping[str, Any]], *, batch_size: int = 16) -> Predictions:
    """Return the heads' predictions and the code loss on ``samples`` (decoded shard rows), in evaluation mode.

    Rows are batched by length, so that little is padded; the order does not change any prediction's meaning.
    """
    found: dict[str, dict[Any, Any]] = {"intents": {}, "tools": {}, "outcomes": {}, "cursor_y": {}}
    total, count = 0.0, 0.0
    by_length = sorted(samples, key=lambda sample: len(sample["input_ids"]))
    with evaluating(model):
        for start in range(0, len(by_length), batch_size):
            batch = to_device(collate(by_length[start : start + batch_size]), model.backbone.device)
            outputs = model(batch)
            _collect(found, batch, model.predictions(outputs))
            total += float(model.component_sums(outputs, batch)["code"])
            count += losses.target_counts(batch)["code"]
    return Predictions(**found, code_loss=total / count if count else float("nan"))


def _collect(found: dict[str, dict[Any, Any]], batch: Mapping[str, Any], said: Mapping[str, torch.Tensor]) -> None:
    names = batch["session_id"]
    for row, probabilities in zip(batch["intent_at"][:, 0].tolist(), said["intent_probs"].tolist(), strict=True):
        found["intents"][names[row]] = probabilities
    for row, place in zip(batch["cursor_at"][:, 0].tolist(), said["cursor"].tolist(), strict=True):
        found["cursor_y"][names[row]] = place[1]
    steps = [(names[row], step) for row, steps in enumerate(batch["steps"]) for step in steps]
    for (name, step), tool in zip(steps, said["tool_probs"].argmax(-1).tolist(), strict=True):
        found["tools"][name, step["step"]] = tool
    executed = [(name, step) for name, step in steps if step["result_at"] >= 0]
    for (name, step), outcome in zip(executed, said["outcome"].tolist(), strict=True):
        if step["runs_code"]:
            found["outcomes"][name, step["step"]] = outcome
