"""A Ray cluster of two nodes as hosts: an actor and a pool each; one node is killed in mid-run."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from own_engines import wait_until
from sandbox_engines import LIMITS, make_engine

from agentft.errors import SandboxError
from agentft.etai import InlineWorkspace
from agentft.sandbox.base import ExecRequest, HostAwayError
from agentft.sandbox.executor import LiveExecutor
from agentft.sandbox.hosts import HostPool, open_hosts
from agentft.tools import ToolCall

pytestmark = pytest.mark.slow
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
FAST = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 300, "health_check_failure_threshold": 3}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    try:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray
        from ray.cluster_utils import Cluster
    except ImportError:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip("Ray is not installed: pip install agentft[ray]")
    make_engine("local").close()  # skips if there is none
    folder = Path(tempfile.mkdtemp(prefix="aft-ray-", dir="/tmp"))
    os.environ["RAY_TMPDIR"] = str(folder)
    found = None
    try:
        head = {**NODE, "include_dashboard": False, "_system_config": FAST}
        found = Cluster(initialize_head=True, head_node_args=head)
        found.add_node(**NODE)
        os.environ["RAY_ADDRESS"] = found.address
        yield found
    finally:
        for name in ("RAY_ADDRESS", "RAY_TMPDIR"):
            os.environ.pop(name, None)
        ray.shutdown()
        if found is not None:
            found.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def opened(cluster: Any) -> Iterator[HostPool]:
    found = open_hosts(["ray://auto"], backend="local", workers=2, limits=LIMITS, run_name="ray")
    yield found
    found.close()


def sandboxes() -> list[str]:
    """Return the runners of this machine, by process id."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"bwrap" in path.read_bytes().split(b"\0")[0]:
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_every_node_serves(opened: HostPool) -> None:
    assert opened.workers == 4
    with opened.lease() as one, opened.lease() as other:
        assert [state.held for state in opened.states()] == [1, 1]
        for lease in (one, other):
            assert lease.exec(ExecRequest(argv=("echo", "x"))).stdout == "x\n"
            lease.write_files({"a/b.bin": bytes(range(256)) * 1000})
            assert lease.read_file("a/b.bin") == bytes(range(256)) * 1000
            with pytest.raises(FileNotFoundError):
                lease.read_file("nothing")
            with pytest.raises(PermissionError):
                lease.write_files({"../out": b"x"})
            result = lease.exec(ExecRequest(argv=("python3", "-c", "import sys; print('x' * 900_000); sys.exit(4)")))
            assert (result.status, result.exit_code, len(result.stdout)) == ("nonzero", 4, 900_001)
            lease.reset()
            assert lease.exec(ExecRequest(argv=("ls", "-A"))).stdout == ""


def test_a_lease_is_clean_and_its_limits_hold(opened: HostPool) -> None:
    for _ in range(6):
        with opened.lease() as lease:
            assert lease.exec(ExecRequest(argv=("ls", "-A", "/workspace"))).stdout == ""
            lease.write_files({"left": b"x"})
            assert lease.exec(ExecRequest(argv=("sleep", "9"), timeout_s=0.2)).status == "timeout"
    hog = "a = bytearray(600 << 20)\nfor i in range(0, len(a), 4096): a[i] = 1"
    with opened.lease() as lease:
        assert lease.exec(ExecRequest(argv=("python3", "-c", hog))).status == "oom"
    assert all(state.up and not state.failures for state in opened.states())  # the program's doing, not the host's


def test_a_lease_can_be_ended_from_another_thread(opened: HostPool) -> None:
    with opened.lease() as lease:
        started = time.monotonic()
        timer = threading.Timer(0.3, lease.close)
        timer.start()
        assert lease.exec(ExecRequest(argv=("sleep", "9"))).status == "infra"
        assert time.monotonic() - started < 4
    assert all(state.up and not state.failures for state in opened.states())


def test_a_node_killed_in_mid_run_costs_nothing(cluster: Any, opened: HostPool) -> None:
    def session(text: str) -> tuple[InlineWorkspace, tuple[ToolCall, ...]]:
        calls = (
            ToolCall("shell_run", {"command": "cat name.txt >> log.txt; sleep 0.1"}),
            ToolCall("shell_run", {"command": "exit 3"}),
            ToolCall("shell_run", {"command": "cat log.txt"}),
        )
        return InlineWorkspace(files={"name.txt": f"{text}\n"}), calls

    def run(executor: LiveExecutor, rows: int, then: Callable[[], None] = lambda: None) -> None:
        futures = [executor.submit(*session(str(row)), key=f"recorded/0/{row}/2") for row in range(rows)]
        assert wait_until(lambda: sum(future.done() for future in futures) >= 6, 30)
        then()
        for row, future in enumerate(futures):
            results = future.result(timeout=60)
            assert [result.status for result in results] == ["ok", "nonzero", "ok"], results
            assert results[2].stdout == f"{row}\n"

    with closing(LiveExecutor(opened, opened.workers)) as executor:
        lost = next(node for node in cluster.list_all_nodes() if not node.head)
        run(executor, 60, lambda: cluster.remove_node(lost, allow_graceful=False))
        stats = executor.stats()
        assert stats["executions"] + stats["cache_hits"] == 180
        assert "infra" not in stats["by_status"]
        assert sorted((state.up, state.outages) for state in opened.states()) == [(False, 1), (True, 0)]
        cluster.add_node(**NODE)
        assert wait_until(lambda: all(state.up for state in opened.states()), 60)
        run(executor, 8)
    assert wait_until(lambda: not sandboxes(), 10)


def test_what_is_missing_is_said(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match="agentft sandbox build nothing") as caught:
        open_hosts(["ray://auto"], backend="docker", image="nothing", workers=1, limits=LIMITS, run_name="x")
    assert not isinstance(caught.value, HostAwayError)
    from agentft.sandbox import ray_pool

    with pytest.raises(SandboxError, match="another version of agentft"):
        ray_pool.check_versions("0123456789", ("0.0.1", "abc"))
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(SandboxError, match=r"pip install agentft\[ray\]"):
        open_hosts(["ray://auto"], backend="local", workers=1, limits=LIMITS, run_name="x")
