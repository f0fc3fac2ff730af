"""What jest says → structured result (floor 0): the JSON report for the fields, the printed report for the eye.

``parse_jest(stdout)`` reads the report of ``jest --json --testLocationInResults``; ``readable(stderr)`` is what jest
prints beside it, without times and without frames that lie outside of the workspace. A test's id is
``path::describe › test``. ``error_location`` is, for the first failure, the innermost frame inside the workspace and
outside of the tests; if there is none, the innermost frame in the test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from agentft.tools.parse import MOST_FAILURES, WORKSPACE_PREFIX, Location, inside, normalise

TITLES = " › "
MESSAGE_CHARACTERS = 300

_FRAME = re.compile(r"^\s*at (?:.*\()?([^()]+?):(\d+):\d+\)?$")
_SYNTAX = re.compile(r"^\s*(\w*Error): (?:/workspace/)?(\S+?): (.*?)\.? \((\d+):(\d+)\)$", re.MULTILINE)
_FOREIGN_FRAME = re.compile(r"^\s*at .*(?:/node_modules/|node:|<anonymous>\)?$)")
_SECONDS = re.compile(r"(?<=\S) \(\d+(?:\.\d+)? m?s\)$")
_UNSAID = ("Time: ", "Snapshots:   0 total", "Ran all test suites", "    Details:")
_DETAIL = re.compile(r"^(Expected|Received)\b.*:")
_HEADING = re.compile(r"^\s*● Test suite failed to run\s*")
_MARKS = re.compile(r"\x1b\[[0-9;]*m")


def parse_jest(stdout: str) -> dict[str, Any]:
    """Return {passed, failed, skipped, errors, failed_tests, failures, message?, error_location?}; {} without a report.

    The report is the last line that is one. ``errors`` counts files that could not run. ``failures`` holds
    {test, message, file?, line?} of the first ones.
    """
    report = _last_report(stdout)
    if report is None:
        return {}
    failures: list[dict[str, Any]] = []
    for file in sorted(report["testResults"], key=lambda file: str(file.get("name"))):
        failures += _failures(file)
    fields: dict[str, Any] = {
        "passed": _count(report, "numPassedTests"),
        "failed": _count(report, "numFailedTests"),
        "errors": _count(report, "numRuntimeErrorTestSuites"),
        "skipped": _count(report, "numPendingTests") + _count(report, "numTodoTests"),
        "failed_tests": [failure["test"] for failure in failures],
        "failures": failures[:MOST_FAILURES],
    }
    if failures:
        fields["message"] = failures[0]["message"]
        if "file" in failures[0]:
            fields["error_location"] = {"file": failures[0]["file"], "line": failures[0]["line"]}
    return fields


def readable(stderr: str) -> str:
    """Return jest's printed report without times, without frames of jest itself and without its general advice."""
    kept: list[str] = []
    advice = False
    for line in _MARKS.sub("", stderr).splitlines():
        advice = (advice or line.startswith("    Jest failed to parse a file.")) and line != "    Details:"
        if advice or _FOREIGN_FRAME.match(line) or line.startswith(_UNSAID):
            continue
        line = _SECONDS.sub("", line).rstrip()
        if not (line == "" and kept and kept[-1] == ""):
            kept.append(line.replace(WORKSPACE_PREFIX, ""))
    return normalise("\n".join(kept).strip("\n") + "\n") if kept else ""


def _last_report(stdout: str) -> dict[str, Any] | None:
    for line in reversed(stdout.splitlines()):
        if line.startswith('{"num'):
            try:
                report = json.loads(line)
            except ValueError:
                continue
            if isinstance(report, dict) and _is_report(report):
                return report
    return None


def _is_report(report: dict[str, Any]) -> bool:
    files = report.get("testResults")
    return isinstance(files, list) and all(
        isinstance(file, dict)
        and isinstance(file.get("name"), str)
        and isinstance(file.get("message", ""), str)
        and isinstance(file.get("assertionResults"), list)
        and all(isinstance(test, dict) for test in file["assertionResults"])
        for file in files
    )


def _count(report: dict[str, Any], name: str) -> int:
    value = report.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _failures(file: dict[str, Any]) -> Iterator[dict[str, Any]]:
    path = inside(file["name"]) or file["name"]
    failed = [test for test in file["assertionResults"] if test.get("status") == "failed"]
    for test in failed:
        titles = [*_texts(test.get("ancestorTitles")), str(test.get("title", ""))]
        text = next(iter(_texts(test.get("failureMessages"))), "")
        location = _innermost(text, path) or _declared(test, path)
        yield {"test": f"{path}::{TITLES.join(titles)}", "message": _message(text), **(location or {})}
    if not failed and file.get("status") == "failed":
        text = _MARKS.sub("", _HEADING.sub("", file.get("message", "")))
        syntax = _SYNTAX.search(text)
        if syntax is not None:
            place = {"file": inside(syntax[2]) or syntax[2], "line": int(syntax[4])}
            yield {"test": path, "message": f"{syntax[1]}: {syntax[3]}", **place}
        else:
            yield {"test": path, "message": _message(text), **(_innermost(text, path) or {})}


def _texts(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _message(text: str) -> str:
    """Return what went wrong in one line: the first line, and what was expected and received."""
    lines = [line.strip() for line in _MARKS.sub("", text).splitlines()]
    end = next((row for row, line in enumerate(lines) if line.startswith("at ")), len(lines))
    said = [line for line in lines[:end] if line]
    if not said:
        return "failed without a message"
    details = [line for line in said[1:] if _DETAIL.match(line)]
    return normalise(" ".join([said[0].removeprefix("Error: "), *details]))[:MESSAGE_CHARACTERS]


def _innermost(text: str, test_file: str) -> Location | None:
    frames: list[tuple[str, int]] = []
    for line in text.splitlines():
        match = _FRAME.match(line)
        path = inside(match[1]) if match else None
        if match and path is not None and "node_modules/" not in path and not path.startswith("node:"):
            frames.append((path, int(match[2])))
    outside = [frame for frame in frames if frame[0] != test_file and not _is_test(frame[0])]
    chosen = next(iter(outside or frames), None)
    return None if chosen is None else {"file": chosen[0], "line": chosen[1]}


def _declared(test: dict[str, Any], path: str) -> Location | None:
    location = test.get("location")
    line = location.get("line") if isinstance(location, dict) else None
    return {"file": path, "line": line} if isinstance(line, int) else None


def _is_test(path: str) -> bool:
    parts = PurePosixPath(path)
    return "__tests__" in parts.parts or bool(re.search(r"\.(test|spec)\.[cm]?[jt]sx?$", parts.name))
