"""``agentft synth`` (floor 3): the command line of ``synthesize``, with a progress bar and a table at the end."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from agentft.data.synthesis.report import SynthReport, report_path
from agentft.data.synthesis.synthesize import Progress, SandboxSettings
from agentft.data.synthesis.synthesize import synthesize as run
from agentft.errors import EXIT_GATE, EXIT_OK


def synthesize(arguments: Namespace) -> int:
    """Run ``agentft synth``; exit code 4 where fewer sessions than asked for could be made."""
    started = time.monotonic()
    settings = SandboxSettings(backend=arguments.backend, image=arguments.image, workers=arguments.workers)
    with shown() as progress:
        report = run(
            arguments.package,
            arguments.sessions,
            Path(arguments.output),
            sandbox=settings,
            seed=arguments.seed,
            progress=progress,
        )
    if arguments.json:
        print(json.dumps(report.to_json()))
    else:
        print_report(report, time.monotonic() - started)
    return EXIT_OK if report.kept >= report.wanted else EXIT_GATE


@contextmanager
def shown() -> Iterator[Callable[[Progress], None]]:
    """Show a bar on standard error: kept of wanted, tried, rate, time left. Silent where that is no terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tried]} tried  {task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None, tried=0, rate="")
        started = time.monotonic()

        def update(state: Progress) -> None:
            seconds = (time.monotonic() - started) / state.kept if state.kept else 0.0
            rate = f"{seconds:.2f} s each" if state.kept else ""
            bar.update(
                task, description=state.doing, total=state.wanted, completed=state.kept, tried=state.tried, rate=rate
            )

        yield update


def print_report(report: SynthReport, seconds: float) -> None:
    """Print what was kept and dropped."""
    console = Console(highlight=False, soft_wrap=True)
    how = "reused, the same request was finished before" if report.reused else f"{seconds:.0f} s"
    console.print(f"{report.kept} sessions of {report.tried} defects tried → {report.output} ({how})")
    table = Table(box=None, pad_edge=False)
    table.add_column("what")
    table.add_column("counts")
    rows = (
        ("packages", report.by_package),
        ("kinds", report.by_kind),
        ("openings", report.by_opening),
        ("steps", dict(sorted(report.steps.items()))),
        ("intents", report.intents),
        ("dropped", report.dropped),
    )
    for name, counts in rows:
        table.add_row(name, ", ".join(f"{key} {value}" for key, value in counts.items()))
    console.print(table)
    console.print(
        f"a first wrong edit in {report.mistakes:.0%} of the sessions; details in {report_path(report.output)}"
    )
