"""Calls sampled from the current model (floor 4): plan, sample, execute, judge; for policy rounds and for the probe.

A plan is a session and a step. The prompt is the session up to that step and a ``<|step|>``; the model writes a thought
and a call. The sandbox gets the recorded calls before the step (``setup``), the sampled call, and, after an edit, the
run of code that judged the recorded session there (``verdict``). A call that does not parse is judged without running.

A training row ends with ``<|result|>``, where the outcome is predicted: what stands behind it cannot change the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from agentft.config.schema import RewardConfig
from agentft.data.batch import Batch, collate, to_device
from agentft.errors import DataError
from agentft.etai import Session
from agentft.feedback.executions import Executions
from agentft.feedback.judged import Judged, Prediction, read_predictions, request_key
from agentft.feedback.reward import EDIT_TOOLS, credit, shaped_reward
from agentft.feedback.trace import Source
from agentft.models.agent_model import AgentModel
from agentft.models.generate import evaluating
from agentft.models.turns import MAX_TURN_TOKENS, write_turns
from agentft.sandbox.base import ExecResult, Verdict
from agentft.sandbox.calls import SessionCalls, session_calls
from agentft.text.draft import Draft
from agentft.text.parse import parse_turn
from agentft.text.render import Renderer
from agentft.text.rendered import Kind
from agentft.tools import TOOLS, FormatError, ToolCall


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where a call is sampled: before the call ``index`` (from 0) of a session that can be executed."""

    session: Session
    calls: SessionCalls
    index: int

    @property
    def step(self) -> int:
        """The number of the step that the sampled call stands for."""
        return self.calls.steps[self.index]


@dataclass(kw_only=True)
class Sampled:
    """A sampled turn: its plan, the row it makes, and its call."""

    key: str
    plan: Plan
    draft: Draft
    call: ToolCall | FormatError
    span: tuple[int, int]
    verdict: ToolCall | None
    prediction: Prediction | None = None

    @property
    def requested(self) -> tuple[ToolCall, ...]:
        """What the sandbox runs: setup and the call (then its verdict). Empty if the call does not parse."""
        if isinstance(self.call, FormatError):
            return ()
        return (*self.plan.calls.calls[: self.plan.index], self.call)


def plan_calls(sessions: Sequence[Session], count: int, generator: torch.Generator) -> list[Plan]:
    """Choose ``count`` different sessions (all, if there are fewer that can be executed), and a step in each."""
    executable = [(s, calls) for s in sessions if (calls := session_calls(s)) is not None]
    order = torch.randperm(len(executable), generator=generator).tolist()[:count]
    plans = []
    for session, calls in (executable[i] for i in order):
        index = int(torch.randint(len(calls.calls), (1,), generator=generator))
        plans.append(Plan(session=session, calls=calls, index=index))
    return plans


def sample_calls(
    model: AgentModel,
    renderer: Renderer,
    plans: Sequence[Plan],
    *,
    source: Source,
    batch: int,
    temperature: float,
    generator: torch.Generator,
    grammar: bool,
) -> list[Sampled]:
    """Let the model write one call at each plan; with ``grammar`` only well-formed ones.

    A session whose context does not fit is left out.
    """
    drafts = []
    for plan in plans:
        try:
            draft = renderer.prompt(plan.session, plan.index + 1, reserve=MAX_TURN_TOKENS + 2)
        except DataError:
            continue
        draft.add([renderer.vocab.step], Kind.THOUGHT)
        drafts.append((plan, draft))
    turns = write_turns(
        model,
        renderer,
        [draft for _, draft in drafts],
        temperature=temperature,
        generator=generator,
        grammar=grammar,
    )
    return [
        _read_turn(renderer, plan, draft, turn.ids, source, batch)
        for (plan, draft), turn in zip(drafts, turns, strict=True)
    ]


def _read_turn(
    renderer: Renderer, plan: Plan, draft: Draft, ids: tuple[int, ...], source: Source, batch: int
) -> Sampled:
    vocab = renderer.vocab
    call = parse_turn([vocab.step, *ids], vocab, draft.handles, renderer.specs).call
    assert call is not None, "a turn that begins with <|step|> holds a call or an error"
    start = len(draft)
    renderer.append_agent(draft, ids)
    started = start + ids.index(vocab.tool_start) if vocab.tool_start in ids else start
    span = (started, len(draft))
    verdict = None
    if isinstance(call, ToolCall):
        at = len(draft)
        draft.add([vocab.result], Kind.RESULT, feedback=True)
        draft.steps[-1] = replace(draft.steps[-1], step=plan.step, result_at=at)
        verdict = _verdict_of(plan, call)
    return Sampled(
        key=request_key(source, batch, plan.calls.session_id, plan.step),
        plan=plan,
        draft=draft,
        call=call,
        span=span,
        verdict=verdict,
    )


def _verdict_of(plan: Plan, call: ToolCall) -> ToolCall | None:
    """Return the run of code that judged the recorded session at this place, if the sampled call is an edit."""
    if call.name not in EDIT_TOOLS:
        return None
    return next((later for later in plan.calls.calls[plan.index :] if TOOLS[later.name].runs_code), None)


def submit_calls(sampled: Sequence[Sampled], executions: Executions) -> None:
    """Start the executions of all calls that parsed."""
    for call in sampled:
        if call.requested:
            verdict = None if call.verdict is None else Verdict(call.verdict, agent_from=call.plan.index)
            executions.submit(call.key, call.plan.calls.workspace, call.requested, verdict)


def judge_calls(
    sampled: Sequence[Sampled], executions: Executions, *, source: Source, batch: int, config: RewardConfig
) -> list[list[Judged]]:
    """Wait for the results; return per sampled call what was executed for it: setup, the call itself, its verdict."""
    answers = executions.take(call.key for call in sampled if call.requested)
    return [_judge(call, answers.get(call.key), source, batch, config) for call in sampled]


def _judge(
    sampled: Sampled, results: list[ExecResult] | None, source: Source, batch: int, config: RewardConfig
) -> list[Judged]:
    plan, session_id, index = sampled.plan, sampled.plan.calls.session_id, sampled.plan.index
    own = None if results is None else results[index]
    verdict = results[index + 1] if results is not None and sampled.verdict is not None else None
    judged = []
    for at, result in enumerate(() if results is None else results[:index]):
        step = plan.calls.steps[at]
        judged.append(
            Judged(
                key=request_key(source, batch, session_id, step),
                source=source,
                role="setup",
                session_id=session_id,
                step=step,
                call=plan.calls.calls[at],
                result=result,
                outcome=shaped_reward(result, config),
            )
        )
    call = _named(sampled.call)
    judged.append(
        Judged(
            key=sampled.key,
            source=source,
            session_id=session_id,
            step=plan.step,
            call=call,
            result=own,
            outcome=shaped_reward(own, config),
            credit=credit(call.name, own, verdict, config),
            prediction=sampled.prediction,
            span=sampled.span,
            result_at=sampled.draft.steps[-1].result_at if results is not None else -1,
        )
    )
    if verdict is not None and sampled.verdict is not None:
        judged.append(
            Judged(
                key=request_key(source, batch, session_id, plan.step + 1),
                source=source,
                role="verdict",
                session_id=session_id,
                step=plan.step + 1,
                call=sampled.verdict,
                result=verdict,
                outcome=shaped_reward(verdict, config),
            )
        )
    return judged


def _named(call: ToolCall | FormatError) -> ToolCall:
    """Return the call, or what stands for one that does not parse."""
    return (
        call
        if isinstance(call, ToolCall)
        else ToolCall("format_error", {"text": call.text[:2000], "reason": call.reason})
    )


def rows_of(sampled: Sequence[Sampled]) -> Batch:
    """Return the sampled turns as a batch with nothing to train yet: no labels, no targets, the call's anchors only.

    ``session_id`` of such a row is the call's key, so that it is never taken for the session; ``record`` is empty.
    Outcome anchors have mask 0; intent anchors have targets, which ``without_intents`` takes away before training.
    """
    return collate([_sample(call) for call in sampled])


def without_intents(batch: Batch) -> Batch:
    """Return the batch without intent anchors: the session itself already trains them."""
    return batch | {"intent_at": batch["intent_at"][:0], "intent_target": batch["intent_target"][:0]}


def _sample(sampled: Sampled) -> dict[str, Any]:
    rendered = sampled.draft.finish()
    steps = [asdict(rendered.steps[-1])] if isinstance(sampled.call, ToolCall) else []
    for step in steps:  # sampled calls train the outcome and the policy, nothing by imitation
        step |= {"mistake": True, "outcome": None}
    return {
        "session_id": sampled.key,
        "input_ids": rendered.input_ids,
        "loss_mask": rendered.loss_mask & False,
        "position_ids": rendered.position_ids,
        "anchors": {
            "intent_at": rendered.intent_at,
            "intents": [],
            "cursor_at": -1,
            "cursor_target": None,
            "viewport": None,
            "steps": steps,
        },
        "record": "",
    }


@torch.no_grad()
def predict(model: AgentModel, batch: Batch, sampled: Sequence[Sampled]) -> None:
    """Note on each sampled call what the heads say about it, from one forward pass over ``rows_of`` them."""
    with evaluating(model):
        said = model.predictions(model(to_device(batch, model.backbone.device)))
    predictions = read_predictions(batch, said, tools=model.tools, intents=model.intents)
    for call in sampled:
        call.prediction = predictions.get((call.key, call.plan.step))
