"""Runs inside the sandbox (never imported here): the package's suite once, noting what each test calls.

    python3 inside_profile.py OUTPUT.json SECONDS_PER_TEST FILE…

Writes {"functions": ["path:first line"…], "tests": {node id: {"passed", "seconds", "work", "repeatable", "calls":
[index…]}}}. "work" is the number of Python and C functions called: a measure of time that is the same on every run
and machine. A test that draws random numbers, sleeps or starts threads is not "repeatable".
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = os.getcwd() + os.sep
UNREPEATABLE = (time.sleep, os.urandom)


class Recorder:
    """A pytest plugin: which functions of the workspace does each test enter, what does it cost, does it pass."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.functions: dict[str, int] = {}
        self.tests: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Trace one test, and stop it when its time is over."""
        entered: set[CodeType] = set()
        work, repeatable = 0, True

        def trace(frame: FrameType, event: str, argument: object) -> None:
            nonlocal work, repeatable
            if event == "call":
                work += 1
                entered.add(frame.f_code)
            elif event == "c_call":
                work += 1
                if argument in UNREPEATABLE or isinstance(getattr(argument, "__self__", None), random.Random):
                    repeatable = False

        started = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, self.limit_s)
        sys.setprofile(trace)
        yield
        sys.setprofile(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        row = self.tests.setdefault(item.nodeid, {"passed": False})
        row["seconds"] = round(time.perf_counter() - started, 4)
        row["work"] = work
        row["repeatable"] = repeatable and not any(map(is_unrepeatable, entered))
        row["calls"] = sorted({index for index in map(self.index_of, entered) if index is not None})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome; a skipped test is no passed test."""
        row = self.tests.setdefault(report.nodeid, {"passed": False})
        if report.when == "call":
            row["passed"] = report.outcome == "passed" and not hasattr(report, "wasxfail")
        elif report.outcome != "passed":
            row["passed"] = False

    def index_of(self, code: CodeType) -> int | None:
        """Return the number of a function of the workspace, None for any other."""
        if not code.co_filename.startswith(ROOT) or code.co_name.startswith("<"):
            return None
        key = f"{code.co_filename[len(ROOT) :]}:{code.co_firstlineno}"
        return self.functions.setdefault(key, len(self.functions))


def is_unrepeatable(code: CodeType) -> bool:
    """Whether a function of the standard library draws random numbers or starts a thread."""
    return code.co_filename == random.__file__ or code is threading.Thread.start.__code__


def out_of_time(number: int, frame: FrameType | None) -> None:
    """End a test that takes too long."""
    raise TimeoutError("this test takes too long for synthesis")


def main() -> None:
    """Run the suite and write what was seen."""
    output, limit_s, files = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
    signal.signal(signal.SIGALRM, out_of_time)
    recorder = Recorder(limit_s)
    options = ["-q", "--tb=no", "--disable-warnings", "--continue-on-collection-errors"]
    options += ["-p", "no:cacheprovider", "-o", "addopts="]
    pytest.main([*options, *files], plugins=[recorder])
    with open(output, "w") as stream:
        json.dump({"functions": list(recorder.functions), "tests": recorder.tests}, stream)


main()
