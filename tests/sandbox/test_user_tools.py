"""Tools of the user, executed for real: a command, a function, a database in its own container, an HTTP service."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sandbox_engines import BACKENDS, LIMITS, make_engine

import docker
from agentft.cli import main
from agentft.config.tools import use_tools
from agentft.errors import SandboxError
from agentft.etai import InlineWorkspace
from agentft.sandbox.base import ExecRequest, ExecResult, Lease
from agentft.sandbox.execute import run_tool
from agentft.sandbox.executor import LiveExecutor
from agentft.sandbox.images import ensure_image
from agentft.sandbox.pool import open_sandbox
from agentft.sandbox.services import OpenedSandbox, open_with_tools
from agentft.tools import USER_TOOLS, ToolCall
from agentft.tools.user import use

REPO = Path(__file__).resolve().parents[2]
SQL, TRACKER = (str(REPO / "yamls" / "tools" / name) for name in ("sql.yaml", "tracker.yaml"))
Tool = Callable[..., ExecResult]
PLAIN = """\
tools:
  - name: word_count
    description: Count words.
    parameters: {properties: {path: {type: string}, least: {type: integer}}, required: [path]}
    command: [python3, -c, "import json, sys; a = json.load(sys.stdin); w = open(a['path']).read().split();
      print(len(w)); print(json.dumps({'words': len(w), 'other': 1}))"]
    fields: [words]
    deterministic: true
  - name: double
    description: Double a number.
    parameters: {properties: {value: {type: number}}, required: [value]}
    python: code.py:double
    timeout_s: 1
"""
CODE = """\
import time

def double(value):
    if value < 0:
        raise ValueError(f"{value} is negative; give 0 or more")
    time.sleep(60 if value > 1000 else 0)
    return {"doubled": value * 2}
"""


@pytest.fixture(autouse=True)
def only_built_in() -> Iterator[None]:
    yield
    use(())


def opened(files: list[str], backend: str = "docker") -> OpenedSandbox:
    """Open a sandbox with these tools, or skip where the engine is missing."""
    make_engine(backend).close()
    use_tools(files)
    for tool in USER_TOOLS.values():
        for image in (tool.image, tool.service.image if tool.service else None):
            if image is not None:
                ensure_image(image)
    return open_with_tools(
        open_sandbox, USER_TOOLS.values(), backend=backend, image="python", workers=1, limits=LIMITS, run_name="tests"
    )


def caller(lease: Lease) -> Tool:
    return lambda name, **args: run_tool(lease, ToolCall(name, args))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_command_and_a_function_run_in_the_sessions_container(backend: str, tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(PLAIN)
    (tmp_path / "code.py").write_text(CODE)
    sandbox = opened([str(tmp_path / "t.yaml")], backend)
    try:
        with sandbox.lease() as lease:
            lease.write_files({"a b'c.txt": b"one two three"})
            tool = caller(lease)
            counted = tool("word_count", path="a b'c.txt")
            assert (counted.status, counted.stdout, dict(counted.fields)) == ("ok", "3\n", {"words": 3})
            assert tool("double", value=1.5).stdout == '{"doubled": 3.0}\n'
            failed = tool("double", value=-1)
            assert (failed.exit_code, failed.fields["message"]) == (1, "ValueError: -1 is negative; give 0 or more")
            assert "error_location" not in failed.fields
            assert tool("double", value=2000).status == "timeout"
            assert tool("double", value="x").exit_code == 2
            assert tool("word_count").stderr.endswith("usage: word_count(path: string, [least: integer])\n")
    finally:
        sandbox.close()


@pytest.mark.engine
def test_a_database_in_a_container_of_its_own() -> None:
    sandbox = opened([SQL])
    try:
        with sandbox.lease() as lease:
            tool = caller(lease)
            counted = tool("sql_query", query="SELECT count(*) AS n FROM orders")
            assert (counted.stdout, dict(counted.fields)) == ("n\n120\n", {"rows": 1, "columns": ["n"], "more": False})
            everything = tool("sql_query", query="SELECT * FROM orders ORDER BY id")
            assert (everything.fields["rows"], everything.fields["more"]) == (50, True)
            assert everything.stdout.endswith("... more than 50 rows: ask for fewer, or for sums\n")
            assert "did you mean name?" in tool("sql_query", query="SELECT nmae FROM customers").stderr
            assert "did you mean customers?" in tool("sql_query", query="SELECT * FROM costumers").stderr
            for query in ("DELETE FROM orders", "PRAGMA user_version=3", "ATTACH '/tmp/x' AS x", "DROP TABLE orders"):
                assert "only SELECT is allowed" in tool("sql_query", query=query).stderr, query
            endless = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c"
            assert tool("sql_query", query=endless).stderr == "stopped after 2 s: ask for less\n"
            # the session's container has neither the database nor a network
            assert "No such file" in tool("shell_run", command="ls /srv/shop.db").stderr
            assert devices(lease) == ["lo"]
            beside = lease.beside("sql")  # type: ignore[attr-defined]
            assert devices(beside) == ["lo"]
            write = beside.exec(ExecRequest(argv=("sh", "-c", "id -u; echo x >> /srv/shop.db")))
            assert (write.stdout, write.exit_code) == ("10001\n", 2)
    finally:
        sandbox.close()


def devices(lease: Lease) -> list[str]:
    shown = lease.exec(ExecRequest(argv=("cat", "/proc/net/dev"))).stdout
    return re.findall(r"^\s*(\S+):", shown, re.MULTILINE)


REACH = """\
import socket, sys
def tries(family, kind, address):
    s = socket.socket(family, kind); s.settimeout(1)
    try:
        s.connect(address); s.send(b"x"); return s.recv(1) or "open"
    except OSError as error:
        return type(error).__name__
I, I6, T, U = socket.AF_INET, socket.AF_INET6, socket.SOCK_STREAM, socket.SOCK_DGRAM
for address in sys.argv[1:]:
    for port in (22, 53, 80, 2375):
        print(address, port, tries(I, T, (address, port)))
print("dns", tries(I, U, ("127.0.0.11", 53)), tries(I, U, ("8.8.8.8", 53)))
print("v6", tries(I6, T, ("2001:db8::1", 80)))
try:
    socket.getaddrinfo("example.org", 80); print("name: resolved")
except OSError as error:
    print("name: no")
try:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print("raw: open")
except OSError as error:
    print("raw: no")
"""


@pytest.mark.engine
def test_a_service_is_reached_and_nothing_else() -> None:
    sandbox = opened([TRACKER])
    try:
        with sandbox.lease() as lease:
            tool = caller(lease)
            first = tool("tracker", path="/issues/1")
            assert (first.status, dict(first.fields)) == ("ok", {"http_status": 200})
            assert first.stdout == '{"id": 1, "title": "add() subtracts", "open": true}\n'
            assert tool("tracker", path="/issues", method="POST", body={"title": "new"}).fields["http_status"] == 201
            assert tool("tracker", path="/issues/1/close", method="POST").stdout.endswith('"open": false}\n')
            missing = tool("tracker", path="/nothing")
            assert (missing.exit_code, dict(missing.fields)) == (1, {"http_status": 404})
            assert missing.stderr == "GET /nothing: 404: there is no /nothing; try /issues or /issues/1\n"
            assert devices(lease) == ["lo"]
            gateways = docker.from_env().api.inspect_network("bridge")["IPAM"]["Config"]
            gateway = gateways[0].get("Gateway", "172.17.0.1")
            told = tool("python_run", code=REACH.replace("sys.argv[1:]", repr([gateway, "10.0.0.1", "1.1.1.1"])))
            assert told.exit_code == 0, told.stderr
            assert not re.search(r"open|resolved|b'", told.stdout), told.stdout
            # the service is another container: not among our processes, and its files are not here
            seen = tool("shell_run", command="cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -c '[s]erver.py'")
            assert seen.stdout == "0\n"
            assert "No such file" in tool("shell_run", command="ls /srv/server.py").stderr
        with sandbox.lease() as lease:  # the next session meets a service that knows nothing of this one
            assert '"open": true' in caller(lease)("tracker", path="/issues/1").stdout
            assert caller(lease)("tracker", path="/issues/3").exit_code == 1
    finally:
        sandbox.close()


@pytest.mark.engine
def test_a_sandbox_without_such_tools_has_no_service_and_says_what_it_lacks() -> None:
    make_engine("docker").close()
    use_tools([SQL, TRACKER])
    sandbox = open_sandbox("docker", "python", workers=1, limits=LIMITS, run_name="tests")
    try:
        with sandbox.lease() as lease:
            for name, args in (("tracker", {"path": "/issues"}), ("sql_query", {"query": "SELECT 1"})):
                result = run_tool(lease, ToolCall(name, args))
                assert (result.status, result.exit_code) == ("infra", None)
                assert "needs containers of its own" in result.stderr
    finally:
        sandbox.close()
    with pytest.raises(SandboxError, match="need the Docker backend"):
        open_with_tools(open_sandbox, USER_TOOLS.values(), backend="local", workers=1, limits=LIMITS, run_name="tests")


@pytest.mark.engine
def test_a_service_that_does_not_start_is_an_error_that_says_how_to_look(tmp_path: Path) -> None:
    text = Path(TRACKER).read_text().replace("port: 8000", "port: 8001")
    (tmp_path / "t.yaml").write_text(text)
    (tmp_path / "tracker.py").write_text((REPO / "yamls" / "tools" / "tracker.py").read_text())
    before = containers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentft.sandbox.services.SERVICE_START_S", 0.3)
        sandbox = opened([str(tmp_path / "t.yaml")])
        try:
            with pytest.raises(SandboxError, match="does not answer on port 8001"), sandbox.lease():
                pass
        finally:
            sandbox.close()
    assert containers() - before == set()


def containers() -> set[str]:
    """Return the ids of the sandbox containers that this test's processes own."""
    found = docker.from_env().api.containers(all=True, filters={"label": "agentft.run=tests"})
    return {entry["Id"] for entry in found}


@pytest.mark.engine
def test_the_executor_runs_and_remembers_them() -> None:
    sandbox = opened([SQL])
    executor = LiveExecutor(sandbox, 1)
    calls = (ToolCall("sql_query", {"query": "SELECT 1"}), ToolCall("file_list", {}))
    try:
        first, again = (
            executor.submit(InlineWorkspace(files={"a": "b"}), calls, key=f"test/{n}").result(60) for n in range(2)
        )
        assert [result.cached for result in first] == [False, False]
        assert [result.cached for result in again] == [True, True]
        assert [result.stdout for result in first] == [result.stdout for result in again] == ["1\n1\n", "a\n"]
    finally:
        executor.close()


OWNER = """\
import time
from agentft.config.tools import use_tools
from agentft.sandbox.base import Limits
from agentft.sandbox.pool import open_sandbox
from agentft.sandbox.services import open_with_tools
from agentft.tools import USER_TOOLS
use_tools({files!r})
sandbox = open_with_tools(
    open_sandbox, USER_TOOLS.values(), backend="docker", image="python", workers=1, limits=Limits(), run_name={run!r}
)
with sandbox.lease() as lease:
    lease.beside("sql")
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.engine
def test_nothing_is_left_of_a_killed_owner() -> None:
    opened([SQL, TRACKER]).close()
    client, run = docker.from_env().api, f"tests-killed-{time.monotonic_ns()}"
    networks = {entry["Id"] for entry in client.networks()}
    command = [sys.executable, "-c", OWNER.format(files=[SQL, TRACKER], run=run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        labelled = {"label": f"agentft.run={run}"}
        assert len(client.containers(all=True, filters=labelled)) == 3  # the session's, the service, the database
        assert {entry["Id"] for entry in client.networks()} == networks
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while client.containers(all=True, filters=labelled) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert client.containers(all=True, filters=labelled) == []


@pytest.mark.engine
def test_the_page_about_them_is_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_engine("docker").close()
    monkeypatch.chdir(REPO)
    page = (REPO / "docs" / "user-tools.md").read_text()
    described, commands, run = re.findall(r"```(?:yaml|bash)\n(.*?)```", page, re.DOTALL)
    (tmp_path / "words.yaml").write_text(described)
    (tmp_path / "notes.txt").write_text("one two three")
    call = ["sandbox", "tool", "word_count", '{"path": "notes.txt"}', "--tools", str(tmp_path / "words.yaml")]
    assert main([*call, "--dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "3\n"
    printed = []
    for line in commands.splitlines():
        assert main(shlex.split(line)[1:]) == 0, line
        printed.append(capsys.readouterr().out)
    assert "sql_query(query: string)" in printed[0]
    assert printed[2] == "name\nAda\nGrace\nLinus\n"
    assert '"title": "add() subtracts"' in printed[4]
    assert main(["validate", "yamls/agent/tiny-glm.yaml", re.sub(r"^tools: ", "tools=", run.strip())]) == 0
