"""A world in which an agent looks for a file where it is not: the error says where it is, and the next call is right.

``met`` sessions imitate the wrong call too (so an agent learns to make it); in ``marked`` ones it is a mistake.
"""

from __future__ import annotations

from agentft.etai import ExecutionResult, InlineWorkspace, Session, TraceStep

FOLDERS = ("lib", "app", "core")
NAMES = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibis", "jay", "kiwi", "lynx")


def session(number: int, *, marked: bool) -> Session:
    name, folder = NAMES[number], FOLDERS[number * 5 % 3]
    right, wrong = f"{folder}/{name}.py", f"src/{name}.py"
    calls = [
        (wrong, ExecutionResult(exit_code=1, stderr=f"no {name} in src, look in {folder}", status="nonzero")),
        (right, ExecutionResult(exit_code=0, stdout="x = 1", status="ok")),
    ]
    return Session(
        session_id=f"folder/{number}",
        user_instruction=f"read {name}",
        execution_trace=[
            TraceStep(
                step=step,
                mistake=marked and step == 1,
                tool_called="file_read",
                tool_args={"path": path},
                execution_result=result,
            )
            for step, (path, result) in enumerate(calls, 1)
        ],
        final_output="done",
        workspace=InlineWorkspace(files={right: "x = 1\n"}),
    )


def sessions(*, marked: bool) -> list[Session]:
    return [session(number, marked=marked) for number in range(len(NAMES))]
