"""OpenAI-style messages (floor 3): ``{"messages": […]}`` or the bare list, with ``tool_calls`` or plain chat.

Also the forms that grew around it: legacy ``function_call`` with role ``function``, Kimi's call ids, content as a
list of parts, with ``reasoning`` and ``tool_call`` parts and no call ids (LLaMA-Factory). A result is paired by
``tool_call_id``, else by order; one tool message that answers several calls as a JSON list of ``{name, content}`` is
taken apart. An exit code is read only where the result is a JSON object that states it.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from agentft.data.importers.common import (
    Draft,
    as_dict,
    as_list,
    as_str,
    function_call,
    join,
    repository_of,
    text_of,
    whole,
    wrong_type,
)
from agentft.etai import RecordError, parse_json

NAME = "openai"
_Call = tuple[str, dict[str, Any], str | None]


def record(document: object, notes: Counter[str]) -> dict[str, Any]:
    """Turn one conversation into an ETAI record.

    Raises:
        RecordError: no messages, or a field of the wrong type.
    """
    envelope = {"messages": document} if isinstance(document, list) else as_dict(document, "")
    draft, reasoned = Draft(NAME, notes), False
    for index, message in enumerate(as_list(envelope.get("messages"), "messages")):
        field = f"messages[{index}]"
        if not isinstance(message, dict):
            raise wrong_type(field, message, "an object")
        role = message.get("role")
        if role in ("system", "developer"):
            notes["system_prompts_left_out"] += 1
        elif role == "user":
            draft.user(text_of(message.get("content"), f"{field}.content", notes))
        elif role == "assistant":
            reasoned = _assistant(draft, message, field)
        elif role in ("tool", "function"):
            _result(draft, message, field)
        else:
            raise RecordError("unknown role", reason="wrong_value", field=f"{field}.role", got=role)
    notes["final_reasoning_left_out"] += reasoned
    notes["tool_lists_left_out"] += bool(envelope.get("tools") or envelope.get("functions"))
    repository = repository_of(envelope.get("repository"), envelope.get("repo"), envelope.get("instance_id"))
    return draft.record(envelope, repository=repository)


def _assistant(draft: Draft, message: dict[str, Any], field: str) -> bool:
    """Take one turn of the agent; returns whether reasoning was left out (the turn holds no call to carry it)."""
    reasoning, text, calls = _parts(message.get("content"), f"{field}.content", draft.notes)
    for key in ("reasoning_content", "reasoning"):
        if isinstance(message.get(key), str):
            reasoning = join(reasoning, message[key])
            break
    for index, call in enumerate(as_list(message.get("tool_calls"), f"{field}.tool_calls")):
        calls.append(function_call(call, f"{field}.tool_calls[{index}]", draft.notes))
    if message.get("function_call") is not None:
        legacy = as_dict(message["function_call"], f"{field}.function_call")
        calls.append(function_call({"function": legacy}, f"{field}.function_call", draft.notes))
    draft.turn()
    if not calls:
        draft.say(text)
        return bool(reasoning)
    for index, (name, args, call_id) in enumerate(calls):
        draft.call(name, args, thought=join(reasoning, text) if index == 0 else None, call_id=call_id)
    return False


def _parts(content: object, field: str, notes: Counter[str]) -> tuple[str, str, list[_Call]]:
    """Split content into reasoning, text and calls; only lists of parts hold the first and the last."""
    if not isinstance(content, list):
        return "", text_of(content, field, notes), []
    reasoning, texts, calls = "", [], []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        value = part.get("value", part.get(str(kind))) if isinstance(part, dict) else None
        if kind == "reasoning":
            reasoning = join(reasoning, as_str(value, f"{field}[{index}].value"))
        elif kind == "tool_call":
            calls.append(function_call(as_dict(value, f"{field}[{index}].value"), f"{field}[{index}]", notes))
        else:
            texts.append(part)
    return reasoning, text_of(texts, field, notes), calls


def _result(draft: Draft, message: dict[str, Any], field: str) -> None:
    text = text_of(message.get("content"), f"{field}.content", draft.notes)
    call_id = as_str(message.get("tool_call_id"), f"{field}.tool_call_id") or None
    status = message.get("status")
    results = [text] if call_id else _taken_apart(draft, text)
    for item in results:
        result = tool_result(item)
        if isinstance(status, str):
            result["status"] = status
        draft.result(result, call_id)


def _taken_apart(draft: Draft, text: str) -> list[str]:
    """Return one text for each open call if ``text`` is a JSON list of their results, in order and by name."""
    names = [draft.steps[index]["tool_called"] for index in draft.waiting]
    try:
        items = parse_json(text) if text.lstrip().startswith("[") else None
    except RecordError:
        items = None
    if not isinstance(items, list) or not all(isinstance(item, dict) and "content" in item for item in items):
        return [text]
    if not names or [item.get("name") for item in items] != names:
        return [text]
    contents = [item["content"] for item in items]
    return [c if isinstance(c, str) else json.dumps(c, ensure_ascii=False) for c in contents]


def tool_result(text: str) -> dict[str, Any]:
    """Return a tool's answer as a result; exit code and streams only where a JSON object states them."""
    result: dict[str, Any] = {"stdout": text, "combined": True}
    try:
        stated = parse_json(text) if text.lstrip().startswith("{") else None
    except RecordError:
        stated = None
    if not isinstance(stated, dict):
        return result
    metadata = stated.get("metadata")
    holders = [stated, metadata if isinstance(metadata, dict) else {}]
    codes = [whole(holder.get(key)) for holder in holders for key in ("exit_code", "returncode")]
    result["exit_code"] = next((code for code in codes if code is not None), None)
    if result["exit_code"] is not None and isinstance(stated.get("stdout"), str):
        error = stated.get("stderr")
        result |= {"stdout": stated["stdout"], "stderr": error if isinstance(error, str) else "", "combined": False}
    return result
