"""Causal attention of one session on a CPU (floor 3), from matrix products over blocks of queries.

A CPU multiplies matrices in bfloat16 several times as fast as PyTorch's fused attention goes there, forward and
backward (`bench/train.py` shows both). Here a block of 128 queries is multiplied with all keys up to its own end, so
that nothing above the diagonal blocks is computed; the products keep the probabilities, half a matrix of tokens ×
tokens for each head, for backward. That is why sessions longer than ``LONGEST`` are left to the fused kernel.

For queries q, keys k and values v of one head, scaled scores S = s·q·kᵀ, probabilities P = softmax(S) by row and a loss
with the gradient G of the output O = P·v: dv = Pᵀ·G, dP = G·vᵀ, dS = P∘(dP − rowsum(dP∘P)), dq = s·dS·k, dk = s·dSᵀ·q.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LONGEST = 1024
"""Tokens; the probabilities then take about a quarter of what a decoder layer keeps for backward anyway."""
BLOCK = 128


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return causal attention [1, heads, N, V] over one session.

    Args:
        query: [1, heads, N, D] in any float type.
        key: [1, kv heads, N, D]; a head of it serves heads ÷ kv heads in a row of the query's.
        value: [1, kv heads, N, V].
        scale: Of the scores.
    """
    if torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(low), key.to(low), value.to(low)
    heads, shared = query.shape[1], key.shape[1]
    grouped = query[0].unflatten(0, (shared, heads // shared))
    attended: Tensor = _CausalBlocks.apply(grouped, key[0], value[0], scale)
    return attended.flatten(0, 1)[None]


class _CausalBlocks(torch.autograd.Function):
    """``query`` [kv heads, G, N, D], ``key`` [kv heads, N, D], ``value`` [kv heads, N, V] → [kv heads, G, N, V]."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        # Copies begin at an aligned address: what a session's products round to must not depend on its place in a row.
        query, key, value = _copy(query).mul_(scale), _copy(key), _copy(value)
        out = value.new_empty((*query.shape[:3], value.shape[-1]))
        unseen = query.new_full((BLOCK, BLOCK), float("-inf")).triu_(1)
        kept = []
        for start in range(0, query.shape[2], BLOCK):
            rows = query[:, :, start : start + BLOCK]
            size = rows.shape[2]
            end = start + size
            scores = torch.bmm(rows.flatten(1, 2), key[:, :end].transpose(1, 2))
            scores.unflatten(1, (-1, size))[..., start:].add_(unseen[:size, :size])
            chances = scores.softmax(-1)
            out[:, :, start:end] = torch.bmm(chances, value[:, :end]).unflatten(1, (-1, size))
            kept.append(chances)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.scale = scale
        return out

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, *kept = ctx.saved_tensors
        d_out, d_query = _copy(d_out), torch.empty_like(query)
        exact = torch.promote_types(key.dtype, torch.float32)  # of sums over blocks
        d_key, d_value = (torch.zeros_like(states, dtype=exact) for states in (key, value))
        for block, chances in enumerate(kept):
            start, end = block * BLOCK, chances.shape[-1]
            given, rows = (states[:, :, start:end].flatten(1, 2) for states in (d_out, query))
            d_value[:, :end] += torch.bmm(chances.transpose(1, 2), given)
            d_chances = torch.bmm(given, value[:, :end].transpose(1, 2))
            d_scores = torch.ops.aten._softmax_backward_data(d_chances, chances, -1, chances.dtype)
            d_query[:, :, start:end] = torch.bmm(d_scores, key[:, :end]).unflatten(1, (-1, end - start))
            d_key[:, :end] += torch.bmm(d_scores.transpose(1, 2), rows)
        return d_query.mul_(ctx.scale), d_key.to(key.dtype), d_value.to(value.dtype), None


def _copy(states: Tensor) -> Tensor:
    return states.clone(memory_format=torch.contiguous_format)
