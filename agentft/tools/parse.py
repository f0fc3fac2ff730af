"""Raw output → structured result (floor 0): pytest, tracebacks, checkers, formatters, git; text that repeats.

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
MOST_FAILURES = 20
"""Failures of a test run that are told one by one; all of them are counted and named."""
Location = dict[str, Any]

_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]*")
_TEMPORARY = re.compile(r"/tmp/tmp(?:[a-z0-9_]{8}|\.[A-Za-z0-9]{10})\b")
_SECONDS = re.compile(r"\bin \d+\.\d+s(?: \(\d+:\d\d:\d\d\))?")
_COUNT = re.compile(r"(\d+) (passed|failed|error)s?\b")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$")
_SECTION = re.compile(r"^_{3,} (.+) _{3,}$")
_SETUP = re.compile(r"^ERROR (?:at (?:setup|teardown) of|collecting) ")
_RULE = re.compile(r"^=+ .+ =+$")
_SHORT_FRAME = re.compile(r"^(\S.*?):(\d+): (?:in |[A-Z]\w+)")
_FILE_FRAME = re.compile(r'^(?:E\s+)?\s*File "([^"]+)", line (\d+)')
_PROBLEM = re.compile(r"^([^\s:][^:]*):(\d+):(?:\d+:)? ")
_CANNOT_FORMAT = re.compile(
    r"^error: (?:cannot format|Failed to (?:parse|format)) (?P<path>.+?):(?: Cannot parse:)? ?"
    r"(?P<line>\d+):\d+:(?P<text>.*)$"
)
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Warning|Interrupt|Exit|Iteration|Group)\b.*)$")


def normalise(text: str) -> str:
    """Replace what differs between equal runs: memory addresses (``at 0x0``) and names of temporary files."""
    return _TEMPORARY.sub("/tmp/tmpXXXXXXXX", _ADDRESS.sub("at 0x0", text))


def normalise_pytest(text: str) -> str:
    """``normalise``, and the time that a run took (``in 0.00s``)."""
    return _SECONDS.sub("in 0.00s", normalise(text))


def parse_pytest(stdout: str, stderr: str = "") -> dict[str, Any]:
    """Return {passed, failed, errors, failed_tests, failures, message?, error_location?} of ``pytest -q --tb=short``.

    ``message`` names the first failure (the exception, else the first explaining line). ``failures`` holds {test,
    message?, file?, line?} of the first ones. Where pytest could not even start (no such file, a broken conftest.py),
    ``stderr`` is read. Text that is no pytest report gives zeros.
    """
    lines = stdout.splitlines()
    counts = {"passed": 0, "failed": 0, "error": 0}
    for line in reversed(lines):
        if " in " in line and (found := _COUNT.findall(line)):
            counts.update({name: int(number) for number, name in found})
            break
    failed_tests = [match.group(1) for line in lines if (match := _FAILED.match(line))]
    tests = {test.split("::", 1)[0] for test in failed_tests}
    sections = _sections(lines)
    fields: dict[str, Any] = {
        "passed": counts["passed"],
        "failed": counts["failed"],
        "errors": counts["error"],
        "failed_tests": failed_tests,
        "failures": [{"test": test, **_explained(section, tests)} for test, section in _told(failed_tests, sections)],
    }
    first = _explained(sections[0][1] if sections else stderr.splitlines(), tests)
    if "message" in first:
        fields["message"] = first["message"]
    if "file" in first:
        fields["error_location"] = {"file": first["file"], "line": first["line"]}
    return fields


def _explained(section: list[str], tests: set[str]) -> dict[str, Any]:
    """Return {message?, file?, line?} of the lines about one failure."""
    explained = [line[1:].strip() for line in section if line.startswith("E ")]
    explained += [line.removeprefix("ERROR: ") for line in section if line.startswith("ERROR: ")]
    message = next((line for line in explained if _EXCEPTION.match(line)), next(filter(None, explained), None))
    return {**({} if message is None else {"message": message}), **(_deepest(_frames(section), tests) or {})}


def _told(failed_tests: list[str], sections: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Return the first failed tests, each with the lines that are about it (none where it cannot be told)."""
    left, told = list(sections), []
    for test in failed_tests[:MOST_FAILURES]:
        path, _, name = test.partition("::")
        title = name.replace("::", ".") if name else path
        fitting = [row for row, (head, _) in enumerate(left) if _SETUP.sub("", head) == title]
        own = [row for row in fitting if any(path in line for line in left[row][1])]
        row = next(iter(own or fitting), None)
        told.append((test, [] if row is None else left.pop(row)[1]))
    return told


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
    """Return {problems, message?, error_location?} of the ``path:line: text`` lines that checkers and linters print.

    Notes that belong to a problem are not counted.
    """
    matches = ((_PROBLEM.match(line), line) for line in stdout.splitlines())
    found = [(match, line) for match, line in matches if match and not line[match.end() :].startswith("note:")]
    fields: dict[str, Any] = {"problems": len(found)}
    if found:
        match, line = found[0]
        fields["message"] = line[match.end() :].strip()
        path = inside(match.group(1))
        if path is not None:
            fields["error_location"] = {"file": path, "line": int(match.group(2))}
    return fields


def parse_format(text: str) -> tuple[str, dict[str, Any]]:
    """Return what a formatter (black, ruff) did, and {changed, problems, message?, error_location?} of its output."""
    other: list[str] = []
    changed: list[str] = []
    broken: list[tuple[str, int, str]] = []
    for line in (line.replace(WORKSPACE_PREFIX, "") for line in text.splitlines()):
        if match := _CANNOT_FORMAT.match(line):
            broken.append((match["path"].removeprefix("./"), int(match["line"]), match["text"].strip()))
        elif line.startswith("reformatted "):
            changed.append(line.removeprefix("reformatted ").removeprefix("./"))
        elif line.strip() and not line.startswith(("All done!", "Oh no!")):
            other.append(line)
    changed.sort()  # files are done in parallel: they are told in no order
    broken.sort()
    kept = [f"{path}:{number}: cannot be parsed: {what}" for path, number, what in broken]
    kept += [*(f"reformatted {path}" for path in changed), *other]
    fields: dict[str, Any] = {"changed": changed, "problems": len(broken)}
    if broken:
        fields["message"] = f"cannot be parsed: {broken[0][2]}"
        fields["error_location"] = {"file": broken[0][0], "line": broken[0][1]}
    return "".join(f"{line}\n" for line in kept), fields


def parse_git_status(stdout: str) -> dict[str, Any]:
    """Return {branch?, changed} of ``git status --short --branch``: the paths that differ from the last commit."""
    lines = stdout.splitlines()
    head = lines[0].removeprefix("## ") if lines and lines[0].startswith("## ") else None
    changed = [line[3:].partition(" -> ")[2] or line[3:] for line in lines if not line.startswith("## ")]
    if head is None:
        return {"changed": changed}
    return {"branch": head.removeprefix("No commits yet on ").partition("...")[0], "changed": changed}


def parse_git_diff(stdout: str) -> dict[str, Any]:
    """Return {changed, added, removed} of a patch: its files, and how many lines it adds and removes."""
    changed, added, removed, in_hunk = [], 0, 0, False
    for line in stdout.splitlines():
        if line.startswith("diff --git "):
            changed.append(line.rpartition(" b/")[2])
            in_hunk = False
        elif line.startswith("@@"):
            in_hunk = True
        elif in_hunk:
            added += line.startswith("+")
            removed += line.startswith("-")
    return {"changed": changed, "added": added, "removed": removed}


def _sections(lines: list[str]) -> list[tuple[str, list[str]]]:
    """Return (title, lines) of every failure: from its ``___ title ___`` to the next one or ``=== heading ===``."""
    sections: list[tuple[str, list[str]]] = []
    inside_one = False
    for line in lines:
        if match := _SECTION.match(line):
            sections.append((match.group(1), []))
            inside_one = True
        elif _RULE.match(line):
            inside_one = False
        elif inside_one:
            sections[-1][1].append(line)
    return sections


def _frames(lines: Iterable[str]) -> Iterable[tuple[str, int]]:
    for line in lines:
        match = _FILE_FRAME.match(line) or _SHORT_FRAME.match(line)
        if match is not None and int(match.group(2)) > 0:
            path = inside(match.group(1))
            if path is not None:
                yield path, int(match.group(2))


def _deepest(frames: Iterable[tuple[str, int]], tests: set[str]) -> Location | None:
    frames = list(frames)
    chosen = [frame for frame in frames if not (frame[0] in tests or _is_test(frame[0]))] or frames
    return {"file": chosen[-1][0], "line": chosen[-1][1]} if chosen else None


def _is_test(path: str) -> bool:
    name = PurePosixPath(path).name
    return name == "conftest.py" or ((name.startswith("test_") or name.endswith("_test.py")) and name.endswith(".py"))


def inside(path: str) -> str | None:
    """Return the path relative to the workspace; None if it lies elsewhere."""
    path = path.removeprefix(WORKSPACE_PREFIX).removeprefix("./")
    return None if path.startswith(("/", "<", "../")) else path
