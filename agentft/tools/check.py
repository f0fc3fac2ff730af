"""Checks a call against its tool's parameters (floor 0): what is wrong with it, in words an agent can act on."""

from __future__ import annotations

from typing import Any

from agentft.tools.builtin import TOOLS
from agentft.tools.spec import ParameterType, ToolCall

_TYPES: dict[ParameterType, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
}


def check_call(call: ToolCall) -> str | None:
    """Return what is wrong with the call (unknown tool, missing, unknown or mistyped argument); None if it is fine."""
    spec = TOOLS.get(call.name)
    if spec is None:
        return f"there is no tool {call.name!r}; tools are {', '.join(TOOLS)}"
    known = {parameter.name: parameter for parameter in spec.parameters}
    for name in call.args:
        if name not in known:
            return f"{call.name} has no argument {name!r}; usage: {spec.usage()}"
    for name, parameter in known.items():
        if name not in call.args:
            if parameter.required:
                return f"{call.name} needs the argument {name!r}; usage: {spec.usage()}"
        elif not has_type(call.args[name], parameter.type):
            got = type(call.args[name]).__name__
            return f"{call.name}: argument {name!r} must be of type {parameter.type}, got {got}"
        elif isinstance(call.args[name], str) and not _is_text(call.args[name]):
            return f"{call.name}: argument {name!r} must be text without NUL characters and lone surrogates"
    return None


def has_type(value: Any, wanted: ParameterType) -> bool:
    """Return whether ``value`` is of the JSON type ``wanted``; a boolean is no number."""
    if isinstance(value, bool):
        return wanted == "boolean"
    return isinstance(value, _TYPES[wanted])


def _is_text(value: str) -> bool:
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)
