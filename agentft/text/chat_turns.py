"""Which tokens of a rendered conversation the assistant wrote (floor 2): by provable prefixes, never by searching.

    view = view_of(template, messages, tools)            # text, ids, where each token begins
    turns, problems = exact_turns(template, view, {1, 3})

A turn is exact in a view when three things hold. The prompt that the template writes for it is, id for id, how the
view begins: so the model reads in training what it reads when it is asked. The turn ends with a token that says so.
And everything up to that token is what the template writes when the conversation ends there. Anything else (thinking
that is stripped later, turns that are merged, prompts that are not repeated) is a problem with a reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agentft.errors import DataError
from agentft.text.chat_template import ChatTemplate, Message

Place = tuple[int, str]
"""(number of the message, ``content`` or ``call0``, ``call1`` … for the name of a call)."""


@dataclass(frozen=True)
class View:
    """A conversation as the template shows it: ``ids`` [T] begin at the characters ``starts`` [T] of ``text``."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    text: str
    ids: list[int]
    starts: npt.NDArray[np.int64]

    def token_at(self, character: int) -> int:
        """Return the token that holds a character."""
        return max(int(np.searchsorted(self.starts, character, side="right")) - 1, 0)


@dataclass(frozen=True)
class Turn:
    """Tokens [start, end) that the assistant wrote in one message, the last one being the end of its turn.

    ``closing`` is an id to put behind the view's last token: the mark of the next role, where only that ends a turn
    and the conversation ends here (−1: none).
    """

    message: int
    start: int
    end: int
    closing: int = -1


def view_of(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Message]) -> View:
    """Render and encode; the ids are those of ``apply_chat_template``."""
    text = template.text(messages, tools)
    ids, starts = template.encode(text)
    return View(tuple(messages), tuple(tools), text, ids, starts)


def exact_turns(
    template: ChatTemplate, view: View, wanted: Iterable[int]
) -> tuple[dict[int, Turn], dict[int, DataError]]:
    """Return the turns of these messages that are exact in ``view``, and for each of the others why it is not."""
    turns: dict[int, Turn] = {}
    problems: dict[int, DataError] = {}
    for message in sorted(wanted):
        try:
            turns[message] = _exact_turn(template, view, message)
        except DataError as error:
            problems[message] = error
    return turns, problems


def prompt_end(template: ChatTemplate, view: View, number: int) -> tuple[str, int]:
    """Return the prompt of a turn as text, and its length in tokens of ``view``.

    Raises:
        DataError: the view does not begin with it, or it ends inside a token.
    """
    prompt = template.text(view.messages[:number], view.tools, prompt=True)
    if not view.text.startswith(prompt):
        raise _inexact(number, "the prompt that the chat template writes for this turn is not how it shows it later")
    return prompt, _boundary(template, view, len(prompt), number)


def _exact_turn(template: ChatTemplate, view: View, number: int) -> Turn:
    prompt, start = prompt_end(template, view, number)
    last = number == len(view.messages) - 1
    until = view.text if last else template.text(view.messages[: number + 1], view.tools)
    if not until.startswith(prompt):
        raise _inexact(number, "the chat template does not put this turn behind its prompt")
    end = template.own_end(until[len(prompt) :])
    if template.end.own and end is None:
        raise _inexact(number, "the chat template closes this turn with no special token", until[len(prompt) :][-60:])
    stop = len(until) if end is None or not template.end.own else len(prompt) + end
    if not view.text.startswith(until[:stop]):
        raise _inexact(number, "the chat template shows this turn in another way once the conversation goes on")
    if not start:
        raise _inexact(number, "the turn has no prompt, so that every token would be trained")
    if template.end.own:
        return Turn(number, start, _boundary(template, view, stop, number))
    return _closed_by_the_next(template, view, number, start, stop)


def _closed_by_the_next(template: ChatTemplate, view: View, number: int, start: int, stop: int) -> Turn:
    """Return a turn that the mark of the next role ends."""
    marks = {template.end.before_user, template.end.before_tool} - {-1}
    end = _boundary(template, view, stop, number)
    if end < len(view.ids):
        if view.ids[end] not in marks:
            got = template.tokenizer.convert_ids_to_tokens(view.ids[end])
            raise _inexact(number, "no mark of a role stands behind this turn, so nothing ends it", got)
        return Turn(number, start, end + 1)
    calls = bool(view.messages[number].get("tool_calls"))
    closing = template.end.before_tool if calls else template.end.before_user
    if closing < 0:
        raise _inexact(number, "the chat template has no mark that ends a turn with calls")
    return Turn(number, start, end + 1, closing)


def _boundary(template: ChatTemplate, view: View, character: int, number: int) -> int:
    """Return how many tokens make up the text before ``character``, if it ends with a token.

    Proven by encoding that text again, from its last special token on: the tokenizer splits there first.
    """
    count = int(np.searchsorted(view.starts, character, side="left"))
    special = set(template.special.values())
    known = next((i for i in range(count - 1, -1, -1) if view.ids[i] in special), 0)
    piece = view.text[int(view.starts[known]) if known else 0 : character]
    if template.encode(piece)[0] != view.ids[known:count]:
        raise _inexact(
            number,
            "a token reaches over the border between the prompt and what the assistant writes",
            view.text[max(0, character - 20) : character + 20],
        )
    return count


def locate(template: ChatTemplate, view: View) -> dict[Place, tuple[int, int]]:
    """Return where the view shows names of calls, results, and words before the calls of a session: [start, end).

    The conversation is rendered once more with a mark in each of these places; between the marks both must agree.

    Raises:
        DataError: the template does not show one of them (many know nothing of tools), or changes it.
    """
    places: dict[Place, tuple[str, str]] = {}
    marked = []
    for number, message in enumerate(view.messages):
        marked.append(_mark(message, number, places))
        words = message["content"].split() if message.get("tool_calls") else []
        if words and words[-1] not in view.text:
            raise _inexact(number, "the chat template does not show the words before a call")
    if not places:
        return {}
    other, found, at, here = template.text(marked, view.tools), {}, 0, 0
    for place, (mark, value) in places.items():
        next_at = other.find(mark, at)
        if next_at < 0:
            what = "a call" if place[1] != "content" else "a result of a tool, or words before a call,"
            raise _inexact(place[0], f"the chat template does not show {what} of this turn")
        between = other[at:next_at]
        if not view.text.startswith(between, here):
            raise _inexact(place[0], "the chat template shows this turn in another way for other values")
        here += len(between)
        forms = (value, value.strip(), json.dumps(value, ensure_ascii=False)[1:-1])
        shown = next((text for text in forms if view.text.startswith(text, here)), None)
        if shown is None:
            raise _inexact(place[0], "the chat template changes what this turn says", view.text[here : here + 60])
        found[place] = (here, here + len(shown))
        here, at = here + len(shown), next_at + len(mark)
    return found


def _mark(message: Message, number: int, places: dict[Place, tuple[str, str]]) -> Message:
    """Return the message with a mark in each place of interest; notes mark and true value in order of appearance."""

    def put(kind: str, value: str) -> str:
        places[(number, kind)] = (f"agentftplace{len(places)}x", value)
        return places[(number, kind)][0]

    marked: dict[str, Any] = dict(message)
    if (message["role"] == "tool" or "step" in message) and message["content"]:
        marked["content"] = put("content", message["content"])
    if message.get("tool_calls"):
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "name": put(f"call{row}", call["function"]["name"])}}
            for row, call in enumerate(message["tool_calls"])
        ]
    return marked


def _inexact(number: int, what: str, got: object = None) -> DataError:
    return DataError(what, where=f"messages[{number}]", got=got, hint="leave this conversation out, or cut it there")
