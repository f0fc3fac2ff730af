"""The data of ``bench/train.py``, and its two sides that are ours: a whole run, and the bare loop on the same rows."""

from __future__ import annotations

import argparse
import random
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger

from agentft.config.load import load
from agentft.config.schema import FeedbackPositionsConfig, ModelConfig, RunConfig
from agentft.data.loader import build_loader, open_shards
from agentft.data.shards import write_shards
from agentft.etai import ExecutionResult, InlineWorkspace, Session, TraceStep
from agentft.models.backbone import build_backbone, hidden_states
from agentft.train.build import build
from kit.memory import peak_mib, reset_peak, resident_mib

YAML = Path(__file__).resolve().parents[2] / "yamls" / "agent" / "tiny-glm.yaml"
OURS = "agentft"
SEED, SIGMA = 17, 0.8
LR = 1e-3


class StepClock(Callback):
    """Time and tokens after every batch, and the memory before the first."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.tokens: list[int] = []
        self.start_mib = 0.0

    def fit_start(self, state: State, logger: Logger) -> None:
        reset_peak()
        self.start_mib = resident_mib()
        self.marks.append(time.perf_counter())

    def batch_end(self, state: State, logger: Logger) -> None:
        self.marks.append(time.perf_counter())
        self.tokens.append(int(state.timestamp.token.value) - sum(self.tokens))


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Write shards, rows and model for every side, and the trace that agentft replays; return what the data is."""
    _quiet(options.threads)
    folder = options.folder
    lines = [_session(number, options.max_tokens).model_dump_json() for number in range(options.sessions)]
    (folder / "sessions.jsonl").write_text("\n".join(lines) + "\n")
    config = _config(options, "data", ["feedback.backend=off"])
    write_shards(
        [folder / "sessions.jsonl"], folder / "shards", text=config.text, positions=config.model.feedback_positions,
        vocab_size=options.vocab, holdout=["held-out"],
    )  # fmt: skip
    meta = open_shards(config.data)
    loader = build_loader(config.data, "train", meta, shuffle=True, seed=SEED).dataloader
    rows = [loader.dataset[i] for i in range(loader.dataset.num_samples)]  # type: ignore[union-attr]
    lengths = [len(row["input_ids"]) for row in rows]
    trained = np.concatenate([row["loss_mask"] for row in rows])
    np.savez(
        folder / "rows.npz",
        ids=np.concatenate([row["input_ids"] for row in rows]),
        trained=trained,
        lengths=np.asarray(lengths),
    )
    plain = ModelConfig(preset="tiny-glm", feedback_positions=FeedbackPositionsConfig(enabled=False))
    backbone = build_backbone(plain, meta.vocab_size, SEED)
    backbone.set_attn_implementation("sdpa")
    backbone.save_pretrained(folder / "model")
    _train(options, "recorded", [f"feedback.backend={options.backend}"])
    return {
        "sessions": len(rows),
        "mean_tokens": float(np.mean(lengths)),
        "longest": max(lengths),
        "trained_share": float(trained.mean()),
        "parameters": sum(p.numel() for p in backbone.parameters()),
    }


def measure_ours(options: argparse.Namespace) -> dict[str, Any]:
    """Train as ``composer train.py`` does, feedback replayed; return {tokens, step_s, peak_mib, start_mib}."""
    _quiet(options.threads)
    clock = _train(options, f"timed-{time.monotonic_ns()}", _replay(options))
    seconds = [after - before for before, after in pairwise(clock.marks)]
    return {"tokens": clock.tokens, "step_s": seconds, "peak_mib": peak_mib(), "start_mib": clock.start_mib}


def measure_bare(options: argparse.Namespace) -> dict[str, Any]:
    """Backbone forward and backward with logits at trained positions, and the optimiser, on the rows of such a run."""
    _quiet(options.threads)
    config = _config(options, "bare", ["feedback.backend=off"])
    meta = open_shards(config.data)
    spec = build_loader(config.data, "train", meta, shuffle=True, seed=SEED)
    batches, steps = [], 0
    while steps < options.steps:
        for batch in spec.dataloader:
            batches.append((int(batch["lengths"].sum()), spec.split_batch(batch, config.data.microbatch_size)))
            steps += 1
            if steps == options.steps:
                break
    backbone = build_backbone(config.model, meta.vocab_size, SEED).train()
    optimizer = torch.optim.AdamW(backbone.parameters(), lr=LR)
    reset_peak()
    start, seconds = resident_mib(), []
    for _, parts in batches:
        begun = time.perf_counter()
        for part in parts:
            at = part["next_at"]
            hidden = hidden_states(backbone, part["input_ids"], part["position_ids"], part["lengths"])
            logits = backbone.get_output_embeddings()(hidden[at[:, 0], at[:, 1] - 1])
            labels = part["labels"][at.unbind(1)]
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / part["denominators"]["code"]
            loss.backward()
        torch.nn.utils.clip_grad_norm_(backbone.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - begun)
    tokens = [count for count, _ in batches]
    return {"tokens": tokens, "step_s": seconds, "peak_mib": peak_mib(), "start_mib": start}


def profile_ours(options: argparse.Namespace) -> str:
    """Return torch's table of what agentft's steps spend their time on."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        _train(options, "profiled", _replay(options))
    return str(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60))


def _replay(options: argparse.Namespace) -> list[str]:
    return ["feedback.backend=replay", f"feedback.replay_from={options.folder / 'recorded'}"]


def _config(options: argparse.Namespace, name: str, more: list[str]) -> RunConfig:
    return load(
        YAML,
        [
            f"run_name={name}", f"runs_dir={options.folder}", f"data.shards={options.folder / 'shards'}",
            f"data.batch_size={options.batch}", f"data.microbatch_size={options.batch}",
            "data.calibration_split=null", f"text.max_tokens={options.max_tokens}", "text.result_tokens=400",
            f"train.duration={options.steps}ba", "train.device=cpu", "train.precision=fp32",
            "train.eval_interval=0ba", f"optimizer.backbone_lr={LR}", "optimizer.warmup=0ba",
            "feedback.probe.every=0", "feedback.recorded.share=1.0", "loggers.console=false", f"seed={SEED}", *more,
        ],
    )  # fmt: skip


def _train(options: argparse.Namespace, name: str, more: list[str]) -> StepClock:
    config, clock = _config(options, name, more), StepClock()
    (options.folder / name).mkdir()
    run = build(config, options.folder / name)
    run.trainer.state.callbacks.append(clock)
    try:
        run.trainer.fit()
    finally:
        run.close()
    return clock


def _quiet(threads: int) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)


def _session(number: int, max_tokens: int) -> Session:
    """Return a session of lognormal length: reads, an edit, a run; every twelfth is held out."""
    draw = random.Random(number)
    words = ["total", "value", "result", "count", "index", "buffer", "parser", "token", "queue", "state", "limit"]

    def function(i: int) -> str:
        a, b, c = (draw.choice(words) for _ in range(3))
        head, check = f"def {a}_{i}({b}, {c}=0):\n", f"    if {b} > {number + i}:\n        return {c} + {i}\n"
        return f"{head}{check}    return {b} * {i}\n\n\n"

    reads = min(24, max(1, round(draw.lognormvariate(0.0, SIGMA) * max_tokens / 700)))
    files = {f"{draw.choice(words)}_{i}.py": "".join(function(k) for k in range(3 + i % 3)) for i in range(reads)}
    steps: list[tuple[str, str, dict[str, Any], str]] = []
    for name, source in files.items():
        said = f"{draw.choice(words)} is used in {name}; look at how {draw.choice(words)} comes out before changing it."
        shown = "".join(f"{row}: {line}\n" for row, line in enumerate(source.splitlines(), 1))
        steps.append((said, "file_read", {"path": name}, shown))
    name, source = next(iter(files.items()))
    old = next(line for line in source.splitlines() if "return" in line)
    new = old + f"  # case {number}: checked by hand, because {draw.choice(words)} may be {draw.choice(words)}"
    steps.append(("Write the change.", "file_edit", {"path": name, "old": old, "new": new}, f"{name}: edited\n"))
    code = f"print('case', {number}, sum(range({number + 3})))\n"
    steps.append(("Run it.", "python_run", {"code": code}, f"case {number} {sum(range(number + 3))}\n"))
    return Session(
        session_id=f"case/{number}",
        repository="held-out" if number % 12 == 0 else None,
        user_instruction=f"Case {number} comes out wrong for small values: repair it and show that it runs.",
        execution_trace=[
            TraceStep(
                step=row,
                thought=said,
                tool_called=tool,
                tool_args=arguments,
                execution_result=ExecutionResult(exit_code=0, status="ok", stdout=stdout),
            )
            for row, (said, tool, arguments, stdout) in enumerate(steps, 1)
        ],
        final_output=f"Case {number} is repaired: {name} returns what it should, and the program runs.",
        intents=["fix_test_failure"] if number % 2 else ["implement_function"],
        workspace=InlineWorkspace(files=files),
    )
