"""Head metrics beside their baselines (floor 4). Every number stands next to the strongest thing that reads nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import torch
from torchmetrics.functional.classification import binary_auroc, multilabel_f1_score

from agentft.etai import INTENTS
from agentft.evals import baselines
from agentft.evals.facts import SessionFacts, StepFacts, known_runs, known_tool_steps
from agentft.tools import TOOL_INDEX

StepKey = tuple[str, int]
"""(session id, step number)."""


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What the heads said, by session and step; steps that truncation dropped are absent.

    ``intents``: probability per intent.  ``tools``: row of the tool head.  ``outcomes``: probability of passing.
    ``cursor_y``: height in the viewport in px.  ``code_loss``: mean cross-entropy of the trained tokens in nats.
    """

    intents: Mapping[str, Sequence[float]]
    tools: Mapping[StepKey, int]
    outcomes: Mapping[StepKey, float]
    cursor_y: Mapping[str, float]
    code_loss: float = float("nan")


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One head's figure, the count it rests on, and the strongest of its baselines."""

    value: float | None
    count: int
    baselines: Mapping[str, float | None] = field(default_factory=dict)
    better: str = "higher"

    @property
    def baseline(self) -> float | None:
        """The strongest baseline (None where there is none)."""
        known = [value for value in self.baselines.values() if value is not None]
        if not known:
            return None
        return max(known) if self.better == "higher" else min(known)

    def as_dict(self) -> dict[str, object]:
        """Return the form of ``summary.json``."""
        return {
            "value": self.value,
            "baseline": self.baseline,
            "baselines": dict(self.baselines),
            "count": self.count,
            "better": self.better,
        }


def head_metrics(
    train: Sequence[SessionFacts], evaluated: Sequence[SessionFacts], said: Predictions
) -> dict[str, Metric]:
    """Return every head's metric on ``evaluated``; baselines are fitted on ``train``."""
    runs = [step for step in known_runs(evaluated) if _key(step) in said.outcomes]
    after_edit = [step for step in runs if step.first_after_edit]
    return {
        "intent_f1": intent_f1(train, evaluated, said),
        "tool_accuracy": tool_accuracy(train, evaluated, said),
        "tool_accuracy_silent": tool_accuracy(train, evaluated, said, silent=True),
        "cursor_error_lines": cursor_error(train, evaluated, said, fmean),
        "cursor_error_lines_median": cursor_error(train, evaluated, said, median),
        "outcome_auc": outcome_auc(train, runs, said),
        "outcome_auc_after_edit": outcome_auc(train, after_edit, said),
        "outcome_brier": outcome_brier(train, runs, said),
    }


def intent_f1(train: Sequence[SessionFacts], evaluated: Sequence[SessionFacts], said: Predictions) -> Metric:
    """Micro-averaged F1 over the 12 intents at threshold 0.5, on sessions that carry labels."""
    labelled = [s for s in evaluated if s.intents is not None and s.session_id in said.intents]
    if not labelled:
        return Metric(value=None, count=0)
    target = torch.tensor([[int(name in (s.intents or ())) for name in INTENTS] for s in labelled])
    predicted = torch.tensor([list(said.intents[s.session_id]) for s in labelled])

    def score(probabilities: torch.Tensor) -> float:
        return float(multilabel_f1_score(probabilities, target, num_labels=len(INTENTS), average="micro"))

    def constant(row: list[float]) -> float:
        return score(torch.tensor([row] * len(labelled)))

    return Metric(
        value=score(predicted),
        count=len(labelled),
        baselines={
            "majority": constant(baselines.majority_intents(train)),
            "best_constant": constant(baselines.best_constant_intents(train)),
        },
    )


def tool_accuracy(
    train: Sequence[SessionFacts], evaluated: Sequence[SessionFacts], said: Predictions, *, silent: bool = False
) -> Metric:
    """Share of steps whose tool the head ranks first; mistakes and tools it does not know are left out.

    With ``silent`` only steps without a thought count: a thought stands before the head's anchor and may tell the tool.
    """
    steps = [s for s in known_tool_steps(evaluated) if _key(s) in said.tools and (s.silent or not silent)]
    if not steps:
        return Metric(value=None, count=0)

    def share(guesses: Sequence[str]) -> float:
        return fmean(guess == step.tool for guess, step in zip(guesses, steps, strict=True))

    return Metric(
        value=fmean(said.tools[_key(step)] == TOOL_INDEX[step.tool] for step in steps),
        count=len(steps),
        baselines={
            "chance": 1 / len(TOOL_INDEX),
            "majority": share(baselines.majority_tool(train, steps)),
            "bigram": share(baselines.bigram_tool(train, steps)),
            "bigram_exit": share(baselines.bigram_exit_tool(train, steps)),
        },
    )


def cursor_error(
    train: Sequence[SessionFacts],
    evaluated: Sequence[SessionFacts],
    said: Predictions,
    middle: Callable[[Sequence[float]], float],
) -> Metric:
    """Mean or median (``middle``) absolute error of the height, in lines of the session's own editor."""
    placed = [s for s in evaluated if s.target_line is not None and s.session_id in said.cursor_y]
    if not placed:
        return Metric(value=None, count=0, better="lower")
    errors = [
        abs(said.cursor_y[s.session_id] - (((s.target_line or 1) - 1) * s.line_px - s.scroll_top)) / s.line_px
        for s in placed
    ]
    return Metric(
        value=middle(errors),
        count=len(placed),
        better="lower",
        baselines={
            "constant": middle(baselines.constant_cursor(train, placed)),
            "caret": middle(baselines.caret_cursor(placed)),
            "recent_edit": middle(baselines.recent_edit_cursor(placed)),
        },
    )


def outcome_auc(train: Sequence[SessionFacts], runs: Sequence[StepFacts], said: Predictions) -> Metric:
    """Area under the ROC curve of the predicted outcome (None where only one outcome occurs)."""

    def auc(scores: Sequence[float]) -> float | None:
        target = torch.tensor([int(bool(step.passed)) for step in runs])
        if len(target) == 0 or target.min() == target.max():
            return None
        return float(binary_auroc(torch.tensor(scores), target))

    return Metric(
        value=auc([said.outcomes[_key(step)] for step in runs]),
        count=len(runs),
        baselines={
            "chance": 0.5,
            "rule": auc(baselines.rule_outcome(runs)),
            "table": auc(baselines.table_outcome(train, runs)),
        },
    )


def outcome_brier(train: Sequence[SessionFacts], runs: Sequence[StepFacts], said: Predictions) -> Metric:
    """Mean squared distance of the predicted probability from what happened (Brier 1950)."""
    if not runs:
        return Metric(value=None, count=0, better="lower")
    known = known_runs(train)
    rate = fmean(bool(step.passed) for step in known) if known else 0.5

    def brier(scores: Sequence[float]) -> float:
        return fmean((score - bool(step.passed)) ** 2 for score, step in zip(scores, runs, strict=True))

    return Metric(
        value=brier([said.outcomes[_key(step)] for step in runs]),
        count=len(runs),
        better="lower",
        baselines={
            "base_rate": brier([rate] * len(runs)),
            "rule": brier(baselines.rule_outcome(runs)),
            "table": brier(baselines.table_outcome(train, runs)),
        },
    )


def _key(step: StepFacts) -> StepKey:
    return step.session_id, step.step
