"""What a tool is (floor 0): its name, its arguments, and a call of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

ParameterType = Literal["string", "integer", "number", "boolean", "array", "object"]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One argument of a tool. ``refers_to`` marks values that point at something the context showed."""

    name: str
    type: ParameterType
    description: str
    required: bool = True
    refers_to: Literal["file", "line"] | None = None


@dataclass(frozen=True, kw_only=True)
class ToolSpec:
    """A tool the agent can call.

    ``deterministic`` tools give the same result on the same workspace and may be cached.
    ``runs_code`` tools have an outcome that depends on what the program does (the reward head's real subject).
    ``fields`` are the parsed fields of its result (beside exit code, status and output), ``needs`` the programs of
    the image that can do its work: the first one that is there does it.
    """

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    deterministic: bool = True
    runs_code: bool = False
    fields: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def usage(self) -> str:
        """Return how the tool is called, such as ``file_read(path: string, [start_line: integer])``."""
        words = (f"{p.name}: {p.type}" if p.required else f"[{p.name}: {p.type}]" for p in self.parameters)
        return f"{self.name}({', '.join(words)})"

    def json_schema(self) -> dict[str, Any]:
        """Return the parameters as a JSON Schema object, in the form OpenAI-style tool lists use."""
        return {
            "type": "object",
            "properties": {p.name: {"type": p.type, "description": p.description} for p in self.parameters},
            "required": [p.name for p in self.parameters if p.required],
            "additionalProperties": False,
        }


@dataclass(frozen=True)
class ToolCall:
    """One call as the agent wrote it: a tool name and its arguments (JSON values)."""

    name: str
    args: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def canonical(self) -> str:
        """Return the call as canonical JSON: the same call gives the same text."""
        return json.dumps({"name": self.name, "args": dict(self.args)}, sort_keys=True, ensure_ascii=True)


@dataclass(frozen=True)
class FormatError:
    """A malformed call: data, never an exception. ``text`` is what was written, ``reason`` what is wrong with it."""

    text: str
    reason: str
