"""The page that ends the demo (floor 5): what happened, how good it is beside what reads nothing, what to try next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

HEADS: tuple[tuple[str, str], ...] = (
    ("tool_accuracy", "next tool, accuracy"),
    ("tool_accuracy_silent", "… where no thought precedes"),
    ("intent_f1", "intents, micro-F1"),
    ("outcome_auc", "will this run pass, AUC"),
    ("outcome_auc_after_edit", "… first run after an edit, AUC"),
    ("outcome_brier", "will this run pass, Brier"),
    ("cursor_error_lines", "caret after the repair, mean lines off"),
    ("cursor_error_lines_median", "… median lines off"),
)
"""Metric of ``summary.json`` → what a reader calls it, in the order of the page."""

CALLS: tuple[tuple[str, str], ...] = (
    ("parsed", "well-formed calls"),
    ("right_tool", "the recorded tool"),
    ("right_file", "the recorded file"),
    ("same_call", "the very same call"),
)


def print_page(summary: Mapping[str, Any], run: Path, console: Console) -> None:
    """Print the page of one finished run."""
    parts: list[RenderableType] = [_what_happened(summary), _loss_table(summary["loss"]), _heads(summary["heads"])]
    parts += [_honest_note(summary["heads"], summary.get("path_accuracy")), _next(run)]
    body = Group(*(renderable for part in parts for renderable in (part, Text())))
    console.print(Panel(body, title=f"[bold]{run.name}: finished[/]", padding=(1, 2)))


def _executions(sandbox: Mapping[str, Any]) -> str:
    if not sandbox["executions"]:
        return "No tool call ran while it trained."
    statuses = ", ".join(f"{count} {status}" for status, count in sandbox["by_status"].items() if count)
    return (
        f"While it trained, {sandbox['executions']} tool calls ran in the sandbox ({statuses}; median "
        f"{sandbox['median_ms']:.1f} ms); {sandbox['cache_hits']} more were answered from its cache."
    )


def _what_happened(summary: Mapping[str, Any]) -> Text:
    sessions, probe = summary["sessions"], summary["probe"]
    splits = ", ".join(f"{count} {split}" for split, count in sessions["by_split"].items() if count)
    packages = ", ".join(f"{name} {count}" for name, count in sessions["by_package"].items())
    lines = [
        f"{sessions['kept']} repair sessions ({packages}), split by package: {splits}.",
        "Every result in them was really executed: defects that a package's own tests catch, and their repair.",
        f"Training saw {summary['tokens']['trained']:,} trained and {summary['tokens']['context']:,} context tokens.",
        _executions(summary["sandbox"]),
        f"The model's own calls: {probe['calls']} sampled on held-out sessions, {_share(probe['parse_ok'], probe)} "
        f"well-formed, {_share(probe['exit0'], probe)} ended with exit code 0.",
    ]
    return Text("\n".join(lines))


def _loss_table(losses: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table(title="Losses on training batches", title_justify="left")
    for column in ("component", "first", "last", "change", "weight first → last"):
        table.add_column(column, justify="left" if column == "component" else "right")
    for name, row in losses.items():
        first, last = row["first"], row["last"]
        if first is None or last is None:
            continue
        change = f"{(last - first) / first:+.0%}" if first else ""
        weights = f"{row['weight_first']:.2f} → {row['weight_last']:.2f}"
        table.add_row(name, f"{first:.3f}", f"{last:.3f}", change, weights)
    return table


def head_table(heads: Mapping[str, Mapping[str, Any]], *, title: str) -> Table:
    """Return the table of every head's figure beside its baselines."""
    table = _metric_table(title, "model")
    for name, label in HEADS:
        table.add_row(label, *_beside(heads[name]))
    return table


def calls_table(calls: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """Return the table of the calls that the model wrote by itself (``free``) and within the ``grammar``."""
    count = calls["free"]["parsed"]["count"]
    table = _metric_table(f"The model's own next calls at {count} recorded ones", "by itself", "in the grammar")
    for name, label in CALLS:
        table.add_row(label, _number(calls["free"][name]["value"]), *_beside(calls["grammar"][name]))
    return table


def _metric_table(title: str, *values: str) -> Table:
    """Return an empty table: question, columns of values, baselines."""
    table = Table(title=title, title_justify="left")
    table.add_column("question")
    for column in (*values, "best baseline"):
        table.add_column(column, justify="right")
    table.add_column("all baselines")
    return table


def _beside(metric: Mapping[str, Any]) -> tuple[Text, str, str]:
    """Return a metric's value, its best baseline and all of them, as cells."""
    others = ", ".join(f"{key} {_number(number)}" for key, number in metric["baselines"].items())
    return Text(_number(metric["value"]), style=_style(metric)), _number(metric["baseline"]), others


def _heads(heads: Mapping[str, Mapping[str, Any]]) -> Table:
    return head_table(heads, title="Heads on the held-out package, beside what reads nothing")


def _honest_note(heads: Mapping[str, Mapping[str, Any]], path_accuracy: Mapping[str, Any] | None) -> Text:
    weak = [label.strip("… ") for name, label in HEADS if not _beats(heads[name])]
    lines = []
    if weak:
        lines.append(f"Not better than a baseline, so not learnt: {'; '.join(weak)}.")
    if path_accuracy:
        lines.append(path_line(path_accuracy))
    return Text("\n".join(lines))


def path_line(accuracy: Mapping[str, Any]) -> str:
    """Return the sentence about Path Accuracy@k."""
    return (
        f"Path Accuracy@{accuracy['steps']} on {accuracy['count']} held-out sessions: {accuracy['value']:.2f} "
        f"({accuracy['edits']} edits applied in {accuracy['calls']} calls, {accuracy['parse_ok']} of them well-formed)."
    )


def _next(run: Path) -> Group:
    commands = Table.grid(padding=(0, 3))
    commands.add_row(f"agentft traces {run} --failed", "read what the callback executed, and what it cost")
    commands.add_row(f"agentft inspect data/{run.name}/sessions.jsonl", "see one session as the model sees it")
    commands.add_row(f"agentft export {run} -o {run}/hf", "a folder that transformers loads without agentft")
    return Group(Text(f"Everything is in {run}/ (summary.json, traces/, model/). Try next:", style="bold"), commands)


def _beats(metric: Mapping[str, Any]) -> bool:
    value, baseline = metric["value"], metric["baseline"]
    if value is None or baseline is None:
        return False
    return bool(value > baseline if metric["better"] == "higher" else value < baseline)


def _style(metric: Mapping[str, Any]) -> str:
    return "bold green" if _beats(metric) else "yellow"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _share(count: int, probe: Mapping[str, Any]) -> str:
    return f"{count / probe['calls']:.0%}" if probe["calls"] else "none"
