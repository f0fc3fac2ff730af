"""The main job, from packages to a trained agent (floor 5): ``agentft demo``, called by ``make demo``.

Stages: sandbox image → synthesised sessions → shards → ``composer train.py`` → evaluation on the held-out package →
``summary.json`` and a printed page. Every stage is a command that the page names, so that each can be run by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from agentft.errors import AgentFTError, SandboxError
from agentft.files import write_json
from agentft.report.page import print_page

PACKAGES = ("boltons==26.2.0", "cachetools==8.0.2", "toolz==1.2.0")
HELD_OUT = "toolz"
SESSIONS = 330
VAL_SHARE = 0.2
CONFIG = "yamls/agent/tiny-glm.yaml"
PATH_ACCURACY_SESSIONS = 10


def command(arguments: argparse.Namespace) -> int:
    """Run every stage; returns 0 when the summary is written."""
    console = Console()
    run = Path(arguments.output)
    work = Path("data") / run.name
    seconds: dict[str, float] = {}
    backend = choose_backend(arguments.backend, console)
    with _stage(console, seconds, "image", "sandbox image"):
        _ready_image(backend)
    sessions = work / "sessions.jsonl"
    with _stage(console, seconds, "synth", "repair sessions from real packages, every step executed"):
        _agentft("synth", *_each("--package", PACKAGES), "-n", SESSIONS, "-o", sessions, "--backend", backend)
    with _stage(console, seconds, "shards", "tokens, masks and anchors into shards"):
        splits = ("--holdout", HELD_OUT, "--val-share", VAL_SHARE)
        _agentft("shards", "write", sessions, "-o", work / "shards", "--config", CONFIG, *splits)
    keep_previous(run, console)
    overrides = [
        f"run_name={run.name}",
        f"runs_dir={run.parent}",
        f"seed={arguments.seed}",
        f"data.shards={work / 'shards'}",
        f"feedback.backend={backend}",
        "train.eval_interval=0ba",  # the next stage measures the same sessions, and more about them
    ]
    with _stage(console, seconds, "train", "training with execution feedback"):
        _call([sys.executable, "-m", "composer.cli.launcher", "-n", "1", "train.py", CONFIG, *overrides])
    with _stage(console, seconds, "evaluate", f"heads on {HELD_OUT}, which the model never saw"):
        _agentft("eval", run, "--split", "test", "--path-accuracy", PATH_ACCURACY_SESSIONS)
    summary = merge_summary(run, sessions, seconds)
    print_page(summary, run, console)
    return 0


def choose_backend(wanted: str, console: Console) -> str:
    """Return docker where an engine answers, else local with a notice; an explicit choice stands."""
    if wanted != "auto":
        return wanted
    from agentft.sandbox.docker import connect

    try:
        connect().close()
    except SandboxError as error:
        console.print(f"[yellow]No Docker Engine answers:[/] {error.got}")
    else:
        return "docker"
    console.print(
        "Going on with the embedded [bold]local[/] backend (bubblewrap): no network, read-only system, limits;"
    )
    console.print("it is meant for trusted code and keeps no memory limit per container.")
    return "local"


def keep_previous(run: Path, console: Console) -> None:
    """Move an earlier run of the same name aside, so that nothing is overwritten."""
    if not run.exists():
        return
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(run.stat().st_mtime))
    aside = run.with_name(f"{run.name}-{stamp}")
    run.rename(aside)
    console.print(f"The earlier run is kept as {aside}.")


def merge_summary(run: Path, sessions: Path, seconds: dict[str, float]) -> dict[str, Any]:
    """Join what synthesis, training and evaluation reported; write it to ``summary.json`` and return it."""
    path = run / "summary.json"
    summary = _read(path)
    report = _read(sessions.with_name(f"{sessions.stem}.report.json"))
    meta = _read(sessions.parent / "shards" / "meta.json")
    summary["sessions"] = {
        "kept": report["kept"],
        "by_split": {split: counts["sessions"] for split, counts in meta["splits"].items()},
        "by_package": report["by_package"],
    }
    summary["seconds"] = {**summary.get("seconds", {}), **{name: round(value, 1) for name, value in seconds.items()}}
    write_json(path, summary)
    return summary


def _ready_image(backend: str) -> None:
    if backend == "docker":
        _agentft("sandbox", "build", "python")


def _agentft(*words: object) -> None:
    _call([sys.executable, "-m", "agentft.cli", *map(str, words)])


def _call(argv: list[str]) -> None:
    """Run one stage as the command it is; its output goes to this terminal."""
    done = subprocess.run(argv, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    if done.returncode:
        shown = " ".join(["agentft", *argv[3:]] if argv[2] == "agentft.cli" else ["composer", *argv[3:]])
        error = AgentFTError(
            f"a stage of the demo ended with exit code {done.returncode}", hint=f"run it alone: {shown}"
        )
        error.exit_code = done.returncode
        raise error


def _each(flag: str, values: tuple[str, ...]) -> list[str]:
    return [word for value in values for word in (flag, value)]


@contextmanager
def _stage(console: Console, seconds: dict[str, float], name: str, what: str) -> Iterator[None]:
    console.rule(f"[bold]{name}[/]: {what}", align="left")
    started = time.monotonic()
    yield
    seconds[name] = time.monotonic() - started


def _read(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise AgentFTError("a stage left no report", where=str(path), hint="run the stage before it again") from None
    return data
