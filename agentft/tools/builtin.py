"""The 18 built-in tools (floor 0), in one table; ``index`` is the row of the tool head's output."""

from __future__ import annotations

from agentft.tools.spec import Parameter, ToolSpec


def _path(description: str = "file, relative to the workspace", required: bool = True) -> Parameter:
    return Parameter(name="path", type="string", description=description, required=required, refers_to="file")


def _line(name: str, description: str, required: bool = False) -> Parameter:
    return Parameter(name=name, type="integer", description=description, required=required, refers_to="line")


def _text(name: str, description: str, required: bool = True) -> Parameter:
    return Parameter(name=name, type="string", description=description, required=required)


TEST_FIELDS = ("passed", "failed", "errors", "failed_tests", "failures", "message", "error_location")
PROBLEM_FIELDS = ("problems", "message", "error_location")

BUILTIN_TOOLS: tuple[ToolSpec, ...] = (
    ToolSpec(
        name="file_read",
        description="Show the numbered lines of a file, or lines start_line..end_line of it.",
        parameters=(_path(), _line("start_line", "first line, from 1"), _line("end_line", "last line, included")),
        fields=("start_line", "total_lines"),
    ),
    ToolSpec(
        name="file_write",
        description="Create or replace a whole file.",
        parameters=(_path(), _text("content", "the new content")),
        fields=("total_lines",),
    ),
    ToolSpec(
        name="file_edit",
        description="Replace `old` by `new`. `old` must occur once in the file, or once starting on `line` if given.",
        parameters=(
            _path(),
            _line("line", "line on which `old` starts"),
            _text("old", "text to replace, exact"),
            _text("new", "replacement"),
        ),
        fields=("start_line",),
    ),
    ToolSpec(
        name="file_list",
        description="List the files under a folder.",
        parameters=(_path("folder", False),),
        fields=("files",),
        needs=("find",),
    ),
    ToolSpec(
        name="code_search",
        description="Find a regular expression in the files under a folder; prints path:line:text.",
        parameters=(_text("pattern", "extended regular expression"), _path("file or folder", False)),
        fields=("matches",),
        needs=("grep",),
    ),
    ToolSpec(
        name="shell_run",
        description="Run a shell command.",
        parameters=(_text("command", "command line for sh"),),
        deterministic=False,
        runs_code=True,
        fields=("message", "error_location"),
        needs=("sh",),
    ),
    ToolSpec(
        name="python_run",
        description="Run Python code.",
        parameters=(_text("code", "source of the program"),),
        deterministic=False,
        runs_code=True,
        fields=("message", "error_location"),
        needs=("python3",),
    ),
    ToolSpec(
        name="pytest_run",
        description="Run tests with pytest.",
        parameters=(_text("targets", "files or node ids, separated by spaces; all tests if left out", False),),
        runs_code=True,
        fields=TEST_FIELDS,
        needs=("pytest",),
    ),
    ToolSpec(
        name="jest_run",
        description="Run tests with jest.",
        parameters=(_text("targets", "files, folders or failed tests; all tests if left out", False),),
        runs_code=True,
        fields=(*TEST_FIELDS, "skipped"),
        needs=("jest",),
    ),
    ToolSpec(
        name="type_check",
        description="Check the types of a file or folder.",
        parameters=(_path("file or folder", False),),
        fields=PROBLEM_FIELDS,
        needs=("mypy", "pyright"),
    ),
    ToolSpec(
        name="lint_run",
        description="Lint a file or folder.",
        parameters=(_path("file or folder", False),),
        fields=PROBLEM_FIELDS,
        needs=("flake8", "ruff"),
    ),
    ToolSpec(
        name="format_run",
        description="Format a file or folder in place.",
        parameters=(_path("file or folder", False),),
        fields=("changed", *PROBLEM_FIELDS),
        needs=("black", "ruff"),
    ),
    ToolSpec(
        name="git_status",
        description="Show changed files.",
        parameters=(),
        fields=("branch", "changed"),
        needs=("git",),
    ),
    ToolSpec(
        name="git_diff",
        description="Show changes that are not committed, of one file if given.",
        parameters=(_path(required=False),),
        fields=("changed", "added", "removed"),
        needs=("git",),
    ),
    ToolSpec(
        name="git_log",
        description="Show the newest commits.",
        parameters=(Parameter(name="count", type="integer", description="how many, 10 if left out", required=False),),
        fields=("commits",),
        needs=("git",),
    ),
    ToolSpec(
        name="git_commit",
        description="Commit every change.",
        parameters=(_text("message", "commit message"),),
        fields=("changed", "added", "removed"),
        needs=("git",),
    ),
    ToolSpec(
        name="npm_publish",
        description="Check what would be published (a dry run: nothing leaves the sandbox).",
        parameters=(),
        fields=("package", "version", "files", "message"),
        needs=("npm",),
    ),
    ToolSpec(
        name="docker_build",
        description="Check the Dockerfile and what it copies (no image is built: there is no engine in the sandbox).",
        parameters=(_text("tag", "name of the image"),),
        fields=("stages", "instructions", *PROBLEM_FIELDS),
    ),
)

TOOL_INDEX: dict[str, int] = {spec.name: row for row, spec in enumerate(BUILTIN_TOOLS)}
"""Tool name → row of the tool head's output."""

TOOLS: dict[str, ToolSpec] = {spec.name: spec for spec in BUILTIN_TOOLS}
