"""Hosts of a Ray cluster (floor 2): one actor a node owns its local pool; Ray places it and carries the calls.

Named in the configuration as ``sandbox.hosts: [ray://auto]``: the cluster that this machine belongs to, or the one
that RAY_ADDRESS names. Every node needs agentft[ray] of the same version, and the engine (or, with the local backend,
bubblewrap). A node that is lost ends its actor; its place is taken by whichever living node has no actor of this run.
An actor ends with the process that made it, and with it every container.

Ray is optional: ``pip install agentft[ray]`` (about 200 MB on disk).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Literal

from agentft import __version__
from agentft.config.hosts import RAY_AUTO
from agentft.errors import SandboxError, boundary
from agentft.sandbox.base import ExecRequest, ExecResult, HostAwayError, Lease, Limits
from agentft.sandbox.container import MAX_OPERATION_S, infra
from agentft.sandbox.pool import LEASE_TIMEOUT_S, Pool, open_sandbox
from agentft.sandbox.sites import CLOSED, Site
from agentft.sandbox.wire import runner_version

ACTOR_START_S = 60.0
ANSWER_S = 5.0
TRAVEL_S = 10.0


class Node:
    """The actor: a pool on one node, and the leases that are held on it. Methods run in threads of Ray's."""

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._leases: dict[int, tuple[ExitStack, Lease]] = {}
        self._lock, self._next = threading.Lock(), 0

    def open(
        self, backend: Literal["docker", "local"], image: str, options: Mapping[str, Any]
    ) -> tuple[tuple[str, str], str, str]:
        """Open the pool; return ((version of agentft, of the runner), image digest, recipe) of this node."""
        self._pool = open_sandbox(backend, image, **options)
        return _versions(), self._pool.image_digest, self._pool.recipe

    def answers(self) -> bool:
        """Return True: this actor is alive."""
        return True

    def acquire(self) -> int:
        """Take a container; returns the number that names it from here on."""
        assert self._pool is not None
        stack = ExitStack()
        lease = stack.enter_context(self._pool.lease())
        with self._lock:
            self._next += 1
            self._leases[self._next] = (stack, lease)
            return self._next

    def call(self, number: int, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, str | None]:
        """Return (what an operation of the lease gave, why the container is broken). Errors are given, not raised."""
        lease = self._leases[number][1]
        try:
            answer: Any = getattr(lease, operation)(*arguments)
        except (OSError, SandboxError) as error:
            answer = error
        hit_limits = getattr(lease, "hit_limits", False)
        return answer, None if hit_limits else getattr(lease, "broken", None)

    def release(self, number: int) -> None:
        """Give a container back."""
        with self._lock:
            stack, _ = self._leases.pop(number)
        stack.close()

    def close(self) -> None:
        """End every container of this node."""
        if self._pool is not None:
            self._pool.close()


class RaySite:
    """A node of the cluster as a host. Meets ``sites.Site``."""

    def __init__(self, actor: Any, node_id: str, taken: _Taken, backend: str, image: str, options: dict[str, Any]):
        """Open the pool of ``actor``, a new ``Node``. Raises ``HostAwayError`` and ``SandboxError``."""
        self.node_id, self._actor, self._taken, self._limits = node_id, actor, taken, options["limits"]
        versions, self.image_digest, self.recipe = self.ask("open", backend, image, options, timeout_s=ACTOR_START_S)
        check_versions(node_id, versions)

    def lease(self) -> AbstractContextManager[Lease]:
        """Hold one clean container of this node."""
        return self._lease()

    def answers(self) -> bool:
        """Whether the actor is alive."""
        try:
            self.ask("answers", timeout_s=ANSWER_S)
        except SandboxError:
            return False
        return True

    def close(self) -> None:
        """End the node's containers, then the actor."""
        import ray

        try:
            self.ask("close", timeout_s=TRAVEL_S)
        except SandboxError:
            pass  # the node is gone, and with it the actor; or it ends now
        finally:
            ray.kill(self._actor)
            self._taken.give_back(self.node_id)

    @contextmanager
    def _lease(self) -> Iterator[Lease]:
        number = self.ask("acquire", timeout_s=LEASE_TIMEOUT_S + TRAVEL_S)
        lease = _RayLease(self, number, self._limits)
        try:
            yield lease
        finally:
            self.tell("release", number)  # a call that may still run there comes first: the stream is serial

    def tell(self, method: str, *arguments: Any) -> None:
        """Call the actor and wait for nothing."""
        import ray

        with suppress(ray.exceptions.RayError):
            getattr(self._actor, method).remote(*arguments)

    def ask(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call the actor. Raises ``HostAwayError`` if it is gone or silent, ``SandboxError`` if it says so."""
        import ray

        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=timeout_s)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, SandboxError):
                where = f"Ray node {self.node_id[:8]}"
                raise SandboxError(
                    cause.what, where=where, got=cause.got, expected=cause.expected, hint=cause.hint
                ) from None
            raise SandboxError("a Ray node failed", where=self.node_id[:8], got=str(cause)) from error
        except (ray.exceptions.RayError, TimeoutError) as error:
            got = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise HostAwayError("a Ray node does not answer", where=self.node_id[:8], got=got) from error


class _RayLease:
    """One container on a node. Meets ``base.Lease``."""

    def __init__(self, site: RaySite, number: int, limits: Limits) -> None:
        self._site, self._number, self._limits = site, number, limits
        self.broken: str | None = None

    def exec(self, request: ExecRequest) -> ExecResult:
        """Run one command; a node that is lost gives ``infra``."""
        timeout_s = self._limits.timeout_s if request.timeout_s is None else request.timeout_s
        try:
            result = self._call("exec", request, timeout_s=timeout_s)
        except SandboxError as error:
            return infra(error)
        assert isinstance(result, ExecResult)
        return result

    def read_file(self, path: str, max_bytes: int = 1_000_000) -> bytes:
        """Return a regular file of the workspace."""
        return bytes(self._call("read_file", path, max_bytes))

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Create or replace files of the workspace."""
        self._call("write_files", dict(files))

    def reset(self) -> None:
        """Kill everything and wipe every writable folder."""
        self._call("reset")

    def retire(self) -> None:
        """Let no other session have this container."""
        self._call("retire")

    def close(self) -> None:
        """End the container now, from any thread."""
        self.broken = self.broken or CLOSED
        self._site.tell("call", self._number, "close", ())

    def _call(self, operation: str, *arguments: Any, timeout_s: float = MAX_OPERATION_S) -> Any:
        limit_s = timeout_s + self._limits.grace_s + TRAVEL_S
        if self.broken is not None:
            raise SandboxError("this sandbox is no longer usable", got=self.broken)
        try:
            answer, broken = self._site.ask("call", self._number, operation, arguments, timeout_s=limit_s)
        except SandboxError as error:
            self.broken = self.broken or error.what
            raise
        self.broken = self.broken or broken
        if isinstance(answer, Exception):
            raise answer
        return answer


class _Taken:
    """Which nodes have an actor of this run."""

    def __init__(self) -> None:
        self._lock, self._ids = threading.Lock(), set[str]()

    def take(self, alive: list[str]) -> str:
        """Return a living node that had none. Raises ``HostAwayError``."""
        with self._lock:
            for node_id in alive:
                if node_id not in self._ids:
                    self._ids.add(node_id)
                    return node_id
        raise HostAwayError("no further Ray node is alive", got=f"{len(alive)} alive, each with an actor")

    def give_back(self, node_id: str) -> None:
        """Let a node be taken again."""
        with self._lock:
            self._ids.discard(node_id)


def ray_makers(backend: Literal["docker", "local"], image: str, **options: Any) -> list[tuple[str, Callable[[], Site]]]:
    """Join the cluster; return (name, what opens a host) for each of its living nodes.

    ``options``: what ``pool.open_sandbox`` takes beside; ``workers`` containers on each node.

    Raises:
        SandboxError: Ray is not installed, or no cluster is there.
    """
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray
    except ImportError as cause:
        raise SandboxError("Ray is not installed", hint="pip install agentft[ray]") from cause
    hint = "start one with `ray start --head` here and `ray start --address HEAD:6379` on the other nodes"
    with boundary("no Ray cluster is there", error=SandboxError, hint=hint):
        if not ray.is_initialized():
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False, configure_logging=False)
        count = len(_alive())
    taken = _Taken()
    return [(f"{RAY_AUTO}#{row}", lambda: _open_node(taken, backend, image, options)) for row in range(count)]


def _alive() -> list[str]:
    import ray

    return [str(node["NodeID"]) for node in ray.nodes() if node["Alive"]]


def _open_node(taken: _Taken, backend: str, image: str, options: dict[str, Any]) -> Site:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node_id = taken.take(_alive())
    settings = {
        "num_cpus": 0,
        "max_concurrency": 2 * options["workers"] + 4,
        "max_restarts": 0,
        "max_task_retries": 0,  # a call whose answer was lost is never run twice
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }
    actor: Any = None
    try:
        actor = ray.remote(Node).options(**settings).remote()
        return RaySite(actor, node_id, taken, backend, image, options)
    except BaseException:
        if actor is not None:
            ray.kill(actor)
        taken.give_back(node_id)
        raise


def _versions() -> tuple[str, str]:
    return __version__, runner_version()


def check_versions(node_id: str, theirs: tuple[str, str]) -> None:
    """Raise ``SandboxError`` unless a node runs the same agentft: results must not depend on where a session ran."""
    if theirs != _versions():
        raise SandboxError(
            "a Ray node has another version of agentft",
            where=f"Ray node {node_id[:8]}",
            got=" with runner ".join(theirs),
            expected=" with runner ".join(_versions()),
        )
