"""The built-in tools, executed for real on every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentft.sandbox.base import ExecResult
from agentft.sandbox.container import Container
from agentft.sandbox.execute import _TOOLS, run_tool
from agentft.tools import TOOLS, ToolCall

Tool = Callable[..., ExecResult]

FILES = {
    "calc/__init__.py": (
        "def add(a, b):\n    return a - b\n\n\ndef fail(x):\n    raise ValueError(f'bad {object()} {x}')\n"
    ),
    "tests/test_calc.py": (
        "import calc\n\n\ndef test_add():\n    assert calc.add(1, 2) == 3\n\n\n"
        "def test_fail(tmp_path):\n    calc.fail(tmp_path)\n\n\ndef test_zero():\n    assert calc.add(0, 0) == 0\n"
    ),
    "notes.txt": "one\r\ntwo\x0ctwo\nthree",
}


@pytest.fixture
def tool(box: Container) -> Tool:
    """Call a tool on a workspace that holds FILES."""
    box.write_files({path: text.encode() for path, text in FILES.items()})

    def call(name: str, **args: Any) -> ExecResult:
        return run_tool(box, ToolCall(name, args))

    return call


def failed(result: ExecResult, code: int = 1) -> str:
    assert (result.status, result.exit_code) == ("nonzero", code), result
    return result.stderr


def test_every_tool_has_an_implementation() -> None:
    assert set(_TOOLS) == set(TOOLS)


def test_file_read_numbers_lines(tool: Tool) -> None:
    result = tool("file_read", path="calc/__init__.py", start_line=2, end_line=3)
    assert result.stdout == "2:     return a - b\n3: \n"
    assert dict(result.fields) == {"start_line": 2, "total_lines": 6}
    assert result.duration_s > 0
    assert tool("file_read", path="notes.txt").stdout == "1: one\n2: two\x0ctwo\n3: three\n"
    assert tool("file_read", path="calc/__init__.py", start_line=5, end_line=99).stdout.count("\n") == 2


def test_file_read_errors_teach(tool: Tool) -> None:
    gone = "No such file or directory"
    assert failed(tool("file_read", path="missing.py")) == f"missing.py: {gone}; file_list shows what is there\n"
    assert failed(tool("file_read", path="test_calc.py")).endswith(f"{gone}; did you mean tests/test_calc.py?\n")
    assert failed(tool("file_read", path="tests/test_clac.py")).endswith("; did you mean tests/test_calc.py?\n")
    assert "has 6 lines; cannot show lines 20 to the end" in failed(
        tool("file_read", path="calc/__init__.py", start_line=20)
    )
    assert "is a folder" in failed(tool("file_read", path="calc"))
    assert "is not inside the workspace" in failed(tool("file_read", path="../etc/passwd"))
    tool("shell_run", command="printf 'a\\0b' > binary")
    assert "binary" in failed(tool("file_read", path="binary"))
    tool("shell_run", command=": > empty")
    assert tool("file_read", path="empty").stdout == ""


def test_file_write_and_edit(tool: Tool) -> None:
    assert tool("file_write", path="new/a.py", content="x = 1\ny = 1\n").fields["total_lines"] == 2
    result = tool("file_edit", path="new/a.py", old="x = 1", new="x = 2")
    assert (result.status, result.fields["start_line"]) == ("ok", 1)
    assert tool("file_edit", path="new/a.py", line=2, old="= 1", new="= 3").fields["start_line"] == 2
    assert tool("file_read", path="new/a.py").stdout == "1: x = 2\n2: y = 3\n"
    tool("file_edit", path="notes.txt", old="one\r\n", new="ONE\r\n")
    assert tool("shell_run", command="head -c 5 notes.txt | od -c | head -1").stdout.split()[1:] == [
        *"ONE",
        "\\r",
        "\\n",
    ]


def test_file_edit_errors_teach(tool: Tool) -> None:
    path = "tests/test_calc.py"
    assert "occurs 2 times, starting on lines 5, 13; give `line`" in failed(
        tool("file_edit", path=path, old="calc.add", new="x")
    )
    assert "`old` does not start on line 4; it starts on lines 5, 13" in failed(
        tool("file_edit", path=path, line=4, old="calc.add", new="x")
    )
    assert "occurs 3 times starting on line 13" in failed(tool("file_edit", path=path, line=13, old="0", new="x"))
    assert "does not occur; file_read" in failed(tool("file_edit", path=path, old="absent", new="x"))
    assert "the most similar line is 4: def test_add():" in failed(
        tool("file_edit", path=path, old="def test_adds():\n", new="x")
    )
    assert "line 5 has the same text with other white space" in failed(
        tool("file_edit", path=path, old="\tassert calc.add(1, 2) == 3", new="x")
    )
    assert "empty" in failed(tool("file_edit", path=path, old="", new="x"))
    assert "the same as `new`" in failed(tool("file_edit", path=path, old="import", new="import"))
    assert "missing.py" in failed(tool("file_edit", path="missing.py", old="a", new="b"))


def test_file_list_and_code_search_are_sorted_and_skip_what_is_generated(tool: Tool) -> None:
    tool("shell_run", command="mkdir -p .git calc/__pycache__ && echo def > .git/x && echo def > calc/__pycache__/y")
    assert tool("file_list").stdout == "calc/__init__.py\nnotes.txt\ntests/test_calc.py\n"
    assert tool("file_list", path="calc").stdout == "calc/__init__.py\n"
    result = tool("code_search", pattern="^def (add|test_)")
    assert result.stdout == (
        "calc/__init__.py:1:def add(a, b):\ntests/test_calc.py:4:def test_add():\n"
        "tests/test_calc.py:8:def test_fail(tmp_path):\ntests/test_calc.py:12:def test_zero():\n"
    )
    assert result.fields["matches"] == 4
    assert tool("code_search", pattern="three", path="notes.txt").stdout == "notes.txt:3:three\n"
    assert failed(tool("code_search", pattern="absent", path="calc")) == "no line matches absent in calc\n"
    assert "Unmatched" in failed(tool("code_search", pattern="("), 2)
    assert tool("code_search", pattern="-n").exit_code == 1
    assert failed(tool("file_list", path="-delete"))
    assert tool("file_list").fields["files"] == 3


def test_pytest_run_is_parsed_and_repeats_byte_for_byte(tool: Tool) -> None:
    first = tool("pytest_run")
    assert (first.status, first.exit_code) == ("nonzero", 1)
    assert dict(first.fields) == {
        "passed": 1,
        "failed": 2,
        "errors": 0,
        "failed_tests": ["tests/test_calc.py::test_add", "tests/test_calc.py::test_fail"],
        "failures": [
            {
                "test": "tests/test_calc.py::test_add",
                "message": "assert -1 == 3",
                "file": "tests/test_calc.py",
                "line": 5,
            },
            {
                "test": "tests/test_calc.py::test_fail",
                "message": "ValueError: bad <object object at 0x0> /tmp/pytest/test_fail0",
                "file": "calc/__init__.py",
                "line": 6,
            },
        ],
        "message": "assert -1 == 3",
        "error_location": {"file": "tests/test_calc.py", "line": 5},
    }
    again = tool("pytest_run")
    assert (again.stdout, again.stderr) == (first.stdout, first.stderr)
    assert "at 0x0" in first.stdout
    only = tool("pytest_run", targets="tests/test_calc.py::test_fail")
    assert only.fields["error_location"] == {"file": "calc/__init__.py", "line": 6}
    assert only.fields["message"].startswith("ValueError: bad <object object at 0x0> /tmp/pytest/test_fail0")


def test_an_edit_of_equal_size_is_seen_at_once(tool: Tool) -> None:
    assert tool("pytest_run", targets="tests/test_calc.py::test_add").exit_code == 1
    tool("file_edit", path="calc/__init__.py", old="a - b", new="a + b")
    assert tool("pytest_run", targets="tests/test_calc.py::test_add").fields["passed"] == 1
    tool("file_edit", path="calc/__init__.py", old="a + b", new="a * b")
    assert tool("pytest_run", targets="tests/test_calc.py::test_add").fields["failed"] == 1


def test_pytest_run_ignores_plugins_and_options_of_the_project(tool: Tool) -> None:
    tool(
        "file_write",
        path="pytest.ini",
        content="[pytest]\naddopts = --cov --no-such-option\nrequired_plugins = pytest-cov\n",
    )
    assert tool("pytest_run", targets="tests/test_calc.py::test_zero").fields["passed"] == 1


def test_pytest_run_tells_what_kept_it_from_running(tool: Tool) -> None:
    result = tool("pytest_run", targets="tests/missing.py")
    assert (result.exit_code, result.fields["message"]) == (4, "file or directory not found: tests/missing.py")
    tool("file_write", path="calc/__init__.py", content="def add(a, b:\n")
    broken = tool("pytest_run")
    assert (broken.exit_code, broken.fields["errors"]) == (2, 1)
    assert broken.fields["error_location"] == {"file": "calc/__init__.py", "line": 1}
    assert broken.fields["message"].startswith("SyntaxError")
    assert "not options" in failed(tool("pytest_run", targets="-p x"), 2)
    assert "targets: No closing quotation" in failed(tool("pytest_run", targets="'x"), 2)


def test_code_of_the_workspace_goes_before_an_installed_copy(tool: Tool) -> None:
    tool("file_write", path="src/attr/__init__.py", content="mine = True\n")
    assert tool("python_run", code="import attr; print(attr.mine)").stdout == "True\n"


def test_python_and_shell_runs(tool: Tool) -> None:
    result = tool("python_run", code="import calc\nprint('before')\ncalc.fail(1)")
    assert (result.exit_code, result.stdout) == (1, "before\n")
    assert result.fields["error_location"] == {"file": "calc/__init__.py", "line": 6}
    assert result.fields["message"] == "ValueError: bad <object object at 0x0> 1"
    assert failed(tool("shell_run", command="nosuch"), 127) == "sh: 1: nosuch: not found\n"
    temporary = tool("python_run", code="import tempfile; print(tempfile.mkdtemp())")
    assert temporary.stdout == "/tmp/tmpXXXXXXXX\n"


def test_a_repository_is_seen_by_the_git_tools(tool: Tool) -> None:
    assert "`git init` makes one" in failed(tool("git_status"), 128)
    assert tool("shell_run", command="git init -q -b main").status == "ok"
    first = tool("git_commit", message="first")
    assert (first.status, first.fields["changed"]) == ("ok", sorted(FILES))
    assert "3 files changed" in first.stdout
    assert "nothing to commit" in tool("git_commit", message="again").stdout
    assert tool("git_diff").stdout == "no changes in files that git knows\n"
    tool("file_write", path="calc/__init__.py", content="new = 1\n")
    assert tool("git_status").stdout == "## main\n M calc/__init__.py\n"
    assert tool("git_status").fields == {"branch": "main", "changed": ["calc/__init__.py"]}
    diff = tool("git_diff", path="calc/__init__.py")
    assert "+new = 1" in diff.stdout
    assert diff.fields == {"changed": ["calc/__init__.py"], "added": 1, "removed": 6}
    log = tool("git_log", count=1)
    assert log.stdout.endswith(" first\n")
    tool("shell_run", command="rm -rf .git calc && git init -q -b main")
    for path, text in FILES.items():
        tool("file_write", path=path, content=text)
    tool("git_commit", message="first")
    assert tool("git_log", count=1).stdout == log.stdout  # the same commit has the same name


def test_jest_is_missed_in_words(tool: Tool) -> None:
    assert failed(tool("jest_run"), 127).startswith("jest is not installed in this image: this tool cannot work")


def test_checkers_tell_each_problem_with_its_place(tool: Tool) -> None:
    broken = "import os\n\n\ndef f(x: int) -> str:\n    y = nothere\n    return x\n"
    tool("file_write", path="bad.py", content=broken)
    lint = tool("lint_run")
    if lint.exit_code == 127:
        pytest.skip("this system has no linter")
    assert lint.stdout.splitlines() == [
        "bad.py:1:1: F401 'os' imported but unused",
        "bad.py:5:5: F841 local variable 'y' is assigned to but never used",
        "bad.py:5:9: F821 undefined name 'nothere'",
    ]
    assert lint.fields["problems"] == 3
    types = tool("type_check", path="bad.py")
    assert (types.exit_code, types.fields["problems"]) == (1, 2)
    assert types.fields["error_location"] == {"file": "bad.py", "line": 5}
    assert tool("type_check", path="tests").stdout == tool("lint_run", path="tests").stdout == "no problem found\n"
    for name in ("type_check", "lint_run", "format_run"):
        assert failed(tool(name, path="gone")) == "gone: No such file or directory; file_list shows what is there\n"


def test_format_run_says_what_it_changed_and_what_it_could_not(tool: Tool) -> None:
    tool("file_write", path="a.py", content="x = {  'a':1 }\n")
    first = tool("format_run")
    if first.exit_code == 127:
        pytest.skip("this system has no formatter")
    assert (first.status, first.fields["changed"]) == ("ok", ["a.py", "calc/__init__.py"])
    assert tool("file_read", path="a.py").stdout == '1: x = {"a": 1}\n'
    assert tool("format_run").fields == {"changed": [], "problems": 0}
    tool("file_write", path="b.py", content="def x(:\n")
    broken = tool("format_run")
    assert broken.fields["error_location"] == {"file": "b.py", "line": 1}
    assert broken.stderr.startswith("b.py:1: cannot be parsed: def x(:\n")


def test_docker_build_checks_and_says_that_it_built_nothing(tool: Tool) -> None:
    assert "Dockerfile: No such file" in failed(tool("docker_build", tag="x"))
    tool("file_write", path="Dockerfile", content="FROM a\nCOPY calc/ *.txt tests/test_calc.py /x/\nCOPY nothere /x\n")
    result = tool("docker_build", tag="x")
    assert failed(result) == "Dockerfile:3: COPY nothere: no such file in the build context\n"
    assert result.fields["error_location"] == {"file": "Dockerfile", "line": 3}
    tool("file_write", path="Dockerfile", content="FROM a\nCOPY . /x/\n")
    assert "x was not built" in tool("docker_build", tag="x").stdout


def test_a_limit_is_said_in_words(tool: Tool) -> None:
    result = tool("shell_run", command="echo so far; sleep 60")
    assert (result.status, result.exit_code) == ("timeout", None)
    assert (result.stdout, result.stderr) == ("so far\n", "stopped: it did not end within the time limit\n")


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("no_tool", {}, "there is no tool 'no_tool'"),
        ("file_read", {}, "needs the argument 'path'"),
        ("file_read", {"path": 3}, "must be of type string, got int"),
        ("file_read", {"path": "a", "start_line": True}, "must be of type integer, got bool"),
        ("file_read", {"path": "a", "lines": 3}, "has no argument 'lines'"),
        ("python_run", {"code": "\ud800"}, "lone surrogates"),
        ("shell_run", {"command": "a\0b"}, "NUL"),
    ],
)
def test_bad_calls_are_data(tool: Tool, name: str, args: dict[str, Any], reason: str) -> None:
    assert reason in failed(tool(name, **args), 2)


def test_a_dead_sandbox_is_infra_for_every_kind_of_tool(engine: Any) -> None:
    box = engine.start()
    box.close()
    for call in (
        ToolCall("file_read", {"path": "a"}),
        ToolCall("shell_run", {"command": "true"}),
        ToolCall("pytest_run"),
    ):
        result = run_tool(box, call)
        assert (result.status, result.exit_code) == ("infra", None)
