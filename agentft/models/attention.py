"""Attention over rows without padding (floor 3): sessions end to end in one row, none of which sees another.

``install(backbone, "sdpa")`` gives the backbone an attention function that knows segments; ``segments(backbone, …)``
returns what a forward pass over such a row takes, so that each session attends to itself only, whatever its positions:

* ``sdpa``: a kernel once a session (PyTorch's own; on a CPU ``causal_blocks``), causal and without a mask, so that
  nothing is computed for pairs of tokens in different sessions. Exact: a session's numbers do not depend on what else
  the row holds, bit for bit. (In a mixture of experts they may, in the last bits: an expert multiplies the tokens of
  all sessions at once, however many come.)
* ``flash_attention_2``: one variable-length kernel for all sessions (package flash-attn, on a GPU).
* ``eager``: a block-diagonal mask in float over the whole row.

Without segments the function is transformers' own for ``sdpa``: padded rows and sampling with a cache stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentft.errors import ModelError
from agentft.models import causal_blocks

BY_SEGMENT = {"sdpa": "sdpa_by_segment", "flash_attention_2": "flash_by_segment"}
"""``model.attention`` → name of the attention function that knows segments."""


def to_load(attention: str) -> str:
    """Return the attention implementation of transformers that a backbone is loaded with.

    Raises:
        ModelError: flash_attention_2 where it cannot run.
    """
    if attention == "flash_attention_2":
        _require_flash()
    return "eager" if attention == "eager" else "sdpa"


def install(backbone: PreTrainedModel, attention: str) -> None:
    """Let ``backbone`` compute attention by segment where it is told segments; ``eager`` needs nothing for that."""
    for name, function in (("sdpa", sdpa_by_segment), ("flash_attention_2", flash_by_segment)):
        AttentionInterface.register(BY_SEGMENT[name], function)
        AttentionMaskInterface.register(BY_SEGMENT[name], sdpa_mask)
    if attention in BY_SEGMENT:
        backbone.set_attn_implementation(BY_SEGMENT[attention])


def segments(backbone: PreTrainedModel, lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments of the decoder for one row [1, N] of segments of ``lengths`` tokens, N in all.

    ``attention_mask`` is a float mask [1, 1, N, N] where attention knows no segments. Elsewhere it is a stand-in in
    int64, which every kernel refuses as a mask: an architecture that does not hand ``segment_lengths`` on to its
    attention fails, instead of letting sessions see each other.
    """
    if backbone.config._attn_implementation not in BY_SEGMENT.values():
        return {"attention_mask": block_mask(lengths, backbone.dtype, device)}
    stand_in = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    return {"attention_mask": stand_in, "segment_lengths": tuple(lengths)}


def block_mask(lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the additive mask [1, 1, N, N] in float: 0 within a segment up to the token itself, lowest elsewhere."""
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    place = torch.arange(len(segment), device=device)
    unseen = (segment[:, None] != segment) | (place[:, None] < place)
    return torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(unseen, torch.finfo(dtype).min)[
        None, None
    ]


def sdpa_by_segment(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segment_lengths: Sequence[int] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return attention [B, N, heads, D]; ``query`` [B, heads, N, D], ``key`` and ``value`` [B, kv heads, N, D].

    With ``segment_lengths`` B is 1. The row is split and not sliced: the gradient of a slice is a whole row of zeros,
    so that slicing costs the square of the number of segments (measured: slower than a dense mask).
    """
    if segment_lengths is None:
        options = kwargs | {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    parts = zip(*(states.split(list(segment_lengths), dim=2) for states in (query, key, value)), strict=True)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = [_one_segment(q, k, v, dropout, scale, sliding_window) for q, k, v in parts]
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous(), None


def _one_segment(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float, window: int | None) -> Tensor:
    """Return the attention [1, heads, n, V] of one session to itself."""
    mask, fewer, on_cpu = _window_mask(q, window), q.shape[1] != k.shape[1], q.device.type == "cpu"
    if on_cpu and mask is None and not dropout and q.shape[2] <= causal_blocks.LONGEST:
        return causal_blocks.causal_attention(q, k, v, scale)
    if fewer and on_cpu:  # twice as fast there as enable_gqa
        groups = q.shape[1] // k.shape[1]
        k, v, fewer = repeat_kv(k, groups), repeat_kv(v, groups), False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, scale=scale, enable_gqa=fewer
    )


def flash_by_segment(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segment_lengths: Sequence[int] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As ``sdpa_by_segment``, in one kernel for all segments; half precision on a GPU only."""
    if segment_lengths is None:
        options = kwargs | {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        return sdpa_by_segment(module, query, key, value, attention_mask, **options)
    from flash_attn import flash_attn_varlen_func

    width = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - width))  # DeepSeek-V3: values are narrower than keys
    half = value.dtype if value.dtype != torch.float32 else torch.bfloat16
    q, k, v = (states[0].transpose(0, 1).to(half) for states in (query, key, value))  # [N, heads, D]
    ends = torch.tensor([0, *accumulate(segment_lengths)], dtype=torch.int32, device=query.device)
    out = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        max_seqlen_q=max(segment_lengths),
        max_seqlen_k=max(segment_lengths),
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
    )
    return out[None, :, :, :width].to(value.dtype), None


def _window_mask(query: Tensor, window: int | None) -> Tensor | None:
    """Return the float mask [n, n] of a segment longer than its sliding window; None where causal is all there is."""
    length = query.shape[2]
    if window is None or length <= window:
        return None
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device)
    hidden = hidden.triu(1) | hidden.tril(-window)
    return torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, torch.finfo(query.dtype).min)


def _require_flash() -> None:
    missing = [
        what
        for what, there in (
            ("the package flash-attn", find_spec("flash_attn") is not None),
            ("a GPU", torch.cuda.is_available()),
        )
        if not there
    ]
    if missing:
        raise ModelError(
            "flash_attention_2 cannot run here",
            where="model.attention",
            got="no " + " and no ".join(part.removeprefix("the ").removeprefix("a ") for part in missing),
            hint="set model.attention=sdpa (packed rows are computed session by session there)",
        )
