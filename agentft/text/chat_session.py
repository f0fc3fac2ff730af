"""A session as the messages of a chat (floor 2): what the user asked, one turn a call, one message a result.

The editor's context stands before the instruction, in the user's message: no system prompt is made up. Messages of a
step carry its number under ``step`` (the template never sees that key); steps marked as mistakes have ``weight`` 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentft.etai import ExecutionResult, IdeContext, Session, TraceStep
from agentft.text.chat_template import Message, assistant, call_of, user
from agentft.text.results import output_text, status_line
from agentft.tools import ToolSpec

SHOWN_FILES = 16
STATUS_CHARACTERS = 200
NO_RESULT = "no result was recorded"


def session_messages(session: Session, *, thoughts: bool) -> list[Message]:
    """Return the conversation of a session; a final output that is empty gives no message."""
    messages = [user(_context(session.ide_context) + session.user_instruction)]
    for step in session.execution_trace:
        messages += _step(step, thoughts)
    if session.final_output or not session.execution_trace:
        messages.append(assistant(session.final_output))
    return messages


def tool_list(specs: Iterable[ToolSpec]) -> list[Message]:
    """Return tools in the form that chat templates take."""
    return [
        {
            "type": "function",
            "function": {"name": spec.name, "description": spec.description, "parameters": spec.json_schema()},
        }
        for spec in specs
    ]


def _step(step: TraceStep, thoughts: bool) -> list[Message]:
    call = call_of(step.tool_called, step.tool_args, step.step)
    said = assistant((step.thought or "") if thoughts else "", [call]) | {"step": step.step}
    if step.mistake:
        said["weight"] = 0
    result: dict[str, Any] = {
        "role": "tool",
        "tool_call_id": call["id"],
        "name": step.tool_called,
        "content": NO_RESULT if step.execution_result is None else _result(step.execution_result),
        "step": step.step,
    }
    return [said, result]


def _result(result: ExecutionResult) -> str:
    lines = [status_line(result)]
    if result.error_location is not None:
        lines.append(f"at {result.error_location.file}:{result.error_location.line}")
    message = (result.model_extra or {}).get("message")
    if isinstance(message, str) and message.strip():
        lines.append(message.strip())
    return "\n".join([*lines, *([text] if (text := output_text(result)) else [])])


def _context(context: IdeContext) -> str:
    files, cursor = list(dict.fromkeys(context.open_files)), context.cursor_position
    lines = []
    if files:
        more = f" and {len(files) - SHOWN_FILES} more" if len(files) > SHOWN_FILES else ""
        lines.append(f"Open files: {', '.join(files[:SHOWN_FILES])}{more}")
    if cursor is not None:
        lines.append(f"Cursor: {cursor.file}:{cursor.line}:{cursor.column}")
    for label, text in (("Git status", context.git_status), ("Last commit", context.last_commit_message)):
        if text:
            lines.append(f"{label}: {text[:STATUS_CHARACTERS]}")
    return "\n".join([*lines, "", ""]) if lines else ""
