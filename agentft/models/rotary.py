"""Feedback positions (floor 3): result tokens are rotated by their own frequencies, counted from their own zero.

``install(backbone, start, base)`` wraps the backbone's rotary module(s). A position p ≥ start gets the angles of
p − start under ``base``; every other position passes through the wrapped module unchanged, bit for bit. Works for any
module called as ``rotary(x, position_ids) -> (cos, sin)`` with an ``inv_freq`` buffer (GLM, DeepSeek-V3, Llama, Qwen;
partial rotary included, because the number of frequencies is taken from the module).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FeedbackRotary(nn.Module):
    """A rotary module with a reserved range of positions.

    Args:
        plain: The backbone's rotary module.
        start: First position of the reserved range.
        base: Frequency base inside the range.
    """

    inv_freq: Tensor

    def __init__(self, plain: nn.Module, start: int, base: float) -> None:
        super().__init__()
        self.plain, self.start = plain, start
        plain_freq = plain.get_buffer("inv_freq")
        count = plain_freq.numel()
        frequencies = 1.0 / base ** (torch.arange(count, dtype=torch.float32) / count)
        self.register_buffer("inv_freq", frequencies.to(plain_freq.device), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [B, T, D] in the dtype of ``x`` for positions [B, T]."""
        feedback = position_ids >= self.start
        cos, sin = self.plain(x, position_ids.masked_fill(feedback, 0))
        own = (position_ids - self.start).clamp_min(0)
        with torch.autocast(x.device.type, enabled=False):
            angles = own[..., None].float() * self.inv_freq.float().to(x.device)
            angles = torch.cat((angles, angles), dim=-1)
            scaling = getattr(self.plain, "attention_scaling", 1.0)
            own_cos, own_sin = angles.cos() * scaling, angles.sin() * scaling
        chosen = feedback[..., None]
        return torch.where(chosen, own_cos.to(cos.dtype), cos), torch.where(chosen, own_sin.to(sin.dtype), sin)


def install(backbone: nn.Module, start: int, base: float) -> int:
    """Wrap every rotary module of ``backbone`` in place; return how many were wrapped (0: it has none)."""
    found = [
        (parent, name, child)
        for parent in list(backbone.modules())
        if not isinstance(parent, FeedbackRotary)
        for name, child in parent.named_children()
        if type(child).__name__.endswith("RotaryEmbedding") and hasattr(child, "inv_freq")
    ]
    for parent, name, child in found:
        setattr(parent, name, FeedbackRotary(child, start, base))
    return len(found)
