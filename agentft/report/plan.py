"""``agentft plan RUN.yaml``: memory of each rank, disk, tokens and hours of a run, before anything is rented (floor 5).

    agentft plan yamls/agent/glm-4-9b.yaml model.lora=null train.distributed.strategy=fsdp --gpus 8 --gpu-memory 80

Nothing is downloaded, and no weights are loaded. docs/plan.md has the formulas and how far they are off.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentft.config.checks import parse_time
from agentft.config.load import load
from agentft.config.schema import RunConfig
from agentft.config.tools import use_tools
from agentft.data.meta import META_NAME, ShardMeta, load_meta
from agentft.errors import EXIT_GATE, EXIT_OK
from agentft.report.plan_memory import FP32, Setup, StepMemory, step_memory
from agentft.report.plan_models import ModelShape, model_shape

GIB = 2.0**30
ALLOCATOR = {"gpu": (0.95, 1.0, 1.15), "cpu": (0.95, 1.22, 1.45)}
"""Factors of low, expected and high. On a CPU glibc keeps freed blocks: 24 measured peaks were 1.11 to 1.33 times what
was asked for (docs/plan.md). A GPU's expected figure is allocated memory; what torch reserves beyond it is in high."""

TRAINED_SHARE = 0.3
"""Of the tokens of agent sessions; taken where the shards are not there to be asked."""

RUNTIME_GIB = {"gpu": (0.5, 0.8, 1.2), "cpu": (0.5, 0.7, 0.9)}
"""CUDA context and kernels; on a CPU Python with its libraries."""

NOT_COUNTED = (
    "sampling of calls (feedback.policy, feedback.probe): a pass of its own, between steps",
    "feedback distillation, EWC, earlier rows of another stage, monitors and samples of `algorithms`",
    "containers of the sandbox, the result cache, loader processes, the page cache of shards",
    "communication buffers of NCCL or gloo beyond gathered weights and gradient buckets",
    "routed experts that get far more than their share of tokens",
    "evaluation (no gradients: less than a training step of the same rows)",
)


def command(arguments: argparse.Namespace) -> int:
    """Print the plan; exit code 4 if a step does not fit into ``--gpu-memory``."""
    config = load(arguments.config, arguments.overrides, world_size=max(1, arguments.gpus))
    use_tools(config.tools)
    meta = _meta(config)
    found = plan(config, ranks=arguments.gpus, meta=meta, throughput=arguments.throughput)
    if arguments.trace:
        from agentft.report.plan_trace import trace_step

        shape = model_shape(config.model, vocab_size=meta.vocab_size if meta else None)
        found["trace"] = trace_step(shape, setup_of(config, ranks=1, meta=meta))
    fits = None
    if arguments.gpu_memory:
        fits = found["peak_gib"]["expected"] <= arguments.gpu_memory
        found |= {"gpu_memory_gib": arguments.gpu_memory, "fits": fits}
    if arguments.json:
        print(json.dumps(found))
    else:
        _show(found)
    return EXIT_GATE if fits is False else EXIT_OK


def plan(config: RunConfig, *, ranks: int, meta: ShardMeta | None, throughput: float | None) -> dict[str, Any]:
    """Return plain numbers: {model, setup, parts_gib, phases_gib, peak_gib, disk_gib, work, not_counted}."""
    shape = model_shape(config.model, vocab_size=meta.vocab_size if meta else None)
    setup = setup_of(config, ranks=ranks, meta=meta)
    memory = step_memory(shape, setup)
    device = "gpu" if setup.on_gpu else "cpu"
    estimates = list(zip(("low", "expected", "high"), ALLOCATOR[device], RUNTIME_GIB[device], strict=True))
    phases = {
        name: {at: size / GIB * factor + runtime for at, factor, runtime in estimates}
        for name, size in memory.phases().items()
    }
    return {
        "model": {
            "source": shape.source,
            "parameters": shape.parameters,
            "trained": memory.trained_parameters,
            "layers": shape.layers,
            "vocabulary": shape.config.vocab_size,
        },
        "setup": asdict(setup),
        "parts_gib": {name: value / GIB for name, value in asdict(memory).items() if isinstance(value, float)},
        "phases_gib": phases,
        "peak_gib": {at: max(phase[at] for phase in phases.values()) for at in ("low", "expected", "high")},
        "disk_gib": _disk(config, shape, memory),
        "work": _work(config, meta, throughput),
        "not_counted": list(NOT_COUNTED),
    }


def setup_of(config: RunConfig, *, ranks: int, meta: ShardMeta | None) -> Setup:
    """Return what decides the memory of one of ``ranks`` processes."""
    longest = config.text.max_tokens
    split = meta.splits.get(config.data.train_split) if meta else None
    if split is not None:
        longest = min(longest, split.longest_tokens)
    packed = config.data.packing == "pack"
    rows = min(config.data.microbatch_size, max(1, config.data.batch_size // ranks))
    tokens = config.data.pack_tokens or config.text.max_tokens
    tokens = max(longest, tokens) if packed else rows * longest
    share, mean = TRAINED_SHARE, longest / 2
    if split is not None:
        whole = split.trained_tokens + split.context_tokens
        share, mean = split.trained_tokens / max(whole, 1), whole / max(split.sessions, 1)
    sessions = config.data.batch_size / ranks
    passes = sessions * mean / tokens if packed else sessions / rows
    lora, frozen = config.model.lora, float(FP32)
    if lora is not None:
        frozen = 0.52 if config.model.quantize == "nf4" else 2.0 if lora.frozen == "bf16" else 4.0
    return Setup(
        tokens=tokens,
        longest=longest,
        trained=round(tokens * share),
        passes=max(1, -(-round(passes * 100) // 100)),
        ranks=ranks,
        sharded=config.train.distributed.strategy == "fsdp" and ranks > 1,
        reshard=config.train.distributed.fsdp.reshard_after_forward,
        amp=config.train.precision == "amp_bf16",
        recompute=config.train.activation_checkpointing,
        packed=packed,
        eager=config.model.attention == "eager",
        chunk=config.train.vocab_chunk_tokens,
        lora_rank=lora.rank if lora is not None else 0,
        lora_targets=tuple(lora.targets) if lora is not None else (),
        frozen_bytes=frozen,
        on_gpu=config.train.device != "cpu",
    )


def _disk(config: RunConfig, shape: ModelShape, memory: StepMemory) -> dict[str, float]:
    """Return the sizes of a checkpoint (trained weights and two moments, float32) and of the model at the end."""
    trained = memory.trained_parameters * FP32 / GIB
    kept = config.train.checkpoints.keep_last + config.train.checkpoints.keep_best
    return {
        "checkpoint": 3 * trained,
        "kept_checkpoints": kept * 3 * trained,
        "model": trained if config.model.lora is not None else shape.parameters * FP32 / GIB,
    }


def _work(config: RunConfig, meta: ShardMeta | None, throughput: float | None) -> dict[str, float | None]:
    """Return tokens of a step and of the run, and hours at ``throughput`` tokens a second; None where not known."""
    value, unit = parse_time(config.train.duration) or (0.0, "ba")
    split = meta.splits.get(config.data.train_split) if meta else None
    if split is None:
        mean, steps = config.text.max_tokens / 2, value if unit == "ba" else None
    else:
        mean = (split.trained_tokens + split.context_tokens) / max(split.sessions, 1)
        steps = value if unit == "ba" else value * (split.sessions // config.data.batch_size)
    a_step = mean * config.data.batch_size
    tokens = a_step * steps if steps is not None else None
    hours = tokens / throughput / 3600 if tokens is not None and throughput else None
    return {"tokens_a_step": a_step, "steps": steps, "tokens": tokens, "hours": hours, "throughput": throughput}


def _meta(config: RunConfig) -> ShardMeta | None:
    path = Path(os.path.expanduser(config.data.shards))
    return load_meta(path) if (path / META_NAME).exists() else None


def _show(found: dict[str, Any]) -> None:
    console = Console()
    model, setup, work = found["model"], Setup(**found["setup"]), found["work"]
    console.print(
        f"{model['source']}: {model['parameters'] / 1e9:,.3f} B parameters, {model['trained'] / 1e6:,.1f} M trained, "
        f"{setup.ranks} process(es){', sharded' if setup.sharded else ''}; a pass is {setup.tokens:,} tokens "
        f"({setup.trained:,} trained), {setup.passes} pass(es) a step"
    )
    table = Table("GiB on each rank", "low", "expected", "high", title="Phases", title_justify="left")
    for name, phase in found["phases_gib"].items():
        table.add_row(name, *(f"{phase[at]:.2f}" for at in ("low", "expected", "high")))
    table.add_row("[bold]peak", *(f"[bold]{found['peak_gib'][at]:.2f}" for at in ("low", "expected", "high")))
    console.print(table)
    parts = ", ".join(f"{name.replace('_', ' ')} {size:.2f}" for name, size in found["parts_gib"].items() if size)
    console.print(f"of which (GiB): {parts}")
    disk = found["disk_gib"]
    console.print(f"disk (GiB): checkpoint {disk['checkpoint']:.2f}, kept {disk['kept_checkpoints']:.2f}, "
                  f"model {disk['model']:.2f}")  # fmt: skip
    known = [f"{work['tokens_a_step']:,.0f} tokens a step"]
    known += [f"{work['steps']:,.0f} steps, {work['tokens']:,.0f} tokens"] if work["tokens"] is not None else []
    known += [f"{work['hours']:.1f} hours at {work['throughput']:,.0f} tokens/s"] if work["hours"] is not None else []
    console.print("work: " + ", ".join(known))
    if "trace" in found:
        console.print("trace of the backbone's step (GiB): " + json.dumps(found["trace"]))
    if found.get("fits") is not None:
        room = found["gpu_memory_gib"] - found["peak_gib"]["expected"]
        console.print(f"[{'green' if room >= 0 else 'red'}]{'fits' if room >= 0 else 'does not fit'}: {room:+.1f} GiB")
    console.print("not counted: " + "; ".join(found["not_counted"]))
