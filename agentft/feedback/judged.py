"""Executed calls on their way into the loss and the trace (floor 4): one ``Judged`` per call, pure functions around it.

``judge_session`` pairs a recorded session's calls with what happened when they ran again; ``assign_advantages`` weighs
them; ``write_targets`` puts outcome targets and policy weights into the batch; ``trace_line`` is what a person reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agentft.config.schema import RewardConfig
from agentft.etai import Session
from agentft.feedback.reward import Outcome, advantages, credits_of_session, shaped_reward
from agentft.feedback.trace import Role, Source, TraceLine
from agentft.sandbox.base import ExecResult
from agentft.sandbox.calls import SessionCalls
from agentft.tools import TOOLS, ToolCall


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the heads said before the result was read: probability of passing, of each tool, of each intent."""

    reward: float | None
    tool_probs: dict[str, float] | None
    intents: dict[str, float] | None


@dataclass(kw_only=True)
class Judged:
    """One executed (or unparsable) call. ``row`` and ``span`` are its place in the batch, None if it is not there.

    ``credit`` is what the policy gradient holds it responsible for, ``advantage`` what its tokens carry in the loss.
    """

    key: str
    source: Source
    role: Role = "call"
    session_id: str
    step: int
    call: ToolCall
    result: ExecResult | None
    outcome: Outcome
    credit: float | None = None
    mistake: bool = False
    row: int | None = None
    span: tuple[int, int] | None = None
    result_at: int = -1
    advantage: float | None = None
    prediction: Prediction | None = None

    @property
    def runs_code(self) -> bool:
        """Whether the outcome of this call depends on what a program does."""
        return self.call.name in TOOLS and TOOLS[self.call.name].runs_code


def session_of(record: str | Mapping[str, Any]) -> Session:
    """Return the session of a shard's ``record`` column."""
    return Session.model_validate(json.loads(record) if isinstance(record, str) else record)


def in_share(name: str, share: float) -> bool:
    """Decide by a stable hash whether ``name``, such as the id of a session, is in a ``share`` (0…1) of all names."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:7], "big") < share * 2**56


def request_key(source: Source, batch: int, session_id: str, step: int) -> str:
    """Return the key of a request whose last judged call is ``step``."""
    return f"{source}/{batch}/{session_id}/{step}"


def judge_session(
    plan: SessionCalls,
    results: Sequence[ExecResult],
    *,
    batch: int,
    row: int,
    anchors: Sequence[Mapping[str, Any]],
    config: RewardConfig,
) -> list[Judged]:
    """Return one ``Judged`` per recorded call of a session that ran again. ``anchors`` are the row's ``steps``."""
    credits = credits_of_session([call.name for call in plan.calls], results, config)
    rendered = {int(anchor["step"]): anchor for anchor in anchors}
    judged = []
    for index, step in enumerate(plan.steps):
        anchor = rendered.get(step)
        judged.append(
            Judged(
                key=request_key("recorded", batch, plan.session_id, step),
                source="recorded",
                session_id=plan.session_id,
                step=step,
                call=plan.calls[index],
                result=results[index],
                outcome=shaped_reward(results[index], config),
                credit=credits[index],
                mistake=plan.mistakes[index],
                row=None if anchor is None else row,
                span=None if anchor is None else (int(anchor["call_start"]), int(anchor["call_end"])),
                result_at=-1 if anchor is None else int(anchor["result_at"]),
            )
        )
    return judged


def credit_totals(judged: Iterable[Judged], source: Source) -> tuple[float, float]:
    """Return sum and number of the credits of one source that have tokens in the batch."""
    credits = [call.credit for call in judged if call.source == source and call.row is not None]
    known = [credit for credit in credits if credit is not None]
    return sum(known), float(len(known))


def assign_advantages(judged: Sequence[Judged], source: Source, total: float, count: float) -> None:
    """Set ``advantage`` of one source's credited calls, given the sum and number of credits in the global batch.

    A step marked as a mistake is never imitated: its advantage is at most 0.
    """
    credited = [call for call in judged if call.source == source and call.row is not None and call.credit is not None]
    values = advantages([call.credit or 0.0 for call in credited], total=total, count=int(count))
    for call, value in zip(credited, values.tolist(), strict=True):
        call.advantage = min(value, 0.0) if call.mistake else value


def write_targets(batch: dict[str, Any], judged: Sequence[Judged]) -> None:
    """Put outcomes and advantages into the batch, in place.

    ``outcome_target``/``outcome_mask`` of calls that run code become the fresh result (mask 0 if it was lost);
    ``policy_weight`` is the advantage on exactly the tokens [call_start, call_end) and stays 0 elsewhere.
    """
    place = {(int(row), int(column)): i for i, (row, column) in enumerate(batch["outcome_at"].tolist())}
    for call in judged:
        if call.row is None:
            continue
        if call.advantage is not None and call.span is not None:
            batch["policy_weight"][call.row, call.span[0] : call.span[1]] = call.advantage
        at = place.get((call.row, call.result_at))
        if at is not None and call.runs_code:
            batch["outcome_target"][at] = call.outcome.target
            batch["outcome_mask"][at] = call.outcome.mask


def read_predictions(
    batch: Mapping[str, Any], said: Mapping[str, torch.Tensor], *, tools: Sequence[str], intents: Sequence[str]
) -> dict[tuple[str, int], Prediction]:
    """Return what the heads said about each step of a batch: (``session_id`` of the row, step) → ``Prediction``.

    ``said`` is ``AgentModel.predictions`` of that batch: probabilities, read at anchors that come before any result.
    """
    outcome = _by_place(batch["outcome_at"], said["outcome"])
    tool = _by_place(batch["tool_at"], said["tool_probs"])
    intent = dict(zip(batch["intent_at"][:, 0].tolist(), said["intent_probs"].tolist(), strict=True))
    predictions = {}
    for row, (row_id, anchors) in enumerate(zip(batch["session_id"], batch["steps"], strict=True)):
        intents_of_row = _rounded(intents, intent[row]) if row in intent else None
        for anchor in anchors:
            probs = tool.get((row, int(anchor["tool_at"])))
            predictions[row_id, int(anchor["step"])] = Prediction(
                reward=outcome.get((row, int(anchor["result_at"]))),
                tool_probs=None if probs is None else _rounded(tools, probs),
                intents=intents_of_row,
            )
    return predictions


def trace_line(call: Judged, *, run: str, batch: int) -> TraceLine:
    """Return the trace line of a call."""
    result, said = call.result, call.prediction
    return TraceLine(
        run=run,
        key=call.key,
        batch=batch,
        source=call.source,
        role=call.role,
        session_id=call.session_id,
        step=call.step,
        tool=call.call.name,
        args=dict(call.call.args),
        parse_ok=result is not None,
        exit_code=None if result is None else result.exit_code,
        status=None if result is None else result.status,
        stdout="" if result is None else result.stdout,
        stderr="" if result is None else result.stderr,
        fields={} if result is None else dict(result.fields),
        duration_s=0.0 if result is None else round(result.duration_s, 6),
        truncated=result is not None and result.truncated,
        total_bytes=0 if result is None else result.total_bytes,
        cached=result is not None and result.cached,
        reward=call.outcome.reward if call.outcome.mask else None,
        advantage=call.advantage,
        predicted_reward=None if said is None else said.reward,
        intents=None if said is None else said.intents,
        tool_probs=None if said is None else said.tool_probs,
        span=call.span,
    )


def _by_place(at: torch.Tensor, values: torch.Tensor) -> dict[tuple[int, int], Any]:
    places = [(int(row), int(column)) for row, column in at.tolist()]
    return dict(zip(places, values.tolist(), strict=True))


def _rounded(names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in zip(names, values, strict=True)}
