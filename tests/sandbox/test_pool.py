"""The pool's path of a lease: taking and giving back wait for nobody's cleaning."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from own_engines import wait_until
from sandbox_engines import BACKENDS, make_engine

from agentft.sandbox.base import ExecRequest
from agentft.sandbox.container import Container
from agentft.sandbox.pool import Pool

ECHO = ExecRequest(argv=("echo", "x"))


@pytest.fixture
def slow_reset(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Resets wait for an event, as that of a workspace with very many files would."""
    go_on, reset = threading.Event(), Container.reset

    def wait_then_reset(self: Container) -> None:
        go_on.wait(20)
        reset(self)

    monkeypatch.setattr(Container, "reset", wait_then_reset)
    yield go_on
    go_on.set()


def test_cleaning_is_not_on_the_path_of_a_lease(slow_reset: threading.Event) -> None:
    with closing(Pool(make_engine("local"), 2)) as pool:
        assert wait_until(lambda: pool._ready.qsize() == 2, 20)
        for _ in range(2):
            started = time.monotonic()
            with pool.lease() as lease:
                taken = time.monotonic()
                assert lease.exec(ECHO).stdout == "x\n"
                done = time.monotonic()
            assert taken - started < 0.5
            assert time.monotonic() - done < 0.5  # its reset has not even begun to end
        slow_reset.set()
        with pool.lease() as first, pool.lease() as second:
            assert {first.exec(ECHO).stdout, second.exec(ECHO).stdout} == {"x\n"}


def test_a_warm_container_is_had_within_milliseconds() -> None:
    with closing(Pool(make_engine("local"), 3)) as pool:
        assert wait_until(lambda: pool._ready.qsize() == 3, 20)
        waits = []
        for _ in range(300):
            assert wait_until(lambda: pool._ready.qsize() >= 1, 5)
            started = time.monotonic()
            with pool.lease():
                waits.append(time.monotonic() - started)
        assert sorted(waits)[len(waits) * 9 // 10] < 0.005  # the benchmark holds p99 to it on a quiet machine


def test_never_reused_means_one_session_each() -> None:
    with closing(Pool(make_engine("local"), 2, reuse="never")) as pool:
        names = []
        for _ in range(6):
            with pool.lease() as lease:
                names.append(lease.name)
                assert lease.exec(ExecRequest(argv=("ls", "-A", "/workspace"))).stdout == ""
                lease.write_files({"left": b"x"})
        assert len(set(names)) == 6
        assert wait_until(lambda: len(pool._alive) == 2, 10)  # those that were used are gone


def test_what_waits_to_be_replaced_is_ended_when_the_pool_closes() -> None:
    pool = Pool(make_engine("local"), 3, reuse="never")
    held = [pool.lease() for _ in range(3)]
    leases = [manager.__enter__() for manager in held]
    for manager in held:
        manager.__exit__(None, None, None)
    pool.close()
    assert all(lease.broken for lease in leases)
    assert not pool._alive


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_container_that_died_while_it_waited_reaches_no_session(backend: str) -> None:
    with closing(Pool(make_engine(backend), 2)) as pool:
        assert wait_until(lambda: pool._ready.qsize() == 2, 20)
        for dead in list(pool._alive):
            dead._kill()
        assert wait_until(lambda: all(dead.hung_up() for dead in list(pool._alive)), 10)
        for _ in range(3):
            with pool.lease() as lease:
                assert lease.exec(ECHO).stdout == "x\n"
        assert wait_until(lambda: pool._ready.qsize() == 2, 20)
