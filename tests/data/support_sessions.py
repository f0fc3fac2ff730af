"""Small true-to-life sessions for the tests of shards, loaders and mixes."""

from __future__ import annotations

from collections.abc import Sequence

from agentft.etai import (
    CursorPosition,
    CursorTarget,
    ErrorLocation,
    ExecutionResult,
    IdeContext,
    InlineWorkspace,
    Session,
    TraceStep,
    Viewport,
)

REPOSITORIES = ("iniconfig==2.0.0", "toolz==1.0.0", "more-itertools==10.5.0")


def make_session(number: int, repository: str = REPOSITORIES[0]) -> Session:
    """A repair session: failing tests, reading, an edit, passing tests; contents vary with ``number``."""
    line = 2 + number % 3
    source = "def total(values):\n" + "    # running sum\n" * (line - 2) + f"    return sum(values) + {number}\n"
    failing = f"FAILED tests/test_sums.py::test_total_{number}\nsrc/sums.py:{line}: AssertionError: {number} != 0\n"
    steps = [
        TraceStep(
            step=1,
            thought=f"Run test {number} first.",
            tool_called="pytest_run",
            tool_args={"targets": f"tests/test_sums.py::test_total_{number}"},
            execution_result=ExecutionResult(
                exit_code=1,
                stdout=failing,
                duration_s=0.4,
                error_location=ErrorLocation(file="src/sums.py", line=line),
            ),
        ),
        TraceStep(
            step=2,
            tool_called="file_read",
            tool_args={"path": "src/sums.py"},
            execution_result=ExecutionResult(exit_code=0, stdout=source),
        ),
        TraceStep(
            step=3,
            thought="The sum has an offset.",
            tool_called="file_edit",
            tool_args={"path": "src/sums.py", "line": line, "old": f" + {number}", "new": ""},
            execution_result=ExecutionResult(exit_code=0, stdout="1 replacement\n"),
        ),
        TraceStep(
            step=4,
            tool_called="pytest_run",
            tool_args={"targets": "tests/test_sums.py"},
            execution_result=ExecutionResult(exit_code=0, stdout="1 passed\n", duration_s=0.3),
        ),
    ]
    return Session(
        session_id=f"{repository}/{number:04d}",
        user_instruction=f"Test {number} of the sums fails. Please repair it.",
        ide_context=IdeContext(
            open_files=["src/sums.py", "tests/test_sums.py"],
            cursor_position=CursorPosition(file="src/sums.py", line=1),
            git_status=" M src/sums.py",
            viewport=Viewport(),
        ),
        execution_trace=[step.model_copy(update={"step": i}) for i, step in enumerate(steps[number % 2 :], 1)],
        final_output=f"Removed the offset {number} in src/sums.py.",
        intents=["fix_test_failure"],
        language="python",
        cursor_target=CursorTarget(file="src/sums.py", line=line, column=4),
        workspace=InlineWorkspace(files={"src/sums.py": source, "tests/test_sums.py": "import sums\n"}),
        repository=repository,
    )


def make_sessions(count: int, repositories: Sequence[str] = REPOSITORIES) -> list[Session]:
    """``count`` sessions, dealt out to the repositories in turn."""
    return [make_session(number, repositories[number % len(repositories)]) for number in range(count)]
