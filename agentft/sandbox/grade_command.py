"""The verb ``agentft sandbox grade SESSIONS.jsonl`` (floor 2): which sessions hold up when others' hands touch nothing.

Each session's calls run from its start; its last run of code then judges what they leave, with the session's own tests,
where none of the calls was (``grader``). A session that changed its tests shows as tampered: worth a look before it is
trained on.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentft import etai_io
from agentft.errors import EXIT_FAILED, EXIT_OK, DataError
from agentft.sandbox.base import ExecResult, Limits, Verdict
from agentft.sandbox.calls import last_run, session_calls
from agentft.sandbox.executor import LiveExecutor
from agentft.sandbox.pool import open_sandbox

AHEAD = 64
"""Sessions that are submitted before the first answer is read."""


def command(arguments: argparse.Namespace) -> int:
    """Grade every session that can be executed. Exit code 0 if all of them passed."""
    pool = open_sandbox(
        arguments.backend, arguments.image, workers=arguments.workers, limits=Limits(), run_name="sandbox-grade"
    )
    executor = LiveExecutor(pool, arguments.workers)
    try:
        rows = list(grades(Path(arguments.sessions), executor))
    finally:
        executor.close()
    if not rows:
        raise DataError(
            "no session can be graded", where=arguments.sessions, expected="inline files and a call that runs code"
        )
    counts = Counter(row["verdict"] for row in rows)
    if arguments.json:
        print(json.dumps({"counts": dict(counts), "sessions": rows}))
    else:
        _print(rows, counts)
    return EXIT_OK if counts["passed"] == len(rows) else EXIT_FAILED


def grades(path: Path, executor: LiveExecutor) -> Iterator[dict[str, Any]]:
    """Yield {session_id, verdict, exit_code, tampered} of every session that can be graded, in the file's order.

    ``verdict`` is passed, failed, tampered or lost (by the sandbox).
    """
    waiting: list[tuple[str, Future[list[ExecResult]]]] = []
    for session in etai_io.read(path):
        plan, test = session_calls(session), last_run(session)
        if plan is None or test is None:
            continue
        future = executor.submit(plan.workspace, plan.calls, key=f"grade/0/{plan.session_id}/0", verdict=Verdict(test))
        waiting.append((plan.session_id, future))
        if len(waiting) == AHEAD:
            yield _row(*waiting.pop(0))
    for session_id, future in waiting:
        yield _row(session_id, future)


def _row(session_id: str, future: Future[list[ExecResult]]) -> dict[str, Any]:
    result = future.result()[-1]
    tampered = result.fields.get("tampered", [])
    passed = result.status == "ok" and result.exit_code == 0
    verdict = "lost" if result.status == "infra" else "tampered" if tampered else "passed" if passed else "failed"
    return {"session_id": session_id, "verdict": verdict, "exit_code": result.exit_code, "tampered": tampered}


def _print(rows: list[dict[str, Any]], counts: Counter[str]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("session", "verdict", "what was tampered with"):
        table.add_column(name)
    for row in rows:
        if row["verdict"] != "passed":
            what = ", ".join(f"{one['path']} ({one['kind'].replace('_', ' ')})" for one in row["tampered"])
            table.add_row(row["session_id"], row["verdict"], what)
    console = Console()
    if table.row_count:
        console.print(table)
    console.print(f"{len(rows)} graded: " + ", ".join(f"{number} {name}" for name, number in sorted(counts.items())))
