"""Raw output → structured result (floor 0): pytest runs, tracebacks, linters; and text that repeats byte for byte.

``error_location`` of a failing run is, for the first failure that is reported, the deepest frame that lies inside the
workspace and not in a test file (a file that holds a failing test, or whose name pytest would collect); if there is
no such frame, the deepest frame in the test itself. Paths are relative to the workspace.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

WORKSPACE_PREFIX = "/workspace/"
Location = dict[str, Any]

_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]*")
_TEMPORARY = re.compile(r"/tmp/tmp(?:[a-z0-9_]{8}|\.[A-Za-z0-9]{10})\b")
_SECONDS = re.compile(r"\bin \d+\.\d+s(?: \(\d+:\d\d:\d\d\))?")
_COUNT = re.compile(r"(\d+) (passed|failed|error)s?\b")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$")
_SECTION = re.compile(r"^_{3,} (.+) _{3,}$")
_RULE = re.compile(r"^=+ .+ =+$")
_SHORT_FRAME = re.compile(r"^(\S.*?):(\d+): (?:in |[A-Z]\w+)")
_FILE_FRAME = re.compile(r'^(?:E\s+)?\s*File "([^"]+)", line (\d+)')
_PROBLEM = re.compile(r"^([^\s:][^:]*):(\d+):(?:\d+:)? ")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Warning|Interrupt|Exit|Iteration|Group)\b.*)$")


def normalise(text: str) -> str:
    """Replace what differs between equal runs: memory addresses (``at 0x0``) and names of temporary files."""
    return _TEMPORARY.sub("/tmp/tmpXXXXXXXX", _ADDRESS.sub("at 0x0", text))


def normalise_pytest(text: str) -> str:
    """``normalise``, and the time that a run took (``in 0.00s``)."""
    return _SECONDS.sub("in 0.00s", normalise(text))


def parse_pytest(stdout: str, stderr: str = "") -> dict[str, Any]:
    """Return {passed, failed, errors, failed_tests, message?, error_location?} of the text of ``pytest -q --tb=short``.

    ``message`` names the first failure (the exception, else the first explaining line). Where pytest could not even
    start (no such file, a broken conftest.py), ``stderr`` is read. Text that is no pytest report gives zeros.
    """
    lines = stdout.splitlines()
    counts = {"passed": 0, "failed": 0, "error": 0}
    for line in reversed(lines):
        if " in " in line and (found := _COUNT.findall(line)):
            counts.update({name: int(number) for number, name in found})
            break
    failed_tests = [match.group(1) for line in lines if (match := _FAILED.match(line))]
    fields: dict[str, Any] = {
        "passed": counts["passed"],
        "failed": counts["failed"],
        "errors": counts["error"],
        "failed_tests": failed_tests,
    }
    section = _first_section(lines) or stderr.splitlines()
    explained = [line[1:].strip() for line in section if line.startswith("E ")]
    explained += [line.removeprefix("ERROR: ") for line in section if line.startswith("ERROR: ")]
    message = next((line for line in explained if _EXCEPTION.match(line)), next(filter(None, explained), None))
    if message is not None:
        fields["message"] = message
    tests = {test.split("::", 1)[0] for test in failed_tests}
    location = _deepest(_frames(section), tests)
    if location is not None:
        fields["error_location"] = location
    return fields


def parse_traceback(text: str) -> dict[str, Any]:
    """Return {message?, error_location?} of the last Python traceback in ``text``; {} if there is none."""
    start = text.rfind("Traceback (most recent call last):")
    lines = (text[start:] if start >= 0 else text).splitlines()
    frames = list(_frames(lines))
    if start < 0 and not any("SyntaxError" in line or "IndentationError" in line for line in lines):
        return {}
    fields: dict[str, Any] = {}
    message = next((line for line in reversed(lines) if _EXCEPTION.match(line)), None)
    if message is not None:
        fields["message"] = message
    location = _deepest(frames, set())
    if location is not None:
        fields["error_location"] = location
    return fields


def parse_problems(stdout: str) -> dict[str, Any]:
    """Return {problems, message?, error_location?} of the ``path:line: text`` lines that checkers and linters print."""
    found = [(match, line) for line in stdout.splitlines() if (match := _PROBLEM.match(line))]
    fields: dict[str, Any] = {"problems": len(found)}
    if found:
        match, line = found[0]
        fields["message"] = line[match.end() :].strip()
        path = _inside(match.group(1))
        if path is not None:
            fields["error_location"] = {"file": path, "line": int(match.group(2))}
    return fields


def _first_section(lines: list[str]) -> list[str]:
    """Return the lines of the first failure: from its ``___ name ___`` to the next such line or ``=== title ===``."""
    start = next((row for row, line in enumerate(lines) if _SECTION.match(line)), None)
    if start is None:
        return []
    rest = lines[start + 1 :]
    end = next((row for row, line in enumerate(rest) if _SECTION.match(line) or _RULE.match(line)), len(rest))
    return rest[:end]


def _frames(lines: Iterable[str]) -> Iterable[tuple[str, int]]:
    for line in lines:
        match = _FILE_FRAME.match(line) or _SHORT_FRAME.match(line)
        if match is not None and int(match.group(2)) > 0:
            path = _inside(match.group(1))
            if path is not None:
                yield path, int(match.group(2))


def _deepest(frames: Iterable[tuple[str, int]], tests: set[str]) -> Location | None:
    frames = list(frames)
    chosen = [frame for frame in frames if not (frame[0] in tests or _is_test(frame[0]))] or frames
    return {"file": chosen[-1][0], "line": chosen[-1][1]} if chosen else None


def _is_test(path: str) -> bool:
    name = PurePosixPath(path).name
    return name == "conftest.py" or ((name.startswith("test_") or name.endswith("_test.py")) and name.endswith(".py"))


def _inside(path: str) -> str | None:
    """Return the path relative to the workspace; None if it lies elsewhere."""
    path = path.removeprefix(WORKSPACE_PREFIX).removeprefix("./")
    return None if path.startswith(("/", "<", "../")) else path
