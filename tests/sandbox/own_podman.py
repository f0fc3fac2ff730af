"""A rootless Podman of the tests' own: a user with ranges of ids, its storage, its service; all gone after ``close``.

Needs root (to make the user and to be it) and podman.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from own_engines import folder_in_memory, need_own_engines, remove_folder, wait_until

from agentft.sandbox.docker import connect

USER = "aftpodman"
STARTED_WITHIN_S = 30.0


class RootlessPodman:
    """Podman's Docker-compatible socket, served by an unprivileged user."""

    def __init__(self) -> None:
        need_own_engines("podman", "newuidmap", "setpriv", "useradd")
        self.folder = folder_in_memory("aft-podman-")
        self.host = f"unix://{self.folder}/run/podman.sock"
        if any(entry.pw_name == USER for entry in pwd.getpwall()):  # of a run that was killed
            subprocess.run(["userdel", USER], check=True)
        subprocess.run(["useradd", "--no-create-home", "--home-dir", f"{self.folder}/home", USER], check=True)
        self.uid = pwd.getpwnam(USER).pw_uid
        for name in ("run", "home"):
            folder = self.folder / name
            folder.mkdir(0o700)
            os.chown(folder, self.uid, -1)
        settings = self.folder / "home/.config/containers/storage.conf"
        settings.parent.mkdir(parents=True)
        settings.write_text('[storage]\ndriver = "overlay"\n')
        with (self.folder / "log").open("ab") as log:
            self._service = subprocess.Popen(
                self.command("podman", "system", "service", "--time=0", self.host),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
            )
        deadline = time.monotonic() + STARTED_WITHIN_S
        while True:
            try:
                connect(self.host).close()
                return
            except Exception:
                if time.monotonic() > deadline or self._service.poll() is not None:
                    text = (self.folder / "log").read_text()[-2000:]
                    self.close()
                    pytest.fail(f"podman did not start: {text}")
                time.sleep(0.1)

    def command(self, *words: str) -> list[str]:
        """Return a command line that runs ``words`` as the user."""
        environment = [f"HOME={self.folder}/home", f"XDG_RUNTIME_DIR={self.folder}/run", f"PATH={os.environ['PATH']}"]
        return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups", "env", "-i", *environment, *words]

    def close(self) -> None:
        """End every process of the user and of its containers, unmount, remove the files and the user."""
        self._service.kill()
        self._service.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.processes(), 5)
        remove_folder(self.folder)
        subprocess.run(["userdel", USER], check=False, capture_output=True)
        for left in (*Path("/dev/shm").glob(f"libpod_rootless_lock_{self.uid}"), *Path("/tmp").glob(self._temporary)):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()

    @property
    def _temporary(self) -> str:
        return f"*-{self.uid}"  # podman-run-1001, containers-user-1001, storage-run-1001

    def processes(self) -> list[int]:
        """Return the living processes of the user and of its containers, by user id."""
        ids, found = {self.uid}, []
        for line in Path("/etc/subuid").read_text().splitlines():
            name, first, count = line.split(":")
            ids |= set(range(int(first), int(first) + int(count))) if name == USER else set()
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError, IndexError):
                fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
                if int(fields["Uid"].split()[0]) in ids and fields["State"].split()[0] not in "ZX":
                    found.append(int(status.parent.name))
        return found
