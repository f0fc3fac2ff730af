"""Makes a conversation fit (floor 2): results of tools shrink, then the oldest goes; the last answer never does.

Order: every result is cut in its middle to ``text.result_tokens``; results shrink further, to 24 tokens; whole
exchanges go (a turn of the user and what followed), the oldest first; then the oldest calls of the last exchange, with
their results, and a line in the user's message says how many.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentft.config.schema import TextConfig
from agentft.errors import DataError
from agentft.text.chat_template import ChatTemplate, Message
from agentft.text.rendered import Dropped

LEAST_RESULT_TOKENS = 24
CUT = "\n[... {} tokens cut ...]\n"


def fit(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Message], text: TextConfig
) -> tuple[list[Message], Dropped]:
    """Return the messages that fit ``text.max_tokens``, and what was left out (``steps`` counts messages).

    Raises:
        DataError: the last exchange without its calls is too long.
    """
    least = min(LEAST_RESULT_TOKENS, text.result_tokens)
    room = text.max_tokens - 1  # a mark may have to be put behind the last turn
    for kept, left_out in _shorter(messages):
        smallest, _ = _cut_results(template, kept, least)
        count = _tokens(template, smallest, tools)
        if count > room:
            continue
        low, high = least, text.result_tokens  # `low` fits
        best, cut = _cut_results(template, kept, high)
        if _tokens(template, best, tools) <= room:
            return best, Dropped(result_tokens=cut, steps=left_out)
        while high - low > 1:
            middle = (low + high) // 2
            tried, _ = _cut_results(template, kept, middle)
            low, high = (middle, high) if _tokens(template, tried, tools) <= room else (low, middle)
        best, cut = _cut_results(template, kept, low)
        return best, Dropped(result_tokens=cut, steps=left_out)
    raise DataError(
        "the last exchange of the conversation does not fit",
        got=f"at least {count} tokens",
        expected=f"at most text.max_tokens = {text.max_tokens}",
        hint="raise text.max_tokens, or leave this conversation out",
    )


def _tokens(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Message]) -> int:
    return len(template.encode(template.text(messages, tools))[0])


def _shorter(messages: Sequence[Message]) -> list[tuple[list[Message], int]]:
    """Return the conversation, then ever shorter ones, each with the number of messages left out."""
    opening = [message for message in messages[:1] if message["role"] == "system"]
    rest = list(messages[len(opening) :])
    asks = [
        row
        for row, message in enumerate(rest)
        if message["role"] == "user" and (row == 0 or rest[row - 1]["role"] != "user")
    ] or [0]
    found = [(opening + rest[row:], row) for row in asks]
    last = rest[asks[-1] :]
    first = next((row for row, message in enumerate(last) if message["role"] != "user"), len(last))
    asked, turns = last[:first], last[first:]
    starts = [row for row, message in enumerate(turns) if message["role"] == "assistant"]
    for steps, row in enumerate(starts[1:], start=1):
        note = f"\n\n[... {steps} earlier steps left out ...]"
        said = [*asked[:-1], {**asked[-1], "content": asked[-1]["content"] + note}] if asked else []
        found.append((opening + said + turns[row:], asks[-1] + row))
    return found


def _cut_results(template: ChatTemplate, messages: Sequence[Message], limit: int) -> tuple[list[Message], int]:
    """Return the messages with results of at most about ``limit`` tokens, and how many tokens went."""
    short, gone = [], 0
    for message in messages:
        if message["role"] != "tool":
            short.append(message)
            continue
        content, cut = _cut(template, message["content"], limit)
        short.append({**message, "content": content})
        gone += cut
    return short, gone


def _cut(template: ChatTemplate, text: str, limit: int) -> tuple[str, int]:
    if len(text.encode()) <= limit:  # a token has at least one byte
        return text, 0
    ids, starts = template.encode(text)
    if len(ids) <= limit:
        return text, 0
    gone, tail = len(ids) - limit, limit // 2
    rest = text[int(starts[len(ids) - tail]) :] if tail else ""
    return text[: int(starts[limit - tail])] + CUT.format(gone) + rest, gone
