"""Raw output → fields: on text as pytest, Python and linters print it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentft.tools.parse import (
    normalise,
    normalise_pytest,
    parse_format,
    parse_git_diff,
    parse_git_status,
    parse_problems,
    parse_pytest,
    parse_traceback,
)

REPORT = """\
.FFE                                                                     [100%]
==================================== ERRORS ====================================
__________________________ ERROR at setup of test_fix __________________________
test_a.py:14: in bad
    def bad(): raise RuntimeError("no")
E   RuntimeError: no
=================================== FAILURES ===================================
___________________________________ test_add ___________________________________
test_a.py:4: in test_add
    assert pkg.add(1, 2) == 3
E   assert -1 == 3
E    +  where -1 = <function add at 0x7fcf4eaeb880>(1, 2)
=========================== short test summary info ============================
FAILED test_a.py::test_add - assert -1 == 3
FAILED test_a.py::test_p[a - b] - ValueError: x
ERROR test_a.py::test_fix - RuntimeError: no
2 failed, 1 passed, 1 skipped, 1 error in 0.02s
"""

DEEP = """\
F
=================================== FAILURES ===================================
__________________________________ test_boom ___________________________________
tests/test_a.py:6: in test_boom
    pkg.boom(1)
pkg/core.py:4: in boom
    return helper(x)
/usr/lib/python3.11/json/decoder.py:355: in raw_decode
    raise JSONDecodeError("Expecting value", s, err.value) from None
E   json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
=========================== short test summary info ============================
FAILED tests/test_a.py::test_boom - json.decoder.JSONDecodeError: Expecting...
1 failed in 61.20s (0:01:01)
"""

TRACEBACK = """\
noise
Traceback (most recent call last):
  File "<string>", line 1, in <module>
  File "/workspace/pkg/core.py", line 9, in run
    return json.loads("")
  File "/usr/lib/python3.11/json/__init__.py", line 346, in loads
    return _default_decoder.decode(s)
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
"""


def test_counts_failed_tests_and_the_first_failure() -> None:
    assert parse_pytest(REPORT) == {
        "passed": 1,
        "failed": 2,
        "errors": 1,
        "failed_tests": ["test_a.py::test_add", "test_a.py::test_p[a - b]", "test_a.py::test_fix"],
        "failures": [
            {"test": "test_a.py::test_add", "message": "assert -1 == 3", "file": "test_a.py", "line": 4},
            {"test": "test_a.py::test_p[a - b]"},
            {"test": "test_a.py::test_fix", "message": "RuntimeError: no", "file": "test_a.py", "line": 14},
        ],
        "message": "RuntimeError: no",
        "error_location": {"file": "test_a.py", "line": 14},
    }


def test_the_deepest_frame_of_the_workspace_outside_of_tests_is_the_place() -> None:
    fields = parse_pytest(DEEP)
    assert fields["error_location"] == {"file": "pkg/core.py", "line": 4}
    assert fields["message"].startswith("json.decoder.JSONDecodeError: Expecting value")
    assert (fields["passed"], fields["failed"]) == (0, 1)


def test_a_passing_run_has_no_place() -> None:
    assert parse_pytest("..   [100%]\n2 passed in 0.01s\n") == {
        "passed": 2,
        "failed": 0,
        "errors": 0,
        "failed_tests": [],
        "failures": [],
    }


SAME_NAMES = """\
FF
=================================== FAILURES ===================================
_________________________________ TestB.test_x _________________________________
tests/test_b.py:3: in test_x
    assert 0
E   assert 0
_________________________________ TestB.test_x _________________________________
tests/test_a.py:7: in test_x
    raise KeyError(1)
E   KeyError: 1
=========================== short test summary info ============================
FAILED tests/test_a.py::TestB::test_x - KeyError: 1
FAILED tests/test_b.py::TestB::test_x - assert 0
2 failed in 0.02s
"""


def test_failures_of_the_same_name_are_told_apart_by_their_file() -> None:
    fields = parse_pytest(SAME_NAMES)
    assert fields["failures"] == [
        {"test": "tests/test_a.py::TestB::test_x", "message": "KeyError: 1", "file": "tests/test_a.py", "line": 7},
        {"test": "tests/test_b.py::TestB::test_x", "message": "assert 0", "file": "tests/test_b.py", "line": 3},
    ]


def test_a_broken_conftest_is_read_from_stderr() -> None:
    stderr = (
        "ImportError while loading conftest '/workspace/tests/conftest.py'.\n"
        "tests/conftest.py:1: in <module>\n    import pkg\npkg/__init__.py:2: in <module>\n    import nothere\n"
        "E   ModuleNotFoundError: No module named 'nothere'\n"
    )
    fields = parse_pytest("", stderr)
    assert fields["error_location"] == {"file": "pkg/__init__.py", "line": 2}
    assert fields["message"] == "ModuleNotFoundError: No module named 'nothere'"


def test_traceback() -> None:
    fields = parse_traceback(TRACEBACK)
    assert fields["error_location"] == {"file": "pkg/core.py", "line": 9}
    assert fields["message"].startswith("json.decoder.JSONDecodeError")
    syntax = '  File "/workspace/a.py", line 3\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
    assert parse_traceback(syntax) == {
        "message": "SyntaxError: invalid syntax",
        "error_location": {"file": "a.py", "line": 3},
    }
    assert parse_traceback("all is well\n") == {}


def test_problems() -> None:
    text = "pkg/a.py:3:5: F401 unused import\npkg/b.py:9: error: bad type\nFound 2 errors.\n"
    assert parse_problems(text) == {
        "problems": 2,
        "message": "F401 unused import",
        "error_location": {"file": "pkg/a.py", "line": 3},
    }
    assert parse_problems("All checks passed!\n") == {"problems": 0}
    noted = "a.py:1: error: No overload  [call-overload]\na.py:1: note: Possible overload variant:\n"
    assert parse_problems(noted)["problems"] == 1


def test_formatters() -> None:
    black = (
        "error: cannot format /workspace/b.py: Cannot parse: 2:6: def x(:\nreformatted /workspace/pkg/a.py\n\n"
        "Oh no! \N{COLLISION SYMBOL}\n1 file reformatted, 1 file failed to reformat.\n"
    )
    text, fields = parse_format(black)
    assert fields == {
        "changed": ["pkg/a.py"],
        "problems": 1,
        "message": "cannot be parsed: def x(:",
        "error_location": {"file": "b.py", "line": 2},
    }
    assert text.splitlines() == [
        "b.py:2: cannot be parsed: def x(:",
        "reformatted pkg/a.py",
        "1 file reformatted, 1 file failed to reformat.",
    ]
    assert parse_format("All done!\n1 file left unchanged.\n")[1] == {"changed": [], "problems": 0}


def test_git() -> None:
    status = "## main...origin/main\n M a.py\nR  old.py -> new.py\n?? b c.py\n"
    assert parse_git_status(status) == {"branch": "main", "changed": ["a.py", "new.py", "b c.py"]}
    assert parse_git_status("## No commits yet on trunk\n") == {"branch": "trunk", "changed": []}
    patch = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1,2 @@\n-old\n+new\n+++ text\n"
    assert parse_git_diff(patch) == {"changed": ["x.py"], "added": 2, "removed": 1}


def test_normalise() -> None:
    text = "<object at 0x7fcf4eaeb880> /tmp/tmpab12_xyz/f /tmp/tmp.MXXKOcssJo 0xdeadbeef"
    assert normalise(text) == "<object at 0x0> /tmp/tmpXXXXXXXX/f /tmp/tmpXXXXXXXX 0xdeadbeef"
    assert normalise("at 0x7fcf4...") == "at 0x0..."
    assert normalise_pytest("1 passed in 61.20s (0:01:01)\n") == "1 passed in 0.00s\n"


@given(st.text())
def test_nothing_that_a_program_prints_breaks_the_parsers(text: str) -> None:
    assert normalise_pytest(normalise_pytest(text)) == normalise_pytest(text)
    assert parse_pytest(text, text)["passed"] >= 0
    assert parse_problems(text)["problems"] >= 0
    assert set(parse_traceback(text)) <= {"message", "error_location"}


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.floats(0, 9999))
def test_counts_are_read_back(passed: int, failed: int, errors: int, seconds: float) -> None:
    parts = [f"{count} {name}" for count, name in ((failed, "failed"), (passed, "passed"), (errors, "errors")) if count]
    fields = parse_pytest(f"{', '.join(parts) or 'no tests ran'} in {seconds:.2f}s\n")
    assert (fields["passed"], fields["failed"], fields["errors"]) == (passed, failed, errors)
