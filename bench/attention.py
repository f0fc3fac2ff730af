"""Causal attention of one session on a CPU: ours beside PyTorch's fused kernel and beside plain products (spec T7, M6).

    python bench/attention.py            # about a minute
    python bench/attention.py --quick    # does it run, rough figures

One step is attention forward and backward, from queries, keys and values to their gradients. The sides take turns on
the same tensors, for each length and type of numbers; all have to agree with attention in float64. *Fused* is
``scaled_dot_product_attention(is_causal=True)``, *plain* is one product, a mask, a softmax and one product, as eager
attention in transformers is written. Exit code 0 only if every gate holds. docs/benchmarks.md says how to read it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from kit.measure import RESULTS, Gate, Samples, machine, report, wide_console
from rich.table import Table
from torch import Tensor

from agentft.models.causal_blocks import causal_attention

FUSED, PLAIN, OURS = "fused", "plain", "agentft"
Side = Callable[[Tensor, Tensor, Tensor, float], Tensor]
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
AT_LEAST = {"float32": 1.1, "bfloat16": 2.0}
"""How many times as fast as the fused kernel ours has to be, over all lengths."""
APART = {"float32": 1e-5, "bfloat16": 2e-2}


def main() -> int:
    options = _options()
    torch.set_num_threads(options.threads)
    samples, apart = Samples(), dict.fromkeys(TYPES, 0.0)
    context = {"machine": machine(), "options": {k: str(v) for k, v in vars(options).items()}}
    for kind in TYPES:
        for length in options.lengths:
            states, down = _states(options, length, TYPES[kind])
            apart[kind] = max(apart[kind], *(_apart(side, states, down) for side in SIDES))
            for _ in range(options.steps + 1):
                for side in SIDES:
                    _time(side, states, down, samples, f"{kind}/{length}/{side}")
            for side in SIDES:
                samples.raw[f"{kind}/{length}/{side}"].pop(0)  # warms up
    _show(samples, options)
    gates = [_gate(samples, kind, options.lengths) for kind in TYPES]
    gates += [Gate(f"{kind}: farthest from float64", apart[kind], APART[kind], "lower") for kind in TYPES]
    return report(gates, samples, context, options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 300, 600, 1000], help="tokens of a session")
    parser.add_argument("--heads", type=int, default=4, help="of the queries; tiny-glm has 4")
    parser.add_argument("--kv-heads", type=int, default=2, help="of keys and values")
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--steps", type=int, default=40, help="steps of each side, after one that does not count")
    parser.add_argument("--quick", action="store_true", help="few steps: a smoke run")
    parser.add_argument("--json", type=Path, default=RESULTS / "attention.json", help="where the figures go")
    options = parser.parse_args()
    if options.quick:
        options.steps = 5
    return options


def _states(options: argparse.Namespace, length: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return query, key and value that want a gradient, and the gradient of the output."""
    torch.manual_seed(7)
    heads = (options.heads, options.kv_heads, options.kv_heads)
    states = [torch.randn(1, n, length, options.width).to(dtype).requires_grad_() for n in heads]
    return states, torch.randn(1, options.heads, length, options.width).to(dtype)


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def _fused(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    key, value = _repeated(query, key, value)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)


def _plain(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    key, value = _repeated(query, key, value)
    length = query.shape[2]
    unseen = torch.full((length, length), float("-inf"), dtype=query.dtype).triu_(1)
    scores = torch.matmul(query * scale, key.transpose(2, 3)) + unseen
    return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(query.dtype), value)


SIDES: dict[str, Side] = {FUSED: _fused, PLAIN: _plain, OURS: causal_attention}


def _step(side: str, states: list[Tensor], down: Tensor) -> list[Tensor]:
    query, key, value = states
    out = SIDES[side](query, key, value, query.shape[-1] ** -0.5)
    return [out, *torch.autograd.grad(out, states, down)]


def _time(side: str, states: list[Tensor], down: Tensor, samples: Samples, name: str) -> None:
    started = time.perf_counter()
    _step(side, states, down)
    samples.add(name, time.perf_counter() - started)


def _apart(side: str, states: list[Tensor], down: Tensor) -> float:
    """Return how far output and gradients are from those in float64, relative to their norms."""
    exact = _step(FUSED, [x.detach().double().requires_grad_() for x in states], down.double())
    pairs = zip(_step(side, states, down), exact, strict=True)
    return max(float(torch.linalg.vector_norm(left.double() - right) / right.norm()) for left, right in pairs)


def _gate(samples: Samples, kind: str, lengths: list[int]) -> Gate:
    """Return the gate on the time of all lengths together."""
    spent = {
        side: sum(samples.quantile(f"{kind}/{length}/{side}").value for length in lengths) for side in (FUSED, OURS)
    }
    return Gate(f"{kind}: fused / agentft, time", spent[FUSED] / spent[OURS], AT_LEAST[kind], "higher")


def _show(samples: Samples, options: argparse.Namespace) -> None:
    table = Table("numbers", "tokens", *(f"{side}, ms" for side in SIDES), "fused / agentft", title_justify="left")
    table.title = (
        f"{options.heads} heads of {options.width} over {options.kv_heads}, forward and backward, "
        f"{options.threads} thread(s) (median [95 %])"
    )
    for kind in TYPES:
        for length in options.lengths:
            names = {side: f"{kind}/{length}/{side}" for side in SIDES}
            times = [samples.quantile(name).show(2, 1000) for name in names.values()]
            table.add_row(kind, str(length), *times, samples.ratio(names[FUSED], names[OURS]).show(2))
    wide_console().print(table)


if __name__ == "__main__":
    sys.exit(main())
