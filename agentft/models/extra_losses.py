"""Losses that only some runs have (floor 3): language modelling on earlier rows, and distillation of failed calls.

Both are sums over positions of the one forward pass, with logits in chunks that are computed again in backward, so that
they cost one chunk of logits whatever the vocabulary. A batch without their keys costs nothing.

* ``lm``: cross-entropy of the next token where ``lm_weight`` is not 0 (``agentft.data.replay_buffer`` adds the rows).
* ``distill``: KL(teacher‖student) at ``distill_at``, the teacher's final hidden states being ``distill_hidden``
  (``agentft.feedback.distillation`` computes them). Its logits come from the same head, without gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentft import losses

CHUNK_TOKENS = 256

Head = Callable[[Tensor], Tensor]
"""Final hidden states [n, H] → logits [n, V]."""


def extra_sums(head: Head, hidden: Tensor, batch: Mapping[str, Any], temperature: float) -> dict[str, Tensor]:
    """Return the sums [] float32 of ``lm`` and ``distill``, those that the batch has keys for.

    Args:
        head: The vocabulary head.
        hidden: [B, T, H] of the batch.
        batch: With ``lm_weight`` [B, T] float32, or ``distill_at`` [N, 2] and ``distill_hidden`` [N, H], or neither.
        temperature: Of ``distill``.
    """
    found: dict[str, Tensor] = {}
    if "lm_weight" in batch:
        before = batch["lm_weight"][:, 1:].nonzero()  # [N, 2]; column c predicts the token at c + 1
        at = (before[:, 0], before[:, 1] + 1)
        found["lm"] = _chunked(head, _code, _before(hidden, at), batch["input_ids"][at], batch["lm_weight"][at])
    if "distill_at" in batch:
        at = batch["distill_at"].unbind(1)
        temperatures = torch.full((len(at[0]),), temperature, device=hidden.device)
        found["distill"] = _chunked(head, _distill, _before(hidden, at), batch["distill_hidden"], temperatures)
    return found


def _before(hidden: Tensor, at: tuple[Tensor, ...]) -> Tensor:
    """Return the hidden states [N, H] that predict the tokens at (row, column)."""
    rows, columns = at
    return hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows * hidden.shape[1] + columns - 1)


def _code(head: Head, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return losses.code_sum(head(hidden), labels, weights)


def _distill(head: Head, student: Tensor, teacher: Tensor, temperatures: Tensor) -> Tensor:
    with torch.no_grad():
        taught = head(teacher)
    return losses.distill_sum(head(student), taught, temperatures)


def _chunked(head: Head, term: Callable[..., Tensor], hidden: Tensor, *beside: Tensor) -> Tensor:
    """Return the sum of ``term`` over chunks of positions; with none of them the head is still touched."""
    total = hidden.new_zeros((), dtype=torch.float32)
    for start in range(0, max(len(hidden), 1), CHUNK_TOKENS):
        part = (hidden[start : start + CHUNK_TOKENS], *(values[start : start + CHUNK_TOKENS] for values in beside))
        total = total + checkpoint(term, head, *part, use_reentrant=False, preserve_rng_state=False)
    return total
