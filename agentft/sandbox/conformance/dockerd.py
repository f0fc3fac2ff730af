"""A Docker engine of the suite's own (floor 2): it may be killed and its disk may be filled.

It has its own socket, containerd, control group, network namespace (without one it would remove the bridge of the
host's engine) and a data folder in memory of limited size; everything that it makes is gone after ``close``. Needs
root and ``dockerd``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from agentft.errors import SandboxError
from agentft.sandbox.conformance.check import NotRunError
from agentft.sandbox.docker import connect, image_reference

STARTED_WITHIN_S = 40.0
ROOM_MIB = 400  # beside the image
MIB = 1 << 20


class OwnDockerd:
    """A dockerd in a folder of its own; holds one image, copied from the engine at ``host``."""

    def __init__(self, image: str, host: str | None) -> None:
        """Start it and copy the image. Raises ``NotRunError`` where that is not possible."""
        missing = [
            name for name in ("dockerd", "containerd", "unshare", "mount", "umount") if shutil.which(name) is None
        ]
        if os.getuid() != 0 or missing:
            raise NotRunError(f"needs root and dockerd ({', '.join(missing) or 'not root'})")
        self.folder = Path(tempfile.mkdtemp(prefix="agentft-dockerd-"))
        self.host, self.data = f"unix://{self.folder}/d.sock", self.folder / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self.data.mkdir()
        try:
            with contextlib.closing(connect(host, timeout_s=120)) as source:
                reference = image_reference(image)
                size_mib = ROOM_MIB + 3 * int(source.inspect_image(reference)["Size"]) // MIB
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(self.data)], check=True)
                self.start()
                with contextlib.closing(connect(self.host, timeout_s=120)) as own:
                    own.load_image(b"".join(source.get_image(reference)))
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Start dockerd and wait until it answers."""
        for stale in (self.folder / "pid", self.folder / "exec/containerd/containerd.pid"):
            stale.unlink(missing_ok=True)
        command = ["unshare", "--net", "dockerd", "--host", self.host, "--data-root", str(self.data), "--exec-root"]
        command += [f"{self.folder}/exec", "--pidfile", f"{self.folder}/pid", "--config-file", f"{self.folder}/d.json"]
        command += ["--bridge=none", "--iptables=false", "--ip-masq=false", "--cgroup-parent", self.folder.name]
        (self.folder / "d.json").write_text("{}")
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + STARTED_WITHIN_S
        while True:
            with contextlib.suppress(SandboxError):
                connect(self.host).close()
                return
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise NotRunError(f"dockerd did not start: {(self.folder / 'log').read_text()[-300:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL dockerd and its containerd; containers may live on."""
        if self._process is None:
            return
        for pid in (self._process.pid, *processes_of(self.folder, "containerd")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def fill(self) -> Path:
        """Use up the disk, to the last byte; return the file to remove."""
        path = self.data / "filler"
        with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(MIB))
        with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 512)
        return path

    def used(self) -> int:
        """Return the bytes in use on its disk."""
        state = os.statvfs(self.data)
        return (state.f_blocks - state.f_bfree) * state.f_frsize

    def close(self) -> None:
        """End it and everything that it started, mounted or wrote. Idempotent."""
        self.kill()
        for _ in range(50):
            pids = processes_of(self.folder)
            children = [child for pid in pids for child in children_of(pid)]
            for pid in (*children, *pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                break
            time.sleep(0.1)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for point in sorted((point for point in mounts if point.startswith(f"{self.folder}/")), reverse=True):
            subprocess.run(["umount", "-l", point], check=False)
        for group in (*Path("/sys/fs/cgroup").glob(f"*/{self.folder.name}"), Path("/sys/fs/cgroup", self.folder.name)):
            for inner in sorted((*group.glob("**/"), group), reverse=True):
                with contextlib.suppress(OSError):
                    inner.rmdir()
        shutil.rmtree(self.folder, ignore_errors=True)


def processes_of(folder: Path, program: str = "") -> list[int]:
    """Return the processes of the engine in ``folder``, by their command line; all of them for an empty name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if any(str(folder) in word for word in words) and Path(words[0]).name.startswith(program):
                found.append(int(path.parent.name))
    return found


def children_of(pid: int) -> list[int]:
    """Return the children of a process."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
