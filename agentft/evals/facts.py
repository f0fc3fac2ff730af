"""What happened in a session, as flat facts (floor 4): the input of metrics and of their baselines.

Baselines see only these facts, never the text, so that a head that beats them has read something.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentft.etai import Session, Viewport
from agentft.tools import TOOL_INDEX, TOOLS

START = "<start>"
"""The "previous tool" of the first step."""

EDITS = frozenset({"file_edit", "file_write"})


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One step: which tool, after what, and how it ended.

    ``silent``: no thought stands before the call.  ``passed`` is None where the exit code is not known.
    ``run_index`` counts earlier runs of code; ``edited_since_run`` says that a file changed after the last of them;
    ``first_after_edit`` is their conjunction: the first run that could show whether an edit works.
    """

    session_id: str
    step: int
    tool: str
    previous_tool: str
    previous_exit: int | None
    mistake: bool
    silent: bool
    runs_code: bool
    passed: bool | None
    run_index: int
    edited_since_run: bool
    edit_line: int | None

    @property
    def first_after_edit(self) -> bool:
        """Whether this is the first run of code after an edit."""
        return self.runs_code and self.edited_since_run


@dataclass(frozen=True, kw_only=True)
class SessionFacts:
    """One session: labels of the heads that read it once, and its steps."""

    session_id: str
    intents: tuple[str, ...] | None
    target_line: int | None
    cursor_line: int | None
    line_px: float
    scroll_top: float
    steps: tuple[StepFacts, ...]


def session_facts(session: Session) -> SessionFacts:
    """Return the facts of one session, every step of its trace included."""
    view = session.ide_context.viewport or Viewport()
    cursor = session.ide_context.cursor_position
    return SessionFacts(
        session_id=session.session_id,
        intents=None if session.intents is None else tuple(session.intents),
        target_line=session.cursor_target.line if session.cursor_target else None,
        cursor_line=cursor.line if cursor else None,
        line_px=view.line_height * view.zoom,
        scroll_top=view.scroll_top,
        steps=tuple(_step_facts(session)),
    )


def known_tool_steps(facts: Iterable[SessionFacts]) -> list[StepFacts]:
    """Return the steps a tool head is measured on: built-in tools, mistakes left out."""
    return [s for session in facts for s in session.steps if s.tool in TOOL_INDEX and not s.mistake]


def known_runs(facts: Iterable[SessionFacts]) -> list[StepFacts]:
    """Return the steps an outcome head is measured on: runs of code with a known exit code."""
    return [s for session in facts for s in session.steps if s.runs_code and s.passed is not None]


def _step_facts(session: Session) -> Iterable[StepFacts]:
    previous_tool, previous_exit, runs, edited = START, None, 0, False
    for step in session.execution_trace:
        result = step.execution_result
        exit_code = result.exit_code if result else None
        spec = TOOLS.get(step.tool_called)
        runs_code = bool(spec and spec.runs_code)
        line = step.tool_args.get("line")
        yield StepFacts(
            session_id=session.session_id,
            step=step.step,
            tool=step.tool_called,
            previous_tool=previous_tool,
            previous_exit=previous_exit,
            mistake=step.mistake,
            silent=not step.thought,
            runs_code=runs_code,
            passed=None if exit_code is None else exit_code == 0,
            run_index=runs,
            edited_since_run=edited,
            edit_line=line if step.tool_called in EDITS and isinstance(line, int) else None,
        )
        previous_tool, previous_exit = step.tool_called, exit_code
        if runs_code:
            runs, edited = runs + 1, False
        elif step.tool_called in EDITS:
            edited = True
