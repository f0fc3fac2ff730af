"""Runs pytest for a grade, inside the grading container (standard library and pytest only; sent there as source).

    python3 -P -B -c SOURCE ARG...        # ARG: pytest's own arguments; stdin: {secret, paths, suspects} as JSON

Everything that pytest needs is imported before the workspace can be imported from. What happened is counted here, from
pytest's own reports, and written behind the run's output as ``secret {json}``, past pytest's capturing. The process
ends at once after that: no exit handler can change its exit code.

The product's code runs in this very process, so no secret is safe from code that was written against *this* program;
what it stops is every trick that works on test runs in general.
"""

from __future__ import annotations

import builtins
import difflib  # noqa: F401  (used by pytest as it goes; to be ours, it must be loaded before the product)
import json
import os
import sys
import unittest.mock
from types import FunctionType, ModuleType
from typing import Any

import pytest

EXITS_AT_ONCE = os._exit
WATCHED = ("_pytest.", "pluggy", "unittest", "pytest")
WATCHED_BUILTINS = (
    "AssertionError",
    "BaseException",
    "Exception",
    "all",
    "any",
    "bool",
    "compile",
    "exec",
    "isinstance",
)


class Counting:
    """A plugin that counts what pytest reports, and notes who skips."""

    def __init__(self, suspects: set[str]) -> None:
        self.suspects, self.skipped_by = suspects, set[str]()
        self.counts = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count the outcome of one phase of one test."""
        if report.skipped:
            self.counts["skipped"] += 1
        elif report.failed:
            self.counts["failed" if report.when == "call" else "errors"] += 1
        elif report.when == "call":
            self.counts["passed"] += 1

    def pytest_collectreport(self, report: Any) -> None:
        """Count a module that could not be collected; note a product that skips it."""
        if report.failed:
            self.counts["errors"] += 1
        elif report.skipped:
            self.counts["skipped"] += 1
            if isinstance(report.longrepr, tuple):
                self.note([str(report.longrepr[0])])

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Note a product that skips the test that calls it."""
        skips = (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest)
        if call.excinfo is not None and isinstance(call.excinfo.value, skips):
            self.note([str(entry.path) for entry in call.excinfo.traceback])

    def note(self, paths: list[str]) -> None:
        """Keep the last file of the workspace on the way to a skip, if the agent changed it."""
        inside = [os.path.relpath(path) for path in paths if os.path.abspath(path).startswith(os.getcwd() + os.sep)]
        if inside and inside[-1] in self.suspects:
            self.skipped_by.add(inside[-1])


def functions() -> dict[str, int]:
    """Return where the code of every function of the test runners is, and of some builtins, by name."""
    found = {f"builtins.{name}": id(vars(builtins).get(name)) for name in WATCHED_BUILTINS}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(WATCHED) and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if isinstance(value, FunctionType):
                    found[f"{module_name}.{name}"] = id(value.__code__)
                elif isinstance(value, type):
                    for inner, method in list(vars(value).items()):
                        if isinstance(method, FunctionType):
                            found[f"{module_name}.{name}.{inner}"] = id(method.__code__)
    return found


def main() -> None:
    """Run pytest, report, end."""
    told = json.loads(sys.stdin.buffer.read())
    channel = os.dup(1)
    sys.path[:0] = told["paths"]
    os.environ["PYTHONPATH"] = os.pathsep.join(told["paths"])
    plugin = Counting(set(told["suspects"]))
    before = functions()
    code = int(pytest.main(sys.argv[1:], plugins=[plugin]))
    after = functions()
    patched = sorted(name for name, place in before.items() if after.get(name) != place)
    report = {"exit": code, **plugin.counts, "skipped_by": sorted(plugin.skipped_by), "patched": patched[:20]}
    sys.stdout.flush()
    sys.stderr.flush()
    line = memoryview(f"\n{told['secret']} {json.dumps(report)}\n".encode())
    while line:
        line = line[os.write(channel, line) :]
    EXITS_AT_ONCE(code)


if __name__ == "__main__":
    main()
