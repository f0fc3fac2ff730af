"""Rootless Podman through its Docker-compatible socket: what holds, and that what does not is said."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from own_engines import wait_until
from own_podman import RootlessPodman
from sandbox_engines import LIMITS

from agentft.sandbox import direct
from agentft.sandbox.base import ExecRequest, ExecResult
from agentft.sandbox.container import Container
from agentft.sandbox.docker import DockerEngine, connect, list_containers
from agentft.sandbox.hosts import open_hosts

pytestmark = [pytest.mark.engine, pytest.mark.slow]
IMAGE = "agentft/python"
OWNER = """
import sys, threading
from agentft.sandbox.base import ExecRequest, Limits
from agentft.sandbox.docker import DockerEngine
engine = DockerEngine(image="agentft/python", limits=Limits(timeout_s=60), run_name="killed", host=sys.argv[1])
idle, busy = engine.start(), engine.start()
threading.Thread(target=busy.exec, args=(ExecRequest(argv=("sleep", "50")),), daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RootlessPodman]:
    found = RootlessPodman()
    try:
        from agentft.sandbox.images import ensure_image

        ensure_image("python")
        archive = tmp_path_factory.mktemp("podman") / "image.tar"
        with closing(connect(timeout_s=120)) as main, archive.open("wb") as file:
            file.writelines(main.get_image(IMAGE))
        with closing(connect(found.host, timeout_s=120)) as client, archive.open("rb") as file:
            client.load_image(file)
        archive.unlink()
        yield found
    finally:
        found.close()
    assert not found.processes()
    assert not found.folder.exists()


@pytest.fixture(scope="module")
def engine(podman: RootlessPodman) -> Iterator[DockerEngine]:
    with closing(DockerEngine(image=IMAGE, limits=LIMITS, run_name="podman", host=podman.host)) as found:
        yield found


@pytest.fixture(scope="module")
def box(engine: DockerEngine) -> Iterator[Container]:
    with closing(engine.start()) as found:
        yield found


def sh(box: Container, command: str, timeout_s: float = 8) -> ExecResult:
    return box.exec(ExecRequest(argv=("bash", "-c", command), timeout_s=timeout_s))


def test_what_it_cannot_enforce_is_said(engine: DockerEngine, podman: RootlessPodman) -> None:
    with closing(connect(podman.host)) as client:
        information = client.info()
    assert information["Rootless"] is True
    if information["CgroupVersion"] == "1":  # rootless Podman has no control groups there
        assert [gap.split()[0] for gap in engine.gaps] == ["memory", "processes", "sandbox.cpus"]


def test_a_runner_of_another_user_is_reached_through_the_engine_and_one_of_ours_past_it(
    podman: RootlessPodman, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the socket keeps other users out, also the engine of another user."""

    def folder_of_its_user() -> tuple[Path, int]:
        folder, held = new_folder()
        os.chown(folder, podman.uid, -1)
        return folder, held

    new_folder = direct._new_folder
    for make, reached in ((new_folder, False), (folder_of_its_user, True)):
        monkeypatch.setattr(direct, "_new_folder", make)
        with (
            closing(DockerEngine(image=IMAGE, limits=LIMITS, run_name="podman", host=podman.host)) as engine,
            closing(engine.start()) as box,
        ):
            assert (engine.direct, sh(box, "echo out; ls -A /run >&2").stdout) == (reached, "out\n")


def test_it_is_locked_down(box: Container) -> None:
    status = sh(box, "cat /proc/self/status").stdout
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    assert all(f"{name}:\t0000000000000000" in status for name in ("CapEff", "CapPrm", "CapInh", "CapAmb", "CapBnd"))
    assert sh(box, "id -u").stdout.strip() != "0"
    for place in ("/etc/x", "/x", "/run/x", "/var/tmp/x", "/usr/x"):
        assert "Read-only file system" in sh(box, f"touch {place}").stderr
    network = "import socket; socket.create_connection(('1.1.1.1', 53), 2)"
    assert "unreachable" in box.exec(ExecRequest(argv=("python3", "-c", network))).stderr
    assert sh(box, "unshare -Ur true").status == "nonzero"


def test_limits_hold(box: Container) -> None:
    hog = "a = bytearray(600 << 20)\nfor i in range(0, len(a), 4096): a[i] = 1"
    assert box.exec(ExecRequest(argv=("python3", "-c", hog))).status == "oom"
    assert "File size limit exceeded" in sh(box, f"head -c {LIMITS.file_mib + 1}M /dev/zero > /workspace/big").stderr
    assert "No space left" in sh(box, "cat /dev/zero > a; cat /dev/zero > b; cat /dev/zero > c").stderr
    box.reset()
    assert sh(box, "bomb() { bomb | bomb & }; bomb; sleep 5", timeout_s=2).status in ("pids", "timeout", "nonzero")
    assert sh(box, "ulimit -n").stdout.strip() == str(LIMITS.open_files)
    assert sh(box, "echo alive").stdout == "alive\n"


def test_files_and_large_output_travel(box: Container) -> None:
    box.write_files({"folder/data.bin": bytes(range(256)) * 2000})
    assert box.read_file("folder/data.bin") == bytes(range(256)) * 2000
    result = sh(box, "python3 -c \"print('x' * 900_000)\"")
    assert (result.status, len(result.stdout)) == ("ok", 900_001)
    box.reset()
    assert sh(box, "ls -A /workspace /tmp /dev/shm").stdout == "/dev/shm:\n\n/tmp:\n\n/workspace:\n"


def test_kill_9_of_the_owner_leaves_nothing(podman: RootlessPodman) -> None:
    def left() -> list[str]:
        with closing(connect(podman.host)) as client:
            return [c["Id"] for c in list_containers(client) if c["Labels"]["agentft.run"] == "killed"]

    with subprocess.Popen([sys.executable, "-c", OWNER, podman.host], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert len(left()) == 2
        process.kill()
    assert wait_until(lambda: not left(), 10)


def test_it_is_a_host_beside_docker(podman: RootlessPodman) -> None:
    with closing(connect()) as main:
        address = main.base_url
    if not address.startswith("http+docker://") or not Path("/var/run/docker.sock").exists():
        pytest.skip("the Docker engine of this machine is not at its default socket")
    addresses = (podman.host, "unix:///var/run/docker.sock")
    with (
        closing(open_hosts(addresses, image=IMAGE, workers=1, limits=LIMITS, run_name="mixed")) as hosts,
        hosts.lease() as one,
        hosts.lease() as other,
    ):
        assert [state.held for state in hosts.states()] == [1, 1]
        assert all(lease.exec(ExecRequest(argv=("echo", "x"))).stdout == "x\n" for lease in (one, other))
        assert hosts.image_digest.startswith("sha256:")
