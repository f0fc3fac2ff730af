"""Small chats as rows of shards, for tests of training: some with calls, of very different lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentft.config.schema import FeedbackPositionsConfig, TextConfig
from agentft.data.shards import sample_of
from agentft.text.chat import ChatRenderer, Conversation, record_texts
from agentft.text.chat_template import assistant, call_of, prepare, user
from agentft.text.vocab import train_tokenizer

TEXT = TextConfig(template="chatml", handles=False, max_tokens=512)


def conversations(count: int) -> list[Conversation]:
    """``count`` chats; one in three calls a tool, one in four has two turns."""
    found = []
    for number in range(count):
        messages = [user(f"What is {number} + {number}? " + "Think. " * (number % 5))]
        if number % 3 == 0:
            result = {"role": "tool", "content": f"{2 * number}", "tool_call_id": "call_1", "name": "add"}
            messages += [assistant("", [call_of("add", {"a": number, "b": number})]), result]
        messages.append(assistant(f"It is {2 * number}."))
        if number % 4 == 0:
            messages += [user("Sure?"), assistant("Yes.")]
        found.append(Conversation(session_id=f"sum/{number:03d}", messages=tuple(messages)))
    return found


def chat_rows(count: int, *, vocab_size: int = 450) -> list[dict[str, Any]]:
    """Rows of shards, ids below ``vocab_size`` + 4."""
    chats = conversations(count)
    tokenizer = train_tokenizer(record_texts(chats), vocab_size)
    prepare(tokenizer, "chatml")
    renderer = ChatRenderer(tokenizer, TEXT, FeedbackPositionsConfig(enabled=False))
    return [sample_of(part, rendered) for chat in chats for part, rendered in renderer.parts(chat)]


def write_chats(path: Path, count: int) -> Path:
    """A file of these chats, in OpenAI's form."""
    lines = [json.dumps({"id": chat.session_id, "messages": chat.messages}) for chat in conversations(count)]
    path.write_text("\n".join(lines) + "\n")
    return path
