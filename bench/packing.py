"""Rows padded as drawn, padded by length, or packed: what a training step costs on this machine (spec: D4).

    python bench/packing.py                        # about fifteen minutes
    python bench/packing.py --preset tiny-kimi --bf16
    python bench/packing.py --shards data/demo/shards
    python bench/packing.py --quick                # a few minutes: does it run, rough figures

Every step is what training does with a global batch: ``data.batch.split``, forward, composite loss, backward, of the
same sessions for each kind in turn. Tokens are useful ones: context and trained, not padding. ``pack, dense mask`` is
the same cut with one block-diagonal mask over the row instead of attention by session. Peak memory is taken in a fresh
process for each kind. Session lengths are lognormal; with ``--shards`` they are those of the train split.
Exit code 0 only if every gate holds: the default (``data.packing: pack``) must be the fastest, and without padding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kit.measure import RESULTS, Gate, Samples, machine, report, wide_console
from kit.memory import in_fresh_process, peak_mib, reset_peak, resident_mib
from rich.table import Table

from agentft.config.schema import DataConfig, ModelConfig
from agentft.data.batch import Batch, collate, split
from agentft.data.loader import SessionLoader, build_loader, open_shards
from agentft.data.packing import Packing
from agentft.models.agent_model import AgentModel, build_agent_model
from agentft.tools import TOOL_INDEX

KINDS: dict[str, Packing] = {"none": "none", "buckets": "buckets", "pack": "pack", "pack, dense mask": "pack"}
VOCAB, TRAINED = 4096, 0.3
console = wide_console()


def main() -> int:
    options = _options()
    torch.set_num_threads(options.threads)
    if options.one is not None:
        print(json.dumps(_peak(options)))
        return 0
    model, batches = _model(options), _batches(options)
    samples = Samples()
    for kind in KINDS:
        _step(model, batches[0], kind, options)  # warm up
    for turn in range(options.repeats):
        for batch in batches:
            for kind in KINDS:
                with console.status(f"{kind}, turn {turn + 1} of {options.repeats}"):
                    seconds, real, computed, passes = _step(model, batch, kind, options)
                samples.add(f"{kind}/tokens_per_s", real / seconds)
                samples.add(f"{kind}/padding", 1 - real / computed)
                samples.add(f"{kind}/passes", passes)
    for kind in KINDS:
        with console.status(f"{kind}: peak memory"):
            samples.add(f"{kind}/peak_mib", in_fresh_process([sys.executable, *sys.argv, "--one", kind])["peak_mib"])
    _show(samples, batches, options)
    faster = samples.ratio("pack/tokens_per_s", "buckets/tokens_per_s")
    padding = float(np.mean(samples.raw["pack/padding"]))
    memory = samples.raw["pack/peak_mib"][0] / samples.raw["buckets/peak_mib"][0]
    gates = [
        Gate("useful tokens/s, pack / buckets", faster.value, 1.0, "higher"),
        Gate("padding share, pack", padding, 0.03, "lower"),
        Gate("peak memory, pack / buckets", memory, 1.0, "lower"),
    ]
    context = {"machine": machine(), "options": {k: str(v) for k, v in vars(options).items()}}
    return report(gates, samples, context, options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=("tiny-glm", "tiny-kimi"), default="tiny-glm")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast, as train.precision=amp_bf16")
    parser.add_argument("--batch", type=int, default=16, help="sessions in a global batch")
    parser.add_argument("--rows", type=int, default=4, help="data.microbatch_size of none and buckets")
    parser.add_argument("--pack-tokens", type=int, default=2048, help="data.pack_tokens")
    parser.add_argument("--median", type=int, default=350, help="median length of a session, in tokens")
    parser.add_argument("--sigma", type=float, default=0.7, help="standard deviation of the logarithm of the length")
    parser.add_argument("--longest", type=int, default=2048, help="longest session, in tokens")
    parser.add_argument("--shards", type=Path, help="take sessions from here instead")
    parser.add_argument("--batches", type=int, default=6, help="different global batches")
    parser.add_argument("--repeats", type=int, default=3, help="turns over all batches")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--quick", action="store_true", help="few steps: a smoke run")
    parser.add_argument("--one", choices=list(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=RESULTS / "packing.json", help="where the figures go")
    options = parser.parse_args()
    if options.quick:
        options.batch, options.batches, options.repeats = min(options.batch, 8), 2, 2
    return options


def _model(options: argparse.Namespace) -> AgentModel:
    vocab = open_shards(DataConfig(shards=str(options.shards))).vocab_size if options.shards else VOCAB
    model = build_agent_model(ModelConfig(preset=options.preset), vocab_size=vocab, tools=list(TOOL_INDEX), seed=1)
    model.cpu_bfloat16 = options.bf16
    return model


def _step(model: AgentModel, batch: Batch, kind: str, options: argparse.Namespace) -> tuple[float, int, int, int]:
    """Compute one batch's gradient; return seconds, real tokens, computed tokens and forward passes."""
    known = model.backbone.config._attn_implementation
    if kind == "pack, dense mask":
        model.backbone.set_attn_implementation("sdpa")  # knows no segments
    model.unpadded = KINDS[kind] == "pack"
    model.zero_grad(set_to_none=True)
    started, real, computed = time.perf_counter(), 0, 0
    parts = split(batch, options.rows, packing=KINDS[kind], pack_tokens=options.pack_tokens)
    for part in parts:
        model.loss(model(part), part)["total"].backward()
        real, computed = real + part["real_tokens"], computed + part["computed_tokens"]
    seconds = time.perf_counter() - started
    model.backbone.set_attn_implementation(known)
    return seconds, real, computed, len(parts)


def _peak(options: argparse.Namespace) -> dict[str, float]:
    """Return what training adds to the resident memory of a process that holds the model, in MiB."""
    model, batches = _model(options), _batches(options)
    reset_peak()
    before = resident_mib()
    for batch in batches:
        _step(model, batch, options.one, options)
    return {"peak_mib": peak_mib() - before}


def _batches(options: argparse.Namespace) -> list[Batch]:
    sessions = _recorded(options) if options.shards else _made(options)
    return [collate(sessions[i : i + options.batch]) for i in range(0, len(sessions), options.batch)]


def _recorded(options: argparse.Namespace) -> list[dict[str, Any]]:
    data = DataConfig(shards=str(options.shards), batch_size=options.batch)
    loader = build_loader(data, "train", open_shards(data), shuffle=True, seed=3).dataloader
    assert isinstance(loader, SessionLoader)
    coming = loader.upcoming(min(options.batches, len(loader)))
    return [sample for batch in coming for sample in batch.samples]


def _made(options: argparse.Namespace) -> list[dict[str, Any]]:
    chance = np.random.default_rng(11)
    count = options.batch * options.batches
    lengths = chance.lognormal(np.log(options.median), options.sigma, count).astype(int).clip(32, options.longest)
    return [_session(number, int(length), chance) for number, length in enumerate(lengths)]


def _session(number: int, length: int, chance: np.random.Generator) -> dict[str, Any]:
    """Return a session of random tokens, of which the share ``TRAINED`` is trained, with steps and anchors."""
    starts: Sequence[int] = range(length // 4, max(length - 20, length // 4 + 1), 64)
    mask = np.zeros(length, np.uint8)
    for start in starts:
        mask[start : start + int(64 * TRAINED / 0.75)] = 1
    steps = [
        {
            "step": step, "tool_at": start, "tool": number % len(TOOL_INDEX), "call_start": start,
            "call_end": start + 4, "result_at": min(start + 5, length - 1), "outcome": float(number % 2),
            "mistake": False, "runs_code": True,
        }
        for step, start in enumerate(starts, 1)
    ]  # fmt: skip
    return {
        "session_id": f"bench/{number}",
        "input_ids": chance.integers(0, VOCAB, length).astype(np.int32),
        "loss_mask": mask,
        "position_ids": np.arange(length, dtype=np.int32),
        "record": "",
        "anchors": {
            "intent_at": length // 4 - 1, "intents": ["fix_test_failure"], "cursor_at": -1, "cursor_target": None,
            "viewport": None, "steps": steps,
        },
    }  # fmt: skip


def _show(samples: Samples, batches: Sequence[Batch], options: argparse.Namespace) -> None:
    lengths = torch.cat([batch["lengths"] for batch in batches])
    table = Table("rows", "useful tokens/s", "/ buckets", "padding", "passes a batch", "peak, MiB")
    table.title, table.title_justify = f"{options.preset}: a step on {options.batch} sessions (median [95 %])", "left"
    for kind in KINDS:
        table.add_row(
            kind,
            samples.quantile(f"{kind}/tokens_per_s").show(0),
            samples.ratio(f"{kind}/tokens_per_s", "buckets/tokens_per_s").show(2),
            f"{np.mean(samples.raw[f'{kind}/padding']):.1%}",
            f"{np.mean(samples.raw[f'{kind}/passes']):.1f}",
            f"{samples.raw[f'{kind}/peak_mib'][0]:.0f}",
        )
    console.print(table)
    console.print(
        f"Sessions of {int(lengths.min())} to {int(lengths.max())} tokens, median {int(lengths.median())}; padded rows "
        f"{options.rows} a pass, packed passes of {options.pack_tokens} tokens; {options.threads} torch threads."
    )


if __name__ == "__main__":
    sys.exit(main())
