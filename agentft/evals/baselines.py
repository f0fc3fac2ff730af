"""Baselines (floor 4): what can be predicted without reading a session, fitted on the training split only.

Each function takes training facts and evaluation facts and returns predictions for the evaluation facts in order.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence

from agentft.etai import INTENTS
from agentft.evals.facts import SessionFacts, StepFacts, known_runs, known_tool_steps

Facts = Sequence[SessionFacts]


def majority_tool(train: Facts, steps: Sequence[StepFacts]) -> list[str]:
    """Always the commonest tool."""
    return _lookup(train, steps, lambda step: None)


def bigram_tool(train: Facts, steps: Sequence[StepFacts]) -> list[str]:
    """The commonest tool after the previous tool."""
    return _lookup(train, steps, lambda step: step.previous_tool)


def bigram_exit_tool(train: Facts, steps: Sequence[StepFacts]) -> list[str]:
    """The commonest tool after the previous tool and its exit code."""
    return _lookup(train, steps, lambda step: (step.previous_tool, step.previous_exit))


def rule_outcome(steps: Sequence[StepFacts]) -> list[float]:
    """The first run fails, every later one passes."""
    return [float(step.run_index > 0) for step in steps]


def table_outcome(train: Facts, steps: Sequence[StepFacts]) -> list[float]:
    """Share of passes by (number of earlier runs, edited since the last run), with one pseudo-count each way."""
    counts: dict[tuple[int, bool], list[int]] = defaultdict(lambda: [1, 2])
    for step in known_runs(train):
        cell = counts[_cell(step)]
        cell[0] += bool(step.passed)
        cell[1] += 1
    return [counts[_cell(step)][0] / counts[_cell(step)][1] for step in steps]


def majority_intents(train: Facts) -> list[float]:
    """Every label that more than half of the training sessions carry."""
    share = _intent_share(train)
    return [float(value > 0.5) for value in share]


def best_constant_intents(train: Facts) -> list[float]:
    """The constant set of labels with the best micro-F1 on the training sessions: the k commonest for the best k."""
    share = _intent_share(train)
    order = sorted(range(len(INTENTS)), key=lambda row: -share[row])
    positives = sum(share)
    best, best_f1 = 0, -1.0
    for k in range(1, len(INTENTS) + 1):
        hits = sum(share[row] for row in order[:k])
        f1 = 2 * hits / (k + positives) if positives else 0.0
        if f1 > best_f1:
            best, best_f1 = k, f1
    chosen = set(order[:best])
    return [float(row in chosen) for row in range(len(INTENTS))]


def constant_cursor(train: Facts, sessions: Facts) -> list[float]:
    """Error in lines of a constant place on the screen: the median height in the viewport over training sessions."""
    heights = [_height(s, s.target_line) for s in train if s.target_line is not None]
    middle = statistics.median(heights) if heights else 0.0
    return [abs(_height(s, s.target_line) - middle) / s.line_px for s in sessions if s.target_line is not None]


def caret_cursor(sessions: Facts) -> list[float]:
    """Error in lines of staying where the caret is (line 1 where it is not known)."""
    return [float(abs(s.target_line - (s.cursor_line or 1))) for s in sessions if s.target_line is not None]


def recent_edit_cursor(sessions: Facts, seed: int = 0) -> list[float]:
    """Error in lines of going to a random edit of the same session (to the caret where none names a line)."""
    draw = random.Random(seed)
    errors = []
    for session in sessions:
        if session.target_line is None:
            continue
        lines = [step.edit_line for step in session.steps if step.edit_line is not None]
        place = draw.choice(lines) if lines else session.cursor_line or 1
        errors.append(float(abs(session.target_line - place)))
    return errors


def _lookup(train: Facts, steps: Sequence[StepFacts], key: Callable[[StepFacts], Hashable]) -> list[str]:
    tables: dict[Hashable, Counter[str]] = defaultdict(Counter)
    overall: Counter[str] = Counter()
    for step in known_tool_steps(train):
        tables[key(step)][step.tool] += 1
        overall[step.tool] += 1

    def best(counter: Counter[str]) -> str:
        return min(counter, key=lambda tool: (-counter[tool], tool))

    return [best(tables.get(key(step)) or overall) for step in steps] if overall else [""] * len(steps)


def _cell(step: StepFacts) -> tuple[int, bool]:
    return min(step.run_index, 3), step.edited_since_run


def _intent_share(train: Facts) -> list[float]:
    labelled = [s.intents for s in train if s.intents is not None]
    return [sum(name in labels for labels in labelled) / max(1, len(labelled)) for name in INTENTS]


def _height(session: SessionFacts, line: int | None) -> float:
    return ((line or 1) - 1) * session.line_px - session.scroll_top
