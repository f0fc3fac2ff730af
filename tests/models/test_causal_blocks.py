"""Attention from products over blocks of queries is causal attention, forward and backward, wherever a block ends."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from agentft.models import attention, causal_blocks
from agentft.models.causal_blocks import BLOCK, LONGEST, causal_attention

AROUND_BLOCKS = st.one_of(
    st.integers(1, 3 * BLOCK), st.builds(lambda n, d: n * BLOCK + d, st.integers(1, 3), st.integers(-1, 1))
)


def states(length: int, *, shared: int, groups: int, widths: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Return query, key and value as leaves that want a gradient."""
    shapes = [(shared * groups, widths[0]), (shared, widths[0]), (shared, widths[1])]
    return [torch.randn(1, heads, length, width).to(dtype).requires_grad_() for heads, width in shapes]


def dense(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return what the kernel of PyTorch gives in float64."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (key, value))
    return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)


def differences(given_states: list[Tensor], scale: float, *, autocast: bool = False) -> list[float]:
    """Return how far output and gradients are from those in float64, relative to their norms."""
    exact = [x.detach().double().requires_grad_() for x in given_states]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        ours = causal_attention(*given_states, scale)
    theirs = dense(*exact, scale)
    down = torch.randn(theirs.shape)
    found = [ours, *torch.autograd.grad(ours, given_states, down.to(ours.dtype))]
    expected = [theirs, *torch.autograd.grad(theirs, exact, down.double())]
    scales = [torch.linalg.vector_norm(right) for right in expected]
    scales[1] = scales[2] = torch.stack(scales[1:3]).amax()  # with one token both are 0: no score has an alternative
    return [
        float(torch.linalg.vector_norm(left.double() - right) / (norm + 1e-9))
        for left, right, norm in zip(found, expected, scales, strict=True)
    ]


@settings(deadline=None, max_examples=40)
@given(AROUND_BLOCKS, st.integers(1, 3), st.integers(1, 3), st.sampled_from([(16, 16), (24, 8)]), st.integers(0, 999))
def test_output_and_gradients_are_those_of_dense_attention(
    length: int, shared: int, groups: int, widths: tuple[int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    found = states(length, shared=shared, groups=groups, widths=widths, dtype=torch.float64)
    assert max(differences(found, 0.3)) < (1e-6 if length == 1 else 1e-12)


@pytest.mark.parametrize("length", [1, BLOCK, 300])
def test_float32_and_bfloat16_are_as_near_as_their_digits_allow(length: int) -> None:
    torch.manual_seed(5)
    kind = {"shared": 2, "groups": 2, "widths": (32, 32)}
    assert max(differences(states(length, dtype=torch.float32, **kind), 0.2)) < 2e-6  # type: ignore[arg-type]
    assert max(differences(states(length, dtype=torch.bfloat16, **kind), 0.2)) < 1e-2  # type: ignore[arg-type]
    assert max(differences(states(length, dtype=torch.float32, **kind), 0.2, autocast=True)) < 1e-2  # type: ignore[arg-type]


def test_a_session_gives_the_same_bits_wherever_it_lies_in_a_row() -> None:
    torch.manual_seed(7)
    for dtype in (torch.float32, torch.bfloat16):
        session = states(157, shared=2, groups=1, widths=(24, 24), dtype=dtype)
        down = torch.randn(1, 157, 2, 24).to(dtype)
        seen = []
        for before in (0, 1, 3, 130):
            row = [torch.cat((torch.randn_like(x[:, :, :1]).expand(-1, -1, before, -1), x), 2) for x in session]
            lengths = [n for n in (before, 157) if n]
            out, _ = attention.sdpa_by_segment(nn.Module(), *row, None, segment_lengths=lengths)
            seen.append([out[:, before:], *torch.autograd.grad(out[:, before:], session, down)])
        for other in seen[1:]:
            assert all(torch.equal(left, right) for left, right in zip(seen[0], other, strict=True))


@pytest.mark.parametrize(
    ("length", "options", "ours"),
    [
        (20, {}, True),
        (LONGEST, {}, True),
        (LONGEST + 1, {}, False),
        (20, {"dropout": 0.1}, False),
        (20, {"sliding_window": 20}, True),
        (20, {"sliding_window": 19}, False),
    ],
)
def test_what_it_is_not_made_for_goes_to_the_fused_kernel(
    monkeypatch: pytest.MonkeyPatch, length: int, options: dict[str, float], ours: bool
) -> None:
    called = []
    kernel = causal_blocks.causal_attention
    monkeypatch.setattr(causal_blocks, "causal_attention", lambda *a: called.append(len(a)) or kernel(*a))
    q, k, v = states(length, shared=1, groups=2, widths=(8, 8), dtype=torch.float32)
    out, _ = attention.sdpa_by_segment(nn.Module(), q, k, v, None, segment_lengths=[length], **options)  # type: ignore[arg-type]
    assert bool(called) == ours
    assert out.shape == (1, length, 2, 8)
