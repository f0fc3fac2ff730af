"""The tools that run programs of the image (floor 2): tests, checkers, git, npm; their output parsed into fields."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from agentft.sandbox.base import ExecRequest, ExecResult, Lease
from agentft.sandbox.container import WORKSPACE
from agentft.sandbox.execute_base import (
    EXIT_FAILED,
    EXIT_NOT_INSTALLED,
    EXIT_USAGE,
    Tool,
    message,
    not_installed,
    operand,
    run_first,
    run_program,
)
from agentft.tools.jest import TITLES, parse_jest, readable
from agentft.tools.parse import (
    normalise_pytest,
    parse_format,
    parse_git_diff,
    parse_git_status,
    parse_problems,
    parse_pytest,
    parse_traceback,
)

PYTEST = (
    *("python3", "-m", "pytest", "-q", "-rfE", "--no-header", "--tb=short", "--disable-warnings"),
    *("-p", "no:cacheprovider", "--basetemp=/tmp/pytest", "-o", "addopts=", "-o", "required_plugins="),
)
JEST = (  # one process and no cache: the order of files would follow the times of the last run
    *("jest", "--ci", "--colors=false", "--runInBand", "--no-cache", "--watchman=false"),
    *("--coverage=false", "--json", "--testLocationInResults"),
)
NPM_PUBLISH = ("npm", "publish", "--dry-run", "--json", "--offline", "--ignore-scripts", "--logs-max=0")


def shell_run(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    """Run a command line."""
    return _with_traceback(run_program(lease, ("sh", "-c", args["command"])))


def python_run(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    """Run Python code."""
    return _with_traceback(run_first(lease, ("python3", "-c", args["code"])))


def pytest_run(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    """Run pytest without the project's options and plugins, and parse its report."""
    targets = _targets(args)
    if isinstance(targets, ExecResult):
        return targets
    result = run_first(lease, (*PYTEST, *targets))
    if result.exit_code == 1 and "No module named pytest" in result.stderr:
        return not_installed("pytest")
    if result.exit_code == EXIT_NOT_INSTALLED:
        return result
    stdout = normalise_pytest(result.stdout)
    return dataclasses.replace(result, stdout=stdout, fields=parse_pytest(stdout, result.stderr))


def jest_run(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    """Run jest; its JSON report becomes the fields, what it prints for people becomes the output.

    The report comes on stdout: unlike a file in the workspace it cannot be put there beforehand. A test that shares
    jest's process can still print one; a report that disagrees with the exit code is not believed.
    """
    targets = _targets(args)
    if isinstance(targets, ExecResult):
        return targets
    words = _jest_words(targets)
    result = run_first(lease, (*JEST, *words))
    if result.exit_code == 1 and "Could not find a config file" in result.stderr:
        result = run_first(lease, (*JEST, "--config={}", f"--rootDir={WORKSPACE}", *words))
    if result.exit_code == EXIT_NOT_INSTALLED or result.status not in ("ok", "nonzero"):
        return result
    fields = parse_jest(result.stdout)
    if fields and (fields["failed"] + fields["errors"] > 0) == (result.exit_code == 0):
        fields = {}
    text = readable(result.stderr)
    if not fields:
        text += readable("\n".join(line for line in result.stdout.splitlines() if not line.startswith('{"num')))
        if text.startswith("No tests found"):
            text = f"no test found{' in ' + ' '.join(targets) if targets else ''}\n"
    return dataclasses.replace(result, stdout=text, stderr="", fields=fields)


def _jest_words(targets: list[str]) -> list[str]:
    """Return patterns that match exactly these files and folders, and the names of tests (``file::name``)."""
    files = sorted({target.partition("::")[0] for target in targets})
    titles = [target.partition("::")[2] for target in targets]
    prefix = re.escape(f"{WORKSPACE}/")
    words = [f"^{prefix}{re.escape(file.removeprefix('./').rstrip('/'))}($|/)" for file in files if file != "."]
    if targets and all(titles):
        names = "|".join(sorted({re.escape(title.replace(TITLES, " ")) for title in titles}))
        words += ["--testNamePattern", f"^({names})$"]
    return words


def _targets(args: Mapping[str, Any]) -> list[str] | ExecResult:
    """Return the words of ``targets``, or the result that explains what is wrong with them."""
    try:
        words = shlex.split(args.get("targets", ""))
    except ValueError as error:
        return message(EXIT_USAGE, stderr=f"targets: {error}")
    if any(word.startswith("-") for word in words):
        return message(EXIT_USAGE, stderr="targets: must be files or node ids, not options")
    return words


def _with_traceback(result: ExecResult) -> ExecResult:
    return dataclasses.replace(result, fields=parse_traceback(result.stderr) if result.status != "ok" else {})


def checker(*commands: tuple[str, ...]) -> Tool:
    """Return a tool that prints problems as ``path:line: text``; each command gets the path as its last word."""

    def run(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
        if missing := _missing(lease, args.get("path")):
            return missing
        result = run_first(lease, *((*command, operand(args.get("path"))) for command in commands))
        stdout = "".join(f"{line.removeprefix('./')}\n" for line in result.stdout.splitlines())
        fields = {} if result.exit_code == EXIT_NOT_INSTALLED else parse_problems(stdout)
        return dataclasses.replace(result, stdout=stdout or _nothing(result, "no problem found"), fields=fields)

    return run


def format_run(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    """Format in place; print what was changed and what could not be parsed."""
    path = operand(args.get("path"))
    if missing := _missing(lease, args.get("path")):
        return missing
    result = run_first(lease, ("black", "--no-color", "--", path), ("ruff", "format", "--no-cache", "--", path))
    if result.exit_code == EXIT_NOT_INSTALLED:
        return result
    text, fields = parse_format(result.stdout + result.stderr)
    ok = result.exit_code == 0
    return dataclasses.replace(result, stdout=text if ok else "", stderr="" if ok else text, fields=fields)


def _missing(lease: Lease, path: str | None) -> ExecResult | None:
    """Return the result that says that there is no such path; programs say it in many ways, some with exit code 0."""
    if path is None or lease.exec(ExecRequest(argv=("test", "-e", operand(path)))).exit_code != 1:
        return None
    return message(EXIT_FAILED, stderr=f"{path}: No such file or directory; file_list shows what is there")


def _nothing(result: ExecResult, text: str) -> str:
    return f"{text}\n" if result.exit_code == 0 else ""


def git_status(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    """Show what differs from the last commit."""
    result = _git(lease, "status", "--short", "--branch")
    return dataclasses.replace(result, fields=parse_git_status(result.stdout)) if result.status == "ok" else result


def git_diff(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    """Show the changes themselves."""
    result = _git(lease, "diff", "--no-ext-diff", "--", *([args["path"]] if "path" in args else []))
    if result.status != "ok":
        return result
    stdout = result.stdout or "no changes in files that git knows\n"
    return dataclasses.replace(result, stdout=stdout, fields=parse_git_diff(result.stdout))


def git_log(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    """Show commits, newest first."""
    result = _git(lease, "log", "--oneline", f"--max-count={args.get('count', 10)}")
    fields = {"commits": len(result.stdout.splitlines())} if result.status == "ok" else {}
    return dataclasses.replace(result, fields=fields)


def git_commit(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    """Commit every change; print the commit and its files."""
    for words in (("add", "-A"), ("commit", "-q", "-m", args["message"])):
        result = _git(lease, *words)
        if result.status != "ok":
            return result
    shown = _git(lease, "show", "--stat", "--format=%h %s")
    patch = _git(lease, "show", "--no-ext-diff", "--format=")
    return dataclasses.replace(shown, fields=parse_git_diff(patch.stdout) if patch.status == "ok" else {})


def _git(lease: Lease, *words: str) -> ExecResult:
    result = run_first(lease, ("git", *words))
    if result.exit_code == 128 and "not a git repository" in result.stderr:
        stderr = "fatal: the workspace is not a git repository; `git init` makes one\n"
        return dataclasses.replace(result, stderr=stderr)
    return result


def npm_publish(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    """Check what would be published; nothing is sent."""
    description = lease.read_file("package.json")
    result = run_first(lease, NPM_PUBLISH)
    if result.exit_code == EXIT_NOT_INSTALLED or result.status not in ("ok", "nonzero"):
        return result
    try:
        said = json.loads(result.stdout)
        if result.status == "nonzero":
            why = str(said["error"]["summary"]).strip().splitlines()[0]
            return dataclasses.replace(result, stdout="", stderr=f"npm: {why}\n", fields={"message": why})
        files = [str(file["path"]) for file in said["files"]]
        package, version = str(said["name"]), str(said["version"])
    except (ValueError, KeyError, TypeError, IndexError):
        return result
    if json.loads(description).get("private"):
        why = "package.json: the package is private; it can be published only without `private`"
        return message(EXIT_FAILED, stderr=why, message=why)
    stdout = f"{package}@{version} would be published with {len(files)} files (dry run: nothing was sent)\n"
    stdout += "".join(f"{file}\n" for file in files)
    fields = {"package": package, "version": version, "files": files}
    return dataclasses.replace(result, stdout=stdout, stderr="", fields=fields)


PROGRAM_TOOLS: Mapping[str, Tool] = {
    "shell_run": shell_run,
    "python_run": python_run,
    "pytest_run": pytest_run,
    "jest_run": jest_run,
    "type_check": checker(
        (
            *("mypy", "--no-error-summary", "--no-color-output", "--cache-dir=/tmp/mypy"),
            *("--ignore-missing-imports", "--explicit-package-bases", "--"),
        ),
        ("pyright",),
    ),
    "lint_run": checker(
        ("flake8", "--isolated", "--select=E4,E7,E9,F", "--"),  # as ruff: mistakes; the formatter minds the style
        ("ruff", "check", "--no-cache", "--output-format=concise", "--"),
    ),
    "format_run": format_run,
    "git_status": git_status,
    "git_diff": git_diff,
    "git_log": git_log,
    "git_commit": git_commit,
    "npm_publish": npm_publish,
}
