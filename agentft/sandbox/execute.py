"""Runs the built-in tools for real (floor 2): one ``ToolCall`` on one lease → one ``ExecResult``.

    with sandbox.lease() as lease:
        lease.write_files({"add.py": b"..."})
        result = run_tool(lease, ToolCall("pytest_run", {}))

Whatever the agent did wrong is data: exit code 1 with a reason in ``stderr`` (a file that is not there, an edit that
does not match), 2 for an unknown tool or bad arguments, 127 for a program that the image does not have. Only the
sandbox's own failure is ``status="infra"``. Text is normalised so that the same call gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any

from agentft.errors import SandboxError
from agentft.sandbox.base import ExecRequest, ExecResult, Lease
from agentft.sandbox.container import WORKSPACE, infra
from agentft.tools import ToolCall
from agentft.tools.check import check_call
from agentft.tools.parse import normalise, normalise_pytest, parse_problems, parse_pytest, parse_traceback

EXIT_FAILED, EXIT_USAGE, EXIT_NOT_INSTALLED = 1, 2, 127
READ_ONLY_TOOLS = frozenset({"file_read", "file_list", "code_search", "git_status", "git_diff", "git_log"})
"""Tools that leave the workspace as it was: they need not be repeated to rebuild its state."""

TOOL_ENV: Mapping[str, str] = {
    "PYTHONPATH": f"{WORKSPACE}:{WORKSPACE}/src",  # the code under test before an installed copy of it
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "COLUMNS": "80",
    "GIT_AUTHOR_NAME": "agent",
    "GIT_AUTHOR_EMAIL": "agent@sandbox",
    "GIT_COMMITTER_NAME": "agent",
    "GIT_COMMITTER_EMAIL": "agent@sandbox",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_PAGER": "cat",
    "GIT_OPTIONAL_LOCKS": "0",
}
PYTEST = (
    *("python3", "-m", "pytest", "-q", "-rfE", "--no-header", "--tb=short", "--disable-warnings"),
    *("-p", "no:cacheprovider", "--basetemp=/tmp/pytest", "-o", "addopts=", "-o", "required_plugins="),
)
SKIPPED_FOLDERS = (".git", "__pycache__")


def run_tool(lease: Lease, call: ToolCall) -> ExecResult:
    """Execute one call; never raises for what the call does. ``fields`` of the result: what its output says."""
    problem = check_call(call)
    if problem is not None:
        return _message(EXIT_USAGE, stderr=problem)
    started = time.monotonic()
    try:
        result = _TOOLS[call.name](lease, call.args)
    except OSError as error:
        result = _message(EXIT_FAILED, stderr=f"{error.filename or 'workspace'}: {error.strerror or error}")
    except SandboxError as error:
        return infra(error, time.monotonic() - started)
    return result if result.duration_s else dataclasses.replace(result, duration_s=time.monotonic() - started)


def _file_read(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    path = args["path"]
    data = lease.read_file(path)
    if b"\0" in data:
        return _message(EXIT_FAILED, stderr=f"{path}: is a binary file")
    lines = _lines(data.decode("utf-8", "replace"))
    first, last = args.get("start_line", 1), min(args.get("end_line", len(lines)), len(lines))
    if first < 1 or (lines and first > len(lines)) or (last < first and lines):
        asked = f"lines {first} to {args.get('end_line', 'the end')}"
        return _message(EXIT_FAILED, stderr=f"{path}: has {len(lines)} lines; cannot show {asked}")
    shown = "".join(f"{number}: {lines[number - 1]}\n" for number in range(first, last + 1))
    return _message(0, stdout=shown, start_line=first, total_lines=len(lines))


def _lines(text: str) -> list[str]:
    """Return the lines as an editor and Python's parser count them (not at form feeds, as ``splitlines`` does)."""
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def _file_write(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    lease.write_files({args["path"]: args["content"].encode()})
    total = len(_lines(args["content"]))
    return _message(0, stdout=f"{args['path']}: wrote {total} lines\n", total_lines=total)


def _file_edit(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    path, old, new, line = args["path"], args["old"], args["new"], args.get("line")
    try:
        text = lease.read_file(path).decode()
    except UnicodeDecodeError:
        return _message(EXIT_FAILED, stderr=f"{path}: is not UTF-8 text")
    if not old or old == new:
        return _message(EXIT_FAILED, stderr=f"{path}: `old` is {'empty' if not old else 'the same as `new`'}")
    places = _occurrences(text, old)
    wanted = [(start, at) for start, at in places if line is None or at == line]
    if len(wanted) != 1:
        return _message(EXIT_FAILED, stderr=f"{path}: {_no_match(places, wanted, line)}")
    start, at = wanted[0]
    lease.write_files({path: (text[:start] + new + text[start + len(old) :]).encode()})
    return _message(0, stdout=f"{path}: edited at line {at}\n", start_line=at)


def _occurrences(text: str, old: str) -> list[tuple[int, int]]:
    """Return (offset, line from 1) of every place where ``old`` starts, overlapping ones included."""
    places, start, line, counted = [], text.find(old), 1, 0
    while start >= 0:
        line, counted = line + text.count("\n", counted, start), start
        places.append((start, line))
        start = text.find(old, start + 1)
    return places


def _no_match(places: list[tuple[int, int]], wanted: list[tuple[int, int]], line: int | None) -> str:
    lines = [at for _, at in places]
    shown = ", ".join(map(str, lines[:10])) + (", …" if len(lines) > 10 else "")
    if not places:
        return "`old` does not occur"
    if line is None:
        return f"`old` occurs {len(lines)} times, starting on lines {shown}; give `line`, or more of the text"
    if wanted:
        return f"`old` occurs {len(wanted)} times starting on line {line}; give more of the text"
    return f"`old` does not start on line {line}; it starts on {'line' if len(lines) == 1 else 'lines'} {shown}"


def _file_list(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    skipped = [word for name in SKIPPED_FOLDERS for word in ("-name", name, "-o")][:-1]
    argv = ("find", _operand(args.get("path")), "(", *skipped, ")", "-prune", "-o", "-type", "f", "-print")
    result = _run(lease, argv)
    files = sorted(line.removeprefix("./") for line in result.stdout.splitlines())
    return dataclasses.replace(result, stdout="".join(f"{name}\n" for name in files), fields={"files": len(files)})


def _code_search(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    skipped = [f"--exclude-dir={name}" for name in SKIPPED_FOLDERS]
    argv = ("grep", "-nHEIrZ", *skipped, "-e", args["pattern"], "--", _operand(args.get("path")))
    result = _run(lease, argv)
    hits = []
    for row in result.stdout.splitlines():
        path, _, rest = row.partition("\0")
        number, _, text = rest.partition(":")
        if number.isdigit():
            hits.append((path.removeprefix("./"), int(number), text))
    stdout = "".join(f"{path}:{number}:{text}\n" for path, number, text in sorted(hits))
    return dataclasses.replace(result, stdout=stdout, fields={"matches": len(hits)})


def _pytest_run(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    targets = _targets(args)
    if isinstance(targets, ExecResult):
        return targets
    result = _run(lease, (*PYTEST, *targets))
    if result.exit_code == 1 and "No module named pytest" in result.stderr:
        return _not_installed(result, "pytest")
    stdout = normalise_pytest(result.stdout)
    return dataclasses.replace(result, stdout=stdout, fields=parse_pytest(stdout, result.stderr))


def _jest_run(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    targets = _targets(args)
    return targets if isinstance(targets, ExecResult) else _run(lease, ("jest", "--ci", "--colors=false", *targets))


def _targets(args: Mapping[str, Any]) -> list[str] | ExecResult:
    """Return the words of ``targets``, or the result that explains what is wrong with them."""
    try:
        words = shlex.split(args.get("targets", ""))
    except ValueError as error:
        return _message(EXIT_USAGE, stderr=f"targets: {error}")
    if any(word.startswith("-") for word in words):
        return _message(EXIT_USAGE, stderr="targets: must be files or node ids, not options")
    return words


def _shell_run(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    return _with_traceback(_run(lease, ("sh", "-c", args["command"]), named=False))


def _python_run(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    return _with_traceback(_run(lease, ("python3", "-c", args["code"])))


def _with_traceback(result: ExecResult) -> ExecResult:
    return dataclasses.replace(result, fields=parse_traceback(result.stderr) if result.status != "ok" else {})


def _checker(*command: str) -> Callable[[Lease, Mapping[str, Any]], ExecResult]:
    def run(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
        result = _run(lease, (*command, "--", _operand(args.get("path"))))
        return dataclasses.replace(result, fields=parse_problems(result.stdout))

    return run


def _git_diff(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    return _run(lease, ("git", "diff", "--no-ext-diff", "--", *([args["path"]] if "path" in args else [])))


def _git_commit(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    added = _run(lease, ("git", "add", "-A"))
    return added if added.status != "ok" else _run(lease, ("git", "commit", "-q", "-m", args["message"]))


_TOOLS: dict[str, Callable[[Lease, Mapping[str, Any]], ExecResult]] = {
    "file_read": _file_read,
    "file_write": _file_write,
    "file_edit": _file_edit,
    "file_list": _file_list,
    "code_search": _code_search,
    "shell_run": _shell_run,
    "python_run": _python_run,
    "pytest_run": _pytest_run,
    "jest_run": _jest_run,
    "type_check": _checker("mypy", "--no-error-summary", "--cache-dir=/tmp/mypy"),
    "lint_run": _checker("ruff", "check", "--no-cache", "--output-format=concise"),
    "format_run": _checker("ruff", "format", "--no-cache"),
    "git_status": lambda lease, args: _run(lease, ("git", "status", "--short", "--branch")),
    "git_diff": _git_diff,
    "git_log": lambda lease, args: _run(lease, ("git", "log", "--oneline", f"--max-count={args.get('count', 10)}")),
    "git_commit": _git_commit,
    "npm_publish": lambda lease, args: _run(lease, ("npm", "publish")),
    "docker_build": lambda lease, args: _run(lease, ("docker", "build", "-t", args["tag"], ".")),
}


def _run(lease: Lease, argv: tuple[str, ...], *, named: bool = True) -> ExecResult:
    """Run a program of the image; ``named``: say so plainly if the image does not have it."""
    result = lease.exec(ExecRequest(argv=argv, env=TOOL_ENV))
    if named and result.exit_code == EXIT_NOT_INSTALLED:
        return _not_installed(result, argv[0])
    return dataclasses.replace(result, stdout=normalise(result.stdout), stderr=normalise(result.stderr))


def _not_installed(result: ExecResult, program: str) -> ExecResult:
    text = f"{program} is not installed in this image\n"
    return dataclasses.replace(result, exit_code=EXIT_NOT_INSTALLED, stdout="", stderr=text)


def _operand(path: str | None) -> str:
    """Return a path that no program takes for an option."""
    return path if path and path.startswith("/") else f"./{path or ''}"


def _message(exit_code: int, *, stdout: str = "", stderr: str = "", **fields: Any) -> ExecResult:
    """Return the result of a tool that is done here."""
    stderr = f"{stderr}\n" if stderr else ""
    return ExecResult(
        status="ok" if exit_code == 0 else "nonzero",
        exit_code=exit_code,
        stdout=stdout,
        stderr=stderr,
        total_bytes=len(stdout.encode()) + len(stderr.encode()),
        fields=fields,
    )
