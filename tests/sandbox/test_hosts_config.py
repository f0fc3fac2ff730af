"""Hosts in the configuration: every wrong one has a message that helps, and a right one becomes an executor."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest

from agentft.config.hosts import RAY_AUTO, host_problem
from agentft.config.load import InvalidConfigError, load
from agentft.config.schema import RunConfig
from agentft.errors import SandboxError
from agentft.etai import InlineWorkspace
from agentft.sandbox.docker import connect
from agentft.tools import ToolCall
from agentft.train import preflight

MINIMAL = "{run_name: t, model: {preset: tiny-glm}, data: {shards: s}, train: {duration: 1ep}}"
SOCKET = Path("/var/run/docker.sock")


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return load(path, overrides)


@pytest.mark.parametrize(
    ("host", "tls", "problem"),
    [
        ("unix:///run/docker.sock", None, None),
        ("tcp://10.0.0.7:2376", "certs", None),
        ("tcp://[fd00::7]:2376", "certs", None),
        ("tcp://127.0.0.1:2375", None, None),
        ("tcp://localhost:2375", None, None),
        ("tcp://[::1]:2375", None, None),
        (RAY_AUTO, None, None),
        ("tcp://10.0.0.7:2375", None, "plain tcp"),
        ("tcp://localhost.example.org:2375", None, "plain tcp"),
        ("tcp://10.0.0.7", "certs", "not an address"),
        ("tcp://:2376", "certs", "not an address"),
        ("unix://docker.sock", None, "not an address"),
        ("ssh://me@host", None, "not an address"),
        ("ray://10.0.0.7:10001", None, "not an address"),
        ("10.0.0.7:2376", "certs", "not an address"),
        ("", None, "not an address"),
    ],
)
def test_addresses(host: str, tls: str | None, problem: str | None) -> None:
    found = host_problem(host, tls)
    assert (found is None) == (problem is None)
    assert problem is None or problem in str(found)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["sandbox.hosts=[10.0.0.7]"], "not an address of a sandbox host.*unix:///path"),
        (["sandbox.hosts=['tcp://10.0.0.7:2375']"], "plain tcp.*sandbox.tls to a folder"),
        (["sandbox.hosts=['unix:///a','unix:///a']"], "named twice"),
        (["feedback.backend=local", "sandbox.hosts=['unix:///a']"], "local backend has no engines.*ray://auto"),
        (["feedback.backend=local", "sandbox.runtime=runsc"], "local backend has no engines"),
        (["sandbox.reuse=sometimes"], "session, never"),
    ],
)
def test_wrong_hosts_are_said_with_what_to_do(tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        config(tmp_path, *overrides)
    assert re.search(said, str(caught.value), re.DOTALL)


def test_right_hosts_are_kept(tmp_path: Path) -> None:
    found = config(tmp_path, "sandbox.hosts=['unix:///a','tcp://h:2376']", "sandbox.tls=certs", "sandbox.runtime=runsc")
    assert found.sandbox.hosts == ["unix:///a", "tcp://h:2376"]
    assert (found.sandbox.tls, found.sandbox.runtime, found.sandbox.reuse) == ("certs", "runsc", "session")
    assert config(tmp_path).sandbox.hosts == []
    assert config(tmp_path, "feedback.backend=local", f"sandbox.hosts=['{RAY_AUTO}']").sandbox.hosts == [RAY_AUTO]


@pytest.mark.engine
def test_a_run_looks_at_its_hosts_first_and_builds_one_executor_over_them(tmp_path: Path) -> None:
    from agentft.sandbox.images import ensure_image
    from agentft.train.build import build_executor

    if not SOCKET.exists():
        pytest.skip("the Docker engine of this machine is not at its default socket")
    ensure_image("python")
    with closing(connect(f"unix://{SOCKET}")) as client:
        assert client.ping()
    hosts = f"sandbox.hosts=['unix://{SOCKET}','unix:///nowhere/docker.sock']"
    found = config(tmp_path, hosts, "sandbox.workers=1", "sandbox.reuse=never")
    preflight._docker(found)  # one of two is enough
    with pytest.raises(SandboxError, match="no Docker engine answers"):
        preflight._docker(config(tmp_path, "sandbox.hosts=['unix:///nowhere/docker.sock']"))
    with pytest.raises(SandboxError, match=f"not there on unix://{SOCKET}") as missing:
        preflight._docker(config(tmp_path, hosts, "sandbox.image=nothing"))
    assert "docker save agentft/nothing" in str(missing.value)
    with closing(build_executor(found, tmp_path)) as executor:
        call = ToolCall("shell_run", {"command": "cat a.txt"})
        workspace = InlineWorkspace(files={"a.txt": "x\n"})
        futures = [executor.submit(workspace, (call,), key=f"recorded/0/{row}/0") for row in range(3)]
        assert [future.result(timeout=60)[0].stdout for future in futures] == ["x\n"] * 3
