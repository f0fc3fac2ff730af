"""What the importers share (floor 3): typed access to foreign JSON, and ``Draft``, a session while it is being read.

Every function raises ``RecordError`` with the path of the field for a value of the wrong type; null means absent.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from agentft.etai import RecordError, parse_json

MESSAGE_TOOL = "message"
"""Tool name of a turn in which the agent only talks and is answered."""

Result = dict[str, Any]
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_IMAGE_PARTS = ("image", "image_url", "input_image")
SESSION_KEYS = ("session_id", "conversation_id", "trajectory_id", "traj_id", "id")


def wrong_type(field: str, got: object, expected: str) -> RecordError:
    """Return the error for a value of the wrong type."""
    return RecordError("wrong type", reason="wrong_type", field=field, got=got, expected=expected)


def as_str(value: object, field: str) -> str:
    """Return a string; null gives the empty string."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise wrong_type(field, value, "a string")
    return value


def as_dict(value: object, field: str) -> dict[str, Any]:
    """Return an object, also one given as JSON text; null and empty text give an empty object."""
    value = _decoded(value)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong_type(field, value, "an object")
    return value


def as_list(value: object, field: str) -> list[Any]:
    """Return a list, also one given as JSON text; null and empty text give an empty list."""
    value = _decoded(value)
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type(field, value, "a list")
    return value


def _decoded(value: object) -> object:
    """Decode JSON text (tables often hold nested values that way); other text stays as it is."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return parse_json(value)
    except RecordError:
        return value


def whole(value: object) -> int | None:
    """Return an exit code that a source states: an integer other than −1, which means "not known"."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value != -1 else None


def seconds(value: object) -> float | None:
    """Return a duration in seconds if it is a number between 0 and 1e9."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= 1e9 else None


def text_of(content: object, field: str, notes: Counter[str]) -> str:
    """Return the text of a message: a string, or a list of text parts; images become ``[image]`` and are counted.

    Raises:
        RecordError: ``unknown_part`` for any other kind of part.
    """
    if isinstance(content, list):
        return "\n".join(_part_text(part, f"{field}[{i}]", notes) for i, part in enumerate(content))
    return as_str(content, field)


def _part_text(part: object, field: str, notes: Counter[str]) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise wrong_type(field, part, "a text part")
    kind = part.get("type")
    if kind in _IMAGE_PARTS:
        notes["images_left_out"] += 1
        return "[image]"
    if kind not in _TEXT_PARTS:
        raise RecordError(
            "unknown kind of content part", reason="unknown_part", field=f"{field}.type", got=kind, expected="text"
        )
    for key in ("text", "value", "refusal"):
        if part.get(key) is not None:
            return as_str(part[key], f"{field}.{key}")
    return ""


def arguments_of(value: object, notes: Counter[str]) -> dict[str, Any]:
    """Return a call's arguments; what is no JSON object is kept as ``{"_raw": text}`` and counted."""
    if isinstance(value, dict):
        return value
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            decoded = parse_json(value)
        except RecordError:
            decoded = None
        if isinstance(decoded, dict):
            return decoded
    notes["malformed_arguments"] += 1
    return {"_raw": value}


def function_call(call: object, field: str, notes: Counter[str]) -> tuple[str, dict[str, Any], str | None]:
    """Return name, arguments and id of an OpenAI-style call (``{id, function: {name, arguments}}``, or flat).

    Kimi writes the name into the id (``functions.name:0``): that name counts where there is no other.
    """
    if not isinstance(call, dict):
        raise wrong_type(field, call, "an object")
    function = as_dict(call.get("function"), f"{field}.function") or call
    call_id = as_str(call.get("id"), f"{field}.id") or None
    name = as_str(function.get("name"), f"{field}.function.name")
    if kimi := re.fullmatch(r"functions\.(.+):\d+", name or call_id or ""):
        name = kimi[1]
    if not name:
        raise RecordError("the call has no name", reason="missing_field", field=f"{field}.function.name")
    return name, arguments_of(function.get("arguments"), notes), call_id


def join(*texts: str | None) -> str:
    """Join the texts that are not blank by a blank line."""
    return "\n\n".join(text.strip() for text in texts if text and text.strip())


class Draft:
    """A session while it is being read, turn by turn in the order of the source.

    ``notes`` counts what had no place in the record.
    """

    def __init__(self, source: str, notes: Counter[str]) -> None:
        self.source, self.notes = source, notes
        self.steps: list[dict[str, Any]] = []
        self._instruction: list[str] = []
        self._said: str = ""
        self._open: list[tuple[str | None, int]] = []

    @property
    def started(self) -> bool:
        """Whether the agent has had a turn."""
        return bool(self.steps or self._said)

    @property
    def talking(self) -> bool:
        """Whether the agent's newest turn was only text."""
        return bool(self._said)

    @property
    def has_instruction(self) -> bool:
        """Whether the user has asked for anything before the agent's first turn."""
        return bool(join(*self._instruction))

    def instruct(self, text: str) -> None:
        """Add to the instruction, whatever has happened since."""
        self._instruction.append(text)

    @property
    def waiting(self) -> list[int]:
        """Indices of the newest steps that have no result yet, in order."""
        return [index for _, index in self._open]

    def user(self, text: str) -> None:
        """Take a user's turn: the instruction, an answer to what the agent said, or an interruption."""
        if not self.started:
            self._instruction.append(text)
        elif self._said:
            said, self._said = self._said, ""
            self._add(MESSAGE_TOOL, {"content": said}, None, {"stdout": text, "combined": True})
        elif text.strip():
            result = self.steps[-1].setdefault("execution_result", {}) or {}
            result["user_message"] = join(result.get("user_message"), text)
            self.steps[-1]["execution_result"] = result
            self.notes["interruptions"] += 1

    def say(self, text: str) -> None:
        """Take a turn in which the agent only talks."""
        self._said = join(self._said, text)
        self._open = []

    def call(
        self, name: str, args: dict[str, Any], *, thought: str | None = None, call_id: str | None = None
    ) -> dict[str, Any]:
        """Take a call; text that the agent said just before becomes part of its thought. Returns the step."""
        thought, self._said = join(self._said, thought) or None, ""
        self._open.append((call_id, len(self.steps)))
        return self._add(name, args, thought, None)

    def turn(self) -> None:
        """Begin a new turn of the agent: calls of earlier turns that have no result stay without one."""
        self._open = []

    def result(self, result: Result, call_id: str | None = None) -> None:
        """Give a result to the open call with ``call_id``, or to the oldest open one where ids are not used."""
        for position, (known, index) in enumerate(self._open):
            if call_id is None or known is None or known == call_id:
                del self._open[position]
                self.attach(self.steps[index], result)
                return
        self.notes["results_without_call"] += 1

    def attach(self, step: dict[str, Any], result: Result) -> None:
        """Give ``step`` its result; a second one is not taken. What a user said meanwhile stays."""
        earlier = step["execution_result"] or {}
        if "stdout" in earlier:
            self.notes["results_without_call"] += 1
        else:
            step["execution_result"] = {**result, **earlier}

    def _add(self, name: str, args: dict[str, Any], thought: str | None, result: Result | None) -> dict[str, Any]:
        step = {
            "step": len(self.steps) + 1,
            "thought": thought,
            "tool_called": name,
            "tool_args": args,
            "execution_result": result,
        }
        self.steps.append(step)
        return step

    def record(self, document: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        """Return the finished record; what the agent said last is its final output.

        Raises:
            RecordError: there is no instruction, or the agent did nothing.
        """
        instruction = join(*self._instruction)
        if not instruction:
            raise RecordError("the user asked for nothing", reason="no_instruction", expected="a user message")
        if not self.steps and not self._said:
            raise RecordError("the agent did nothing", reason="no_agent_turn", expected="an assistant message")
        record = {
            "user_instruction": instruction,
            "execution_trace": self.steps,
            "final_output": self._said,
            "source": self.source,
            **{name: value for name, value in fields.items() if value is not None},
        }
        return {"session_id": _session_id(document, record), **record}


def _session_id(document: Mapping[str, Any], record: dict[str, Any]) -> str:
    for key in SESSION_KEYS:
        if isinstance(document.get(key), str) and document[key]:
            return str(document[key])
    digest = hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode()).hexdigest()
    task = document.get("instance_id")
    return f"{task}-{digest[:12]}" if isinstance(task, str) and task else f"{record['source']}-{digest[:16]}"


def repository_of(*candidates: object) -> str | None:
    """Return ``owner/name`` from the first that tells it: a URL, ``owner/name``, ``owner__name`` or a task's id."""
    patterns = (
        r"(?:https?://|git@)[\w.-]+[/:]([\w.-]+)/([\w.-]+?)(?:\.git)?(?:/.*)?",
        r"([\w.-]+)/([\w.-]+)",
        r"/?([A-Za-z\d.-]+(?:_[A-Za-z\d.-]+)*)__([\w.-]+?)(?:\.[\da-f]{7,8}(?:\..*)?|-i?\d+)?",
    )
    for candidate in candidates:
        for pattern in patterns if isinstance(candidate, str) else ():
            if match := re.fullmatch(pattern, str(candidate)):
                return f"{match[1]}/{match[2]}"
    return None


def git_workspace(url: object, commit: object) -> dict[str, str] | None:
    """Return a git workspace if both are known and the commit is a full hash (a branch name does not pin files)."""
    if isinstance(url, str) and url and isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{40}", commit):
        return {"kind": "git", "url": url, "commit": commit}
    return None
