"""``agentft traces RUN`` (floor 5): the reward traces of a run as a table, or one session step by step.

Works while the run is going on. ``RUN`` is a run folder, a trace file, or a name under ``runs/``.

    agentft traces runs/demo --failed --tool pytest_run
    agentft traces runs/demo --session more-itertools-0017
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from agentft.errors import EXIT_OK, DataError
from agentft.feedback.trace import TraceLine, read_traces

STYLES = {"passed": "green", "failed": "red", "lost": "yellow", "no parse": "magenta"}
WIDTH = 140
"""Columns of the output where it does not go to a terminal."""

OUTPUT_LINES = 16
"""Lines of output that the step-by-step view shows of one execution; the middle is cut."""


def command(arguments: argparse.Namespace) -> int:
    """``agentft traces``: print totals and lines (newest last), or one session; ``--json`` prints one object."""
    path = run_path(arguments.run)
    lines = list(read_traces(path))
    chosen = select(
        lines,
        failed=arguments.failed,
        tool=arguments.tool,
        step=arguments.step,
        source=arguments.source,
        session=find_session(arguments.session, lines, path) if arguments.session else None,
    )
    shown = chosen if arguments.session or arguments.limit <= 0 else chosen[-arguments.limit :]
    if arguments.json:
        found = {"run": str(path), "totals": totals(lines), "matching": len(chosen)}
        print(json.dumps({**found, "lines": [asdict(line) for line in shown]}))
        return EXIT_OK
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if arguments.session:
        print_session(shown, console)
        return EXIT_OK
    print_totals(lines, console)
    print_table(shown, console)
    if len(shown) < len(chosen):
        console.print(f"newest {len(shown)} of {len(chosen)} lines; --limit 0 shows all", style="dim")
    if shown:
        console.print(f"step by step: agentft traces {arguments.run} --session {shown[-1].session_id}", style="dim")
    return EXIT_OK


def run_path(run: str) -> Path:
    """Return a run folder or trace file; a bare name is looked up under ``runs/``."""
    path = Path(run)
    return path if path.exists() or not (Path("runs") / run).exists() else Path("runs") / run


def how(line: TraceLine) -> str:
    """Say how an execution ended: passed, failed, lost (the sandbox's fault) or no parse (never ran)."""
    if line.status is None:
        return "no parse"
    if line.status == "infra":
        return "lost"
    passed = line.status == "ok" and line.exit_code == 0 and not line.fields.get("tampered")
    return "passed" if passed else "failed"


def select(
    lines: Iterable[TraceLine],
    *,
    failed: bool = False,
    tool: str | None = None,
    step: int | None = None,
    source: str | None = None,
    session: str | None = None,
) -> list[TraceLine]:
    """Return the lines that meet every given condition, in order."""
    return [
        line
        for line in lines
        if (not failed or how(line) != "passed")
        and (tool is None or line.tool == tool)
        and (step is None or line.step == step)
        and (source is None or line.source == source)
        and (session is None or line.session_id == session)
    ]


def find_session(part: str, lines: Sequence[TraceLine], path: Path) -> str:
    """Return the one session whose id is ``part`` or contains it.

    Raises:
        DataError: None or several do; names some that could be meant.
    """
    known = sorted({line.session_id for line in lines})
    found = [name for name in known if name == part] or [name for name in known if part in name]
    if len(found) == 1:
        return found[0]
    shown = ", ".join((found or known)[:5])
    what = f"{len(found)} sessions fit" if found else "no execution of this session"
    raise DataError(what, where=str(path), got=part, expected=f"one of {len(found or known)}: {shown}, …")


def totals(lines: Sequence[TraceLine]) -> dict[str, Any]:
    """Return counts, median milliseconds and mean reward over all lines, by source and by tool."""
    return {
        **_total(lines),
        "by_source": _grouped(lines, lambda line: line.source),
        "by_tool": _grouped(lines, lambda line: line.tool),
    }


def _grouped(lines: Sequence[TraceLine], name: Callable[[TraceLine], str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[TraceLine]] = defaultdict(list)
    for line in lines:
        groups[name(line)].append(line)
    return {key: _total(groups[key]) for key in sorted(groups, key=lambda k: -len(groups[k]))}


def _total(lines: Sequence[TraceLine]) -> dict[str, Any]:
    ended = [how(line) for line in lines]
    ran_ms = [line.duration_s * 1000 for line in lines if line.status is not None and not line.cached]
    rewards = [line.reward for line in lines if line.reward is not None]
    return {
        "lines": len(lines),
        **{name.replace(" ", "_"): ended.count(name) for name in STYLES},
        "cached": sum(line.cached for line in lines),
        "median_ms": round(median(ran_ms), 1) if ran_ms else None,
        "mean_reward": round(sum(rewards) / len(rewards), 3) if rewards else None,
    }


def print_totals(lines: Sequence[TraceLine], console: Console) -> None:
    """Print one row per source and per tool."""
    found = totals(lines)
    table = Table(box=None, pad_edge=False, header_style="bold", title=f"{len(lines)} executions", title_justify="left")
    table.add_column("")
    for name in ("lines", "passed", "failed", "lost", "no parse", "median ms", "mean reward"):
        table.add_column(name, justify="right")
    for group in ("by_source", "by_tool"):
        for key, row in found[group].items():
            values = [row[n] for n in ("lines", "passed", "failed", "lost", "no_parse", "median_ms", "mean_reward")]
            table.add_row(Text(key), *("-" if value is None else str(value) for value in values))
        table.add_section()
    console.print(table)
    console.print()


def print_table(lines: Sequence[TraceLine], console: Console) -> None:
    """Print one row per execution; a star marks results that came from the cache."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for name in ("batch", "source", "session", "step", "tool", "result", "ms", "reward", "predicted"):
        number = name in ("batch", "step", "ms", "reward", "predicted")
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    room = max(10, console.width - 66)
    for line in lines:
        ended = how(line)
        table.add_row(
            str(line.batch),
            line.source if line.role == "call" else f"{line.source} {line.role}",
            Text(_tail(line.session_id, room)),
            str(line.step),
            Text(line.tool),
            Text(_result(line), style=STYLES[ended]),
            f"{line.duration_s * 1000:.0f}" + ("*" if line.cached else ""),
            _number(line.reward),
            _number(line.predicted_reward),
        )
    console.print(table)


def _result(line: TraceLine) -> str:
    if line.fields.get("tampered"):
        return "tampered"
    if line.status == "nonzero":
        return f"exit {line.exit_code}"
    return line.status or "no parse"


def _tail(text: str, room: int) -> str:
    return text if len(text) <= room else "…" + text[-(room - 1) :]


def print_session(lines: Sequence[TraceLine], console: Console) -> None:
    """Print every execution of one session: the call, its output, its reward, what the heads thought before."""
    console.print(Text(lines[0].session_id, style="bold"))
    intents = next((line.intents for line in lines if line.intents), None)
    if intents:
        console.print(f"intents: {_probabilities(intents)}")
    for line in sorted(lines, key=lambda item: (item.source, item.batch, item.step)):
        _print_step(line, console)


def _print_step(line: TraceLine, console: Console) -> None:
    ended = how(line)
    console.rule(Text(f"{line.source} · batch {line.batch} · step {line.step} · {line.role}"), align="left")
    console.print(Text(line.tool, style="bold"))
    for name, value in line.args.items():
        text = value if isinstance(value, str) else json.dumps(value)
        if "\n" in text:
            console.print(Text(f"  {name}:"))
            console.print(Syntax(text, "python", background_color="default", word_wrap=True))
        else:
            console.print(Text(f"  {name}: {text}"))
    for name, text in (("stdout", line.stdout), ("stderr", line.stderr)):
        if text.strip():
            console.print(Panel(Text(_cut(text)), title=name, title_align="left", border_style="dim"))
    for one in line.fields.get("tampered") or ():
        console.print(Text(f"tampered: {one['path']} ({one['kind'].replace('_', ' ')})", style="red"))
    exit_code = "" if line.exit_code is None else f", exit {line.exit_code}"
    console.print(Text(f"{line.status or ended}{exit_code}, {line.duration_s * 1000:.0f} ms", style=STYLES[ended]))
    parts = {"reward": line.reward, "predicted": line.predicted_reward, "advantage": line.advantage}
    console.print("  ".join(f"{name} {_number(value)}" for name, value in parts.items()))
    if line.tool_probs:
        console.print(f"tools: {_probabilities(line.tool_probs)}")


def _probabilities(values: dict[str, float], most: int = 4) -> str:
    best = sorted(values.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{name} {value:.2f}" for name, value in best)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _cut(text: str) -> str:
    lines = text.rstrip().splitlines()
    if len(lines) <= OUTPUT_LINES:
        return "\n".join(lines)
    half = OUTPUT_LINES // 2
    return "\n".join([*lines[:half], f"… {len(lines) - 2 * half} lines left out …", *lines[-half:]])
