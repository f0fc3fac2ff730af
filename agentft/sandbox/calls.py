"""What a recorded session executes (floor 2): its files before the first call, and its calls in order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from agentft.etai import InlineWorkspace, Session
from agentft.tools import TOOLS, ToolCall


@dataclass(frozen=True, kw_only=True)
class SessionCalls:
    """What a session executes: its files before the first call, and its calls with their step numbers, in order."""

    session_id: str
    workspace: InlineWorkspace
    calls: tuple[ToolCall, ...]
    steps: tuple[int, ...]
    mistakes: tuple[bool, ...]


def session_calls(session: Session) -> SessionCalls | None:
    """Return what ``session`` executes, or None if it cannot be replayed (no inline files, no calls, foreign tools)."""
    trace = session.execution_trace
    workspace = session.workspace
    if not isinstance(workspace, InlineWorkspace) or not trace or any(step.tool_called not in TOOLS for step in trace):
        return None
    return SessionCalls(
        session_id=session.session_id,
        workspace=workspace,
        calls=tuple(ToolCall(step.tool_called, step.tool_args) for step in trace),
        steps=tuple(step.step for step in trace),
        mistakes=tuple(step.mistake for step in trace),
    )


def start_files(workspace: InlineWorkspace) -> dict[str, bytes]:
    """Return the files that a session starts from, as bytes by path.

    A ``.git`` among them is left out, with all that is in it: history may tell the answer (the commits after the
    start, tags, reflogs, unreachable objects).
    """
    return {
        path: text.encode("utf-8", "replace")
        for path, text in workspace.files.items()
        if ".git" not in PurePosixPath(path).parts
    }


def last_run(session: Session) -> ToolCall | None:
    """Return the session's last run of code, which is what a verdict over the whole session runs; None if none is."""
    runs = [step for step in session.execution_trace if step.tool_called in TOOLS and TOOLS[step.tool_called].runs_code]
    return ToolCall(runs[-1].tool_called, runs[-1].tool_args) if runs else None
