"""The Docker engine (floor 2): containers with every lock-down on, reached over one attached stream each.

The engine's API is used to create, attach, start and remove; calls never touch it. What a container may do is
decided in ``_host_config`` alone. Defence in depth on a shared kernel: for adversarial code use gVisor or microVMs.

    engine = DockerEngine(image="python", limits=Limits(), run_name="demo")
    container = engine.start()
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import time
from typing import Any, cast

import requests
from docker.errors import APIError, DockerException, NotFound
from docker.types import Ulimit

import docker
from agentft.errors import SandboxError, boundary
from agentft.sandbox import owner
from agentft.sandbox.base import Limits
from agentft.sandbox.container import BASE_ENV, WIPED, WORKSPACE, Container
from agentft.sandbox.wire import Wire, runner_command

MIB = 1 << 20
USER_ID = 10001
START_TIMEOUT_S = 30.0
ENGINE_HINT = "start the Docker engine (`agentft doctor` says how), or use the local backend"

log = logging.getLogger(__name__)


def connect() -> docker.APIClient:
    """Return a client of the engine that DOCKER_HOST (or the default socket) names.

    Raises:
        SandboxError: no engine answers.
    """
    try:
        client = cast(docker.APIClient, docker.from_env(timeout=30).api)
        client.ping()
    except (DockerException, requests.RequestException, OSError) as cause:
        raise SandboxError("no Docker engine answers", got=str(cause), hint=ENGINE_HINT) from cause
    return client


def image_reference(image: str) -> str:
    """Return the engine's name of an image: a bare name is one of ours."""
    return image if "/" in image or ":" in image else f"agentft/{image}"


class DockerEngine:
    """Starts hardened containers of one image. Meets ``container.Engine``."""

    def __init__(self, *, image: str, limits: Limits, run_name: str) -> None:
        """Connect, find the image, remove what dead owners left.

        Raises:
            SandboxError: no engine answers, or the image is not there (with the command that builds it).
        """
        self._client = connect()
        reference = image_reference(image)
        try:
            self.image_digest: str = self._client.inspect_image(reference)["Id"]
        except NotFound as cause:
            raise SandboxError(
                f"the sandbox image {reference} is not there", hint=f"agentft sandbox build {image}"
            ) from cause
        self.limits, self._labels = limits, owner.labels(run_name)
        if not any("seccomp" in option for option in self._client.info().get("SecurityOptions") or ()):
            log.warning("this Docker engine has no seccomp: system calls inside the sandbox are not filtered")
        remove_leftovers(self._client)

    def start(self) -> Container:
        """Create, attach, start, and wait for the runner's greeting."""
        with boundary("a sandbox container could not be started", error=SandboxError, hint=ENGINE_HINT):
            identity = self._create()
            remove = functools.partial(self._remove, identity)
            try:
                wire = Wire(self._attach(identity), multiplexed=True)
                self._client.start(identity)
                wire.hello(time.monotonic() + START_TIMEOUT_S)
            except BaseException:
                remove()
                raise
        return Container(wire, self.limits, remove, name=f"container {identity[:12]}")

    def close(self) -> None:
        """Close the connections to the engine."""
        self._client.close()

    def _create(self) -> str:
        config = {"workspace": WORKSPACE, "wipe": WIPED}
        created = self._client.create_container(
            self.image_digest,
            entrypoint=runner_command(config),
            command=[],
            user=f"{USER_ID}:{USER_ID}",
            hostname="sandbox",
            stdin_open=True,  # with attach: closed when we hang up
            environment=dict(BASE_ENV),
            working_dir="/",
            labels=self._labels,
            network_disabled=True,
            host_config=self._client.create_host_config(**_host_config(self.limits)),
        )
        return str(created["Id"])

    def _attach(self, identity: str) -> socket.socket:
        wrapped = self._client.attach_socket(identity, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        return cast(socket.socket, getattr(wrapped, "_sock", wrapped))

    def _remove(self, identity: str) -> None:
        with contextlib.suppress(APIError, requests.RequestException):
            self._client.remove_container(identity, force=True, v=True)


def _host_config(limits: Limits) -> dict[str, Any]:
    def tmpfs(size_mib: int) -> str:
        return f"rw,exec,nosuid,nodev,size={size_mib * MIB},mode=0755,uid={USER_ID},gid={USER_ID}"

    return {
        "network_mode": "none",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],  # seccomp stays at the engine's default profile
        "read_only": True,
        "tmpfs": {WORKSPACE: tmpfs(limits.workspace_mib), "/tmp": tmpfs(limits.tmp_mib)},
        "shm_size": limits.shm_mib * MIB,
        "pids_limit": limits.pids,
        "mem_limit": limits.memory_mib * MIB,
        "memswap_limit": limits.memory_mib * MIB,
        "nano_cpus": int(limits.cpus * 1e9),
        "ulimits": [
            Ulimit(name="fsize", soft=limits.file_mib * MIB, hard=limits.file_mib * MIB),
            Ulimit(name="nofile", soft=limits.open_files, hard=limits.open_files),
            Ulimit(name="core", soft=0, hard=0),
        ],
        "log_config": {"type": "none"},
        "auto_remove": True,
        "privileged": False,
    }


def list_containers(client: docker.APIClient) -> list[dict[str, Any]]:
    """Return every sandbox container of this engine, running or not."""
    return cast(list[dict[str, Any]], client.containers(all=True, filters={"label": owner.LABEL}))


def remove_leftovers(client: docker.APIClient, *, everything: bool = False) -> list[str]:
    """Remove containers whose owner is dead (or all of them); return their ids."""
    removed = []
    for entry in list_containers(client):
        if everything or owner.is_dead(entry["Labels"]):
            with contextlib.suppress(APIError):
                client.remove_container(entry["Id"], force=True, v=True)
                removed.append(str(entry["Id"])[:12])
    return removed
