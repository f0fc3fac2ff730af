"""What execution feedback costs a training step when every session runs a tool of 1.2 s (spec: at most 5 %).

    python bench/feedback_overhead.py                     # about five minutes
    python bench/feedback_overhead.py --backend local --workers 8
    python bench/feedback_overhead.py --quick             # half a minute: does it run, rough figures

Three runs of the same model on the same data, one after the other and over again: ``off`` (no feedback), ``prefetched``
(calls run while earlier batches train) and ``synchronous`` (prefetch_batches=0: every batch waits for its calls).
They are what ``composer train.py`` runs: its configuration, loader, callback and sandbox. The first steps, which no
earlier batch can hide, are reported apart. Exit code 0 only if every gate holds.
docs/benchmarks.md says how to read it.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from kit.measure import RESULTS, Gate, Samples, machine, report, wide_console
from rich.table import Table

from agentft.config.load import load
from agentft.data.shards import write_shards
from agentft.errors import AgentFTError
from agentft.etai import ExecutionResult, InlineWorkspace, Session, TraceStep
from agentft.train.build import build

YAML = Path(__file__).resolve().parents[1] / "yamls" / "agent" / "tiny-glm.yaml"
KINDS = ("off", "prefetched", "synchronous")
SLOWER = 1.05
console = wide_console()


@dataclass(frozen=True)
class Usage:
    """Clock, processor time of this process and of all containers, and busy time of all cores, in seconds."""

    wall: float
    own_cpu: float
    containers_cpu: float
    busy: float

    @classmethod
    def now(cls) -> Usage:
        """Return the counters as they stand."""
        own = resource.getrusage(resource.RUSAGE_SELF)
        with open("/proc/stat") as file:
            jiffies = [int(word) for word in file.readline().split()[1:9]]  # user nice system idle iowait irq ...
        busy = (sum(jiffies) - jiffies[3] - jiffies[4]) / os.sysconf("SC_CLK_TCK")
        return cls(time.perf_counter(), own.ru_utime + own.ru_stime, containers_cpu_s(), busy)


def containers_cpu_s() -> float:
    """Return what the engine's control groups have used, in seconds; 0 where they are not to be seen."""
    root = Path("/sys/fs/cgroup")
    first = root / "cpuacct" / "docker" / "cpuacct.usage"
    if first.exists():
        return int(first.read_text()) / 1e9
    stats = [*root.glob("system.slice/docker-*.scope/cpu.stat"), *root.glob("docker/cpu.stat")]
    return sum(int(path.read_text().split()[1]) for path in stats) / 1e6


class StepClock(Callback):
    """Reads the counters at the start and after every batch."""

    def __init__(self) -> None:
        self.marks: list[Usage] = []

    def fit_start(self, state: State, logger: Logger) -> None:
        self.marks.append(Usage.now())

    def batch_end(self, state: State, logger: Logger) -> None:
        self.marks.append(Usage.now())


def main() -> int:
    options = _options()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", module=r"(composer|torch|streaming|torchmetrics|torch_optimizer)\b")
    torch.set_num_threads(options.threads)
    samples = Samples()
    context: dict[str, Any] = {"machine": machine(), "options": {k: str(v) for k, v in vars(options).items()}}
    folder = Path(tempfile.mkdtemp(prefix="agentft-bench-"))
    try:
        _write_data(folder, options)
        for turn in range(options.repeats):
            for kind in KINDS:
                with console.status(f"{kind}, run {turn + 1} of {options.repeats}"):
                    _train(kind, turn, folder, options, samples)
    except AgentFTError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    context["machine_after"] = machine()
    context["limits"] = _limits(samples, options)
    _show(samples, context["limits"], options)
    slower = samples.ratio("prefetched/step_s", "off/step_s")
    mean = _mean(samples, "prefetched/step_s") / _mean(samples, "off/step_s")
    gates = [
        Gate("step with feedback / without (median)", slower.value, SLOWER, "lower"),
        Gate("step with feedback / without (mean)", mean, SLOWER, "lower"),
    ]
    return report(gates, samples, context, options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("docker", "local"), default="docker")
    parser.add_argument("--tool-s", type=float, default=1.2, help="seconds that each tool takes")
    parser.add_argument("--batch", type=int, default=8, help="sessions in a batch, each with one slow tool")
    parser.add_argument("--workers", type=int, default=16, help="containers kept warm")
    parser.add_argument("--prefetch", type=int, default=4, help="feedback.recorded.prefetch_batches")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1), help="torch threads")
    parser.add_argument("--steps", type=int, default=16, help="steps of a run that count")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind")
    parser.add_argument("--quick", action="store_true", help="few steps: a smoke run")
    parser.add_argument("--json", type=Path, default=RESULTS / "feedback_overhead.json", help="where the figures go")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.repeats = 6, 1
    return options


def _train(kind: str, turn: int, folder: Path, options: argparse.Namespace, samples: Samples) -> None:
    """Train once; add the samples of the steps behind the first ``prefetch`` ones."""
    first = 1 + (0 if kind == "synchronous" else options.prefetch)
    steps = options.steps if kind != "synchronous" else max(4, options.steps // 4)
    name = f"{kind}-{turn}"
    config = load(
        YAML,
        [
            f"run_name={name}", f"runs_dir={folder}", f"data.shards={folder / 'shards'}",
            f"data.batch_size={options.batch}", f"data.microbatch_size={options.batch}",
            f"feedback.backend={'off' if kind == 'off' else options.backend}", "feedback.probe.every=0",
            f"feedback.recorded.prefetch_batches={0 if kind == 'synchronous' else options.prefetch}",
            "feedback.recorded.share=1.0", f"sandbox.workers={options.workers}",
            f"train.duration={first + steps}ba", "train.device=cpu", "train.eval_interval=0ba",
            "loggers.console=false", "loggers.tensorboard=false",
        ],
    )  # fmt: skip
    (folder / name).mkdir()
    run, clock = build(config, folder / name), StepClock()
    run.trainer.state.callbacks.append(clock)
    try:
        run.trainer.fit()
    finally:
        run.close()
    marks = clock.marks[first:]
    samples.add(f"{kind}/first_steps_s", marks[0].wall - clock.marks[0].wall)
    for before, after in pairwise(marks):
        samples.add(f"{kind}/step_s", after.wall - before.wall)
        samples.add(f"{kind}/own_cpu_s", after.own_cpu - before.own_cpu)
        samples.add(f"{kind}/containers_cpu_s", after.containers_cpu - before.containers_cpu)
        samples.add(f"{kind}/busy_s", after.busy - before.busy)
    if run.feedback is not None:
        summary = run.feedback.summary()["sandbox"]
        samples.add(f"{kind}/waited_s", run.feedback.executions.wait_s)
        samples.add(f"{kind}/executions", summary["executions"])
        lost = summary["executions"] - summary["by_status"].get("ok", 0)
        if lost:
            raise AgentFTError("executions went wrong", got=summary["by_status"], expected="all of them ok")


def _limits(samples: Samples, options: argparse.Namespace) -> dict[str, float]:
    """Return what bounds prefetching, in seconds: a batch's tools on the workers, one tool, a step, the look-ahead."""
    step = samples.quantile("off/step_s").value
    return {
        "step_s": step,
        "tools_of_a_batch_s": options.tool_s * options.batch / options.workers,
        "tool_s": options.tool_s,
        "look_ahead_s": step * options.prefetch,
    }


def _show(samples: Samples, limits: dict[str, float], options: argparse.Namespace) -> None:
    table = Table("run", "step, ms", "/ off", "mean, ms", "first steps, s", "waited, s", "trainer", "containers", "all")
    table.title, table.title_justify = f"Step time with tools of {options.tool_s:g} s (median [95 %])", "left"
    for kind in KINDS:
        mean = _mean(samples, f"{kind}/step_s")
        table.add_row(
            kind,
            samples.quantile(f"{kind}/step_s").show(0, 1000),
            "-" if kind == "off" else samples.ratio(f"{kind}/step_s", "off/step_s").show(3),
            f"{mean * 1000:.0f}",
            f"{samples.quantile(f'{kind}/first_steps_s').value:.1f}",
            f"{samples.quantile(f'{kind}/waited_s').value:.1f}" if f"{kind}/waited_s" in samples else "-",
            *(f"{_mean(samples, f'{kind}/{who}') * 1000:.0f}" for who in ("own_cpu_s", "containers_cpu_s", "busy_s")),
        )
    console.print(table)
    console.print(
        "trainer, containers, all: processor time of a step in ms; all: with the engine and whatever else runs. "
        f"{options.threads} torch threads on {machine()['cores']} cores."
    )
    busy, step = limits["tools_of_a_batch_s"], limits["step_s"]
    if busy > step:
        console.print(
            f"[yellow]The sandbox is the limit: {options.batch} tools of {options.tool_s:g} s on {options.workers} "
            f"workers take {busy:.2f} s, a step {step:.2f} s; --workers {int(busy * options.workers / step) + 1}"
        )
    if options.tool_s > limits["look_ahead_s"]:
        console.print(
            f"[yellow]The look-ahead is the limit: {options.prefetch} batches of {step:.2f} s are shorter than a tool"
        )


def _mean(samples: Samples, name: str) -> float:
    values = samples.raw[name]
    return sum(values) / len(values)


# Data


def _write_data(folder: Path, options: argparse.Namespace) -> None:
    """Write shards of eight batches of sessions of about 1000 tokens, each with one slow tool that is never cached."""
    lines = [_session(number, options.tool_s).model_dump_json() for number in range(10 * options.batch)]
    (folder / "sessions.jsonl").write_text("\n".join(lines) + "\n")
    config = load(YAML)
    write_shards(
        [folder / "sessions.jsonl"], folder / "shards", text=config.text, positions=config.model.feedback_positions,
        vocab_size=800, holdout=["held-out"],
    )  # fmt: skip


def _session(number: int, tool_s: float) -> Session:
    """Return a session that reads files, changes one, and runs a program that sleeps; every ninth is held out."""
    source = "".join(f"def part_{i}(value):\n    return value * {number + i} + {i}\n\n\n" for i in range(10))
    code = f"import time\ntime.sleep({tool_s})\nprint('case {number} done')\n"
    shown = "".join(f"{row}: {line}\n" for row, line in enumerate(source.splitlines(), 1))
    names = ["parts.py", *(f"part_{i}.py" for i in range(4))]
    steps = [
        *(("file_read", {"path": name}, shown) for name in names),
        ("file_edit", {"path": "parts.py", "old": "+ 3\n", "new": "+ 4\n"}, "parts.py: edited at line 14\n"),
        ("python_run", {"code": code}, f"case {number} done\n"),
    ]
    return Session(
        session_id=f"slow/{number}",
        repository="held-out" if number % 9 == 0 else None,
        user_instruction=f"Part 3 of case {number} is off by one: repair it and show that the case still runs. " * 3,
        execution_trace=[
            TraceStep(
                step=row,
                thought=f"Step {row} of case {number}: use {name} and look at what comes back before going on.",
                tool_called=name,
                tool_args=args,
                execution_result=ExecutionResult(exit_code=0, status="ok", stdout=stdout),
            )
            for row, (name, args, stdout) in enumerate(steps, 1)
        ],
        final_output=f"Part 3 of case {number} adds four now, and the case runs.",
        intents=["fix_test_failure"] if number % 2 else ["implement_function"],
        workspace=InlineWorkspace(files=dict.fromkeys(names, source)),
    )


if __name__ == "__main__":
    sys.exit(main())
