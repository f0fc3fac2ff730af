"""The four heads (floor 3): intent, tool, cursor and outcome, each read off hidden states at its anchors.

``AgentHeads`` gathers the hidden states of all anchors in one ``index_select`` and hands each head its rows. A head
without anchors gets an empty [0, H] input: its outputs are empty and its gradients zero, never missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from agentft.losses import CELLS_PER_UNIT, cell_px

HEADS: tuple[str, ...] = ("intent", "tool", "cursor", "reward")
"""Names of the heads; each has its own optimiser group."""


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))


def _as_weights(mlp: nn.Sequential, hidden: Tensor) -> Tensor:
    """Return ``hidden`` in the precision of the head's weights: a backbone with frozen weights may have a lower one."""
    return hidden.to(mlp[0].weight.dtype)


class IntentHead(nn.Module):
    """Hidden states [N, H] → one logit per intent [N, intents]."""

    def __init__(self, hidden_size: int, intents: int) -> None:
        super().__init__()
        self.mlp = _mlp(hidden_size, hidden_size, intents)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [N, intents]."""
        return self.mlp(_as_weights(self.mlp, hidden))


class ToolHead(nn.Module):
    """Hidden states [N, H] at tool-start tokens → one logit per tool [N, tools]."""

    def __init__(self, hidden_size: int, tools: int) -> None:
        super().__init__()
        self.mlp = _mlp(hidden_size, hidden_size, tools)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [N, tools]."""
        return self.mlp(_as_weights(self.mlp, hidden))


class CursorHead(nn.Module):
    """Hidden states and viewport → where the caret should land in the window.

    The network works in units of 64 character cells (a cell is char_width × line_height at the zoom in force), so that
    its outputs and the Huber loss live near 1; ``forward`` returns pixels.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mlp = _mlp(hidden_size + 4, hidden_size, 3)

    def forward(self, hidden: Tensor, view: Tensor) -> Tensor:
        """Return [N, 3]: x px, y px, logit of "after"; ``view`` [N, 4] is scroll_top, zoom, line_height, char_width."""
        cells = cell_px(view)
        scrolled = view[:, 0] / cells[:, 1] / CELLS_PER_UNIT
        features = torch.stack((scrolled, view[:, 1] - 1, view[:, 2] / 20 - 1, view[:, 3] / 8 - 1), dim=-1)
        hidden = _as_weights(self.mlp, hidden)
        out = self.mlp(torch.cat((hidden, features.to(hidden.dtype)), dim=-1)).float()
        return torch.cat((out[:, :2] * cells * CELLS_PER_UNIT, out[:, 2:]), dim=-1)


class RewardHead(nn.Module):
    """Hidden states [N, H] at result-start tokens → logit that the execution passes [N]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mlp = _mlp(hidden_size, hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [N]."""
        return self.mlp(_as_weights(self.mlp, hidden))[:, 0]


class AgentHeads(nn.Module):
    """All heads over one gather.

    Args:
        hidden_size: Width of the backbone.
        intents: Number of intents.
        tools: Number of tools.
    """

    def __init__(self, hidden_size: int, intents: int, tools: int) -> None:
        super().__init__()
        self.intent = IntentHead(hidden_size, intents)
        self.tool = ToolHead(hidden_size, tools)
        self.cursor = CursorHead(hidden_size)
        self.reward = RewardHead(hidden_size)

    def forward(self, hidden: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return ``intent`` [Ni, intents], ``tool`` [Nt, tools], ``cursor`` [Nc, 3] and ``reward`` [Nr].

        Args:
            hidden: [B, T, H].
            batch: Holds ``intent_at``, ``tool_at``, ``cursor_at``, ``outcome_at`` ([N, 2]) and ``cursor_view``.
        """
        anchors = [batch[key] for key in ("intent_at", "tool_at", "cursor_at", "outcome_at")]
        at = torch.cat(anchors)
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, at[:, 0] * hidden.shape[1] + at[:, 1])
        intent, tool, cursor, outcome = rows.split([len(anchor) for anchor in anchors])
        return {
            "intent": self.intent(intent),
            "tool": self.tool(tool),
            "cursor": self.cursor(cursor, batch["cursor_view"]),
            "reward": self.reward(outcome),
        }
