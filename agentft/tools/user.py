"""Tools of the user (floor 0): what they are, and the one table of tools that a process works with.

``use(tools)`` puts them behind the 18 built-in ones: row 18 of the tool head is the first of them. It changes
``agentft.tools.TOOLS`` and ``TOOL_INDEX`` in place, because a process trains, evaluates or executes with one table;
``use(())`` goes back to the built-in tools. ``agentft.config.tools`` reads them from YAML.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from agentft.tools.builtin import BUILTIN_TOOLS, TOOL_INDEX, TOOLS
from agentft.tools.spec import ToolSpec


@dataclass(frozen=True, kw_only=True)
class Service:
    """A program that runs beside the session's container while the session lasts, reachable on 127.0.0.1 only."""

    image: str
    command: tuple[str, ...]
    port: int


@dataclass(frozen=True, kw_only=True)
class UserTool:
    """A tool of the user: what the agent sees (``spec``) and what runs.

    Either ``command`` (argv; it gets the arguments as a JSON object on stdin) or a Python function: ``source`` of its
    module and its name ``function``, called with the arguments inside the sandbox. It runs in the session's container;
    with ``image`` in a container of its own; ``service`` is what it talks to.
    """

    spec: ToolSpec
    command: tuple[str, ...] = ()
    source: str = ""
    function: str = ""
    image: str | None = None
    service: Service | None = None
    timeout_s: float | None = None

    def digest(self) -> str:
        """Return a digest of all that the tool is: part of every key of a cached result."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


USER_TOOLS: dict[str, UserTool] = {}
"""The user's tools that are in use, by name."""


def use(tools: Iterable[UserTool]) -> None:
    """Make ``tools`` the user's tools of this process, in this order; their names are unique and not built in."""
    found = {tool.spec.name: tool for tool in tools}
    USER_TOOLS.clear()
    USER_TOOLS.update(found)
    TOOLS.clear()
    TOOLS.update({spec.name: spec for spec in (*BUILTIN_TOOLS, *(tool.spec for tool in found.values()))})
    TOOL_INDEX.clear()
    TOOL_INDEX.update({name: row for row, name in enumerate(TOOLS)})


def specs() -> tuple[ToolSpec, ...]:
    """Return every tool in use, in the order of the tool head."""
    return tuple(TOOLS.values())


def user_specs() -> dict[str, str]:
    """Return name → digest of the user's tools as the agent sees them (shards remember it)."""
    return {
        name: hashlib.sha256(json.dumps(dataclasses.asdict(tool.spec), sort_keys=True).encode()).hexdigest()[:16]
        for name, tool in USER_TOOLS.items()
    }
