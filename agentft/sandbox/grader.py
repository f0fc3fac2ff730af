"""The verdict over a whole session (floor 2): its tests, on what the agent left, where the agent never was.

    grade = grade(sandbox, workspace, calls, ToolCall("pytest_run", {"targets": "tests"}))
    grade.passed, grade.tampered, grade.result

The session's calls run in one container; the files that they leave are read through its runner and that container is
given up. ``restore`` decides what of them is graded. They go into another container together with the session's own
tests, and those run there. What the verdict rests on:

* the exit code that the runner saw, and for pytest the report that ``graded_pytest`` writes past the product's reach:
  both must say that all is well, and at least one test must have passed. No file that the agent can write is read.
* the tests as they are after the run: one that was rewritten meanwhile is tampering.
* ``.git`` is neither in the session's container nor in this one.

Tampering is reported, by file and kind, and never passes, whatever the tests say.

What cannot be told from an honest solution is decided like this. A product that ends the process while the tests run
(``os._exit(0)``) leaves no report: not passed, ``no_report``. A product that skips the tests that call it:
``skipped_by_product``. An ``__eq__`` that is always true is tampering, a cleverer one is for the tests to find. Code
that is written against this very grader shares a process with pytest and can deceive it: for such an adversary, grade
in a process that the product cannot reach, such as a service that is tested from outside.

Other runs of code than pytest's (``jest_run``, ``shell_run``, ``python_run``) are judged by their exit code alone.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import posixpath
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from agentft.etai import InlineWorkspace
from agentft.sandbox.base import ExecRequest, ExecResult, Lease, Sandbox
from agentft.sandbox.calls import start_files
from agentft.sandbox.container import WORKSPACE
from agentft.sandbox.execute import PYTEST, TOOL_ENV, run_tool
from agentft.sandbox.restore import Restored, Tampering, is_test_code, restore
from agentft.tools import ToolCall
from agentft.tools.parse import normalise, normalise_pytest, parse_pytest

MOST_CHANGED = 2000
"""Changed files of one session; with more, it is failed."""

LARGEST_FILE_BYTES = 32 << 20
TEST_TOOLS = frozenset({"pytest_run", "jest_run"})

Left = Mapping[str, bytes | None]
"""What a session left: content by path of every file that differs from its start, None where it removed one."""

_LIST = """
import hashlib, os, stat
for parent, folders, names in os.walk("."):
    folders[:] = [name for name in folders if name not in (".git", "__pycache__")]
    for name in names:
        path = os.path.join(parent, name)
        if stat.S_ISREG(os.lstat(path).st_mode):
            try:
                with open(path, "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError:
                digest = ""
            print(ascii((path[2:], digest)))
"""


@dataclass(frozen=True, kw_only=True)
class Grade:
    """The verdict: ``result`` is the run of the tests, its ``fields["tampered"]`` the same list as here."""

    result: ExecResult
    tampered: tuple[Tampering, ...] = ()
    taken: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the tests passed and nothing was tampered with. False as well where the sandbox lost it."""
        return self.result.status == "ok" and self.result.exit_code == 0 and not self.tampered


def grade(sandbox: Sandbox, workspace: InlineWorkspace, calls: tuple[ToolCall, ...], test: ToolCall) -> Grade:
    """Run a session's calls in one container and grade in another.

    Raises:
        SandboxError: the sandbox failed. (``executor.LiveExecutor.submit(…, verdict=test)`` tries again instead.)
    """
    original = start_files(workspace)
    with sandbox.lease() as lease:
        lease.write_files(original)
        for call in calls:
            run_tool(lease, call)
        left = what_is_left(lease, original)
        lease.retire()
    if isinstance(left, ExecResult):
        return Grade(result=left)
    with sandbox.lease() as lease:
        return grade_left(lease, original, left, test)


def what_is_left(lease: Lease, original: Mapping[str, bytes]) -> Left | ExecResult:
    """Return what differs in a container from the files it began with.

    An ``ExecResult`` is the verdict already: there is more than can be read (the session's doing, so no ``infra``).

    Raises:
        SandboxError: the sandbox failed.
    """
    listed = lease.exec(ExecRequest(argv=("python3", "-I", "-S", "-c", _LIST)))
    if listed.status == "infra":
        return listed
    if listed.status != "ok":
        return dataclasses.replace(listed, stdout="", stderr="the files that the session left cannot be listed\n")
    found = dict(ast.literal_eval(line) for line in listed.stdout.splitlines())
    before = {path: hashlib.sha256(content).hexdigest() for path, content in original.items()}
    paths = [path for path, digest in found.items() if before.get(path) != digest]
    if len(paths) > MOST_CHANGED:
        reason = f"the session left {len(paths)} changed files, more than {MOST_CHANGED}\n"
        return dataclasses.replace(listed, status="nonzero", exit_code=None, stdout="", stderr=reason)
    left: dict[str, bytes | None] = {path: None for path in before if path not in found}
    for path in paths:
        try:
            left[path] = lease.read_file(path, LARGEST_FILE_BYTES)
        except OSError:  # nobody can read it: it is no part of a solution
            left[path] = None
    return left


def grade_left(lease: Lease, original: Mapping[str, bytes], left: Left, test: ToolCall) -> Grade:
    """Grade in a clean container. What the sandbox loses is a grade whose result is ``infra``.

    Raises:
        SandboxError: the sandbox failed while files were written or read.
    """
    restored = restore(original, left, named=named_files(test))
    try:
        lease.write_files(restored.files)
    except OSError as error:  # the agent's files do not fit, or cannot exist
        result = ExecResult(status="nonzero", exit_code=None, stderr=f"the files cannot be graded: {error}\n")
        return _graded(result, restored, ())
    if test.name == "pytest_run":
        result, seen = _run_pytest(lease, test, restored)
    else:
        result, seen = run_tool(lease, test), ()
    if result.status == "infra":
        return Grade(result=result)
    return _graded(result, restored, (*seen, *_rewritten(lease, original, restored, named_files(test))))


def named_files(test: ToolCall) -> frozenset[str]:
    """Return the files that a run of tests names (of ``tests/test_a.py::test_b`` the file)."""
    if test.name not in TEST_TOOLS:
        return frozenset()
    words = str(test.args.get("targets", "")).split()
    return frozenset(posixpath.normpath(word.partition("::")[0]) for word in words)


@cache
def _program() -> str:
    return (Path(__file__).parent / "graded_pytest.py").read_text()


def _run_pytest(lease: Lease, test: ToolCall, restored: Restored) -> tuple[ExecResult, tuple[Tampering, ...]]:
    """Run the tests; return the result as ``pytest_run`` gives it, and what its report shows of tampering."""
    try:
        targets = shlex.split(str(test.args.get("targets", "")))
    except ValueError as error:
        return ExecResult(status="nonzero", exit_code=None, stderr=f"targets: {error}\n"), ()
    secret = secrets.token_hex(16)
    told = {"secret": secret, "paths": [WORKSPACE, f"{WORKSPACE}/src"], "suspects": restored.taken}
    env = {name: value for name, value in TOOL_ENV.items() if name != "PYTHONPATH"}
    argv = ("python3", "-P", "-B", "-c", _program(), *PYTEST[3:], *targets)
    result = lease.exec(ExecRequest(argv=argv, env=env, stdin=json.dumps(told).encode()))
    stdout, report = _split_report(result.stdout, secret)
    stdout, stderr = normalise_pytest(stdout), normalise(result.stderr)
    result = dataclasses.replace(result, stdout=stdout, stderr=stderr, fields=parse_pytest(stdout, stderr))
    return result, tuple(_seen(result, report, " ".join(targets) or "."))


def _split_report(stdout: str, secret: str) -> tuple[str, dict[str, Any] | None]:
    """Return the run's output without the report, and the report if there is one."""
    before, mark, after = stdout.rpartition(f"\n{secret} ")
    if not mark:
        return stdout, None
    try:
        return before, dict(json.loads(after.partition("\n")[0]))
    except ValueError:
        return before, None


def _seen(result: ExecResult, report: dict[str, Any] | None, what: str) -> list[Tampering]:
    """Say what a run's report shows of tampering, above all where the exit code alone would say that all is well."""
    if result.status not in ("ok", "nonzero"):
        return []
    if report is None:
        return [Tampering(what, "no_report")] if result.exit_code == 0 else []
    found = [Tampering(path, "skipped_by_product") for path in report["skipped_by"]]
    if report["patched"]:
        found.append(Tampering(", ".join(report["patched"][:3]), "patched_runner"))
    if report["exit"] != result.exit_code or (result.exit_code == 0 and report["failed"] + report["errors"]):
        found.append(Tampering(what, "exit_code"))
    elif result.exit_code == 0 and not report["passed"]:
        found.append(Tampering(what, "nothing_passed"))
    return found


def _rewritten(
    lease: Lease, original: Mapping[str, bytes], restored: Restored, named: frozenset[str]
) -> list[Tampering]:
    """Return the tests (their code, not their data) that are not what they were before the run."""
    found = []
    for path in sorted(path for path in original if path in named or is_test_code(path)):
        if path in restored.taken:
            continue
        try:
            same = lease.read_file(path, LARGEST_FILE_BYTES) == original[path]
        except OSError:
            same = False
        if not same:
            found.append(Tampering(path, "rewritten_test"))
    return found


def _graded(result: ExecResult, restored: Restored, seen: tuple[Tampering, ...]) -> Grade:
    tampered = (*restored.tampered, *seen)
    fields = {**result.fields, "tampered": [one.as_dict() for one in tampered]}
    return Grade(
        result=dataclasses.replace(result, fields=fields),
        tampered=tampered,
        taken=restored.taken,
        left_out=restored.left_out,
    )
