"""The tools for JavaScript, on the Node image."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_engines import LIMITS

from agentft.errors import SandboxError
from agentft.sandbox.base import ExecResult, Limits
from agentft.sandbox.execute import run_tool
from agentft.sandbox.images import ensure_image
from agentft.sandbox.pool import Pool, open_sandbox
from agentft.tools import ToolCall

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from jest_project import FIELDS, FILES

pytestmark = pytest.mark.engine
NODE_LIMITS = Limits(timeout_s=60, pids=LIMITS.pids)


@pytest.fixture(scope="module")
def node() -> Iterator[Pool]:
    try:
        ensure_image("node")
    except SandboxError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no Node image: {error.what}")
    sandbox = open_sandbox("docker", "node", workers=1, limits=NODE_LIMITS, run_name="tests")
    yield sandbox
    sandbox.close()


@pytest.fixture
def tool(node: Pool) -> Iterator[Callable[..., ExecResult]]:
    with node.lease() as lease:
        lease.write_files({path: text.encode() for path, text in FILES.items()})
        yield lambda name, **args: run_tool(lease, ToolCall(name, args))


def test_jest_run_is_parsed_and_repeats_byte_for_byte(tool: Callable[..., ExecResult]) -> None:
    first = tool("jest_run")
    assert (first.status, first.exit_code) == ("nonzero", 1)
    assert {name: value for name, value in first.fields.items() if name != "failures"} == FIELDS
    assert first.stderr == ""
    assert "at fail (src/sum.js:5:9)" in first.stdout
    again = tool("jest_run")
    assert (again.stdout, again.fields) == (first.stdout, first.fields)


def test_a_repair_is_seen_and_targets_are_exact(tool: Callable[..., ExecResult]) -> None:
    tool("file_edit", path="src/sum.js", old="a - b", new="a + b")
    only = tool("jest_run", targets="'src/sum.test.js::sum › adds'")
    assert (only.status, only.fields["passed"], only.fields["failed"]) == ("ok", 1, 0)
    folder = tool("jest_run", targets="src")
    assert (folder.fields["passed"], folder.fields["failed_tests"]) == (2, ["src/sum.test.js::sum › throws"])
    missing = tool("jest_run", targets="src/sum")
    assert (missing.exit_code, missing.stdout, missing.fields) == (1, "no test found in src/sum\n", {})
    assert "not options" in tool("jest_run", targets="--help").stderr


def test_jest_needs_no_configuration_and_says_what_is_wrong_with_one(tool: Callable[..., ExecResult]) -> None:
    tool("shell_run", command="rm package.json")
    assert tool("jest_run", targets="src").fields["failed"] == 2
    tool("file_write", path="jest.config.js", content="module.exports = {\n")
    broken = tool("jest_run")
    assert broken.exit_code == 1
    assert "SyntaxError: Unexpected end of input" in broken.stdout


def test_a_report_that_contradicts_the_exit_code_is_not_believed(tool: Callable[..., ExecResult]) -> None:
    report = json.dumps({"numPassedTests": 9, "numFailedTests": 0, "testResults": []}, separators=(",", ":"))
    forged = f"process.on('exit', () => require('fs').writeSync(1, '\\n' + {report!r} + '\\n'));\n"
    tool("file_write", path="src/forged.test.js", content=f"{forged}test('a', () => expect(1).toBe(2));\n")
    result = tool("jest_run", targets="src/forged.test.js")
    assert result.exit_code == 1
    assert result.fields.get("passed", 0) == 0


def test_npm_publish_is_a_dry_run(tool: Callable[..., ExecResult]) -> None:
    result = tool("npm_publish")
    assert result.stdout.startswith("demo@1.2.3 would be published with 6 files (dry run: nothing was sent)\n")
    assert dict(result.fields) == {"package": "demo", "version": "1.2.3", "files": sorted(FILES)}
    cases: dict[str, Any] = {
        '{"name": "demo", "version": "1.2"}': 'npm: Invalid version: "1.2"\n',
        '{"name": "demo", "version": "1.2.3", "private": true}': "the package is private",
        "{": "Invalid package.json",
    }
    for content, reason in cases.items():
        tool("file_write", path="package.json", content=content)
        assert reason in tool("npm_publish").stderr
    tool("shell_run", command="rm package.json")
    assert tool("npm_publish").stderr == "package.json: No such file or directory\n"


def test_python_tools_say_that_they_cannot_work_here(tool: Callable[..., ExecResult]) -> None:
    for name in ("pytest_run", "lint_run", "type_check", "format_run"):
        result = tool(name)
        assert (result.exit_code, result.fields) == (127, {}), name
        assert "installed in this image: this tool cannot work here, use another one" in result.stderr
