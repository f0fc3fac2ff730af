"""The warm pool (floor 2): a few containers kept ready, one leased per session, clean before every lease.

sandbox = open_sandbox("docker", "python", workers=2, limits=Limits(), run_name="demo")
with sandbox.lease() as lease:
    result = lease.exec(ExecRequest(argv=("python3", "-c", "print(1)")))
sandbox.close()
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from agentft.errors import SandboxError
from agentft.sandbox.base import Limits
from agentft.sandbox.container import Container, Engine

Reuse = Literal["session", "never"]
PARALLEL_STARTS = 3
LEASE_TIMEOUT_S = 120.0


def open_sandbox(
    backend: Literal["docker", "local"],
    image: str = "python",
    *,
    workers: int,
    limits: Limits,
    run_name: str,
    runtime: str | None = None,
    reuse: Reuse = "session",
) -> Pool:
    """Open a pool of ``workers`` containers on this machine's engine; they start in the background.

    Args:
        backend: the engine; for several hosts see ``hosts.open_hosts``.
        image: the name of an image as ``agentft sandbox build`` makes it, or any reference that the Docker engine
            knows and that has python3; the local backend has one system and ignores it.
        workers: containers kept warm.
        limits: of each container.
        run_name: goes into the containers' labels.
        runtime: an OCI runtime of the Docker engine, such as runsc; None takes its default.
        reuse: whether a container serves one session after the other, cleaned in between, or only one.

    Raises:
        SandboxError: the engine, the image or the runtime is missing, with the command to run.
    """
    if backend == "docker":
        from agentft.sandbox.docker import DockerEngine

        engine = DockerEngine(image=image, limits=limits, run_name=run_name, runtime=runtime)
        return Pool(engine, workers, reuse=reuse)
    from agentft.sandbox.local import LocalEngine

    return Pool(LocalEngine(limits=limits), workers, reuse=reuse)


class Pool:
    """``workers`` containers of one engine; implements ``base.Sandbox``. Leases may be taken from any thread.

    Cleaning happens behind the lease, in the background: whoever takes or gives back a container does not wait for it.
    A container that failed, hit a limit or served many sessions is replaced there too.
    """

    def __init__(self, engine: Engine, workers: int, *, reuse: Reuse = "session") -> None:
        """``reuse="never"``: every session gets a container that no other session had."""
        self._engine, self._reuse = engine, reuse
        self.image_digest, self.limits, self.workers = engine.image_digest, engine.limits, workers
        self.recipe = str(getattr(engine, "recipe", ""))  # how the image was made, where the engine knows
        self._ready: queue.Queue[Container | SandboxError] = queue.Queue()
        self._alive: set[Container] = set()
        self._lock = threading.Lock()
        self._closed = False
        # These threads start all containers and live as long as the pool: a local sandbox ends with its thread.
        self._starters = ThreadPoolExecutor(min(PARALLEL_STARTS, workers), thread_name_prefix="sandbox-start")
        self._cleaners = ThreadPoolExecutor(workers, thread_name_prefix="sandbox-clean")  # one that hangs delays none
        self._at_exit = _close_at_exit(self)
        for _ in range(workers):
            self._starters.submit(self._start)

    @contextlib.contextmanager
    def lease(self) -> Iterator[Container]:
        """Hold one clean container.

        Raises:
            SandboxError: none could be started, none came free in time, or the pool is closed.
        """
        container = self._acquire()
        try:
            yield container
        finally:
            self._give_back(container)

    def close(self) -> None:
        """End every container, also those that are leased (their calls give ``infra``). Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            alive = list(self._alive)
        self._ready.put(SandboxError("the sandbox pool is closed"))
        for container in alive:
            container.close()
        for threads in (self._cleaners, self._starters):
            threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            late = list(self._alive)
            self._alive.clear()
        for container in late:
            container.close()
        self._engine.close()
        atexit.unregister(self._at_exit)

    def _acquire(self) -> Container:
        deadline = time.monotonic() + LEASE_TIMEOUT_S
        while True:
            try:
                found = self._ready.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise SandboxError(
                    "no sandbox came free", got=f"waited {LEASE_TIMEOUT_S:.0f} s", hint="raise sandbox.workers"
                ) from None
            if self._closed:
                self._ready.put(found)  # wakes whoever else waits
                raise SandboxError("the sandbox pool is closed")
            if isinstance(found, SandboxError):
                self._later(self._start)
                raise SandboxError(found.what, got=found.got, hint=found.hint) from found
            if not found.hung_up():
                found.uses += 1
                return found
            self._later(self._replace, found)  # it ended while it waited: no session needs to notice

    def _later(self, work: Callable[..., None], *arguments: Container) -> None:
        with contextlib.suppress(RuntimeError):  # the pool is being closed
            self._starters.submit(work, *arguments)

    def _give_back(self, container: Container) -> None:
        try:
            self._cleaners.submit(self._clean, container)
        except RuntimeError:  # the pool was closed, or this process is about to end
            container.close()

    def _clean(self, container: Container) -> None:
        if self._reuse == "session" and container.reusable:
            container.reset()
        with self._lock:
            if self._closed:
                return  # close() ends it
            if self._reuse == "session" and container.reusable:
                self._ready.put(container)
                return
            self._later(self._replace, container)

    def _replace(self, old: Container) -> None:
        old.close()
        with self._lock:
            self._alive.discard(old)
        self._start()

    def _start(self) -> None:
        if self._closed:
            return
        try:
            container = self._engine.start()
        except SandboxError as error:
            self._ready.put(error)
            return
        with self._lock:
            if not self._closed:
                self._alive.add(container)
                self._ready.put(container)
                return
        container.close()


def _close_at_exit(pool: Pool) -> Callable[[], None]:
    """Register a last resort that does not keep the pool alive."""
    reference = weakref.ref(pool)

    def close() -> None:
        if (still_there := reference()) is not None:
            still_there.close()

    atexit.register(close)
    return close
