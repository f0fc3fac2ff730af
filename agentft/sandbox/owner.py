"""Who owns a container (floor 2): labels that outlive the owner, and the test whether it is still alive.

A container ends by itself when its owner goes away (the runner sees the hang-up). Labels and ``is_dead`` are for what
is left nevertheless: a container that was created but never started, or an engine that was down at that moment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

LABEL = "agentft.sandbox"


def labels(run_name: str) -> dict[str, str]:
    """Return the labels of a container that this process owns."""
    return {
        LABEL: "1",
        "agentft.run": run_name,
        "agentft.host": socket.gethostname(),
        "agentft.boot": boot_id(),
        "agentft.pid_namespace": os.readlink("/proc/self/ns/pid"),
        "agentft.pid": str(os.getpid()),
        "agentft.pid_started": start_time(os.getpid()) or "",
    }


def is_dead(of: Mapping[str, str], *, here: bool = True) -> bool:
    """Whether the owner named by these labels is known to be gone; False where this machine cannot know.

    ``here``: the engine serves this machine alone. On an engine that several machines share, another boot of a machine
    of this name may be another machine of the same name, and its owner alive.
    """
    if of.get("agentft.host") != socket.gethostname():
        return False
    if of.get("agentft.boot") != boot_id():
        return here
    if of.get("agentft.pid_namespace") != os.readlink("/proc/self/ns/pid"):
        return False
    pid = of.get("agentft.pid", "")
    return not pid.isdigit() or start_time(int(pid)) != of.get("agentft.pid_started")


def boot_id() -> str:
    """Return the id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> str | None:
    """Return when the process started (clock ticks since boot); None if there is no such process or it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    after_name = text.rpartition(")")[2].split()
    return None if after_name[0] in "ZX" else after_name[19]
