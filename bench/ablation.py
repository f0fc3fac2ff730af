"""What each optional part of training changes on a held-out package: one factor at a time, the same seeds for each.

    python bench/ablation.py --sessions data/demo/sessions.jsonl --holdout toolz      # eighteen runs, 50 minutes
    python bench/ablation.py --sessions … --holdout toolz --only raspberry --seed 17
    python bench/ablation.py --sessions … --holdout toolz --duration 20ba --seed 17   # does it run

Every run is `composer train.py` as a user starts it and `agentft eval`, without a probe and without the evaluation
while training, on shards that this script writes. Finished runs are not repeated, so a stopped ablation goes on. A
difference is taken within a seed. No gate: the table (and the JSON) say what was measured; docs/results.md keeps it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.measure import RESULTS, machine, wide_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from agentft.config.load import load
from agentft.data.shards import write_shards
from agentft.errors import AgentFTError

BASE = "as shipped"
FACTORS: Mapping[str, Sequence[str]] = {
    BASE: (),
    "no feedback positions": ("model.feedback_positions.enabled=false",),
    "raspberry": ("algorithms.raspberry.enabled=true",),
    "constant weights": ("loss.code={kind: constant, start: 0.8}", "loss.cursor={kind: constant, start: 0.15}"),
    "curriculum": ("data.curriculum.by=steps",),
    "distillation": ("loss.distill.start=0.1",),
}
FIGURES: Mapping[str, tuple[str, int]] = {
    "tool_accuracy": ("next tool", 3),
    "intent_f1": ("intents, F1", 3),
    "outcome_auc": ("outcome, AUC", 3),
    "outcome_auc_after_edit": ("… after edit", 3),
    "outcome_brier": ("Brier", 3),
    "cursor_error_lines_median": ("caret, lines", 0),
    "code_loss": ("code loss", 2),
    "fit_s": ("training, s", 0),
}
"""Columns: what they are called, and their digits; ``code_loss`` is nats a trained token of the held-out package."""
Found = dict[str, dict[int, dict[str, float | None]]]
"""Setting → seed → figure → value."""
ROOT = Path(__file__).resolve().parents[1]
console = wide_console()


def main() -> int:
    options = _options()
    chosen = {name: FACTORS[name] for name in FACTORS if name == BASE or not options.only or name in options.only}
    found: Found = {name: {} for name in chosen}
    with _bar() as bar:
        task = bar.add_task("", total=len(options.seed) * len(chosen))
        for seed in options.seed:
            for name, overrides in chosen.items():
                bar.update(task, description=f"{name}, seed {seed}")
                try:
                    found[name][seed] = _measured(name, seed, overrides, options)
                except AgentFTError as error:
                    print(error, file=sys.stderr)
                    return error.exit_code
                except subprocess.CalledProcessError as error:
                    console.print(f"{name}, seed {seed}: exit code {error.returncode} of {' '.join(error.cmd)}")
                    console.print(error.output[-2000:], markup=False, highlight=False)
                    return 1
                bar.advance(task)
    _show(found)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"machine": machine(), "factors": chosen, "found": found}, indent=2) + "\n")
    console.print(f"every figure: {options.json}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=Path, required=True, help="sessions of several repositories")
    parser.add_argument("--holdout", action="append", required=True, help="repository that is measured on")
    parser.add_argument("--val-share", type=float, default=0.2, help="of the other sessions, for the calibration")
    parser.add_argument("--config", type=Path, default=ROOT / "yamls/agent/tiny-glm.yaml")
    parser.add_argument("--seed", type=int, action="append", help="repeat for several (default: 17, 18, 19)")
    parser.add_argument("--only", action="append", choices=[name for name in FACTORS if name != BASE])
    parser.add_argument("--duration", help="length of each run instead of the configuration's")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/ablation", help="folder of the runs")
    parser.add_argument("--json", type=Path, default=RESULTS / "ablation.json", help="where the figures go")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further overrides, the same for every run")
    options = parser.parse_args()
    options.seed = options.seed or [17, 18, 19]
    return options


def _bar() -> Progress:
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)


def _measured(name: str, seed: int, overrides: Sequence[str], options: argparse.Namespace) -> dict[str, float | None]:
    """Train and evaluate, unless this run is there already; return its figures."""
    run: Path = options.runs / f"{name.replace(' ', '-')}-{seed}"
    summary = run / "summary.json"
    if not (summary.is_file() and "heads" in json.loads(summary.read_text())):
        common = [f"run_name={run.name}", f"runs_dir={run.parent}", "overwrite=true", f"seed={seed}"]
        common += ["train.eval_interval=0ba", "feedback.probe.every=0"]
        common += [f"train.duration={options.duration}"] if options.duration else []
        shards = _shards([*overrides, *options.overrides], options)
        train = ["-m", "composer.cli.launcher", "-n", "1", str(ROOT / "train.py"), str(options.config)]
        _run([sys.executable, *train, *common, *overrides, *options.overrides, f"data.shards={shards}"])
        _run([sys.executable, "-m", "agentft.cli", "eval", str(run), "--json"])
    return _figures(json.loads(summary.read_text()))


def _shards(overrides: Sequence[str], options: argparse.Namespace) -> Path:
    """Return shards as a run with these overrides renders them, written at the first need."""
    config = load(options.config, overrides)
    rendered = repr((config.text, config.model.feedback_positions)).encode()
    folder: Path = options.runs / f"shards-{hashlib.sha256(rendered).hexdigest()[:12]}"
    if not folder.is_dir():
        write_shards(
            [options.sessions],
            folder,
            text=config.text,
            positions=config.model.feedback_positions,
            holdout=options.holdout,
            val_share=options.val_share,
        )
    return folder


def _run(argv: Sequence[str]) -> None:
    subprocess.run(argv, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _figures(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the columns; None where the held-out sessions do not define one (an AUC of runs that all pass, say)."""
    heads = {name: metric["value"] for name, metric in summary["heads"].items()}
    known = {name: heads.get(name) for name in FIGURES}
    return {**known, "code_loss": summary["held_out"]["code_loss"], "fit_s": summary["seconds"]["fit"]}


def _show(found: Found) -> None:
    table = Table("setting", title="Mean over seeds; below it each seed's difference to the run as shipped")
    for label, _ in FIGURES.values():
        table.add_column(label, justify="right")
    for name, by_seed in found.items():
        columns = {figure: [by_seed[seed][figure] for seed in by_seed] for figure in FIGURES}
        table.add_row(name, *(_mean(values, FIGURES[figure][1]) for figure, values in columns.items()))
        if name != BASE:
            pairs = {f: [(by_seed[seed][f], found[BASE][seed][f]) for seed in by_seed] for f in FIGURES}
            changes = [" ".join(_change(*pair, min(2, FIGURES[f][1])) for pair in pairs[f]) for f in FIGURES]
            table.add_row("", *changes, style="dim", end_section=True)
    console.print(table)


def _mean(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.{digits}f}" if len(known) == len(values) else "-"


def _change(value: float | None, base: float | None, digits: int) -> str:
    """Return a difference without its leading zero: six columns of three have to fit."""
    if value is None or base is None:
        return "-"
    return f"{value - base:+.{digits}f}".replace("+0.", "+.").replace("-0.", "-.")


if __name__ == "__main__":
    sys.exit(main())
