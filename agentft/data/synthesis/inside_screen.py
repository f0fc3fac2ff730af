"""Runs inside the sandbox (never imported here): tries many changed versions of one workspace, one process each.

    python3 inside_screen.py OUTPUT.json < JOBS.json

JOBS: {"limit_s": S, "jobs": [{"path", "text", "tests": [node id…]}…]}. For each job the file ``path`` gets ``text``,
a forked child runs the tests, and the file gets its old content back. Forking saves Python's and pytest's start.

Writes [{"exit_code": int | null, "outcomes": {node id: "passed" | "failed"…}, "errors": {node id: message}}…]; the exit
code is null where the child was ended by the time limit.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from typing import Any, NoReturn

import pytest


class Recorder:
    """A pytest plugin that keeps outcomes and the first line of every error."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.errors: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst outcome of a test's phases."""
        if report.when == "call" or report.outcome != "passed":
            if self.outcomes.get(report.nodeid) != "failed":
                self.outcomes[report.nodeid] = report.outcome
            crash = getattr(report.longrepr, "reprcrash", None)
            if crash is not None:
                self.errors.setdefault(report.nodeid, crash.message.split("\n", 1)[0])


def run(tests: list[str], write_end: int) -> NoReturn:
    """Run the tests in this (forked) process, and end it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    recorder = Recorder()
    options = ["-q", "--tb=short", "--disable-warnings", "--basetemp=/tmp/pytest", "--assert=plain"]
    options += ["-p", "no:cacheprovider", "-o", "addopts="]
    code = int(pytest.main([*options, *tests], plugins=[recorder]))
    with os.fdopen(write_end, "w") as stream:
        json.dump({"exit_code": code, "outcomes": recorder.outcomes, "errors": recorder.errors}, stream)
    os._exit(0)


def attempt(job: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Try one job in a child process group that ends after ``limit_s`` seconds."""
    with open(job["path"]) as stream:
        old = stream.read()
    with open(job["path"], "w") as stream:
        stream.write(job["text"])
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(read_end)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            run(job["tests"], write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    with os.fdopen(read_end) as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with open(job["path"], "w") as stream:
        stream.write(old)
    return dict(json.loads(answer)) if answer else {"exit_code": None, "outcomes": {}, "errors": {}}


def main() -> None:
    """Try every job in order."""
    for part in ("assertion.rewrite", "doctest", "junitxml", "unittest"):  # what every child would import again
        importlib.import_module(f"_pytest.{part}")
    request = json.load(sys.stdin)
    answers = [attempt(job, request["limit_s"]) for job in request["jobs"]]
    with open(sys.argv[1], "w") as stream:
        json.dump(answers, stream)


main()
