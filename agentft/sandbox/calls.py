"""What a recorded session executes (floor 2): its files before the first call, and its calls in order."""

from __future__ import annotations

from dataclasses import dataclass

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
