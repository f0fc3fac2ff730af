"""File operations of the runner (standard library only; sent into the sandbox together with ``runner.py``).

Paths are relative to the workspace (or start with its absolute path). No symbolic link is followed in any component,
``..`` is refused, only regular files are opened, and never in a way that could block (FIFO).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable

CHUNK_BYTES = 1 << 16
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def read_file(workspace: str, path: str, max_bytes: int) -> bytes:
    """Return the content; ``OSError`` (``EFBIG``) if it is longer than ``max_bytes``."""
    with open(_open_regular(workspace, path, os.O_RDONLY), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= max_bytes:
            data = bytearray()
            while len(data) <= max_bytes and (chunk := file.read(CHUNK_BYTES)):
                data += chunk
            if len(data) <= max_bytes:
                return bytes(data)
        raise OSError(errno.EFBIG, f"has {size} bytes, more than {max_bytes}", path)


def write_files(workspace: str, files: Iterable[tuple[str, int]], body: bytes) -> None:
    """Create or replace every file of ``files`` (path, size) from ``body`` (the contents, joined)."""
    start = 0
    for path, size in files:
        with open(_open_regular(workspace, path, os.O_WRONLY | os.O_CREAT), "wb", buffering=0) as file:
            os.ftruncate(file.fileno(), 0)
            left = memoryview(body)[start : start + size]
            while left:
                left = left[file.write(left) :]
        start += size


def wipe(folder: str) -> None:
    """Remove everything inside ``folder``, however deep. Nothing else may be running: there is no race to lose then."""
    if os.stat(folder).st_uid == os.getuid():
        os.chmod(folder, 0o755)
    lifted, unused = 0, os.urandom(8).hex()
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for below in list(os.scandir(entry.path)):
                if below.is_dir(follow_symlinks=False):  # up one floor, so that no path gets long
                    os.chmod(below.path, 0o700)
                    os.rename(below.path, f"{folder}/{unused}-{lifted}")
                    lifted += 1
                else:
                    os.unlink(below.path)
            os.rmdir(entry.path)


def _open_regular(workspace: str, path: str, flags: int) -> int:
    """Open a regular file of the workspace; FIFOs, devices, folders and links are refused."""
    folder, name = _open_parent(workspace, path, bool(flags & os.O_CREAT))
    try:
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644, dir_fd=folder)
    except OSError as error:
        raise _explained(error, path) from None
    finally:
        os.close(folder)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "is a folder", path)
        raise PermissionError(errno.EPERM, "is not a regular file", path)
    return fd


def _open_parent(workspace: str, path: str, create: bool) -> tuple[int, str]:
    """Return the descriptor of the folder that holds ``path``, and the last component of ``path``."""
    inside = path.removeprefix(workspace + "/")
    parts = [part for part in inside.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or inside.startswith("/"):
        raise PermissionError(errno.EPERM, "is not inside the workspace", path)
    if "\0" in path or any("\ud800" <= character <= "\udfff" for character in path):
        raise OSError(errno.EINVAL, "is not a possible path", path)
    folder = os.open(workspace, FOLDER_FLAGS)
    for part in parts[:-1]:
        try:
            if create:
                _make_folder(part, folder)
            below = os.open(part, FOLDER_FLAGS, dir_fd=folder)
        except OSError as error:
            raise _explained(error, path) from None
        finally:
            os.close(folder)
        folder = below
    return folder, parts[-1]


def _make_folder(name: str, parent: int) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=parent)


def _explained(error: OSError, path: str) -> OSError:
    if error.errno == errno.ELOOP:
        return PermissionError(errno.EPERM, "is a symbolic link, which is not followed", path)
    if error.errno == errno.ENXIO:
        return PermissionError(errno.EPERM, "is not a regular file", path)
    return OSError(error.errno, error.strerror, path)
