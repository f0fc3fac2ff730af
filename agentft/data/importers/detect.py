"""What a document is (floor 3): its format, seen from its content, and the sessions that one JSON value holds.

Formats that are known but not supported are named in the refusal, so that nothing is imported by accident.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any

from agentft.data.importers import etai_lines, mini_swe_agent, openai_messages, openhands, swe_agent
from agentft.data.importers.common import SESSION_KEYS, as_list
from agentft.errors import ConfigError
from agentft.etai import RecordError

Importer = Callable[..., dict[str, Any]]
IMPORTERS: dict[str, Importer] = {
    swe_agent.NAME: swe_agent.record,
    mini_swe_agent.NAME: mini_swe_agent.record,
    openhands.NAME: openhands.record,
    openai_messages.NAME: openai_messages.record,
    etai_lines.NAME: etai_lines.record,
}
_MINI_BLOCK = "```mswea_bash_command"
_TURN_KEYS = ("role", "from", "action", "observation")


def check_format(name: str) -> None:
    """Raise ``ConfigError`` unless ``name`` is ``auto`` or a supported format."""
    if name != "auto" and name not in IMPORTERS:
        near = difflib.get_close_matches(name, IMPORTERS, n=1)
        raise ConfigError(
            "unknown format",
            where="--format",
            got=name,
            expected=f"auto, {', '.join(IMPORTERS)}",
            hint=f"did you mean {near[0]}?" if near else None,
        )


def split(value: object, where: str) -> Iterator[tuple[str, object]]:
    """Take a decoded file apart: a list of sessions into sessions, a retry agent's ``attempts`` into attempts."""
    if isinstance(value, list) and not _is_one_session(value):
        for index, item in enumerate(value):
            yield from split(item, f"{where}[{index}]")
        return
    attempts = value.get("attempts") if isinstance(value, dict) else None
    if isinstance(value, dict) and isinstance(attempts, list) and all(isinstance(item, dict) for item in attempts):
        own = ("attempts", "trajectory", "history", "info", *SESSION_KEYS)
        shared = {k: v for k, v in value.items() if k not in own}
        for index, attempt in enumerate(attempts):
            yield f"{where}.attempts[{index}]", {**shared, **attempt}
        if attempts:
            return
    yield where, value


def _is_one_session(items: list[Any]) -> bool:
    return any(isinstance(item, dict) and any(isinstance(item.get(key), str) for key in _TURN_KEYS) for item in items)


def detect(document: object) -> str:
    """Return the name of a supported format.

    Raises:
        RecordError: ``unsupported_format`` names one that is known; ``unknown_format`` says what the document holds.
    """
    if _is_etai(document):
        return etai_lines.NAME
    if foreign := _unsupported(document):
        raise RecordError(
            f"format {foreign} is not supported yet",
            reason="unsupported_format",
            expected=", ".join(IMPORTERS),
            hint="convert it to OpenAI messages, or leave the file out",
        )
    for name, matches in _CHECKS.items():
        if matches(document):
            return name
    keys = ", ".join(sorted(map(str, document))[:12]) if isinstance(document, dict) else type(document).__name__
    raise RecordError(
        "the format is not recognised",
        reason="unknown_format",
        got=f"an object with {keys}" if isinstance(document, dict) else keys,
        expected=", ".join(IMPORTERS),
        hint="put the messages of a conversation into one list, one list a line"
        if isinstance(document, dict) and "role" in document
        else "name the format with --format if it is one of these",
    )


def _items(document: object, *keys: str) -> list[dict[str, Any]]:
    """Return the objects of the first of ``keys`` that is a list (or JSON text of one), or of a bare list."""
    values = [document] if isinstance(document, list) else []
    values += [document[key] for key in keys if document.get(key) is not None] if isinstance(document, dict) else []
    for value in values:
        try:
            items = as_list(value, "")
        except RecordError:
            continue
        flat = [part for item in items for part in (item if isinstance(item, list) else [item])]
        if objects := [item for item in flat if isinstance(item, dict)]:
            return objects
    return []


def _is_etai(document: object) -> bool:
    return isinstance(document, dict) and "user_instruction" in document


def _is_openhands(document: object) -> bool:
    items = _items(document, "trajectory", "history")
    return any(("action" in e or "observation" in e) and ("source" in e or "cause" in e) for e in items)


def _is_swe_agent(document: object) -> bool:
    if not isinstance(document, dict):
        return False
    return any("action" in step and "observation" in step for step in _items(document, "trajectory")) or any(
        "role" in item for item in _items(document, "history")
    )


def _is_mini(document: object) -> bool:
    if isinstance(document, dict) and str(document.get("trajectory_format", "")).startswith("mini-swe-agent"):
        return True
    info = document.get("info") if isinstance(document, dict) else None
    if isinstance(info, dict) and "mini_version" in info:
        return True
    for message in _items(document, "messages"):
        extra, content = message.get("extra"), message.get("content")
        if message.get("role") == "exit" or (isinstance(extra, dict) and {"actions", "returncode"} & set(extra)):
            return True
        if isinstance(content, str) and (content.lstrip().startswith("<returncode>") or _MINI_BLOCK in content):
            return True
    return False


def _is_openai(document: object) -> bool:
    return any("role" in item for item in _items(document, "messages"))


_CHECKS: dict[str, Callable[[object], bool]] = {
    openhands.NAME: _is_openhands,
    swe_agent.NAME: _is_swe_agent,
    mini_swe_agent.NAME: _is_mini,
    openai_messages.NAME: _is_openai,
}


def _unsupported(document: object) -> str | None:
    """Return the name of a known format that no importer takes, or None."""
    messages = _items(document, "messages", "conversations", "history", "trajectory")
    if isinstance(document, dict) and not messages:
        messages = [document]
    if any("from" in item and "value" in item for item in messages):
        return "ShareGPT (conversations of from/value)"
    if isinstance(document, dict) and isinstance(document.get("chat"), str):
        return "glaive-function-calling-v2 (text with <functioncall>)"
    for item in messages:
        if str(item.get("kind", "")).endswith("Event") or ("tool_name" in item and "action_id" in item):
            return "OpenHands V1 events"
        if isinstance(item.get("data"), dict) and isinstance(item.get("type"), str):
            return "LangChain messages"
        if "sessionId" in item and ("uuid" in item or "parentUuid" in item):
            return "Claude Code session log"
        if item.get("type") in ("session_meta", "response_item", "event_msg") and "payload" in item:
            return "Codex CLI rollout"
        if foreign := _foreign_content(item):
            return foreign
    return None


def _foreign_content(message: dict[str, Any]) -> str | None:
    content = message.get("content")
    if isinstance(content, list):
        kinds = {str(part.get("type")) for part in content if isinstance(part, dict)}
        if kinds & {"tool_use", "tool_result"}:
            return "Anthropic messages (tool_use and tool_result parts)"
    if message.get("role") == "assistant" and isinstance(content, str) and not message.get("tool_calls"):
        if "<tool_call>" in content and "</tool_call>" in content:
            return "Hermes (calls in <tool_call> tags)"
        if content.lstrip().startswith("<functioncall>"):
            return "text with <functioncall>"
    return None
