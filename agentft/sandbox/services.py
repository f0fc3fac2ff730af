"""Sandboxes for the user's tools (floor 2): containers of other images, and services beside the session's container.

    sandbox = open_with_tools(open_sandbox, tools, backend="docker", image="python", workers=2, limits=Limits(), ...)

**A container of its own** (``image``): leased from a second warm pool at the session's first call of the tool, held
to the session's end, without any network.

**A service**: a program in a container of its own, started before the session's container, which then joins its
network namespace. That namespace has a loopback device and nothing else: the session reaches 127.0.0.1:port and no
gateway, no host, no name server; there is no network object that could be left behind. Both containers serve one
session and are replaced after it, so that nothing passes from one session to the next through the service. The
service ends with the session's container, or, as every sandbox, with the process that owns it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from agentft.errors import SandboxError
from agentft.sandbox.base import ExecRequest, ExecResult, Lease, Limits, Sandbox
from agentft.sandbox.container import Container
from agentft.sandbox.pool import Pool
from agentft.tools import Service, UserTool

SERVICE_LOG = "/tmp/service.log"
SERVICE_START_S = 20.0
A_LONG_TIME_S = 7 * 86400.0
WAIT_FOR_PORT = """\
import socket, sys, time
end = time.monotonic() + float(sys.argv[2])
while True:
    try:
        socket.create_connection(("127.0.0.1", int(sys.argv[1])), 1).close()
        break
    except OSError:
        if time.monotonic() > end:
            sys.exit(1)
        time.sleep(0.02)
"""


class OpenedSandbox(Sandbox, Protocol):
    """A sandbox that says how many sessions it takes at a time."""

    workers: int


def open_with_tools(
    plain: Callable[..., OpenedSandbox], tools: Iterable[UserTool], *, limits: Limits, run_name: str, **options: Any
) -> OpenedSandbox:
    """Open what ``plain`` opens, with what these tools need beside it; without tools exactly what ``plain`` opens.

    Args:
        plain: ``pool.open_sandbox`` or ``hosts.open_hosts`` with its hosts bound.
        tools: the user's tools in use.
        limits: of every container.
        run_name: goes into the labels of every container.
        options: for ``plain``: backend, image, workers, runtime, reuse.

    Raises:
        SandboxError: the engine or an image is missing, with the command to run.
    """
    tools = list(tools)
    if not tools:
        return plain(limits=limits, run_name=run_name, **options)
    services = list(dict.fromkeys(tool.service for tool in tools if tool.service is not None))
    images = sorted({tool.image for tool in tools if tool.image is not None})
    if (services or images) and options.get("backend") != "docker":
        raise SandboxError(
            "tools with containers of their own need the Docker backend",
            got=options.get("backend"),
            hint="feedback.backend=docker",
        )
    with ExitStack() as undo:
        if services:
            inner: OpenedSandbox = _open_served(services, limits=limits, run_name=run_name, **options)
        else:
            inner = plain(limits=limits, run_name=run_name, **options)
        undo.callback(inner.close)
        beside: dict[str, Sandbox] = {}
        for image in images:
            beside[image] = _pool(image, limits, run_name, inner.workers, options)
            undo.callback(beside[image].close)
        undo.pop_all()
    return ToolSandbox(inner, beside, tools)


def _pool(image: str, limits: Limits, run_name: str, workers: int, options: Mapping[str, Any]) -> Pool:
    from agentft.sandbox.docker import DockerEngine

    engine = DockerEngine(image=image, limits=limits, run_name=run_name, runtime=options.get("runtime"))
    return Pool(engine, workers, reuse=options.get("reuse", "session"))


def _open_served(
    services: Sequence[Service], *, limits: Limits, run_name: str, image: str, workers: int, **options: Any
) -> Pool:
    from agentft.sandbox.docker import DockerEngine

    def engine(name: str) -> DockerEngine:
        return DockerEngine(image=name, limits=limits, run_name=run_name, runtime=options.get("runtime"))

    return Pool(ServedEngine(engine(image), [(engine(s.image), s) for s in services]), workers, reuse="never")


class StartsJoined(Protocol):
    """What ``docker.DockerEngine`` offers here: a container in another one's network namespace."""

    image_digest: str
    limits: Limits

    def start(self, network: str | None = None) -> Container:
        """Return a running container; ``network`` is the engine's name of a network mode, None for no network."""

    def close(self) -> None:
        """Release the engine's connections."""


class ServedEngine:
    """Starts a session's container together with its services. Meets ``container.Engine``."""

    def __init__(self, engine: StartsJoined, services: Sequence[tuple[StartsJoined, Service]]) -> None:
        self._engine, self._services = engine, services
        self.image_digest, self.limits = engine.image_digest, engine.limits

    def start(self) -> Container:
        """Return the session's container once every service answers. Raises ``SandboxError``."""
        running: list[Container] = []
        try:
            network: str | None = None
            for engine, service in self._services:
                container = engine.start(network)
                running.append(container)
                network = network or f"container:{container.name.split()[-1]}"
                _run_service(container, service)
            session = self._engine.start(network)
            session.companions += running
            running.append(session)
            for row, (_, service) in enumerate(self._services):
                self._wait(session, running[row], service)
            return session
        except BaseException:
            for container in reversed(running):
                container.close()
            raise

    def close(self) -> None:
        """Close the connections of every engine."""
        for engine in (self._engine, *(engine for engine, _ in self._services)):
            engine.close()

    def _wait(self, session: Container, container: Container, service: Service) -> None:
        argv = ("python3", "-c", WAIT_FOR_PORT, str(service.port), str(SERVICE_START_S))
        if session.exec(ExecRequest(argv=argv, timeout_s=SERVICE_START_S + 5)).exit_code == 0:
            return
        container.close()
        raise SandboxError(
            f"the service {service.image} does not answer on port {service.port}",
            got=" ".join(service.command),
            hint=f"agentft sandbox run --image {service.image} -- {' '.join(service.command)}",
        )


def _run_service(container: Container, service: Service) -> None:
    """Run the service in the background, to the end of its container; what it prints stays in there."""
    argv = ("sh", "-c", f'exec "$@" >{SERVICE_LOG} 2>&1', "service", *service.command)
    request = ExecRequest(argv=argv, timeout_s=A_LONG_TIME_S)
    threading.Thread(target=container.exec, args=(request,), name=f"service-{service.image}", daemon=True).start()


class ToolSandbox:
    """A sandbox with what the user's tools need. Implements ``base.Sandbox``; owns all that it was given."""

    def __init__(self, inner: OpenedSandbox, beside: Mapping[str, Sandbox], tools: Sequence[UserTool]) -> None:
        """``beside``: image → pool of the containers that tools have to themselves."""
        self._inner, self._beside = inner, beside
        self.limits, self.workers = inner.limits, inner.workers
        parts = [tool.digest() for tool in tools] + [f"{name}={pool.image_digest}" for name, pool in beside.items()]
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        self.image_digest = f"{inner.image_digest}+tools:{digest}"

    @contextmanager
    def lease(self) -> Iterator[ToolLease]:
        """Hold one clean container, and later those that the session's tools ask for."""
        with self._inner.lease() as lease, ExitStack() as held:
            yield ToolLease(lease, self._beside, held)

    def close(self) -> None:
        """Remove every container. Idempotent."""
        self._inner.close()
        for pool in self._beside.values():
            pool.close()


class ToolLease:
    """One session's containers: its own, and one per image that its tools have asked for. Implements ``Lease``."""

    def __init__(self, lease: Lease, beside: Mapping[str, Sandbox], held: ExitStack) -> None:
        self._lease, self._beside, self._held = lease, beside, held
        self._others: dict[str, Lease] = {}
        self._lock = threading.Lock()
        self._closed = False

    def beside(self, image: str) -> Lease:
        """Return this session's container of ``image``, the same one at every call."""
        if image not in self._others:
            if image not in self._beside:
                raise SandboxError("the sandbox was opened without this image", got=image)
            other = self._held.enter_context(self._beside[image].lease())
            with self._lock:
                self._others[image] = other
                if self._closed:
                    other.close()
        return self._others[image]

    def exec(self, request: ExecRequest) -> ExecResult:
        """Run one command in the session's container."""
        return self._lease.exec(request)

    def read_file(self, path: str, max_bytes: int = 1_000_000) -> bytes:
        """Return a file of the session's workspace."""
        return self._lease.read_file(path, max_bytes)

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write files of the session's workspace."""
        self._lease.write_files(files)

    def reset(self) -> None:
        """Clean every container."""
        for lease in (self._lease, *self._others.values()):
            lease.reset()

    def retire(self) -> None:
        """Let no other session have the session's container."""
        self._lease.retire()

    def close(self) -> None:
        """End every container now, from any thread."""
        with self._lock:
            self._closed = True
            others = list(self._others.values())
        for lease in (self._lease, *others):
            lease.close()
