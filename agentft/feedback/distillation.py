"""Feedback distillation (floor 4): where a call failed, the model that sees the error teaches the one that does not.

Teacher and student are the same model with the weights of now (Hübotter et al. 2026, "Reinforcement Learning via
Self-Distillation", arXiv:2601.20802). For a failed call the teacher reads the row up to the step, then the error as a
hint, then the step again; the student reads the row as it is:

    student  … <|step|>thought <|tool_start|>call<|tool_end|>
    teacher  … <|result|>error<|result_end|> <|step|>thought <|tool_start|>call<|tool_end|>

The hint stands where the newest result always stands, and what failed is not shown before it: a model that copies
would write it once more, and an edit that was applied would have changed the state. The loss is KL(teacher‖student) on
exactly the tokens of the call; no gradient reaches the teacher.

What counts as failed, and what is its error text:

* a recorded ``mistake`` step: its own recorded result if that failed, else (an edit that was applied) that of the next
  run of code in the session if that failed;
* any call that feedback executed and that could not do its work (``feedback.reward``): its fresh result; of a call that
  does not parse the reason. Of a sampled edit that was applied and judged as failed: the run that judged it.

A run of code that fails is news, not fault, unless the step is marked; what the sandbox lost counts as nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from composer.core import Callback, State, get_precision_context
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor

from agentft.config.schema import DistillationConfig
from agentft.data.batch import Batch, bare_sample, collate
from agentft.etai import ExecutionResult
from agentft.feedback.judged import Judged
from agentft.feedback.reward import standing
from agentft.models.agent_model import agent_of
from agentft.models.generate import evaluating
from agentft.text.handles import Handles
from agentft.text.render import Renderer
from agentft.text.results import ResultWriter, format_error_result


@dataclass(frozen=True, kw_only=True)
class FailedCall:
    """A call to learn from: its row, half-open column spans, and the tokens of the hint.

    ``step_at`` is the column of its ``<|step|>``; ``key`` is the same however the batch is shared out.
    """

    key: str
    row: int
    step_at: int
    call_start: int
    call_end: int
    hint: tuple[int, ...]


class FeedbackDistillation(Callback):
    """Adds the teacher's hidden states at failed calls to each batch while ``loss.distill`` is more than 0.

    Put it behind ``LossWeights`` and ``ExecutionFeedback`` in the list of callbacks. Nothing is remembered from batch
    to batch. Its cost is logged: ``distill/calls``, ``distill/teacher_tokens``, ``distill/teacher_ms``.

    Args:
        config: The ``feedback.distillation`` section.
        renderer: Of the run.
        rows: Rows in one forward pass of the teacher.
        judged: Gives this batch's executed calls (``ExecutionFeedback.judged``).
        seed: Decides which calls are taken where there are more than ``max_calls``.
    """

    def __init__(
        self,
        config: DistillationConfig,
        *,
        renderer: Renderer,
        rows: int,
        judged: Callable[[], Sequence[Judged]] = tuple,
        seed: int,
    ) -> None:
        self.config, self.renderer, self.rows, self.judged, self.seed = config, renderer, rows, judged, seed

    def batch_start(self, state: State, logger: Logger) -> None:
        """Find the failed calls of the batch and let the teacher read them (a collective call)."""
        model = agent_of(state)
        if not model.loss_weights.get("distill"):
            return
        started, batch = time.monotonic(), state.batch
        calls = self._choose(failed_calls(batch, self.judged(), self.renderer), state.timestamp.batch.value)
        samples = [teacher_sample(batch, call, self.renderer) for call in calls]
        with evaluating(model), torch.no_grad(), get_precision_context(state.precision, state.precision_config):
            hidden = self._read(state, samples, calls)
        size = model.backbone.config.get_text_config().hidden_size
        columns = [(call.row, column) for call in calls for column in range(call.call_start, call.call_end)]
        batch["distill_at"] = torch.tensor(columns, dtype=torch.int64).reshape(-1, 2)
        batch["distill_hidden"] = torch.cat(hidden) if hidden else torch.zeros(0, size)
        logger.log_metrics(
            {
                "distill/calls": float(len(calls)),
                "distill/teacher_tokens": float(sum(len(sample["input_ids"]) for sample in samples)),
                "distill/teacher_ms": (time.monotonic() - started) * 1000,
            }
        )

    def _choose(self, found: Sequence[FailedCall], batch: int) -> list[FailedCall]:
        """Return this rank's part of the calls that the global batch learns from: by a hash that no rank decides."""
        gathered: list[list[str]] = dist.all_gather_object([call.key for call in found])
        keys = {key for part in gathered for key in part}
        chosen = set(sorted(keys, key=lambda key: _hash(f"{self.seed}/{batch}/{key}"))[: self.config.max_calls])
        return [call for call in found if call.key in chosen]

    def _read(self, state: State, samples: Sequence[dict[str, Any]], calls: Sequence[FailedCall]) -> list[Tensor]:
        """Return per call the final hidden states [tokens of the call, H] before its tokens, as the teacher has them.

        Every rank makes as many passes as the one with most, because weights may be sharded over them.
        """
        passes = torch.tensor([-(-len(samples) // self.rows)])
        passes = state.device.tensor_to_device(passes)
        dist.all_reduce(passes, reduce_operation="MAX")
        hidden: list[Tensor] = []
        for number in range(int(passes)):
            part = slice(number * self.rows, (number + 1) * self.rows)
            batch = collate(samples[part] or [bare_sample("", [0], [0])])
            states = state.model(state.device.batch_to_device(batch))["hidden"]
            for row, call in enumerate(calls[part]):
                first = call.call_start + len(call.hint) - 1
                hidden.append(states[row, first : first + call.call_end - call.call_start].cpu())
        return hidden


def failed_calls(batch: Batch, judged: Sequence[Judged], renderer: Renderer) -> list[FailedCall]:
    """Return the failed calls of a batch that have an error text (see the module), in the order of its rows."""
    rows = [_Row(batch, row, renderer) for row in range(len(batch["lengths"]))]
    found = {call.key: call for row in rows for call in row.mistakes()}
    for call in judged:
        failed = _executed(call, judged, rows, renderer)
        if failed is not None:
            found.setdefault(failed.key, failed)
    return sorted(found.values(), key=lambda call: (call.row, call.call_start))


def teacher_sample(batch: Batch, call: FailedCall, renderer: Renderer) -> dict[str, Any]:
    """Return what the teacher reads (a sample for ``collate``): the row up to the step, the hint, the step to its end.

    With feedback positions the hint goes on counting in their range, and nothing else moves; without them everything
    behind it moves by its length.
    """
    ids, positions = (batch[key][call.row, : call.call_end].tolist() for key in ("input_ids", "position_ids"))
    start, moved = positions[call.step_at], len(call.hint)
    if renderer.positions.enabled:
        start, moved = max([renderer.positions.start - 1, *positions[: call.step_at]]) + 1, 0
    return bare_sample(
        call.key,
        [*ids[: call.step_at], *call.hint, *ids[call.step_at :]],
        [
            *positions[: call.step_at],
            *range(start, start + len(call.hint)),
            *(position + moved for position in positions[call.step_at :]),
        ],
    )


class _Row:
    """One row of a batch as ids, with what its anchors say."""

    def __init__(self, batch: Batch, row: int, renderer: Renderer) -> None:
        self.row, self.session_id = row, str(batch["session_id"][row])
        self.anchors: list[dict[str, Any]] = batch["steps"][row]
        self.ids: list[int] = batch["input_ids"][row, : int(batch["lengths"][row])].tolist()
        self._vocab = renderer.vocab

    def mistakes(self) -> Iterator[FailedCall]:
        """Yield the recorded mistakes whose error text the row shows."""
        for index, anchor in enumerate(self.anchors):
            if not anchor["mistake"]:
                continue
            hint = self.error_of(anchor)
            if hint is None and not anchor["runs_code"]:
                hint = next((self.error_of(later) for later in self.anchors[index + 1 :] if later["runs_code"]), None)
            call = self.failed(int(anchor["step"]), int(anchor["call_start"]), int(anchor["call_end"]), hint)
            if call is not None:
                yield call

    def error_of(self, anchor: dict[str, Any]) -> tuple[int, ...] | None:
        """Return the tokens of a step's result if the record says that it failed."""
        at = int(anchor["result_at"])
        if anchor["outcome"] != 0.0 or at < 0 or self._vocab.result_end not in self.ids[at:]:
            return None
        return tuple(self.ids[at : self.ids.index(self._vocab.result_end, at) + 1])

    def failed(self, step: int, start: int, end: int, hint: Sequence[int] | None) -> FailedCall | None:
        """Return the call with these columns; None without a hint, or where the row does not show all of the step."""
        before = self.ids[:start]
        if not hint or end > len(self.ids) or self._vocab.step not in before:
            return None
        step_at = len(before) - 1 - before[::-1].index(self._vocab.step)
        return FailedCall(
            key=f"{self.session_id}/{step}",
            row=self.row,
            step_at=step_at,
            call_start=start,
            call_end=end,
            hint=tuple(hint),
        )


def _executed(call: Judged, judged: Sequence[Judged], rows: Sequence[_Row], renderer: Renderer) -> FailedCall | None:
    """Return an executed call that failed, with its error text."""
    if call.role != "call" or call.row is None or call.span is None or call.outcome.mask == 0.0:
        return None
    row, hint = rows[call.row], None
    if call.result is None:
        hint = _hint(call, format_error_result(str(call.call.args.get("reason", ""))), renderer)
    elif standing(call.result) == "failed" and (call.mistake or call.credit is not None):
        shown = next((row.error_of(anchor) for anchor in row.anchors if anchor["step"] == call.step), None)
        hint = shown or _hint(call, call.result.to_record(), renderer)
    elif call.credit is not None and (call.mistake or call.source == "policy"):
        verdict = _next_run(call, judged)
        if verdict is not None and verdict.result is not None and standing(verdict.result) == "failed":
            hint = _hint(verdict, verdict.result.to_record(), renderer)
    return row.failed(call.step, *call.span, hint)


def _next_run(call: Judged, judged: Sequence[Judged]) -> Judged | None:
    """Return the next run of code of the same session: what judged an edit."""
    if call.runs_code:
        return None
    later = (j for j in judged if j.source == call.source and j.session_id == call.session_id and j.step > call.step)
    return next((j for j in later if j.runs_code), None)


def _hint(call: Judged, result: ExecutionResult, renderer: Renderer) -> tuple[int, ...]:
    """Return a result as tokens that point at nothing: handles belong to the row, which this result is not in."""
    writer = ResultWriter(renderer.vocab, Handles(off=True), renderer.text.result_tokens)
    writer.write(call.call if call.result is not None else None, renderer.specs.get(call.call.name), result)
    return tuple(writer.ids)


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()
