"""The pool of hosts: who gets the next session, when a host is taken out and back, and what is an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field

import pytest
from own_engines import wait_until
from sandbox_engines import LIMITS, make_engine

from agentft.errors import SandboxError
from agentft.sandbox.base import ExecRequest, HostAwayError, Lease
from agentft.sandbox.hosts import HostPool
from agentft.sandbox.pool import Pool

TRUE = ExecRequest(argv=("true",))
HOG = ExecRequest(argv=("python3", "-c", "a = bytearray(400 << 20)\nfor i in range(0, len(a), 4096): a[i] = 1"))


@dataclass
class Site:
    """A pool of real local sandboxes that stands for a host; its engine can be switched off."""

    switch: Switch
    image_digest: str
    recipe: str
    pool: Pool

    def lease(self) -> AbstractContextManager[Lease]:
        return self._lease()

    @contextmanager
    def _lease(self) -> Iterator[Lease]:
        if self.switch.refuses:
            raise SandboxError("no container can be created here")
        with self.pool.lease() as lease:
            yield lease

    def answers(self) -> bool:
        return self.switch.on

    def close(self) -> None:
        self.pool.close()


@dataclass
class Switch:
    """What a host is and does, changed by a test."""

    name: str
    on: bool = True
    refuses: bool = False
    digest: str = "sha256:one"
    recipe: str = ""
    opened: list[float] = field(default_factory=list)

    def make(self) -> Site:
        self.opened.append(time.monotonic())
        if not self.on:
            raise HostAwayError("nobody is there", where=self.name)
        return Site(self, self.digest, self.recipe, Pool(make_engine("local"), 1))


def open_switches(*switches: Switch, workers: int = 1, patience_s: float = 2.0) -> HostPool:
    makers = [(switch.name, switch.make) for switch in switches]
    return HostPool(makers, workers=workers, limits=LIMITS, first_pause_s=0.2, patience_s=patience_s)


@pytest.fixture
def two() -> Iterator[tuple[Switch, Switch, HostPool]]:
    make_engine("local").close()  # skips if there is none
    one, other = Switch("one"), Switch("other")
    with closing(open_switches(one, other)) as hosts:
        yield one, other, hosts


def test_the_least_loaded_host_is_next_and_full_hosts_are_waited_for(two: tuple[Switch, Switch, HostPool]) -> None:
    _, _, hosts = two
    assert hosts.workers == 2
    with hosts.lease() as first, hosts.lease() as second:
        assert [state.held for state in hosts.states()] == [1, 1]
        assert {lease.exec(TRUE).status for lease in (first, second)} == {"ok"}
        timer = threading.Timer(0.3, first.close)
        got = []

        def third() -> None:
            with hosts.lease() as lease:
                got.append(lease.exec(TRUE).status)

        thread = threading.Thread(target=third)
        thread.start()
        timer.start()
        timer.join()
        assert not got  # both are still held
    thread.join(timeout=10)
    assert got == ["ok"]
    assert all(state.failures == 0 for state in hosts.states())  # a lease that we ended is no failure of the host


def test_a_lost_engine_is_noticed_when_idle_and_taken_back(two: tuple[Switch, Switch, HostPool]) -> None:
    one, other, hosts = two
    other.on = False
    assert wait_until(lambda: not hosts.states()[1].up, 10)
    assert hosts.states()[1].reason
    for _ in range(4):
        with hosts.lease() as lease:
            assert lease.exec(TRUE).status == "ok"
    assert wait_until(lambda: len(other.opened) >= 4, 10)
    tries = other.opened[1:4]
    assert tries[2] - tries[1] > 1.5 * (tries[1] - tries[0])  # pauses grow
    other.on = True
    assert wait_until(lambda: hosts.states()[1].up, 10)
    with hosts.lease(), hosts.lease() as second:
        assert second.exec(TRUE).status == "ok"
    assert (hosts.states()[1].outages, len(one.opened)) == (1, 1)


def test_a_container_that_breaks_on_a_lost_host_takes_it_out_at_once(two: tuple[Switch, Switch, HostPool]) -> None:
    one, other, hosts = two
    with hosts.lease() as first, hosts.lease() as second:
        one.on = False
        for lease in (first, second):
            lease._kill()  # type: ignore[attr-defined]
            assert lease.exec(TRUE).status == "infra"
    up = [state.up for state in hosts.states()]
    assert up == [False, True]
    assert hosts.states()[1].failures == 1  # once is no reason
    with hosts.lease() as lease:
        assert lease.exec(TRUE).status == "ok"
    assert other.on


def test_three_failures_in_a_row_take_a_host_out_but_programs_do_not(two: tuple[Switch, Switch, HostPool]) -> None:
    one, _, hosts = two
    for _ in range(4):
        with hosts.lease() as lease:
            assert lease.exec(HOG).status == "oom"
    assert all(state.up and not state.failures for state in hosts.states())
    one.refuses = True
    for _ in range(8):
        with hosts.lease() as lease:  # never an error for the session: the next host has it
            assert lease.exec(TRUE).status == "ok"
    state = hosts.states()[0]
    assert (state.up, state.failures, state.outages) == (False, 3, 1)
    assert "3 failures in a row" in str(state.reason) or "no container" in str(state.reason)
    one.refuses = False
    assert wait_until(lambda: hosts.states()[0].up, 10)


def test_no_host_left_is_waited_for_and_then_said_at_once() -> None:
    make_engine("local").close()
    one = Switch("one")
    with closing(open_switches(one, patience_s=0.6)) as hosts:
        one.on, one.refuses = False, True
        started = time.monotonic()
        with pytest.raises(SandboxError, match="no sandbox host is there") as caught, hosts.lease():
            pass
        assert 0.5 < time.monotonic() - started < 5
        assert "one: " in str(caught.value)
        started = time.monotonic()
        with pytest.raises(SandboxError, match="no sandbox host is there"), hosts.lease():
            pass
        assert time.monotonic() - started < 0.3  # the patience is over until a host is back
        one.on, one.refuses = True, False
        assert wait_until(lambda: hosts.states()[0].up, 10)
        with hosts.lease() as lease:
            assert lease.exec(TRUE).status == "ok"
    with pytest.raises(SandboxError, match="closed"), hosts.lease():
        pass


def test_a_host_that_is_away_at_the_start_joins_later(caplog: pytest.LogCaptureFixture) -> None:
    make_engine("local").close()
    one, late = Switch("one"), Switch("late", on=False)
    with closing(open_switches(one, late)) as hosts:
        assert [state.up for state in hosts.states()] == [True, False]
        assert "late is away at the start" in caplog.text
        late.on = True
        assert wait_until(lambda: hosts.states()[1].up, 10)
    with pytest.raises(SandboxError, match="no sandbox host is there"):
        open_switches(Switch("a", on=False), Switch("b", on=False))


def test_another_image_is_an_error_at_the_start_and_keeps_a_host_out_later(caplog: pytest.LogCaptureFixture) -> None:
    make_engine("local").close()
    one, other = Switch("one", recipe="r1"), Switch("other", digest="sha256:two", recipe="r2")
    with pytest.raises(SandboxError, match="different images") as caught:
        open_switches(one, other)
    assert all(part in str(caught.value) for part in ("one: sha256:one", "other: sha256:two", "r1", "r2"))
    other.recipe = "r1"
    with closing(open_switches(one, other)) as hosts:
        assert hosts.image_digest == "recipe:r1"
        other.on = False
        assert wait_until(lambda: not hosts.states()[1].up, 10)
        other.recipe, other.on = "r2", True
        assert wait_until(lambda: "stays out" in caplog.text, 10)
        assert not hosts.states()[1].up
        assert "different images" in str(hosts.states()[1].reason)


def test_closing_ends_what_runs_and_leaves_no_thread() -> None:
    make_engine("local").close()
    before = set(threading.enumerate())
    hosts = open_switches(Switch("one"), Switch("other"))
    results = []

    def long_call() -> None:
        with hosts.lease() as lease:
            results.append(lease.exec(ExecRequest(argv=("sleep", "9"))).status)

    thread = threading.Thread(target=long_call)
    thread.start()
    assert wait_until(lambda: any(state.held for state in hosts.states()), 5)
    time.sleep(0.3)
    hosts.close()
    hosts.close()
    thread.join(timeout=5)
    assert results == ["infra"]
    assert wait_until(lambda: set(threading.enumerate()) <= before, 5)
