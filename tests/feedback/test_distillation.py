"""Feedback distillation: which calls, what the teacher reads, the exact loss, replay, and what it is for."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wrong_folder
from composer.core import Callback, State
from composer.loggers import Logger
from support_agent import InProcessExecutor, lost, make_model, make_renderer, sessions
from support_training import Trained, train_agent
from support_two_tasks import learn

from agentft.algorithms.loss_weights import LossWeights
from agentft.config.schema import (
    DistillationConfig,
    FeedbackConfig,
    LossConfig,
    PolicyConfig,
    ProbeConfig,
    RecordedConfig,
    ScheduleConfig,
)
from agentft.data.batch import Batch, collate, select_rows, split
from agentft.data.shards import sample_of
from agentft.feedback.callback import ExecutionFeedback
from agentft.feedback.distillation import FailedCall, FeedbackDistillation, failed_calls, teacher_sample
from agentft.models.agent_model import AgentModel, CompositeLoss
from agentft.models.generate import evaluating, prompt_of, sample_turns
from agentft.sandbox.base import Executor
from agentft.sandbox.replay import ReplayExecutor
from agentft.text.parse import parse_turn

KNOWN = sessions(6)
RENDERER = make_renderer(KNOWN)
VOCAB = RENDERER.vocab
ON = LossConfig(distill=ScheduleConfig(start=0.5))
RECORDED = FeedbackConfig(recorded=RecordedConfig(prefetch_batches=1), probe=ProbeConfig(every=0))
SAMPLED = FeedbackConfig(policy=PolicyConfig(every=1, calls=3), probe=ProbeConfig(every=0))


def batch_of_known() -> Batch:
    return collate([sample_of(session, RENDERER.render(session)) for session in KNOWN])


def spelled(batch: Batch, call: FailedCall) -> tuple[str, str]:
    """The text of a failed call and of its hint."""
    ids = batch["input_ids"][call.row, call.call_start : call.call_end].tolist()
    return VOCAB.decode(ids), VOCAB.decode(list(call.hint))


class Keep(Callback):
    """Keeps every batch as it is when it is trained."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def before_train_batch(self, state: State, logger: Logger) -> None:
        self.batches.append(dict(state.batch))


def train(
    folder: Path, executor: Executor, config: FeedbackConfig, loss: LossConfig = ON, calls: int = 8
) -> tuple[Trained, list[Batch]]:
    kept = Keep()

    def behind(feedback: ExecutionFeedback) -> list[Callback]:
        wanted = DistillationConfig(max_calls=calls)
        distillation = FeedbackDistillation(wanted, renderer=RENDERER, rows=2, judged=feedback.judged, seed=1)
        return [LossWeights(CompositeLoss(loss)), distillation, kept]

    trained = train_agent(folder, executor, config, renderer=RENDERER, known=KNOWN, batches=4, behind=behind)
    return trained, kept.batches


# Which calls, and what the teacher reads


def test_a_recorded_mistake_learns_from_the_run_that_found_it() -> None:
    batch = batch_of_known()
    found = failed_calls(batch, [], RENDERER)
    assert [call.key for call in found] == ["calc/2/3", "calc/5/3"]
    for call in found:
        ids = batch["input_ids"][call.row].tolist()
        assert ids[call.step_at] == VOCAB.step
        assert ids[call.call_start] == VOCAB.tool_start
        assert ids[call.call_end - 1] == VOCAB.tool_end
        assert (call.hint[0], call.hint[-1]) == (VOCAB.result, VOCAB.result_end)
        text, hint = spelled(batch, call)
        assert "a * b + 9" in text  # the edit was applied; the tests failed after it
        assert "AssertionError" in hint


def test_a_mistake_without_an_error_text_teaches_nothing() -> None:
    batch = batch_of_known()
    for anchors in batch["steps"]:
        for anchor in anchors:
            anchor["outcome"] = None
    assert failed_calls(batch, [], RENDERER) == []
    cut = select_rows(batch_of_known(), range(6))
    cut["lengths"] = torch.minimum(cut["lengths"], torch.tensor(40))  # nothing of the mistakes is left
    assert failed_calls(cut, [], RENDERER) == []


@pytest.mark.parametrize("enabled", [True, False])
def test_the_teacher_reads_the_hint_before_the_step_and_the_same_tokens_otherwise(enabled: bool) -> None:
    renderer = copy.copy(RENDERER)
    renderer.positions = type(RENDERER.positions)(enabled=enabled)
    known = [sample_of(session, renderer.render(session)) for session in KNOWN]
    batch = collate(known)
    for call in failed_calls(batch, [], renderer):
        sample = teacher_sample(batch, call, renderer)
        ids, positions = sample["input_ids"], np.array(sample["position_ids"])
        row_ids = batch["input_ids"][call.row].tolist()
        row_positions = batch["position_ids"][call.row].numpy()
        length = len(call.hint)
        assert ids == [*row_ids[: call.step_at], *call.hint, *row_ids[call.step_at : call.call_end]]
        after = positions[call.step_at + length :] - row_positions[call.step_at : call.call_end]
        assert set(after.tolist()) == {0 if enabled else length}
        assert len(set(positions.tolist())) == len(positions), "no two tokens share a position"
        if enabled:
            hint = positions[call.step_at : call.step_at + length]
            before = [p for p in row_positions[: call.step_at] if p >= renderer.positions.start]
            assert hint.tolist() == list(range(max(before) + 1, max(before) + 1 + length))


# The loss


def taught(model: AgentModel, batch: Batch, calls: list[FailedCall]) -> Batch:
    """The batch with the teacher's states, one call at a time, by hand."""
    places, states = [], []
    for call in calls:
        with torch.no_grad():
            hidden = model(collate([teacher_sample(batch, call, RENDERER)]))["hidden"][0]
        for column in range(call.call_start, call.call_end):
            places.append((call.row, column))
            states.append(hidden[column + len(call.hint) - 1])
    return batch | {"distill_at": torch.tensor(places), "distill_hidden": torch.stack(states)}


def test_the_loss_is_the_divergence_on_exactly_the_tokens_of_the_call() -> None:
    model = make_model(RENDERER)
    model.loss_weights = {**model.loss_weights, "distill": 1.0}
    model.distill_temperature = 2.0
    with torch.no_grad():
        model.backbone.lm_head.weight.mul_(50)  # untrained weights hardly tell one context from another
    plain = batch_of_known()
    calls = failed_calls(plain, [], RENDERER)
    batch = taught(model, plain, calls)
    outputs = model(batch)
    expected = 0.0
    for call in calls:
        hint = teacher_sample(plain, call, RENDERER)
        there = collate([hint])
        with torch.no_grad():
            teacher = model.vocabulary_logits(model(there)["hidden"][0])[call.call_start + len(call.hint) - 1 : -1]
        student = model.vocabulary_logits(outputs["hidden"][call.row])[call.call_start - 1 : call.call_end - 1]
        p, q = (teacher / 2).softmax(-1), (student / 2).softmax(-1)
        expected = expected + 4 * (p * (p.log() - q.log())).sum()
    count = sum(call.call_end - call.call_start for call in calls)
    parts = model.loss(outputs, batch)
    assert float(parts["distill"]) == pytest.approx(float(expected) / count, rel=1e-4)
    assert float(parts["distill"]) > 1e-4
    (gradient,) = torch.autograd.grad(parts["distill"], outputs["hidden"])
    touched = (gradient.abs().sum(-1) > 0).nonzero().tolist()
    assert touched == [[c.row, at - 1] for c in calls for at in range(c.call_start, c.call_end)]


def test_the_loss_does_not_depend_on_how_the_batch_is_cut() -> None:
    model = make_model(RENDERER)
    model.loss_weights = {**model.loss_weights, "distill": 1.0}
    plain = batch_of_known()
    batch = taught(model, plain, failed_calls(plain, [], RENDERER))
    whole = model.loss(model(batch), batch)["distill"]
    for size in (1, 2, 4):
        parts = split(batch, size)
        found = sum(model.loss(model(part), part)["distill"] * len(part["lengths"]) / 6 for part in parts)
        assert float(found) == pytest.approx(float(whole), rel=1e-5)


# In training


def test_executed_failures_count_and_a_replay_is_equal_bit_for_bit(tmp_path: Path) -> None:
    (seen, _, memory), batches = train(tmp_path / "first", InProcessExecutor(), SAMPLED)
    rows = {int(row) for batch in batches for row in batch["distill_at"][:, 0]}
    assert max(rows) >= 4, "sampled calls are rows behind the four sessions of a batch"
    calls = [float(value) for _, value in memory.data["distill/calls"]]
    assert max(calls) >= 2
    assert all(float(value) > 0 for _, value in memory.data["distill/teacher_ms"])
    (again, _, _), _ = train(tmp_path / "second", ReplayExecutor(tmp_path / "first"), SAMPLED)
    assert again.losses == seen.losses


def test_what_the_sandbox_lost_is_no_failure(tmp_path: Path) -> None:
    _, batches = train(tmp_path, InProcessExecutor(lambda key: lost()), replace(SAMPLED, max_infra_share=1.0))
    for batch in batches:
        rows = {batch["session_id"][int(row)] for row in batch["distill_at"][:, 0]}
        unparsed = {name for name in rows if name.startswith("policy/")}
        assert rows - unparsed <= {"calc/2", "calc/5"}, "recorded mistakes need no sandbox"
        assert not unparsed, "within the grammar every call parses"


def test_at_most_so_many_calls_are_taken_and_others_another_time(tmp_path: Path) -> None:
    _, batches = train(tmp_path, InProcessExecutor(), SAMPLED, calls=1)
    assert all(len(set(batch["distill_at"][:, 0].tolist())) == 1 for batch in batches)


def test_at_weight_zero_nothing_runs_and_nothing_changes(tmp_path: Path) -> None:
    off = LossConfig(distill=ScheduleConfig(kind="step", start=0.0, points=["100ba=0.5"]))
    (seen, _, memory), batches = train(tmp_path / "later", InProcessExecutor(), RECORDED, off)
    (plain, _, _), _ = train(tmp_path / "off", InProcessExecutor(), RECORDED, LossConfig())
    assert all("distill_at" not in batch for batch in batches)
    assert "distill/calls" not in memory.data
    assert [float(value) for _, value in memory.data["loss/distill/raw"]] == [0.0] * 4
    assert seen.losses == pytest.approx(plain.losses, abs=1e-6)
    assert "distill" not in CompositeLoss(LossConfig()).schedules


# What it is for


def share_of_repeats(model: AgentModel, renderer: Any, *, temperature: float, samples: int) -> tuple[float, float]:
    """How many first calls are the one that fails, and how many the right one."""
    met = wrong_folder.sessions(marked=False)
    drafts = [(s, renderer.prompt(s, 1)) for s in met for _ in range(samples)]
    with evaluating(model):
        turns = sample_turns(
            model.backbone,
            [prompt_of(draft.finish(), feedback_start=renderer.positions.start) for _, draft in drafts],
            stop_ids=renderer.vocab.end_of_turn,
            max_new_tokens=40,
            temperature=temperature,
            generator=torch.Generator().manual_seed(1),
        )
    hits = np.zeros(2)
    for (session, draft), turn in zip(drafts, turns, strict=True):
        call = parse_turn(list(turn.ids), renderer.vocab, draft.handles, renderer.specs).call
        path = getattr(call, "args", {}).get("path")
        hits += [path == step.tool_args["path"] for step in session.execution_trace]
    return tuple((hits / len(drafts)).tolist())  # type: ignore[return-value]


def test_an_agent_stops_repeating_the_call_that_fails() -> None:
    met, marked = wrong_folder.sessions(marked=False), wrong_folder.sessions(marked=True)
    renderer = make_renderer(met)
    rows, shown = ([sample_of(s, renderer.render(s)) for s in part] for part in (met, marked))
    start = make_model(renderer, seed=0)
    learn(start, rows, batches=150, seed=0, batch_size=6)
    assert share_of_repeats(start, renderer, temperature=0.0, samples=1) == (1.0, 0.0)

    def after(weight: float) -> AgentModel:
        model = copy.deepcopy(start)
        loss = LossConfig(code=ScheduleConfig(start=1.0), distill=ScheduleConfig(start=weight))
        teach = FeedbackDistillation(DistillationConfig(), renderer=renderer, rows=8, seed=1)
        learn(model, shown, batches=40, seed=9, batch_size=6, lr=1e-3, loss=loss, callbacks=[teach])
        return model

    without, taught_one = after(0.0), after(0.5)
    assert share_of_repeats(without, renderer, temperature=0.0, samples=1)[0] == 1.0
    assert share_of_repeats(without, renderer, temperature=1.0, samples=4)[0] > 0.5
    repeats, right = share_of_repeats(taught_one, renderer, temperature=0.0, samples=1)
    assert repeats <= 0.1
    assert right >= 0.8
    assert share_of_repeats(taught_one, renderer, temperature=1.0, samples=4)[0] <= 0.1
