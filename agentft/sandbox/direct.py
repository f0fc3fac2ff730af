"""A connection to the runner of a container on this machine, past the engine (floor 2).

An engine relays a runner's stream through two processes of its own (Docker: daemon and shim), which with as many
threads as cores costs a tenth of all calls (docs/benchmarks.md). So the host listens on a Unix domain socket that is
bind-mounted into the one container; the runner connects before any program has run, and then nobody listens any more:
a program that finds the socket is refused. The folder around the socket keeps other users of this machine out.

Where the mount or the connection is not possible (an engine behind a forwarded socket, in a virtual machine or of
another user, gVisor), the stream that the engine relays stays in use.

    with DirectListener() as listener:
        ...  # start a container with listener.path mounted at INSIDE, and wait for the runner's word
        stream = listener.accept(deadline)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

INSIDE = "/run/agentft.sock"
PREFIX = "agentft-direct-"
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class DirectListener:
    """A socket in a new folder that only this user can enter; takes one connection. A context manager."""

    def __init__(self) -> None:
        """Listen. Raises ``OSError``: there is no place for the socket."""
        with contextlib.ExitStack() as undo:
            folder, held = _new_folder()
            undo.callback(os.close, held)
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            self.path = folder / "runner.sock"
            self._socket = undo.enter_context(socket.socket(socket.AF_UNIX))
            self._socket.bind(f"/proc/self/fd/{held}/{self.path.name}")  # a path of any length
            self.path.chmod(0o666)  # the runner is another user
            self._socket.listen(1)
            self._undo = undo.pop_all()

    def accept(self, deadline: float) -> socket.socket:
        """Return the runner's connection. ``deadline`` is on the clock of ``time.monotonic``. Raises ``OSError``."""
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        return self._socket.accept()[0]

    def __enter__(self) -> DirectListener:
        return self

    def __exit__(self, *_: object) -> None:
        """Listen no more and remove the folder; an accepted connection stays. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # also for a process that was forked meanwhile and has it open
        self._undo.close()


def remove_leftovers() -> None:
    """Remove the folders of owners that were killed while they started a container."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as undo:  # in use, another's, or just gone
            held = os.open(folder, FOLDER)
            undo.callback(os.close, held)
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(held).st_uid == os.getuid():
                shutil.rmtree(folder)


def _new_folder() -> tuple[Path, int]:
    """Return a folder and the descriptor whose lock says, until it is closed, that the owner lives."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with contextlib.suppress(FileNotFoundError):  # removed by another start that saw it before it was locked
            held = os.open(folder, FOLDER)
            fcntl.flock(held, fcntl.LOCK_EX)
            if folder.exists():
                return folder, held
            os.close(held)
