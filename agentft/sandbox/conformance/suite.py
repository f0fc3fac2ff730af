"""The whole suite (floor 2): every check in order, run on a subject, printed as a table; and the table of promises.

with open_subject("docker", image="python", host=None) as subject:
    outcomes = run_suite(subject)
print_table(outcomes, title="docker")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentft.errors import ConfigError
from agentft.sandbox.conformance import faults, files, kernel, limits, outside, processes, results, sessions
from agentft.sandbox.conformance.check import Check, Outcome, Stage, Subject, Verdict

MODULES = (results, processes, limits, files, kernel, outside, sessions, faults)
CHECKS: tuple[Check, ...] = tuple(one for module in MODULES for one in vars(module).values() if isinstance(one, Check))
STYLES: dict[Verdict, str] = {"held": "green", "BROKEN": "bold red", "not promised": "yellow", "not run": "yellow"}
ENGINES = ("docker", "local")


def select(names: Iterable[str]) -> tuple[Check, ...]:
    """Return the checks of these names or groups; all of them for none. Raises ``ConfigError`` for unknown ones."""
    wanted = list(names)
    for name in wanted:
        if not any(name in (one.name, one.group) for one in CHECKS):
            groups = ", ".join(dict.fromkeys(one.group for one in CHECKS))
            raise ConfigError(
                "there is no such check",
                where="--only",
                got=name,
                expected=f"a name of the table, or a group: {groups}",
            )
    return tuple(one for one in CHECKS if not wanted or one.name in wanted or one.group in wanted)


def run_suite(
    subject: Subject, checks: Sequence[Check] = CHECKS, report: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Make the checks one after the other; ``report`` gets each outcome as it comes."""
    outcomes = []
    stage = Stage(subject)
    try:
        for one in checks:
            outcomes.append(stage.run(one))
            report(outcomes[-1])
    finally:
        stage.close()
    return outcomes


def all_held(outcomes: Iterable[Outcome]) -> bool:
    """Whether everything that is promised held."""
    return all(outcome.verdict != "BROKEN" for outcome in outcomes)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the line below the table."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    parts = [f"{counts[verdict]} {verdict}" for verdict in STYLES if counts[verdict]]
    count = "1 check" if len(outcomes) == 1 else f"{len(outcomes)} checks"
    return f"{count}: {', '.join(parts)}; {sum(outcome.seconds for outcome in outcomes):.0f} s"


def print_table(outcomes: Sequence[Outcome], *, title: str, console: Console | None = None) -> None:
    """Print one row a check, by group, then the summary. The verdict is there on a terminal of 80 columns as well."""
    console = console or Console()
    table = Table(title=title, title_justify="left", box=box.HORIZONTALS)
    table.add_column("verdict", no_wrap=True)
    for heading, ratio in (("what must happen", 5), ("what was seen", 3)):
        table.add_column(heading, overflow="fold", ratio=ratio)
    for _, rows in groupby(outcomes, key=lambda outcome: outcome.check.group):
        table.add_section()
        for outcome in rows:
            verdict, one = Text(outcome.verdict, style=STYLES[outcome.verdict]), outcome.check
            must = Text.assemble((f"{one.group}: {one.name}", "bold"), f"\n{one.must}")
            table.add_row(verdict, must, Text(outcome.seen))
    console.print(table)
    console.print(summary(outcomes), highlight=False)


def outcomes_object(outcomes: Sequence[Outcome], *, engine: str, image: str) -> dict[str, Any]:
    """Return the run as a JSON object."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    rows = [
        {
            "name": outcome.check.name,
            "group": outcome.check.group,
            "must": outcome.check.must,
            "seen": outcome.seen,
            "verdict": outcome.verdict,
            "seconds": outcome.seconds,
        }
        for outcome in outcomes
    ]
    return {"engine": engine, "image": image, "ok": all_held(outcomes), "verdicts": dict(counts), "checks": rows}


def promises_table() -> str:
    """Return the checks as the Markdown table of docs/sandbox.md: what must happen, and which engine promises it."""
    lines = ["| check | must happen | docker | local |", "|---|---|---|---|"]
    for one in CHECKS:
        promises = [f"no: {one.not_promised[name]}" if name in one.not_promised else "yes" for name in ENGINES]
        lines.append(f"| {one.group}: {one.name} | {one.must} | {' | '.join(promises)} |")
    return "\n".join(lines) + "\n"
