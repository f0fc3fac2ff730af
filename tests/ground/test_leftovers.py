"""The check that the suite leaves nothing behind sees what is left, however it hides, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import support_leftovers
from support_leftovers import SHM, Machine

SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]
ORPHAN = (
    "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=-3, stderr=-3).pid)"
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv(support_leftovers.MARK, "")  # the suite's own mark comes back behind the test
    monkeypatch.setattr(support_leftovers, "WAIT_S", 0.0)
    return Machine(lambda: False)


def test_a_process_that_nobody_waits_for_is_seen(machine: Machine) -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN, *SLEEP], capture_output=True, text=True, check=True)
    pid = int(done.stdout)
    try:
        assert [line for line in machine.left_behind() if line.startswith(f"processes: {pid} ")]
    finally:
        os.kill(pid, 9)


def test_a_process_of_somebody_else_is_not(machine: Machine) -> None:
    other = subprocess.Popen(SLEEP, env={"PATH": os.environ["PATH"]})
    try:
        assert not [line for line in machine.left_behind() if f" {other.pid} " in line]
    finally:
        other.kill()
        other.wait()


def test_shared_memory_is_seen(machine: Machine) -> None:
    segment = SHM / f"agentft-test-{os.getpid()}"
    segment.write_bytes(b"x")
    try:
        assert f"shared memory: {segment.name}" in machine.left_behind()
    finally:
        segment.unlink()
    assert f"shared memory: {segment.name}" not in machine.left_behind()


def test_shared_memory_that_this_process_holds_goes_with_it(machine: Machine) -> None:
    held = SharedMemory(create=True, size=8)
    try:
        assert not [line for line in machine.left_behind() if held.name in line]
    finally:
        held.close()
    assert [line for line in machine.left_behind() if held.name in line], "closed, but not removed"
    held.unlink()


@pytest.mark.engine
def test_containers_volumes_and_networks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import docker

    monkeypatch.setenv(support_leftovers.MARK, "")
    monkeypatch.setattr(support_leftovers, "WAIT_S", 0.0)
    before, client = Machine(lambda: True), docker.from_env()
    name = f"agentft-test-{os.getpid()}"
    volume = client.volumes.create(name)
    network = client.networks.create(name, internal=True)
    try:
        assert {f"volumes: {name}", f"networks: {name}"} <= set(before.left_behind())
    finally:
        network.remove()
        volume.remove()
        client.close()


def test_a_suite_that_leaves_something_fails_under_ci(tmp_path: Path) -> None:
    """The hooks of conftest.py, in a suite of one test that passes and leaves a process."""
    here = Path(__file__).resolve().parents[1]
    (tmp_path / "conftest.py").write_text((here / "conftest.py").read_text())
    code = "import subprocess, sys\n\n\ndef test_it():\n    subprocess.Popen([sys.executable, '-c', '%s'])\n"
    (tmp_path / "test_one.py").write_text(code % "import time; time.sleep(12)")
    env = {**os.environ, "CI": "true", "PYTHONPATH": str(here)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert "processes:" in done.stdout
