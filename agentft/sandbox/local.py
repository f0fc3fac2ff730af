"""The embedded engine (floor 2): the same runner inside bubblewrap, for trusted code where no Docker engine answers.

What it gives: no network, a read-only system, private workspace, temporary folder and shared memory of limited size,
own process, IPC and host-name spaces, an unprivileged user without capabilities, limits on processes, open files and
file size, the runner's caps on time and output, and the end of everything when the owner ends.

What it does **not** promise: there is no control group. Memory is limited by sampling (a short burst, or memory that
belongs to no process, may exceed it) and ``Limits.cpus`` has no effect. System calls are filtered by the runner's list
of what is denied only, not by an engine's list of what is allowed. Run code you trust, such as the packages you train
on; for anything else use the Docker backend.

The system inside is, in this order: the folder that ``agentft sandbox build`` leaves (``rootfs_folder()``); the host's
own ``/usr``, if its python3 has pytest; else the host's ``/usr`` with this process's interpreter, if that has pytest.

Started as root, every sandbox gets a user id of its own; started by a user, it runs as that user in a user namespace.
The kernel ends the sandbox with the *thread* that started it: start it from one that lives as long as the sandbox.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from agentft.errors import SandboxError
from agentft.sandbox.base import Limits
from agentft.sandbox.container import BASE_ENV, WIPED, WORKSPACE, Container
from agentft.sandbox.wire import Wire, runner_command

MIB = 1 << 20
START_TIMEOUT_S = 20.0
INSTALL_HINT = "apt-get install -y bubblewrap, or use the Docker backend"
FIRST_USER_ID = 100_000_000


@dataclass(frozen=True)
class System:
    """What a sandbox sees as its file system: bubblewrap arguments, folders put before PATH, and an identity."""

    mounts: tuple[str, ...]
    path: str
    digest: str


def rootfs_folder() -> Path:
    """Return where ``agentft sandbox build`` keeps the extracted Debian system."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentft" / "rootfs"


class LocalEngine:
    """Starts bubblewrap sandboxes. Meets ``container.Engine``."""

    def __init__(self, *, limits: Limits) -> None:
        """Find bubblewrap and a system with Python and pytest. Raises ``SandboxError`` with what to install."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError("bubblewrap is not installed", expected="`bwrap` on PATH", hint=INSTALL_HINT)
        self._bwrap, self.limits, self._system = bwrap, limits, find_system()
        self.image_digest = f"local:{self._system.digest}"

    def start(self) -> Container:
        """Start bubblewrap with the runner as its PID 1 and wait for the greeting."""
        ours, theirs = socket.socketpair()
        told, tells = os.pipe()
        with theirs, open(told, "rb", buffering=0) as information, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [*self._arguments(), "--info-fd", str(tells), *runner_command(self._config())],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=errors,
                env={**BASE_ENV, "PATH": self._system.path},
                cwd="/",
                pass_fds=(tells,),
            )
            os.close(tells)
            theirs.close()
            wire, kill = Wire(ours, multiplexed=False), _Killer(process)
            try:
                kill.aim(information)
                wire.hello(time.monotonic() + START_TIMEOUT_S)
            except BaseException as error:
                wire.close()
                kill()
                errors.seek(0)
                why = errors.read(2000).decode("utf-8", "replace").strip() or str(error)
                raise SandboxError("a local sandbox could not be started", got=why, hint=INSTALL_HINT) from error
        name = f"bubblewrap process {process.pid}"
        return Container(wire, self.limits, kill, name=name, env={**BASE_ENV, "PATH": self._system.path})

    def close(self) -> None:
        """Nothing is held."""

    def _arguments(self) -> list[str]:
        limits = self.limits
        if os.getuid() == 0:  # keep only what the runner needs to become another user
            user = ["--cap-drop", "ALL"]
            user += [word for name in ("SETUID", "SETGID", "CHOWN") for word in ("--cap-add", f"CAP_{name}")]
        else:
            user = ["--unshare-user", "--disable-userns"]
        return [
            self._bwrap,
            *user,
            *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
            *("--hostname", "sandbox", "--as-pid-1", "--die-with-parent", "--new-session"),
            *self._system.mounts,
            *("--proc", "/proc", "--dev", "/dev", "--mqueue", "/dev/mqueue"),
            *("--perms", "1777", "--size", str(limits.shm_mib * MIB), "--tmpfs", "/dev/shm"),
            *("--perms", "1777", "--size", str(limits.tmp_mib * MIB), "--tmpfs", "/tmp"),
            *("--perms", "0755", "--size", str(limits.workspace_mib * MIB), "--tmpfs", WORKSPACE),
            *("--remount-ro", "/", "--chdir", "/"),
        ]

    def _config(self) -> dict[str, object]:
        limits = self.limits
        config: dict[str, object] = {
            "workspace": WORKSPACE,
            "wipe": WIPED,
            "watch": {"memory_bytes": limits.memory_mib * MIB, "pids": limits.pids},
            "rlimits": {
                "NPROC": limits.pids,
                "NOFILE": limits.open_files,
                "FSIZE": limits.file_mib * MIB,
                "CORE": 0,
                "DATA": 4 * limits.memory_mib * MIB,
            },
        }
        if os.getuid() == 0:  # a user id of its own: the limit on processes counts per user
            config["uid"] = FIRST_USER_ID + secrets.randbelow(1 << 24)
        return config


def find_system() -> System:
    """Return the first system that has Python 3 and pytest (see the module's text).

    Raises:
        SandboxError: none has.
    """
    rootfs = rootfs_folder()
    if (rootfs / "usr/bin/python3").exists():
        status = (rootfs / "var/lib/dpkg/status").read_bytes()
        mounts = [*_usr_mounts(rootfs), "--ro-bind", str(rootfs / "etc"), "/etc"]
        return System(tuple(mounts), BASE_ENV["PATH"], hashlib.sha256(status).hexdigest()[:16])
    mounts = [*_usr_mounts(Path("/")), "--perms", "0755", "--dir", "/etc"]
    mounts += [w for name in ("/etc/alternatives", "/etc/ld.so.cache") for w in ("--ro-bind-try", name, name)]
    if version := _pytest_version("/usr/bin/python3"):
        return System(tuple(mounts), BASE_ENV["PATH"], f"host-{version}")
    if version := _pytest_version(sys.executable):
        for folder in dict.fromkeys((sys.base_prefix, sys.prefix)):
            if not folder.startswith("/usr/"):
                above = [str(parent) for parent in reversed(Path(folder).parents)][1:]
                mounts += [word for parent in above for word in ("--perms", "0755", "--dir", parent)]
                mounts += ["--ro-bind", folder, folder]
        return System(tuple(mounts), f"{Path(sys.executable).parent}:{BASE_ENV['PATH']}", f"venv-{version}")
    raise SandboxError(
        "no Python with pytest for the local sandbox",
        expected=f"a system in {rootfs}, or a python3 that can import pytest",
        hint="agentft sandbox build python, or apt-get install -y python3-pytest",
    )


def _usr_mounts(root: Path) -> list[str]:
    """Return the arguments that show ``root``'s /usr, and the links /bin, /lib, … that point into it."""
    links = [name for name in ("bin", "sbin", "lib", "lib64", "lib32") if (root / name).is_symlink()]
    return ["--ro-bind", str(root / "usr"), "/usr", *(w for n in links for w in ("--symlink", f"usr/{n}", f"/{n}"))]


@functools.cache
def _pytest_version(python: str) -> str | None:
    """Return "3.11.2-7.2.1" for a python that has pytest."""
    code = "import sys, pytest; print('%d.%d.%d' % sys.version_info[:3] + '-' + pytest.__version__)"
    try:
        found = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None


class _Killer:
    """Ends a sandbox from outside: the runner itself, because nobody may signal another user's process for us."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._lock = process, threading.Lock()
        self._runner: int | None = None  # a pidfd

    def aim(self, information: FileIO) -> None:
        """Read the runner's process id, which bubblewrap tells as a JSON object."""
        text = b""
        while b"}" not in text and (chunk := information.read(4096)):
            text += chunk
        if text:
            self._runner = os.pidfd_open(json.loads(text)["child-pid"])

    def __call__(self) -> None:
        """Kill the runner (with it ends its PID namespace) and bubblewrap; reap. Idempotent, from any thread."""
        with self._lock:
            if self._runner is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._runner, signal.SIGKILL)
                os.close(self._runner)
                self._runner = None
            self._process.kill()
            self._process.wait()
