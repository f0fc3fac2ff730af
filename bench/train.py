"""Training speed and memory: agentft with everything on, beside Hugging Face Trainer, TRL and the bare backbone.

    python bench/train.py                       # about fifteen minutes
    python bench/train.py --backend local       # where the first run, which writes the trace, executes its calls
    python bench/train.py --quick               # three minutes: does it run, rough figures
    python bench/train.py --profile             # where agentft's step spends its time, instead of the comparison

The same tiny GLM, the same sessions (lengths lognormal), float32, the same optimiser, the same sessions a step. agentft
has its four heads, the composite loss, feedback replayed from a trace, and its logs; the bare loop is the backbone's
forward and backward pass with logits at trained positions and the optimiser, on rows prepared in advance. Each side
runs in a fresh process, one after the other and over again. TRL lives in an environment of its own under
~/.cache/agentft/peers, made on first use. Exit code 0 only if every gate holds. docs/benchmarks.md says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from kit.measure import RESULTS, Gate, Samples, machine, report, wide_console
from kit.memory import ChildError, in_fresh_process
from kit.peers import PeerError, environment
from kit.training import OURS, measure_bare, measure_ours, prepare, profile_ours
from rich.table import Table

from agentft.errors import AgentFTError

PADDED, GROUPED, TRL, BARE = "HF Trainer, padded", "HF Trainer, group_by_length", "TRL SFTTrainer, packed", "bare loop"
SIDES = (OURS, PADDED, GROUPED, TRL, BARE)
KINDS = {PADDED: "trainer", GROUPED: "grouped", TRL: "sft"}
TRL_PACKAGES = ("trl==1.16.0", "torch==2.7.0", "transformers==4.57.6", "accelerate==1.15.0", "datasets==5.0.1")
WARM_UP = 2
console = wide_console()


def main() -> int:
    options = _options()
    if options.one:
        print(json.dumps((measure_ours if options.one == OURS else measure_bare)(options)))
        return 0
    samples, failures = Samples(), dict[str, str]()
    context: dict[str, Any] = {"machine": machine(), "options": {k: str(v) for k, v in vars(options).items()}}
    options.folder = Path(tempfile.mkdtemp(prefix="agentft-bench-"))
    try:
        with console.status("sessions, shards, and a run that executes the calls"):
            context["data"] = prepare(options)
        if options.profile:
            console.print(profile_ours(options), markup=False, highlight=False)
            return 0
        for turn in range(options.repeats):
            for side in options.only or SIDES:
                if side in failures:
                    continue
                with console.status(f"{side}, run {turn + 1} of {options.repeats}"):
                    try:
                        _add(samples, side, _run(side, options, context["data"]))
                    except (ChildError, PeerError) as error:
                        failures[side] = str(error)
    except AgentFTError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
    context |= {"failures": failures, "machine_after": machine()}
    _show(samples, context["data"], failures, options)
    return report(_gates(samples), samples, context, options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("docker", "local"), default="docker", help="of the run that is replayed")
    parser.add_argument("--sessions", type=int, default=96, help="training sessions")
    parser.add_argument("--batch", type=int, default=8, help="sessions a step, of every side")
    parser.add_argument("--max-tokens", type=int, default=2048, help="longest session; also a packed row")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=12, help="steps of a process, the first two do not count")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each side")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="torch threads")
    parser.add_argument("--only", action="append", choices=SIDES, help="only this side; repeat for several")
    parser.add_argument("--profile", action="store_true", help="torch's profile of agentft's step instead")
    parser.add_argument("--quick", action="store_true", help="few steps: a smoke run")
    parser.add_argument("--json", type=Path, default=RESULTS / "train.json", help="where the figures go")
    parser.add_argument("--one", choices=(OURS, BARE), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.sessions, options.steps, options.repeats, options.max_tokens = 32, 4, 1, 1024
    return options


def _run(side: str, options: argparse.Namespace, data: dict[str, Any]) -> dict[str, Any]:
    """Run one side in a fresh process; return {tokens, step_s, peak_mib, start_mib}."""
    env = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
    if side in (OURS, BARE):
        names = ("backend", "sessions", "batch", "max_tokens", "vocab", "steps", "threads", "folder")
        passed = [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
        return in_fresh_process([sys.executable, __file__, *passed, "--one", side], env=env)
    python = str(environment("TRL", TRL_PACKAGES)) if side == TRL else sys.executable
    asked = {
        "kind": KINDS[side],
        "rows": str(options.folder / "rows.npz"),
        "model": str(options.folder / "model"),
        "batch": options.batch,
        "accumulate": max(1, round(options.batch * data["mean_tokens"] / options.max_tokens)) if side == TRL else 1,
        "max_tokens": options.max_tokens,
        "steps": options.steps,
        "threads": options.threads,
        "lr": 1e-3,
    }
    script = Path(__file__).parent / "kit" / "peer_trainer.py"
    return in_fresh_process([python, str(script), json.dumps(asked)], env=env)


def _add(samples: Samples, side: str, found: dict[str, Any]) -> None:
    """Keep a process's rate over the steps behind the warm-up, its peak, and its steps."""
    tokens, seconds = found["tokens"][WARM_UP:], found["step_s"][WARM_UP:]
    samples.add(f"{side}/tokens_per_s", sum(tokens) / sum(seconds))
    samples.add(f"{side}/peak_mib", found["peak_mib"] - found["start_mib"])
    samples.add(f"{side}/whole_mib", found["peak_mib"])
    for count, duration in zip(tokens, seconds, strict=True):
        samples.add(f"{side}/step_tokens", count)
        samples.add(f"{side}/step_s", duration)


def _gates(samples: Samples) -> list[Gate]:
    def ratio(name: str, one: str, other: str) -> float | None:
        known = f"{one}/{name}" in samples and f"{other}/{name}" in samples
        return samples.ratio(f"{one}/{name}", f"{other}/{name}").value if known else None

    return [
        Gate("tokens/s: agentft / HF Trainer padded", ratio("tokens_per_s", OURS, PADDED), 2.0, "higher"),
        Gate("tokens/s: agentft / HF group_by_length", ratio("tokens_per_s", OURS, GROUPED), 1.5, "higher"),
        Gate("tokens/s: agentft / TRL packed", ratio("tokens_per_s", OURS, TRL), 1.2, "higher"),
        Gate("tokens/s: agentft / bare loop", ratio("tokens_per_s", OURS, BARE), 0.97, "higher"),
        Gate("peak above start: agentft / HF Trainer padded", ratio("peak_mib", OURS, PADDED), 0.5, "lower"),
    ]


def _show(samples: Samples, data: dict[str, Any], failures: dict[str, str], options: argparse.Namespace) -> None:
    table = Table("side", "useful tokens/s", "agentft / side", "peak above start, MiB", "whole process, MiB")
    table.title_justify = "left"
    size, count, mean = data["parameters"] / 1e6, data["sessions"], data["mean_tokens"]
    table.title = (
        f"{size:.1f} M parameters, {count} sessions of {mean:.0f} tokens in the mean (up to {data['longest']}), "
        f"{data['trained_share']:.0%} trained, {options.batch} a step, {options.threads} threads (median [95 %])"
    )
    for side in SIDES:
        if side in failures or f"{side}/tokens_per_s" not in samples:
            table.add_row(side, f"[red]{failures.get(side, 'not run')[-300:]}")
            continue
        table.add_row(
            side,
            samples.quantile(f"{side}/tokens_per_s").show(0),
            samples.ratio(f"{OURS}/tokens_per_s", f"{side}/tokens_per_s").show(2)
            if f"{OURS}/tokens_per_s" in samples
            else "-",
            f"{samples.quantile(f'{side}/peak_mib').value:,.0f}",
            f"{samples.quantile(f'{side}/whole_mib').value:,.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
