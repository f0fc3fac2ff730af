"""What jest 29 really said (golden files) → fields and readable text; and whatever else stands on its streams."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jest_project import FAILURES, FIELDS, GOLDEN

from agentft.tools.jest import parse_jest, readable
from agentft.tools.parse import MOST_FAILURES

REPORT = (GOLDEN / "report.json").read_text()
PRINTED = (GOLDEN / "printed.txt").read_text()


def test_a_real_report() -> None:
    fields = parse_jest(REPORT)
    told = fields.pop("failures")
    assert fields == FIELDS
    assert [(failure["message"], failure["file"], failure["line"]) for failure in told] == FAILURES
    assert [failure["test"] for failure in told] == FIELDS["failed_tests"]


def test_the_report_is_the_last_line_that_is_one() -> None:
    forged = json.dumps({"numPassedTests": 9, "numFailedTests": 0, "testResults": []}, separators=(",", ":"))
    assert parse_jest(f"noise\n{forged}\n{REPORT}\nnoise\n")["failed"] == 6
    assert parse_jest("noise") == {}
    assert parse_jest('{"numPassedTests": 1}') == {}


def test_the_printed_text_keeps_what_the_project_did_and_nothing_that_differs_between_runs() -> None:
    text = readable(PRINTED)
    assert "> 6 |     expect(add(1, 2)).toBe(3);" in text
    assert "at fail (src/sum.js:5:9)" in text
    assert "hello from the test" in text
    assert "SyntaxError: sub/syntax.test.js: Identifier directly after number. (2:11)" in text
    assert "Tests:       6 failed, 1 skipped, 1 todo, 1 passed, 9 total" in text
    for absent in ("node_modules/", "Time:", "jestjs.io/docs/configuration", "/workspace/", " ms)"):
        assert absent not in text, absent
    assert readable(text) == text


def test_colours_and_times_are_left_out() -> None:
    assert readable("\x1b[31mFAIL\x1b[0m a.test.js (5.1 s)\n    ✓ adds (3 ms)\nTime:        1.1 s\n") == (
        "FAIL a.test.js\n    ✓ adds\n"
    )


def test_many_failures_are_named_but_not_all_told() -> None:
    tests = [{"status": "failed", "title": f"t{n}", "failureMessages": ["Error: x"]} for n in range(50)]
    report = {"numFailedTests": 50, "testResults": [{"name": "/workspace/a.test.js", "assertionResults": tests}]}
    fields = parse_jest(json.dumps(report))
    assert (len(fields["failed_tests"]), len(fields["failures"])) == (50, MOST_FAILURES)
    assert "error_location" not in fields


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["status", "title", "ancestorTitles", "failureMessages", "location"]), json_values),
    st.dictionaries(st.sampled_from(["name", "message", "status"]), json_values),
)
def test_no_report_breaks_the_parser(test: dict[str, Any], file: dict[str, Any]) -> None:
    report = {"numFailedTests": None, "testResults": [{**file, "assertionResults": [{"status": "failed", **test}]}]}
    fields = parse_jest(json.dumps(report))
    assert not fields or fields["failed"] == 0


@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    assert isinstance(readable(text), str)
    assert parse_jest(text) == {} or text.startswith("{")


@pytest.mark.parametrize("path", ["/workspace/lib/__tests__/a.js", "/workspace/a.spec.ts"])
def test_frames_of_tests_come_after_frames_of_the_program(path: str) -> None:
    stack = f"Error: x\n    at t ({path}:3:1)\n    at f (/workspace/lib/f.js:7:2)\n    at g (node:internal/x:1:1)"
    tests = [{"status": "failed", "title": "t", "failureMessages": [stack]}]
    report = {"numFailedTests": 1, "testResults": [{"name": path, "assertionResults": tests}]}
    assert parse_jest(json.dumps(report))["error_location"] == {"file": "lib/f.js", "line": 7}
