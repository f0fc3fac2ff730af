"""What the tools share (floor 2): the environment of their programs, running one, and results that need none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from agentft.sandbox.base import ExecRequest, ExecResult, Lease
from agentft.sandbox.container import WORKSPACE
from agentft.tools.parse import normalise

Tool = Callable[[Lease, Mapping[str, Any]], ExecResult]
"""A tool's implementation: it gets the checked arguments; what the agent did wrong is its result."""

EXIT_FAILED, EXIT_USAGE, EXIT_NOT_INSTALLED = 1, 2, 127
NODE_MODULES = "/opt/node/node_modules"

TOOL_ENV: Mapping[str, str] = {
    "PYTHONPATH": f"{WORKSPACE}:{WORKSPACE}/src",  # the code under test before an installed copy of it
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "NODE_PATH": NODE_MODULES,  # tests may require what jest brings along
    "COLUMNS": "80",
    "GIT_AUTHOR_NAME": "agent",
    "GIT_AUTHOR_EMAIL": "agent@sandbox",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",  # the same commit has the same name wherever it is made
    "GIT_COMMITTER_NAME": "agent",
    "GIT_COMMITTER_EMAIL": "agent@sandbox",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_PAGER": "cat",
    "GIT_OPTIONAL_LOCKS": "0",
}
_STOPPED = {
    "timeout": "stopped: it did not end within the time limit",
    "oom": "stopped: it used up the memory of the sandbox",
    "pids": "it reached the limit on processes of the sandbox",
    "output_limit": "stopped: it printed more than the sandbox keeps",
}


def run_program(
    lease: Lease, argv: tuple[str, ...], *, stdin: bytes = b"", timeout_s: float | None = None
) -> ExecResult:
    """Run a program; its text is normalised, and a limit that ended it is said in words at the end of ``stderr``."""
    result = lease.exec(ExecRequest(argv=argv, env=TOOL_ENV, stdin=stdin, timeout_s=timeout_s))
    stderr = normalise(result.stderr)
    if result.status in _STOPPED:
        stderr += ("" if not stderr or stderr.endswith("\n") else "\n") + _STOPPED[result.status] + "\n"
    return dataclasses.replace(result, stdout=normalise(result.stdout), stderr=stderr)


def run_first(lease: Lease, *commands: tuple[str, ...]) -> ExecResult:
    """Run the first of ``commands`` whose program the image has; say so plainly if it has none of them."""
    for argv in commands:
        result = run_program(lease, argv)
        if result.exit_code != EXIT_NOT_INSTALLED or not result.stderr.startswith(f"{argv[0]}: "):
            return result
    return not_installed(*(argv[0] for argv in commands))


def not_installed(*programs: str) -> ExecResult:
    """Return the result of a tool whose programs the image lacks."""
    missing = f"{programs[0]} is not" if len(programs) == 1 else f"neither {' nor '.join(programs)} is"
    why = f"{missing} installed in this image: this tool cannot work here, use another one"
    return message(EXIT_NOT_INSTALLED, stderr=why)


def operand(path: str | None) -> str:
    """Return a path that no program takes for an option."""
    return path if path and path.startswith("/") else f"./{path or ''}"


def message(exit_code: int, *, stdout: str = "", stderr: str = "", **fields: Any) -> ExecResult:
    """Return the result of a tool that needs no program, or ends before one; ``stderr`` is one or more lines."""
    stderr = f"{stderr}\n" if stderr else ""
    return ExecResult(
        status="ok" if exit_code == 0 else "nonzero",
        exit_code=exit_code,
        stdout=stdout,
        stderr=stderr,
        total_bytes=len(stdout.encode()) + len(stderr.encode()),
        fields=fields,
    )
