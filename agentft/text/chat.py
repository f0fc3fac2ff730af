"""Conversations as tokens, by the tokenizer's own chat template (floor 2): ids, mask and anchors, born together.

    renderer = ChatRenderer(tokenizer, text, positions, specs())
    for record, rendered in renderer.parts(conversation): ...     # mostly one part

What the assistant wrote is trained, from behind its prompt up to the token that ends its turn. Ids are those of
``apply_chat_template`` (one closing mark more where only the next role's mark ends a turn). A turn that the template
shows in another way once the conversation goes on (thinking that is stripped) gets a part of its own, the conversation
up to there; a turn that is exact nowhere refuses the conversation, with the reason (``text.chat_turns``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from agentft.config.schema import FeedbackPositionsConfig, TextConfig
from agentft.errors import DataError
from agentft.etai import Session, TraceStep
from agentft.text.chat_fit import fit
from agentft.text.chat_session import session_messages, tool_list
from agentft.text.chat_template import ChatTemplate, Message
from agentft.text.chat_turns import Place, Turn, View, exact_turns, locate, prompt_end, view_of
from agentft.text.draft import Draft
from agentft.text.handles import Handles
from agentft.text.render import outcome
from agentft.text.rendered import Dropped, Kind, Rendered, StepAnchor
from agentft.tools import BUILTIN_TOOLS, ToolSpec

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A chat: messages in OpenAI's form and the tools that it could call.

    Messages have ``role`` (one of ``ROLES``), ``content`` (text) and, where there are some, ``tool_calls`` (arguments
    as objects), ``tool_call_id``, ``name``, ``reasoning_content``, ``weight`` (0: shown, not trained).
    """

    session_id: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    repository: str | None = None

    @property
    def complexity(self) -> None:
        """A chat is not graded."""
        return None

    def split_key(self) -> str:
        """What the split is decided by, as of a session."""
        return self.repository or self.session_id

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object that ``from_dict`` reads."""
        return {
            "session_id": self.session_id,
            "messages": list(self.messages),
            "tools": list(self.tools),
            "repository": self.repository,
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Conversation:
        """Return the conversation of ``as_dict``."""
        return cls(**{**record, "messages": tuple(record["messages"]), "tools": tuple(record["tools"])})


Record = Session | Conversation


def record_texts(records: Iterable[Record]) -> Iterator[str]:
    """Yield what is said in these records, for a tokenizer to learn from."""
    for record in records:
        messages = session_messages(record, thoughts=True) if isinstance(record, Session) else record.messages
        for message in messages:
            yield message["content"]
            for call in message.get("tool_calls", ()):
                yield json.dumps(call["function"], ensure_ascii=False)


class ChatRenderer:
    """Renders sessions and conversations with one tokenizer. Holds no state between calls."""

    def __init__(
        self,
        tokenizer: Any,
        text: TextConfig,
        positions: FeedbackPositionsConfig,
        tools: tuple[ToolSpec, ...] = BUILTIN_TOOLS,
    ) -> None:
        self.template, self.text, self.positions = ChatTemplate(tokenizer), text, positions
        self.rows = {spec.name: row for row, spec in enumerate(tools)}
        self.runs_code = {spec.name for spec in tools if spec.runs_code}
        self.tools = tool_list(tools) if text.list_tools else []

    def parts(self, record: Record) -> Iterator[tuple[Record, Rendered]]:
        """Yield the parts of a record: one, or as many as it takes to show every trained turn exactly.

        The first is the whole. Every other one ends with a turn that it trains, and is a record of its own: the
        beginning of the conversation, named by the number of its messages (``id#4``), without targets of its own for
        what belongs to the whole.

        Raises:
            DataError: a turn is exact nowhere, nothing is trained, or it does not fit.
        """
        tools: Sequence[Message] = self.tools if isinstance(record, Session) else record.tools
        part = record
        try:
            said = self._messages(record)
            self._check(said)
            messages, dropped = fit(self.template, said, tools, self.text)
            wanted = {i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight", 1)}
            if not wanted:
                raise DataError("no turn of the assistant is trained", expected="an assistant message, weight not 0")
            while wanted:
                view = view_of(self.template, messages[: max(wanted) + 1], tools)
                turns, problems = exact_turns(self.template, view, wanted)
                if max(wanted) in problems:
                    raise problems[max(wanted)]
                yield part, self._rendered(part, view, turns, dropped)
                wanted -= turns.keys()
                part, dropped = _beginning(record, view.messages[: max(wanted, default=0) + 1]), Dropped()
        except DataError as error:
            where = f"{record.session_id}: {error.where}" if error.where else record.session_id
            raise DataError(error.what, where=where, got=error.got, expected=error.expected, hint=error.hint) from error

    def render(self, record: Record) -> Rendered:
        """Return a record that is exact as a whole.

        Raises:
            DataError: it is not, or does not fit.
        """
        (_, rendered), *others = self.parts(record)
        if others:
            raise DataError("the chat template shows earlier turns in another way", where=record.session_id)
        return rendered

    def _messages(self, record: Record) -> Sequence[Message]:
        if isinstance(record, Conversation):
            return record.messages
        return session_messages(record, thoughts=self.text.show_thoughts)

    def _check(self, messages: Sequence[Message]) -> None:
        """Refuse what a template would render as something else than it is."""
        spoken = [message for message in messages if message["role"] != "system"]
        if not spoken or spoken[0]["role"] != "user":
            got = spoken[0]["role"] if spoken else "no message"
            raise DataError("a conversation begins with the user", where="messages", got=got)
        for number, message in enumerate(messages):
            texts = [message["content"], message.get("reasoning_content") or ""]
            texts += [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
            found = next((hit for text in texts if (hit := self.template.special_text.search(text))), None)
            if found:
                raise DataError(
                    "a turn spells out a special token, which the chat template would make one",
                    where=f"messages[{number}] ({message['role']})",
                    got=found[0],
                )

    def _rendered(self, record: Record, view: View, turns: dict[int, Turn], dropped: Dropped) -> Rendered:
        session = record if isinstance(record, Session) else None
        places, count = locate(self.template, view), len(view.ids)
        ids = view.ids + [turn.closing for turn in turns.values() if turn.closing >= 0]
        kinds, trained, results = [int(Kind.INSTRUCTION)] * len(ids), [False] * len(ids), [False] * len(ids)
        draft = Draft(Handles(off=True), self.positions, record.session_id)
        draft.cut_result_tokens, draft.left_out_steps = dropped.result_tokens, dropped.steps
        for turn in turns.values():
            kind = Kind.CALL if view.messages[turn.message].get("tool_calls") else Kind.OUTPUT
            for at in range(turn.start, turn.end):
                kinds[at], trained[at] = int(kind), True
        for (number, _), (start, end) in places.items():
            if view.messages[number]["role"] == "tool":
                for at in range(view.token_at(start), min(view.token_at(end - 1) + 1, count)):
                    kinds[at], results[at] = int(Kind.RESULT), True
        if session is not None:
            self._anchor(draft, session, view, places, turns)
        runs = groupby(range(len(ids)), key=lambda at: (kinds[at], trained[at], results[at]))
        for (kind_value, is_trained, is_result), run in runs:
            draft.add([ids[at] for at in run], Kind(kind_value), trained=is_trained, feedback=is_result)
        return draft.finish()

    def _anchor(
        self, draft: Draft, session: Session, view: View, places: dict[Place, tuple[int, int]], turns: dict[int, Turn]
    ) -> None:
        """Note where the heads of a session read: the steps trained here, and mistakes that are shown exactly here."""
        said = [number for number, message in enumerate(view.messages) if message["role"] == "assistant"]
        mistakes = {number for number in said if not view.messages[number].get("weight", 1)}
        spans = turns | exact_turns(self.template, view, mistakes)[0]
        draft.intent_at = prompt_end(self.template, view, said[0])[1] - 1
        if "step" not in view.messages[-1]:
            draft.cursor_at = spans[len(view.messages) - 1].start - 1
        steps = {step.step: step for step in session.execution_trace}
        draft.steps += [
            self._step(steps[view.messages[number]["step"]], number, spans[number], view, places)
            for number in said
            if "step" in view.messages[number] and number in spans
        ]

    def _step(
        self, step: TraceStep, number: int, turn: Turn, view: View, places: dict[Place, tuple[int, int]]
    ) -> StepAnchor:
        words, result = places.get((number, "content")), places.get((number + 1, "content"))
        known = step.execution_result is not None and result is not None and number + 1 < len(view.messages)
        return StepAnchor(
            step=step.step,
            tool_at=view.token_at(places[(number, "call0")][0]) - 1,
            tool=self.rows.get(step.tool_called, -1),
            call_start=max(turn.start, view.token_at(words[1])) if words else turn.start,
            call_end=turn.end,
            result_at=view.token_at(result[0]) - 1 if known and result else -1,
            outcome=outcome(step.execution_result) if known else math.nan,
            mistake=step.mistake,
            runs_code=step.tool_called in self.runs_code,
        )


def _beginning(record: Record, messages: Sequence[Message]) -> Record:
    """Return the record of a part: what was said up to there, with an id of its own."""
    name = f"{record.session_id}#{len(messages)}"
    if isinstance(record, Conversation):
        return replace(record, session_id=name, messages=tuple(messages))
    steps = max((message.get("step", 0) for message in messages), default=0)
    shorter = {"execution_trace": [step for step in record.execution_trace if step.step <= steps], "final_output": ""}
    return record.model_copy(update={"session_id": name, "intents": None, "cursor_target": None, **shorter})
