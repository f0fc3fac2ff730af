"""Runs the user's tools (floor 2): a command or a Python function, in the session's container or in one of its own.

The arguments travel as JSON on stdin: no text of the agent becomes part of a command line. If the tool declares
``fields``, the last line of its stdout is a JSON object with them, which is taken off the text.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Protocol, cast

from agentft.errors import SandboxError
from agentft.sandbox.base import ExecResult, Lease
from agentft.sandbox.execute_base import run_program
from agentft.tools import UserTool
from agentft.tools.parse import parse_traceback

CALL_FUNCTION = """\
import json, sys
work = json.load(sys.stdin)
scope = {"__name__": "tool"}
exec(compile(work["source"], "/tool.py", "exec"), scope)
result = scope[work["function"]](**work["args"])
print(result if isinstance(result, str) else json.dumps(result))
"""


class LeaseWithTools(Protocol):
    """A lease that can run commands in containers of other images, beside its own."""

    def beside(self, image: str) -> Lease:
        """Return this session's container of ``image``. Raises ``SandboxError``."""


def run_user_tool(lease: Lease, tool: UserTool, args: Mapping[str, Any]) -> ExecResult:
    """Run the tool with checked arguments.

    Raises:
        SandboxError: it needs a container or a service, and the sandbox was opened without (see ``services``).
    """
    where = lease
    if tool.image is not None or tool.service is not None:
        if not hasattr(lease, "beside"):
            raise SandboxError(
                f"the tool {tool.spec.name} needs containers of its own",
                expected="a sandbox from services.open_with_tools",
            )
        if tool.image is not None:
            where = cast(LeaseWithTools, lease).beside(tool.image)
    if tool.command:
        argv, given = tool.command, dict(args)
    else:
        argv = ("python3", "-c", CALL_FUNCTION)
        given = {"source": tool.source, "function": tool.function, "args": dict(args)}
    result = run_program(where, argv, stdin=json.dumps(given).encode(), timeout_s=tool.timeout_s)
    if result.status not in ("ok", "nonzero"):
        return result
    text, fields = _take_fields(result.stdout, tool.spec.fields)
    if not fields and result.status == "nonzero":
        fields = parse_traceback(result.stderr)
    return dataclasses.replace(result, stdout=text, fields=fields)


def _take_fields(stdout: str, names: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    head, _, last = stdout.rstrip("\n").rpartition("\n")
    if not names or not last.startswith("{"):
        return stdout, {}
    try:
        found = json.loads(last)
    except ValueError:
        return stdout, {}
    return (f"{head}\n" if head else ""), {name: found[name] for name in names if name in found}
