"""What an engine with Docker's API does with what it is asked (floor 2): Docker, or Podman with or without cgroups.

What a container may do is decided in ``host_config`` and ``runner_config`` alone. Podman ignores some of it without a
word, so it is asked once, with a container that never starts; what it ignored the runner then does as well as a
process can, and ``gaps()`` says in plain words what that is worth.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker.errors import APIError
from docker.types import Mount, Ulimit

import docker
from agentft.sandbox.base import Limits
from agentft.sandbox.container import WIPED, WORKSPACE
from agentft.sandbox.direct import INSIDE

MIB = 1 << 20
USER_ID = 10001
USER_IDS = 40_000
ASKED = {"memory": "Memory", "pids": "PidsLimit", "cpus": "NanoCpus", "ulimits": "Ulimits"}
SLOW_STORAGE = "every container copies its image (storage driver vfs): set driver = overlay in storage.conf"
GAPS = {
    "memory": "memory is limited by looking, 20 times a second: a short burst may exceed it (no memory control group)",
    "pids": "processes are limited by a resource limit of the user and by looking (no pids control group)",
    "cpus": "sandbox.cpus has no effect (no cpu control group)",
}


@dataclass(frozen=True)
class Dialect:
    """``podman``: its ways instead of Docker's. ``ignored``: keys of ``ASKED`` that the engine does not enforce."""

    podman: bool = False
    ignored: frozenset[str] = frozenset()

    def gaps(self) -> tuple[str, ...]:
        """Return what a container here does not promise, a sentence each."""
        return tuple(text for name, text in GAPS.items() if name in self.ignored)

    def user(self) -> int:
        """Return the user id of a new container: its own where processes can only be counted by user."""
        return USER_ID + (secrets.randbelow(USER_IDS) if "pids" in self.ignored else 0)

    def host_config(self, limits: Limits, user: int, direct: Path | None = None) -> dict[str, Any]:
        """Return the arguments of ``create_host_config``. ``direct``: socket of the host to be mounted."""

        def tmpfs(size_mib: int) -> str:
            # Podman takes no user id here but gives the folder to the user of the container.
            owned = "mode=0755,notmpcopyup,U" if self.podman else f"mode=0755,uid={user},gid={user}"
            return f"rw,exec,nosuid,nodev,size={size_mib * MIB},{owned}"

        mounts = {WORKSPACE: tmpfs(limits.workspace_mib), "/tmp": tmpfs(limits.tmp_mib)}
        if self.podman:  # beside a read-only system it would add these, writable and without a limit
            mounts |= dict.fromkeys(("/run", "/var/tmp"), "ro,nosuid,nodev,noexec,size=4096,notmpcopyup")
        return {
            "network_mode": "none",
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],  # seccomp stays at the engine's default profile
            "read_only": True,
            "tmpfs": mounts,
            "mounts": [] if direct is None else [Mount(INSIDE, str(direct), type="bind", read_only=True)],
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

    def runner_config(self, limits: Limits, *, direct: bool = False) -> dict[str, Any]:
        """Return what the runner is told: where it works, which limits are left to it, and where the host listens."""
        config: dict[str, Any] = {"workspace": WORKSPACE, "wipe": WIPED}
        if direct:
            config["direct"] = INSIDE
        own: dict[str, int] = {}
        if "ulimits" in self.ignored:
            own |= {"NOFILE": limits.open_files, "FSIZE": limits.file_mib * MIB, "CORE": 0}
        if "pids" in self.ignored:
            own["NPROC"] = limits.pids
        if "memory" in self.ignored:
            own["DATA"] = 4 * limits.memory_mib * MIB
        if own:
            config["rlimits"] = own
        if self.ignored & {"memory", "pids"}:
            config["watch"] = {"memory_bytes": limits.memory_mib * MIB, "pids": limits.pids}
        return config


def find_dialect(client: docker.APIClient, image_id: str, limits: Limits, labels: Mapping[str, str]) -> Dialect:
    """Ask the engine what it is, and what it will ignore. Raises ``docker.errors.APIError``."""
    if not any("Podman" in part["Name"] for part in client.version().get("Components") or ()):
        return Dialect()
    asked = client.create_host_config(**Dialect(podman=True).host_config(limits, USER_ID))
    created = client.create_container(image_id, command=["true"], labels=dict(labels), host_config=asked)
    try:
        given = client.inspect_container(created)["HostConfig"]
    finally:
        with contextlib.suppress(APIError):
            client.remove_container(created, force=True)
    return Dialect(podman=True, ignored=frozenset(name for name, key in ASKED.items() if not given.get(key)))
