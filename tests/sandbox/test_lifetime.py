"""Nothing outlives its owner; what fails is replaced; what hangs is ended."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from own_engines import wait_until
from sandbox_engines import BACKENDS, LIMITS, make_engine

from agentft.errors import SandboxError
from agentft.sandbox import owner
from agentft.sandbox.base import ExecRequest
from agentft.sandbox.container import Container
from agentft.sandbox.pool import Pool, open_sandbox


@pytest.mark.engine
def test_the_next_start_removes_what_a_dead_owner_left() -> None:
    engine = make_engine("docker", run_name="reaper")
    from agentft.sandbox.docker import DockerEngine, list_containers, remove_leftovers

    assert isinstance(engine, DockerEngine)
    client = engine._client
    gone = subprocess.Popen(["sleep", "30"])
    dead = {**owner.labels("dead"), "agentft.pid": str(gone.pid), "agentft.pid_started": owner.start_time(gone.pid)}
    assert not owner.is_dead(dead)
    gone.kill()
    gone.wait()
    assert owner.is_dead(dead)
    assert not owner.is_dead({**dead, "agentft.host": "another-machine"})
    assert owner.is_dead({**owner.labels("x"), "agentft.boot": "earlier"})
    left = client.create_container(engine.image_digest, command=["true"], labels=dead)["Id"]
    mine = client.create_container(engine.image_digest, command=["true"], labels=owner.labels("mine"))["Id"]
    try:
        assert left[:12] in remove_leftovers(client)
        assert mine in [entry["Id"] for entry in list_containers(client)]
    finally:
        client.remove_container(mine, force=True)
        engine.close()


@pytest.fixture(params=BACKENDS)
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = Pool(make_engine(request.param), 2)
    yield pool
    pool.close()


def test_a_lease_is_clean_and_reused(pool: Pool) -> None:
    names = set()
    for _ in range(6):
        with pool.lease() as lease:
            names.add(lease.name)
            assert lease.exec(ExecRequest(argv=("ls", "-A", "/workspace", "/tmp"))).stdout == "/tmp:\n\n/workspace:\n"
            lease.write_files({"left": b"x"})
            lease.exec(ExecRequest(argv=("sh", "-c", "echo x > /tmp/left")))
    assert len(names) <= 2


def test_a_tainted_container_is_replaced(pool: Pool) -> None:
    hog = ExecRequest(argv=("python3", "-c", "a = bytearray(400 << 20)\nfor i in range(0, len(a), 4096): a[i] = 1"))
    with pool.lease() as first:
        assert first.exec(hog).status == "oom"
    with pool.lease() as second, pool.lease() as third:
        assert first not in (second, third)
        second._kill()
        assert second.exec(ExecRequest(argv=("true",))).status == "infra"
    with pool.lease() as fourth, pool.lease() as fifth:
        assert second not in (fourth, fifth)
        assert all(lease.exec(ExecRequest(argv=("echo", "x"))).stdout == "x\n" for lease in (fourth, fifth))


def test_closing_the_pool_ends_what_runs(pool: Pool) -> None:
    results = []

    def long_call() -> None:
        with pool.lease() as lease:
            results.append(lease.exec(ExecRequest(argv=("sleep", "9"))))

    thread = threading.Thread(target=long_call)
    thread.start()
    assert wait_until(lambda: any(container.uses for container in list(pool._alive)), 10)
    time.sleep(0.2)
    pool.close()
    pool.close()
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert results[0].status == "infra"
    with pytest.raises(SandboxError, match="closed"), pool.lease():
        pass


def test_an_engine_that_fails_once_does_not_lose_a_place() -> None:
    engine = make_engine("local")
    start, calls = engine.start, []

    def flaky() -> Container:
        calls.append(1)
        if len(calls) == 1:
            raise SandboxError("the engine is away")
        return start()

    engine.start = flaky  # type: ignore[method-assign]
    pool = Pool(engine, 1)
    with pytest.raises(SandboxError, match="away"), pool.lease():
        pass
    with pool.lease() as lease:
        assert lease.exec(ExecRequest(argv=("true",))).status == "ok"
    pool.close()


def test_missing_engine_and_image_say_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(SandboxError, match="no Docker engine answers") as caught:
        open_sandbox("docker", workers=1, limits=LIMITS, run_name="x")
    assert "doctor" in str(caught.value)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="bubblewrap is not installed"):
        open_sandbox("local", workers=1, limits=LIMITS, run_name="x")


@pytest.mark.engine
def test_a_missing_image_names_the_build_command() -> None:
    make_engine("docker").close()
    with pytest.raises(SandboxError, match="agentft sandbox build nothing"):
        open_sandbox("docker", "nothing", workers=1, limits=LIMITS, run_name="x")
