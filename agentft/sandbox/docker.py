"""The Docker engine (floor 2): containers with every lock-down on, reached over one stream each.

The engine's API is used to create, attach, start and remove; calls never touch it, and on this machine the engine does
not relay them either (``direct.py``). What a container may do is decided in ``dialect.py`` alone. Defence in depth on a
shared kernel: for adversarial code use gVisor or microVMs.

    engine = DockerEngine(image="python", limits=Limits(), run_name="demo")
    container = engine.start()
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any, cast

import requests
from docker.errors import APIError, DockerException, NotFound
from docker.tls import TLSConfig
from docker.utils import kwargs_from_env

import docker
from agentft.config.hosts import ADDRESSES, host_problem
from agentft.errors import SandboxError, boundary
from agentft.sandbox import direct, owner
from agentft.sandbox.base import HostAwayError, Limits
from agentft.sandbox.container import BASE_ENV, Container
from agentft.sandbox.dialect import SLOW_STORAGE, find_dialect
from agentft.sandbox.wire import Wire, runner_command

START_TIMEOUT_S = 30.0
MEMORY_END_NS = 5_000_000_000
RECIPE_LABEL = "agentft.recipe"
TLS_FILES = ("ca.pem", "cert.pem", "key.pem")
ENGINE_HINT = "start the Docker engine (`agentft doctor` says how), or use the local backend"

log = logging.getLogger(__name__)


class _Client(docker.APIClient):
    """Talks to its engine alone: an HTTP proxy or REQUESTS_CA_BUNDLE in the environment is not meant for it."""

    def merge_environment_settings(self, url: str, proxies: Any, stream: Any, verify: Any, cert: Any) -> dict[str, Any]:
        """Return the settings of one request, from this client's own."""
        own = self.verify if verify is None else verify
        return {"proxies": proxies or {}, "stream": stream, "verify": own, "cert": cert or self.cert}


def connect(host: str | None = None, tls: Path | str | None = None, *, timeout_s: float = 30.0) -> docker.APIClient:
    """Return a client of an engine that answers. Podman's Docker-compatible socket is such an engine too.

    Args:
        host: ``unix:///path`` or ``tcp://name:port``; None takes DOCKER_HOST, else the default socket.
        tls: folder with ca.pem, cert.pem and key.pem, as Docker uses; needed for tcp beyond this machine.
        timeout_s: of every request.

    Raises:
        HostAwayError: no engine answers.
        SandboxError: it is not who the certificates say, or a tcp host would be plain.
    """
    where = host or os.environ.get("DOCKER_HOST")
    try:
        address = kwargs_from_env() if host is None else {"base_url": host, "tls": _tls(host, tls)}
        client = _Client(version="auto", timeout=int(timeout_s), **address)
        client.ping()
    except (DockerException, requests.RequestException, OSError) as cause:
        if "SSLError" in str(cause) or "CERTIFICATE" in str(cause):
            raise SandboxError("the engine's certificate or ours is refused", where=where, got=str(cause)) from cause
        raise HostAwayError("no Docker engine answers", where=where, got=str(cause), hint=ENGINE_HINT) from cause
    return client


def _tls(host: str, folder: Path | str | None) -> TLSConfig | bool:
    if problem := host_problem(host, folder):
        hint = "set sandbox.tls to a folder of certificates" if host.startswith("tcp://") else None
        raise SandboxError(problem, where="sandbox.hosts", got=host, expected=ADDRESSES, hint=hint)
    if folder is None or not host.startswith("tcp://"):
        return False
    ca, cert, key = (Path(folder) / name for name in TLS_FILES)
    missing = [path.name for path in (ca, cert, key) if not path.is_file()]
    if missing:
        raise SandboxError(
            "certificates are missing", where=str(folder), got=f"no {', '.join(missing)}", expected=", ".join(TLS_FILES)
        )
    return TLSConfig(client_cert=(str(cert), str(key)), ca_cert=str(ca), verify=True)


def image_reference(image: str) -> str:
    """Return the engine's name of an image: a bare name is one of ours."""
    return image if "/" in image or ":" in image else f"agentft/{image}"


class DockerEngine:
    """Starts hardened containers of one image. Meets ``container.Engine``.

    ``gaps`` says what this engine cannot enforce (rootless Podman without control groups), a sentence each. ``direct``:
    whether runners here are reached past the engine; None until the first has started.
    """

    def __init__(
        self,
        *,
        image: str,
        limits: Limits,
        run_name: str,
        host: str | None = None,
        tls: Path | str | None = None,
        runtime: str | None = None,
    ) -> None:
        """Connect, find the image, remove what dead owners left.

        Args:
            image: a name as ``agentft sandbox build`` takes it, or a reference that the engine knows.
            limits: of every container.
            run_name: goes into the labels.
            host: the engine's address, see ``connect``.
            tls: folder of certificates for tcp.
            runtime: an OCI runtime that the engine knows, such as runsc; None takes the engine's default.

        Raises:
            SandboxError: no engine answers, the image is not there (with the command that builds it), or the engine
                does not have this runtime.
        """
        self._address = (host, tls)
        self._client = connect(host, tls)
        address = host or os.environ.get("DOCKER_HOST")
        self.host = address or "the default engine"
        self.direct: bool | None = None if address is None or address.startswith("unix://") else False
        reference = image_reference(image)
        try:
            found = self._client.inspect_image(reference)
        except NotFound as cause:
            raise SandboxError(
                f"the sandbox image {reference} is not there", where=host, hint=f"agentft sandbox build {image}"
            ) from cause
        self._image_id = str(found["Id"])
        self.recipe = str((found["Config"].get("Labels") or {}).get(RECIPE_LABEL, ""))
        information = self._client.info()
        self._runtime = check_runtime(information, runtime, self.host)
        self.image_digest = self._image_id + (f"+{runtime}" if runtime else "")
        self.limits, self._labels = limits, owner.labels(run_name)
        if not any("seccomp" in option for option in information.get("SecurityOptions") or ()):
            log.warning("this Docker engine has no seccomp: system calls inside the sandbox are not filtered")
        remove_leftovers(self._client)
        direct.remove_leftovers()
        with boundary("the engine could not be asked what it enforces", error=SandboxError):
            self._dialect = find_dialect(self._client, self._image_id, limits, self._labels)
        self.gaps = self._dialect.gaps()
        for gap in (*self.gaps, *((SLOW_STORAGE,) if information.get("Driver") == "vfs" else ())):
            log.warning("%s: %s", self.host, gap)

    def answers(self, timeout_s: float = 3.0) -> bool:
        """Whether the engine itself still answers."""
        try:
            connect(*self._address, timeout_s=timeout_s).close()
        except SandboxError:
            return False
        return True

    def start(self, network: str | None = None) -> Container:
        """Create, attach, start, and wait for the runner's greeting.

        ``network``: None for none at all (a loopback device), or ``container:ID`` to share that of another sandbox.
        """
        with boundary("a sandbox container could not be started", error=SandboxError, hint=ENGINE_HINT):
            if self.direct is False:
                return self._start(network)
            try:
                with direct.DirectListener() as listener:
                    return self._start(network, listener)
            except (APIError, OSError) as cause:
                if self.direct:
                    raise
                container = self._start(network)  # if this one starts, the socket was the reason
                self._relayed(str(cause))
                return container

    def _start(self, network: str | None, listener: direct.DirectListener | None = None) -> Container:
        identity = self._create(network, None if listener is None else listener.path)
        remove = functools.partial(self._remove, identity)
        try:
            wire = Wire(self._attach(identity), multiplexed=True)
            self._client.start(identity)
            deadline = time.monotonic() + START_TIMEOUT_S
            hello = wire.hello(deadline)
            if listener is not None and hello["direct"]:
                wire.move(listener.accept(deadline))
                self.direct = True
            elif listener is not None:
                self._relayed("the runner cannot connect to a socket that is mounted")
        except BaseException:
            remove()
            raise
        memory = functools.partial(self._ended_for_memory, identity)
        return Container(wire, self.limits, remove, name=f"container {identity[:12]}", ended_for_memory=memory)

    def _relayed(self, reason: str) -> None:
        if self.direct is not False:
            log.info("%s: the engine relays every call, which takes a little longer: %s", self.host, reason)
        self.direct = False

    def close(self) -> None:
        """Close the connections to the engine."""
        self._client.close()

    def _create(self, network: str | None, socket_path: Path | None) -> str:
        user = self._dialect.user()
        created = self._client.create_container(
            self._image_id,
            entrypoint=runner_command(self._dialect.runner_config(self.limits, direct=socket_path is not None)),
            command=[],
            user=f"{user}:{user}",
            hostname="sandbox" if network is None else None,  # it has that of whose network it shares
            stdin_open=True,  # with attach: closed when we hang up
            environment=dict(BASE_ENV),
            working_dir="/",
            labels=self._labels,
            network_disabled=network is None,
            host_config=self._client.create_host_config(
                **(self._dialect.host_config(self.limits, user, socket_path) | {"network_mode": network or "none"}),
                runtime=self._runtime,
            ),
        )
        return str(created["Id"])

    def _attach(self, identity: str) -> socket.socket:
        wrapped = self._client.attach_socket(identity, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        return cast(socket.socket, getattr(wrapped, "_sock", wrapped))

    def _ended_for_memory(self, identity: str) -> bool:
        """Whether the container was killed within seconds of its memory having run out, by the engine's own clock."""
        seen, filters = [], {"container": identity, "event": ["oom", "die"]}
        with contextlib.suppress(APIError, requests.RequestException):
            for event in self._client.events(since="1", until=f"{time.time() + 2:.3f}", filters=filters, decode=True):
                if event["Action"] == "oom":
                    seen.append(event["timeNano"])
                elif event["Action"] in ("die", "died"):
                    killed = str(event["Actor"]["Attributes"].get("exitCode")) == "137"
                    return killed and any(event["timeNano"] - when < MEMORY_END_NS for when in seen)
        return False

    def _remove(self, identity: str) -> None:
        with contextlib.suppress(APIError, requests.RequestException):
            self._client.remove_container(identity, force=True, v=True)


def check_runtime(information: dict[str, Any], runtime: str | None, where: str) -> str | None:
    """Return ``runtime`` if an engine with this ``info()`` has it. Raises ``SandboxError`` naming those it has."""
    known = sorted(information.get("Runtimes") or ())
    if runtime is not None and runtime not in known:
        raise SandboxError(
            "the engine does not have this container runtime",
            where=where,
            got=runtime,
            expected=" or ".join(known) or "none is known to it",
            hint="install it on that host and name it in the engine's daemon.json, or leave sandbox.runtime null",
        )
    return runtime


def list_containers(client: docker.APIClient) -> list[dict[str, Any]]:
    """Return every sandbox container of this engine, running or not."""
    return cast(list[dict[str, Any]], client.containers(all=True, filters={"label": owner.LABEL}))


def remove_leftovers(client: docker.APIClient, *, everything: bool = False) -> list[str]:
    """Remove containers whose owner is dead (or all of them); return their ids."""
    removed, here = [], not client.base_url.startswith("https:")
    for entry in list_containers(client):
        if everything or owner.is_dead(entry["Labels"], here=here):
            with contextlib.suppress(APIError):
                client.remove_container(entry["Id"], force=True, v=True)
                removed.append(str(entry["Id"])[:12])
    return removed
