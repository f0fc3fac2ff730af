"""Files of chats and sessions as records (floor 3): what ``agentft shards write`` reads for a chat template.

    reader = read_records("training.jsonl")      # .jsonl, .jsonl.gz, .jsonl.zst
    for record in reader: ...                    # Conversation or Session; reader.report counts the rest

One JSON object (or a bare list of messages) a line, of these forms, which may be mixed:

- ``{"messages": [...], "tools": [...]}``: OpenAI's chat form, also with ``function_call``, role ``function``,
  arguments as text or object, content as a list of text parts, ``weight: 0`` (shown, not trained);
- ``{"user": ..., "assistant": ...}`` or ``{"prompt": ..., "completion": ...}``: one question, one answer;
- an ETAI session.

No system prompt is made up, and none is left out. A line without an id is named by a digest of what it says.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentft.data.importers.common import (
    SESSION_KEYS,
    as_dict,
    as_list,
    as_str,
    function_call,
    repository_of,
    text_of,
    wrong_type,
)
from agentft.errors import DataError
from agentft.etai import RecordError, clean, to_session
from agentft.etai_io import JsonLine, ReadReport, RejectFile, duplicate, json_lines, rejected_path
from agentft.text.chat import ROLES, Conversation, Record
from agentft.text.chat_template import Message

PAIRS = (("user", "assistant"), ("prompt", "completion"))
_ROLE_NAMES = {"developer": "system", "function": "tool"}


class RecordReader(Iterator[Record]):
    """The records of one file; ``report`` is complete once the iteration has ended."""

    def __init__(self, path: Path) -> None:
        self.report = ReadReport(path=path, rejects=rejected_path(path))
        self._records = self._read()

    def __next__(self) -> Record:
        return next(self._records)

    def _read(self) -> Iterator[Record]:
        report, first_line = self.report, dict[str, int]()
        with contextlib.closing(RejectFile(report.rejects)) as rejects:
            for line in json_lines(report.path):
                try:
                    record = to_record(line)
                    first = first_line.setdefault(record.session_id, line.number)
                    if first != line.number:
                        raise duplicate(record.session_id, f"line {first}")
                except RecordError as error:
                    report.by_reason[error.reason] += 1
                    located = error.at(f"{report.path}:{line.number}")
                    rejects.add(located, file=str(report.path), line=line.number, text=line.text)
                    continue
                report.kept += 1
                report.repaired.update(line.repairs)
                yield record


def read_records(path: str | Path) -> RecordReader:
    """Iterate over the records of a file; a bad line goes to ``<name>.rejected.jsonl`` with its reason.

    Raises:
        DataError: no such file, or one of another kind.
    """
    source = Path(path)
    if not source.is_file() or not source.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        raise DataError("no file of JSON lines", where=str(source), expected="a .jsonl, .jsonl.gz or .jsonl.zst file")
    return RecordReader(source)


def to_record(line: JsonLine) -> Record:
    """Return the session or conversation of one decoded line.

    Raises:
        RecordError: with the first thing that is wrong.
    """
    if line.error is not None:
        raise line.error
    if isinstance(line.value, dict) and "user_instruction" in line.value:
        return to_session(line.value, line.repairs)
    return conversation_of(clean(line.value, line.repairs), Counter())


def conversation_of(value: object, notes: Counter[str]) -> Conversation:
    """Return the conversation of a decoded document; ``notes`` counts what had no place (images).

    Raises:
        RecordError: no messages, an unknown role, or a field of the wrong type.
    """
    document = {"messages": value} if isinstance(value, list) else as_dict(value, "")
    for asks, answers in PAIRS:
        if "messages" not in document and isinstance(document.get(answers), str):
            said = [
                {"role": "user", "content": document.get(asks)},
                {"role": "assistant", "content": document[answers]},
            ]
            document = {**document, "messages": said}
    listed = as_list(document.get("messages"), "messages")
    if not listed:
        raise RecordError(
            "the line holds no conversation",
            reason="no_messages",
            got=", ".join(sorted(map(str, document))[:12]),
            expected="messages, user and assistant, prompt and completion, or an ETAI session",
        )
    messages = tuple(_message(item, f"messages[{number}]", notes) for number, item in enumerate(listed))
    tools = tuple(_tool(item, f"tools[{number}]") for number, item in enumerate(_tools(document)))
    return Conversation(
        session_id=_id(document, messages, tools),
        messages=messages,
        tools=tools,
        repository=repository_of(document.get("repository"), document.get("repo")),
    )


def _message(item: object, field: str, notes: Counter[str]) -> Message:
    if not isinstance(item, dict):
        raise wrong_type(field, item, "an object")
    role = _ROLE_NAMES.get(str(item.get("role")), item.get("role"))
    if role not in ROLES:
        raise RecordError("unknown role", reason="wrong_value", field=f"{field}.role", got=role, expected=str(ROLES))
    message: Message = {"role": role, "content": text_of(item.get("content"), f"{field}.content", notes)}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if text := as_str(item.get(key), f"{field}.{key}"):
            message[key] = text
    if item.get("weight") is not None:
        if item["weight"] not in (0, 1):
            raise wrong_type(f"{field}.weight", item["weight"], "0 or 1")
        message["weight"] = int(item["weight"])
    if calls := _calls(item, field):
        message["tool_calls"] = calls
    return message


def _calls(item: dict[str, Any], field: str) -> list[Message]:
    listed = list(as_list(item.get("tool_calls"), f"{field}.tool_calls"))
    if item.get("function_call") is not None:
        listed.append({"function": as_dict(item["function_call"], f"{field}.function_call")})
    calls, notes = [], Counter[str]()
    for number, call in enumerate(listed):
        name, arguments, call_id = function_call(call, f"{field}.tool_calls[{number}]", notes)
        if notes["malformed_arguments"]:
            place = f"{field}.tool_calls[{number}].function.arguments"
            raise RecordError("the arguments are no JSON object", reason="wrong_value", field=place, got=arguments)
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id or f"call_{number + 1}", "type": "function", "function": function})
    return calls


def _tools(document: dict[str, Any]) -> list[Any]:
    return as_list(document.get("tools") or document.get("functions"), "tools")


def _tool(item: object, field: str) -> Message:
    """Return a tool in OpenAI's form; the older one has the function alone."""
    tool = as_dict(item, field)
    return tool if isinstance(tool.get("function"), dict) else {"type": "function", "function": tool}


def _id(document: dict[str, Any], messages: tuple[Message, ...], tools: tuple[Message, ...]) -> str:
    for key in SESSION_KEYS:
        if isinstance(document.get(key), str) and document[key]:
            return str(document[key])
    digest = hashlib.sha256(json.dumps([messages, tools], sort_keys=True).encode()).hexdigest()
    return f"chat-{digest[:16]}"
