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
    assert failed(tool("file_read", path="missing.py")) == "missing.py: No such file or directory\n"
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
    assert "does not occur" in failed(tool("file_edit", path=path, old="absent", new="x"))
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
    assert failed(tool("code_search", pattern="absent")) == ""
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
    assert "not a git repository" in failed(tool("git_status"), 128)
    assert tool("shell_run", command="git init -q -b main").status == "ok"
    assert tool("git_commit", message="first").status == "ok"
    tool("file_write", path="calc/__init__.py", content="new = 1\n")
    assert tool("git_status").stdout == "## main\n M calc/__init__.py\n"
    assert "+new = 1" in tool("git_diff", path="calc/__init__.py").stdout
    assert tool("git_log", count=1).stdout.endswith(" first\n")


@pytest.mark.parametrize("name", ["npm_publish", "jest_run"])
def test_programs_that_the_image_lacks(tool: Tool, name: str) -> None:
    assert failed(tool(name), 127).endswith("is not installed in this image\n")


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
