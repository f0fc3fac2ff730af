"""Two real Docker engines as one sandbox, one of them in another network over TLS; one is killed in mid-run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from io import BytesIO
from pathlib import Path

import pytest
from own_engines import OwnDockerd, make_certificates, need_own_engines, network_namespace, wait_until
from sandbox_engines import LIMITS

from agentft.errors import SandboxError
from agentft.etai import InlineWorkspace
from agentft.sandbox import owner
from agentft.sandbox.base import ExecRequest, HostAwayError
from agentft.sandbox.conformance.dockerd import processes_of
from agentft.sandbox.docker import DockerEngine, connect, list_containers, remove_leftovers
from agentft.sandbox.executor import LiveExecutor
from agentft.sandbox.hosts import HostPool, open_hosts
from agentft.tools import ToolCall

pytestmark = [pytest.mark.engine, pytest.mark.slow]
IMAGE = "agentft/python"


@dataclasses.dataclass(frozen=True)
class Two:
    near: OwnDockerd
    far: OwnDockerd
    tls: Path

    def open(self, image: str = IMAGE) -> HostPool:
        hosts = (self.near.host, self.far.host)
        return open_hosts(hosts, image=image, workers=2, limits=LIMITS, run_name="two-hosts", tls=self.tls)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    need_own_engines()
    bridge = Path("/sys/class/net/docker0").exists()
    from agentft.sandbox.images import ensure_image

    ensure_image("python")
    folder = tmp_path_factory.mktemp("hosts")
    archive = folder / "image.tar"
    with closing(connect(timeout_s=120)) as main, archive.open("wb") as file:
        file.writelines(main.get_image(IMAGE))
    engines: list[OwnDockerd] = []
    with network_namespace() as (process, address):
        try:
            tls = make_certificates(folder / "tls", address)
            engines.append(OwnDockerd("near"))
            engines.append(OwnDockerd("far", network_of=process, listen=f"tcp://{address}:2376", tls=tls))
            with ThreadPoolExecutor() as threads:
                list(threads.map(lambda engine: engine.load(archive), engines))
            archive.unlink()
            yield Two(*engines, tls)
        finally:
            with ThreadPoolExecutor() as threads:
                list(threads.map(OwnDockerd.close, engines))
    left = [line for line in Path("/proc/mounts").read_text().splitlines() if "/tmp/aft-" in line]
    assert not left, left
    assert Path("/sys/class/net/docker0").exists() == bridge
    assert not any(processes_of(engine.folder) for engine in engines)


def test_tls_is_checked_on_both_sides(two: Two, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"sandbox\.tls to a folder"):
        connect(two.far.host)
    with pytest.raises(SandboxError, match="certificates are missing") as missing:
        connect(two.far.host, tmp_path)
    assert "no ca.pem, cert.pem, key.pem" in str(missing.value)
    strangers = make_certificates(tmp_path / "strangers", "10.213.77.2")
    with pytest.raises(SandboxError, match="certificate or ours is refused") as refused:
        connect(two.far.host, strangers)
    assert not isinstance(refused.value, HostAwayError)
    with pytest.raises(HostAwayError, match="no Docker engine answers"):
        connect("tcp://10.213.77.2:2377", two.tls)
    connect(two.far.host, two.tls).close()


def test_both_hosts_serve_and_large_output_survives_tls(two: Two) -> None:
    with closing(two.open()) as hosts:
        assert hosts.image_digest.startswith("sha256:")
        with hosts.lease() as one, hosts.lease() as other:
            assert sorted(state.held for state in hosts.states()) == [1, 1]  # the least loaded takes the next
            for lease in (one, other):
                call = ExecRequest(argv=("python3", "-c", "print('x' * 900_000, end='y')"))
                result = lease.exec(call)
                assert (result.status, len(result.stdout), result.stdout[-1]) == ("ok", 900_001, "y")
                lease.write_files({"a/b.bin": bytes(range(256)) * 1000})
                assert lease.read_file("a/b.bin") == bytes(range(256)) * 1000
    assert wait_until(lambda: not two_containers(two), 5)


def test_only_an_engine_behind_a_file_is_gone_past(two: Two) -> None:
    for host, tls, reached in ((two.near.host, None, True), (two.far.host, two.tls, False)):
        engine = DockerEngine(image=IMAGE, limits=LIMITS, run_name="two-hosts", host=host, tls=tls)
        with closing(engine), closing(engine.start()) as box:
            assert box.exec(ExecRequest(argv=("true",))).status == "ok"
            assert engine.direct is reached


def two_containers(two: Two) -> list[str]:
    found = []
    for engine in (two.near, two.far):
        with closing(connect(engine.socket)) as client:
            found += [entry["Id"] for entry in list_containers(client)]
    return found


def test_different_images_are_refused_by_name_and_equal_recipes_accepted(two: Two) -> None:
    def build(engine: OwnDockerd, name: str, labels: str) -> None:
        with closing(connect(engine.socket)) as client:
            text = f"FROM {IMAGE}\n{labels}".encode()
            list(client.build(fileobj=BytesIO(text), tag=name, network_mode="none", rm=True, decode=True))

    build(two.near, "agentft/odd", "LABEL agentft.recipe=one")
    build(two.far, "agentft/odd", "LABEL agentft.recipe=two")
    with pytest.raises(SandboxError, match="hosts have different images") as different:
        two.open("odd")
    text = str(different.value)
    assert all(part in text for part in (two.near.host, two.far.host, "recipe one", "recipe two", "docker save"))
    build(two.far, "agentft/odd", "LABEL agentft.recipe=one\nLABEL built=elsewhere")
    with closing(two.open("odd")) as hosts:
        assert hosts.image_digest == "recipe:one"
    with pytest.raises(SandboxError, match="agentft sandbox build nowhere"):
        two.open("nowhere")


def test_on_a_shared_host_only_what_is_surely_dead_is_removed(two: Two) -> None:
    twin = {**owner.labels("twin"), "agentft.boot": "of another machine with our name"}
    dead = {**owner.labels("dead"), "agentft.pid_started": "1"}
    with closing(connect(two.far.host, two.tls)) as client:
        kept, gone = (
            client.create_container(IMAGE, command=["true"], labels=labels, host_config=client.create_host_config())[
                "Id"
            ]
            for labels in (twin, dead)
        )
        removed = remove_leftovers(client)
        assert (gone[:12] in removed, kept[:12] in removed) == (True, False)
        client.remove_container(kept)


def test_an_unknown_runtime_is_refused_with_those_there_are(two: Two) -> None:
    with pytest.raises(SandboxError, match="does not have this container runtime") as caught:
        open_hosts([two.near.host], image=IMAGE, workers=1, limits=LIMITS, run_name="x", runtime="runsc")
    assert "runc" in str(caught.value)
    assert two.near.host in str(caught.value)
    with (
        closing(
            open_hosts([two.near.host], image=IMAGE, workers=1, limits=LIMITS, run_name="x", runtime="runc")
        ) as hosts,
        hosts.lease() as lease,
    ):
        assert lease.exec(ExecRequest(argv=("true",))).status == "ok"


def test_a_killed_host_costs_nothing_and_is_taken_back(two: Two, two_calls: Callable[[str], tuple]) -> None:
    hosts = two.open()
    with closing(LiveExecutor(hosts, hosts.workers)) as executor:
        futures = {}
        for row in range(40):
            workspace, calls = two_calls(f"session-{row}")
            futures[row] = executor.submit(workspace, calls, key=f"recorded/0/session-{row}/2")
        assert wait_until(lambda: sum(future.done() for future in futures.values()) >= 8, 30)
        assert {state.held for state in hosts.states()} != {0}
        two.far.kill()
        for row, future in futures.items():
            results = future.result(timeout=60)
            assert [result.status for result in results] == ["ok", "nonzero", "ok"], results
            assert results[1].exit_code == 3
            assert results[2].stdout == f"session-{row}\n"  # its own files, written once
        stats = executor.stats()
        assert stats["executions"] + stats["cache_hits"] == 120
        assert "infra" not in stats["by_status"]
        near, far = hosts.states()
        assert (near.up, near.outages) == (True, 0)
        assert (far.up, far.outages) == (False, 1)
        assert "engine" in str(far.reason)
        two.far.start()
        assert wait_until(lambda: hosts.states()[1].up, 30)
        before = hosts.states()[1].served
        for row in range(6):
            workspace, calls = two_calls(f"later-{row}")
            assert executor.submit(workspace, calls, key="x").result(timeout=30)[2].stdout == f"later-{row}\n"
        assert hosts.states()[1].served > before
    assert wait_until(lambda: not two_containers(two), 10)


@pytest.fixture
def two_calls() -> Callable[[str], tuple[InlineWorkspace, tuple[ToolCall, ...]]]:
    def make(text: str) -> tuple[InlineWorkspace, tuple[ToolCall, ...]]:
        calls = (
            ToolCall("shell_run", {"command": "cat name.txt >> log.txt; sleep 0.1"}),
            ToolCall("shell_run", {"command": "sleep 0.1; exit 3"}),
            ToolCall("shell_run", {"command": "cat log.txt"}),
        )
        return InlineWorkspace(files={"name.txt": f"{text}\n"}), calls

    return make


def use_until_refused(hosts: HostPool) -> None:
    """What runs goes on past the engine; once that is noticed to be gone, there is no lease."""
    for _ in range(300):
        with hosts.lease() as lease:
            result = lease.exec(ExecRequest(argv=("echo", "x")))
            assert result.status == "infra" or (result.status, result.stdout) == ("ok", "x\n")
        time.sleep(0.05)


def test_all_hosts_gone_is_said_in_time_and_nothing_hangs(two: Two) -> None:
    hosts = open_hosts([two.near.host], image=IMAGE, workers=1, limits=LIMITS, run_name="x")
    hosts._patience_s = 1.0
    with closing(hosts):
        with hosts.lease() as lease:
            two.near.kill()
            started = time.monotonic()
            assert lease.exec(ExecRequest(argv=("true",))).status == "ok"
        with pytest.raises(SandboxError, match="no sandbox host is there"):
            use_until_refused(hosts)
        assert time.monotonic() - started < 15
        with pytest.raises(SandboxError, match="no sandbox host is there"):
            open_hosts([two.near.host], image=IMAGE, workers=1, limits=LIMITS, run_name="x")
        two.near.start()
        assert wait_until(lambda: hosts.states()[0].up, 30)
        with hosts.lease() as lease:
            assert lease.exec(ExecRequest(argv=("true",))).status == "ok"
