"""Several hosts as one sandbox (floor 2): the least loaded takes the next session, and a lost one is done without.

    hosts = open_hosts(["unix:///run/docker.sock", "tcp://10.0.0.7:2376"], backend="docker", image="python",
                       workers=8, limits=Limits(), run_name="demo", tls="certs")
    with hosts.lease() as lease: ...
    hosts.close()

A session stays on one host, because it holds one lease. Every host has a circuit breaker: after three failures in a
row, or at once when its engine no longer answers, the host is taken out, and what ran there ends as ``infra`` (the
executor runs such a session again, from its own files, on another host). A background thread then looks for the host
in growing pauses and takes it back with fresh containers, a few created at a time. A host that is away when a run
starts is only reported; a wrong image, runtime or certificate is an error.

All hosts must have one image: equal ids, or, because a build is not equal bit for bit on every host, the same recipe
(the label that ``agentft sandbox build`` writes).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agentft.errors import SandboxError
from agentft.sandbox.base import HostAwayError, Lease, Limits
from agentft.sandbox.pool import LEASE_TIMEOUT_S, Reuse
from agentft.sandbox.sites import CLOSED, DockerSite, Site, check_same_image

MOST_FAILURES = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
CHECK_EVERY_S = 5.0
PATIENCE_S = 20.0
CLOSE_S = 5.0
RAY = "ray://"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HostState:
    """What a report shows of a host. ``reason``: why it is out, or None."""

    name: str
    up: bool
    held: int
    served: int
    failures: int
    outages: int
    reason: str | None


@dataclass(eq=False)
class _Open:
    """A host in use: leases that are held now, and failures in a row."""

    site: Site
    held: int = 0
    failures: int = 0


@dataclass(eq=False)
class _Host:
    """One configured host, in use (``open``) or out (``reason``)."""

    name: str
    make: Callable[[], Site]
    open: _Open | None = None
    reason: SandboxError | None = None
    served: int = 0
    failures: int = 0
    outages: int = 0
    closers: list[threading.Thread] = field(default_factory=list)


class HostPool:
    """Implements ``base.Sandbox`` over several hosts, with ``workers`` leases on each. Use from any thread."""

    def __init__(
        self,
        makers: Sequence[tuple[str, Callable[[], Site]]],
        *,
        workers: int,
        limits: Limits,
        first_pause_s: float = FIRST_PAUSE_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Open every host, side by side.

        Args:
            makers: (name, what opens that host), one per host. A maker raises ``HostAwayError`` for a host that is not
                there; it is called again, from another thread, to take a lost host back.
            workers: leases on each host.
            limits: of every container.
            first_pause_s: before the first look for a lost host; each further pause is twice as long, up to a minute.
            patience_s: how long a lease waits for a host to come back once all are out.

        Raises:
            SandboxError: no host answers, one of them cannot be used, or their images differ.
        """
        self.limits, self._places, self._first_pause_s, self._patience_s = limits, workers, first_pause_s, patience_s
        self.workers = workers * len(makers)
        self._hosts = [_Host(name, make) for name, make in makers]
        self._changed = threading.Condition()
        self._closed = False
        self._all_out_since: float | None = None
        try:
            self._first = self._open_all()
            self.image_digest = self._common_digest()
        except BaseException:
            self._close_sites()
            raise
        self._watchers = [
            threading.Thread(target=self._watch, args=(host,), name=f"sandbox-host-{row}", daemon=True)
            for row, host in enumerate(self._hosts)
        ]
        for watcher in self._watchers:
            watcher.start()

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        """Hold one clean container on the least loaded host.

        Raises:
            SandboxError: no place came free in time, no host is left, or the pool is closed.
        """
        host, place, manager, lease = self._acquire()
        try:
            yield lease
        finally:
            manager.__exit__(None, None, None)
            self._release(host, place, lease)

    def states(self) -> list[HostState]:
        """Return how every host is and what it did."""
        with self._changed:
            return [
                HostState(
                    name=host.name,
                    up=host.open is not None,
                    held=host.open.held if host.open else 0,
                    served=host.served,
                    failures=host.failures,
                    outages=host.outages,
                    reason=None if host.open or host.reason is None else str(host.reason),
                )
                for host in self._hosts
            ]

    def close(self) -> None:
        """End every container on every host, also those that are leased. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._close_sites()
        closers = [closer for host in self._hosts for closer in host.closers]
        until = time.monotonic() + CLOSE_S
        for thread in (*self._watchers, *closers):  # those that wait for a lost host end by themselves
            thread.join(max(0.0, until - time.monotonic()))

    def _acquire(self) -> tuple[_Host, _Open, AbstractContextManager[Lease], Lease]:
        deadline = time.monotonic() + LEASE_TIMEOUT_S
        while True:
            host, place = self._reserve(deadline)
            manager = place.site.lease()
            try:
                lease = manager.__enter__()
            except BaseException as error:
                with self._changed:
                    place.held -= 1
                    self._changed.notify_all()
                if not isinstance(error, SandboxError):
                    raise
                self._failed(host, place, error)
            else:
                return host, place, manager, lease

    def _reserve(self, deadline: float) -> tuple[_Host, _Open]:
        """Take a place on the host that has most of them free; wait while there is none."""
        with self._changed:
            while True:
                if self._closed:
                    raise SandboxError("the sandbox pool is closed")
                up = [(host, host.open) for host in self._hosts if host.open is not None]
                free = [pair for pair in up if pair[1].held < self._places]
                if free:
                    host, place = min(free, key=lambda pair: (pair[1].held, pair[0].served))
                    place.held += 1
                    host.served += 1
                    return host, place
                until = deadline
                if not up and self._all_out_since is not None:
                    until = min(deadline, self._all_out_since + self._patience_s)
                remaining = until - time.monotonic()
                if remaining <= 0 and not up:
                    raise self._none_left()
                if remaining <= 0:
                    raise SandboxError(
                        "no sandbox came free", got=f"waited {LEASE_TIMEOUT_S:.0f} s", hint="raise sandbox.workers"
                    )
                self._changed.wait(remaining)

    def _release(self, host: _Host, place: _Open, lease: Lease) -> None:
        broken = None if getattr(lease, "hit_limits", False) else getattr(lease, "broken", None)
        if broken not in (None, CLOSED) and not self._closed:
            self._failed(host, place, SandboxError(str(broken), where=host.name))
        with self._changed:
            place.held -= 1
            if broken is None:
                place.failures = 0
            self._changed.notify_all()

    def _failed(self, host: _Host, place: _Open, error: SandboxError) -> None:
        """Count a failure; take the host out if there were many, or if its engine is gone."""
        if host.open is not place:
            return  # of containers that ended because the host had been taken out
        gone = not place.site.answers()
        with self._changed:
            host.failures += 1
            place.failures += 1
            many = place.failures >= MOST_FAILURES
        if gone or many:
            why = "its engine does not answer" if gone else f"{MOST_FAILURES} failures in a row"
            self._take_out(host, place, SandboxError(f"{why}; the last was: {error.what}", where=host.name))

    def _take_out(self, host: _Host, place: _Open, reason: SandboxError) -> None:
        with self._changed:
            if self._closed or host.open is not place:
                return
            host.open, host.reason = None, reason
            host.outages += 1
            if all(other.open is None for other in self._hosts):
                self._all_out_since = time.monotonic()
            closer = threading.Thread(target=place.site.close, name="sandbox-host-close", daemon=True)
            host.closers = [thread for thread in host.closers if thread.is_alive()] + [closer]
            closer.start()  # what runs there ends now and moves on; a host that is gone may take long to say so
            self._changed.notify_all()
        log.warning("sandbox host %s is out: %s", host.name, reason.what)

    def _watch(self, host: _Host) -> None:
        """Look for the host while it is out, in growing pauses; see whether it is alive while it is in use."""
        pause = self._first_pause_s
        while True:
            with self._changed:
                place = host.open
                self._changed.wait_for(
                    lambda before=place: self._closed or host.open is not before,  # type: ignore[misc]
                    timeout=CHECK_EVERY_S if place else pause,
                )
                if self._closed:
                    return
                if host.open is not place:
                    pause = self._first_pause_s
                    continue
            if place is None:
                pause = min(2 * pause, LONGEST_PAUSE_S)
                self._try_to_take_back(host)
            elif not place.site.answers():
                self._take_out(host, place, SandboxError("its engine does not answer", where=host.name))

    def _try_to_take_back(self, host: _Host) -> None:
        site: Site | None = None
        try:
            site = host.make()
            check_same_image(self._first, (host.name, site))
            with site.lease():  # an engine may answer and yet start nothing
                pass
        except SandboxError as error:
            if site is not None:
                site.close()
            if not isinstance(error, HostAwayError) and str(error) != str(host.reason):
                log.warning("sandbox host %s stays out: %s", host.name, error)
            with self._changed:
                host.reason = error
            return
        with self._changed:
            if not self._closed:
                host.open, host.reason, self._all_out_since = _Open(site), None, None
                self._changed.notify_all()
        if host.open is None:
            site.close()
            return
        log.warning("sandbox host %s is back", host.name)

    def _open_all(self) -> tuple[str, Site]:
        """Open all hosts; return the first that is there."""

        def attempt(host: _Host) -> None:
            try:
                host.open = _Open(host.make())
            except HostAwayError as error:
                host.reason = error
                host.outages += 1

        with ThreadPoolExecutor(len(self._hosts)) as threads:
            outcomes = [threads.submit(attempt, host) for host in self._hosts]
        for outcome in outcomes:
            outcome.result()  # raises what a person has to put right
        found = [(host.name, host.open.site) for host in self._hosts if host.open is not None]
        if not found:
            raise self._none_left()
        for other in found[1:]:
            check_same_image(found[0], other)
        for host in self._hosts:
            if host.open is None:
                log.warning("sandbox host %s is away at the start: %s", host.name, host.reason)
        return found[0]

    def _common_digest(self) -> str:
        digests = {host.open.site.image_digest for host in self._hosts if host.open is not None}
        return digests.pop() if len(digests) == 1 else f"recipe:{self._first[1].recipe}"

    def _none_left(self) -> SandboxError:
        reasons = "; ".join(f"{host.name}: {host.reason.what if host.reason else 'away'}" for host in self._hosts)
        return SandboxError("no sandbox host is there", got=reasons, hint="start their engines (`agentft doctor`)")

    def _close_sites(self) -> None:
        """Close what is open, side by side: a host that is gone delays the others by nothing."""
        places = [host.open for host in self._hosts if host.open is not None]
        if places:
            with ThreadPoolExecutor(len(places)) as threads:
                list(threads.map(lambda place: place.site.close(), places))


def open_hosts(
    hosts: Sequence[str],
    *,
    backend: Literal["docker", "local"] = "docker",
    image: str = "python",
    workers: int,
    limits: Limits,
    run_name: str,
    tls: Path | str | None = None,
    runtime: str | None = None,
    reuse: Reuse = "session",
) -> HostPool:
    """Open ``workers`` containers on each of ``hosts`` (``unix://``, ``tcp://``; ``ray://auto``: on every Ray node).

    Raises:
        SandboxError: no host answers, one cannot be used, the images differ, or Ray is not installed.
    """
    makers: list[tuple[str, Callable[[], Site]]] = []
    for host in hosts:
        if host.startswith(RAY):
            from agentft.sandbox.ray_pool import ray_makers

            makers += ray_makers(
                backend, image, workers=workers, limits=limits, run_name=run_name, runtime=runtime, reuse=reuse
            )
            continue

        def make(host: str = host) -> Site:
            return DockerSite(
                host,
                image=image,
                workers=workers,
                limits=limits,
                run_name=run_name,
                tls=tls,
                runtime=runtime,
                reuse=reuse,
            )

        makers.append((host, make))
    return HostPool(makers, workers=workers, limits=limits)
