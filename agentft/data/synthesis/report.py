"""What a synthesis tried, kept and dropped, and how the kept sessions look (floor 3)."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentft.etai import Session
from agentft.files import write_json


@dataclass
class SynthReport:
    """Counts of one synthesis; ``output`` is the file of sessions.

    ``tried`` counts defects whose tests were run; ``dropped`` says why those without a session have none, ``unused``
    how many were caught but not needed. ``resumed`` counts answers taken over from an earlier call.
    ``bigram`` is the share of steps whose tool the commonest successor of (tool, exit code) names, counted on the same
    sessions: what a router that reads nothing else would reach at most.
    """

    output: Path
    request: str
    tried: int = 0
    kept: int = 0
    wanted: int = 0
    unused: int = 0
    resumed: int = 0
    reused: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    by_package: Counter[str] = field(default_factory=Counter)
    by_opening: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    intents: Counter[str] = field(default_factory=Counter)
    complexity: Counter[str] = field(default_factory=Counter)
    tools: Counter[str] = field(default_factory=Counter)
    next_tool: dict[str, dict[str, int]] = field(default_factory=dict)
    bigram: float = 0.0
    mistakes: float = 0.0

    def describe(self, sessions: Iterable[Session]) -> None:
        """Count what the kept sessions are made of."""
        table: dict[str, Counter[str]] = defaultdict(Counter)
        with_mistake = total = 0
        for session in sessions:
            total += 1
            self.by_package[session.repository or ""] += 1
            self.steps[str(len(session.execution_trace))] += 1
            self.intents.update(session.intents or ())
            self.complexity[session.complexity or ""] += 1
            with_mistake += any(step.mistake for step in session.execution_trace)
            before = "start"
            for step in session.execution_trace:
                self.tools[step.tool_called] += 1
                if not step.mistake:
                    table[before][step.tool_called] += 1
                result = step.execution_result
                before = f"{step.tool_called} {result.exit_code if result else None}"
        self.kept = total
        self.mistakes = round(with_mistake / max(1, total), 3)
        self.next_tool = {key: dict(counts.most_common()) for key, counts in sorted(table.items())}
        decided = sum(sum(counts.values()) for counts in table.values())
        self.bigram = round(sum(max(counts.values()) for counts in table.values()) / max(1, decided), 3)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        plain = {
            name: dict(value.most_common()) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }
        plain["steps"] = dict(sorted(self.steps.items()))
        return {**plain, "output": str(self.output)}

    def write(self) -> Path:
        """Write ``<output stem>.report.json`` beside the output; return its path."""
        path = report_path(self.output)
        write_json(path, self.to_json())
        return path


def report_path(output: Path) -> Path:
    """Return where the report of ``output`` lies (``sessions.jsonl`` → ``sessions.report.json``)."""
    stem = output.name
    for suffix in (".gz", ".zst", ".jsonl"):
        stem = stem.removesuffix(suffix)
    return output.with_name(f"{stem}.report.json")


def load_report(output: Path, request: str) -> SynthReport | None:
    """Return the report of a finished synthesis of the same request; None if there is none."""
    path = report_path(output)
    if not (path.is_file() and output.is_file()):
        return None
    try:
        plain = json.loads(path.read_text())
        if plain["request"] != request:
            return None
        counters = {name: Counter(plain[name]) for name in vars(SynthReport(output, "")) if name in _COUNTERS}
        return SynthReport(**{**plain, **counters, "output": output, "reused": True})
    except (ValueError, KeyError, TypeError):
        return None


_COUNTERS = {"dropped", "by_kind", "by_package", "by_opening", "steps", "intents", "complexity", "tools"}
