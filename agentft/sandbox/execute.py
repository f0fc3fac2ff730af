"""Runs tools for real, built in or the user's (floor 2): one ``ToolCall`` on one lease → one ``ExecResult``.

    with sandbox.lease() as lease:
        lease.write_files({"add.py": b"..."})
        result = run_tool(lease, ToolCall("pytest_run", {}))

Whatever the agent did wrong is data: exit code 1 with a reason in ``stderr`` (a file that is not there, an edit that
does not match), 2 for an unknown tool or bad arguments, 127 for a program that the image does not have. Only the
sandbox's own failure is ``status="infra"``. Text is normalised so that the same call gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from agentft.errors import SandboxError
from agentft.sandbox import execute_files as files
from agentft.sandbox.base import ExecResult, Lease
from agentft.sandbox.container import infra
from agentft.sandbox.execute_base import EXIT_FAILED, EXIT_USAGE, TOOL_ENV, Tool, message
from agentft.sandbox.execute_programs import PROGRAM_TOOLS, PYTEST
from agentft.sandbox.execute_user import run_user_tool
from agentft.tools import USER_TOOLS, ToolCall
from agentft.tools.check import check_call

__all__ = ["PYTEST", "READ_ONLY_TOOLS", "TOOL_ENV", "run_tool"]

READ_ONLY_TOOLS = frozenset({"file_read", "file_list", "code_search", "git_status", "git_diff", "git_log"})
"""Tools that leave the workspace as it was: they need not be repeated to rebuild its state."""

_TOOLS: Mapping[str, Tool] = {
    "file_read": files.file_read,
    "file_write": files.file_write,
    "file_edit": files.file_edit,
    "file_list": files.file_list,
    "code_search": files.code_search,
    "docker_build": files.docker_build,
    **PROGRAM_TOOLS,
}


def run_tool(lease: Lease, call: ToolCall) -> ExecResult:
    """Execute one call; never raises for what the call does. ``fields`` of the result: what its output says."""
    problem = check_call(call)
    if problem is not None:
        return message(EXIT_USAGE, stderr=problem)
    started = time.monotonic()
    try:
        if call.name in USER_TOOLS:
            result = run_user_tool(lease, USER_TOOLS[call.name], call.args)
        else:
            result = _TOOLS[call.name](lease, call.args)
    except OSError as error:
        result = message(EXIT_FAILED, stderr=f"{error.filename or 'workspace'}: {error.strerror or error}")
    except SandboxError as error:
        return infra(error, time.monotonic() - started)
    return result if result.duration_s else dataclasses.replace(result, duration_s=time.monotonic() - started)
