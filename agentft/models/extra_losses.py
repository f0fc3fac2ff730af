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

from agentft import losses
from agentft.models.vocab_head import checkpointed_sum

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
        states, labels, weights = _before(hidden, at), batch["input_ids"][at], batch["lm_weight"][at]

        def lm(part: slice) -> Tensor:
            return losses.code_sum(head(states[part]), labels[part], weights[part])

        found["lm"] = checkpointed_sum(lm, len(states), CHUNK_TOKENS)
    if "distill_at" in batch:
        student, teacher = _before(hidden, batch["distill_at"].unbind(1)), batch["distill_hidden"]
        temperatures = torch.full((len(student),), temperature, device=hidden.device)

        def distill(part: slice) -> Tensor:
            with torch.no_grad():
                taught = head(teacher[part])
            return losses.distill_sum(head(student[part]), taught, temperatures[part])

        found["distill"] = checkpointed_sum(distill, len(student), CHUNK_TOKENS)
    return found


def _before(hidden: Tensor, at: tuple[Tensor, ...]) -> Tensor:
    """Return the hidden states [N, H] that predict the tokens at (row, column)."""
    rows, columns = at
    return hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows * hidden.shape[1] + columns - 1)
