"""The vocabulary head at a large vocabulary: ours beside full logits and beside chunked cross-entropy (spec L5).

    python bench/vocab_head.py            # about six minutes
    python bench/vocab_head.py --quick    # a minute: does it run, rough figures

One step is the head's forward and backward pass from the final hidden states on: loss, gradient of the hidden states,
gradient of the weight. Each side runs in a fresh process, one after the other and over again; memory is the peak of
that process above what it holds before its first step (hidden states and weight), so the gradient of the weight, which
every side has to make, is in everybody's figure. All sides must give the same loss and gradient. Exit code 0 only if
every gate holds. docs/benchmarks.md says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.measure import RESULTS, Gate, Samples, machine, report, wide_console
from kit.memory import in_fresh_process, peak_mib, reset_peak, resident_mib
from rich.table import Table

FULL, CHUNKED, TRAINED, OURS = "full logits", "chunked, all positions", "trained positions", "agentft"
SIDES = (FULL, CHUNKED, TRAINED, OURS)
SAME_LOSS, SAME_GRADIENT = 1e-5, 1e-4
console = wide_console()


def main() -> int:
    options = _options()
    if options.one:
        print(json.dumps(_measure(options)))
        return 0
    samples, context = Samples(), {"machine": machine(), "options": {k: str(v) for k, v in vars(options).items()}}
    losses: dict[str, float] = {}
    gradients: dict[str, float] = {}
    arguments = [sys.executable, __file__, *_passed_on(options)]
    for turn in range(options.repeats):
        for side in SIDES:
            with console.status(f"{side}, run {turn + 1} of {options.repeats}"):
                found = in_fresh_process([*arguments, "--one", side])
            for seconds in found["step_s"]:
                samples.add(f"{side}/step_s", seconds)
            samples.add(f"{side}/peak_mib", found["peak_mib"])
            losses[side], gradients[side] = found["loss"], found["gradient_norm"]
    context |= {"loss": losses, "gradient_norm": gradients, "machine_after": machine()}
    _show(samples, options)
    return report(_gates(samples, losses, gradients), samples, context, options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_552, help="tokens of the vocabulary; GLM-4's is 151,552")
    parser.add_argument("--width", type=int, default=512, help="size of a hidden state")
    parser.add_argument("--tokens", type=int, default=2048, help="positions of a step")
    parser.add_argument("--trained", type=float, default=0.25, help="share of the positions that are trained")
    parser.add_argument("--chunk", type=int, default=256, help="train.vocab_chunk_tokens, also of the chunked peer")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="torch threads")
    parser.add_argument("--steps", type=int, default=2, help="steps of a process, after one that does not count")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each side")
    parser.add_argument("--quick", action="store_true", help="few and small steps: a smoke run")
    parser.add_argument("--json", type=Path, default=RESULTS / "vocab_head.json", help="where the figures go")
    parser.add_argument("--one", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.steps, options.repeats = 1024, 1, 1
    return options


def _passed_on(options: argparse.Namespace) -> list[str]:
    names = ("vocab", "width", "tokens", "trained", "chunk", "threads", "steps")
    return [part for name in names for part in (f"--{name}", str(getattr(options, name)))]


def _gates(samples: Samples, losses: dict[str, float], gradients: dict[str, float]) -> list[Gate]:
    def apart(values: dict[str, float]) -> float:
        return max(abs(value - values[FULL]) / abs(values[FULL]) for value in values.values())

    return [
        Gate("full logits / agentft, time", samples.ratio(f"{FULL}/step_s", f"{OURS}/step_s").value, 4.0, "higher"),
        Gate(
            "agentft / full logits, peak", samples.ratio(f"{OURS}/peak_mib", f"{FULL}/peak_mib").value, 1 / 3, "lower"
        ),
        Gate("chunked / agentft, time", samples.ratio(f"{CHUNKED}/step_s", f"{OURS}/step_s").value, 4.0, "higher"),
        Gate("losses apart", apart(losses), SAME_LOSS, "lower"),
        Gate("gradient norms apart", apart(gradients), SAME_GRADIENT, "lower"),
    ]


def _show(samples: Samples, options: argparse.Namespace) -> None:
    table = Table("side", "step, ms", "full / side", "peak above start, MiB", "side / full")
    table.title_justify = "left"
    table.title = (
        f"{options.tokens} positions, {options.trained:.0%} trained, vocabulary {options.vocab:,}, "
        f"width {options.width}, float32, {options.threads} threads (median [95 %])"
    )
    for side in SIDES:
        table.add_row(
            side,
            samples.quantile(f"{side}/step_s").show(0, 1000),
            samples.ratio(f"{FULL}/step_s", f"{side}/step_s").show(2),
            f"{samples.quantile(f'{side}/peak_mib').value:,.0f}",
            samples.ratio(f"{side}/peak_mib", f"{FULL}/peak_mib").show(3),
        )
    console.print(table)


# One side, in a process of its own


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return {step_s, peak_mib, loss, gradient_norm} of one side."""
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(7)
    hidden = torch.randn(options.tokens, options.width).requires_grad_()
    weight = (torch.randn(options.vocab, options.width) * 0.02).requires_grad_()
    labels = torch.randint(0, options.vocab, (options.tokens,))
    labels[torch.randperm(options.tokens)[int(options.tokens * options.trained) :]] = -100
    loss_of = _side(options.one, options.chunk)
    reset_peak()
    before, seconds = resident_mib(), []
    loss = torch.zeros(())
    for _ in range(options.steps + 1):
        hidden.grad = weight.grad = None
        started = time.perf_counter()
        loss = loss_of(hidden, weight, labels)
        loss.backward()
        seconds.append(time.perf_counter() - started)
    assert hidden.grad is not None
    assert weight.grad is not None
    peak = peak_mib() - before
    norm = (hidden.grad.square().sum() + weight.grad.square().sum()).sqrt()
    return {"step_s": seconds[1:], "peak_mib": peak, "loss": loss.item(), "gradient_norm": norm.item()}


def _side(name: str, chunk: int) -> Callable[..., Any]:
    """Return a function (hidden [T, H], weight [V, H], labels [T]) → summed loss []."""
    import torch
    from torch import Tensor
    from torch.nn.functional import cross_entropy
    from torch.utils.checkpoint import checkpoint

    from agentft.models.vocab_head import VocabTargets, vocab_terms

    def summed(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(hidden @ weight.t(), labels, ignore_index=-100, reduction="sum")

    def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        parts = zip(hidden.split(chunk), labels.split(chunk), strict=True)
        return torch.stack([checkpoint(summed, h, weight, at, use_reentrant=False) for h, at in parts]).sum()

    def trained(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        at = (labels != -100).nonzero()[:, 0]
        return summed(hidden[at], weight, labels[at])

    def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        at = (labels != -100).nonzero()[:, 0]
        wanted = labels[at]
        targets = VocabTargets(
            labels=wanted, weights=torch.ones(len(at)), tokens=wanted, advantages=torch.zeros(len(at)), policy_rows=0
        )
        return vocab_terms(hidden[at], weight, None, targets, chunk_tokens=chunk).total

    return {FULL: summed, CHUNKED: chunked, TRAINED: trained, OURS: ours}[name]


if __name__ == "__main__":
    sys.exit(main())
