"""The runner: PID 1 of every sandbox (standard library only).

The host sends the source of this file and its siblings on the command line, so any image that has a Python 3.11 runs
it, and runner and host can never differ. It reads requests on stdin and answers on stdout; where the configuration
names a socket of the host (``direct``) that it can connect to, that connection becomes both after the greeting.

A frame is ``>II`` (length of header, length of body), the header and the body (bytes). The header of a request is
marshalled, which is quick to read but safe only from a sender that is trusted; that of an answer is JSON.
Every request carries an ``id`` that nobody inside can guess; the reply repeats it. Requests by ``op``:

- ``ping``; ``reset``: wipe the folders of the configuration, leave one process
- ``exec`` {argv, cwd, env, timeout_s, output_bytes}, body = stdin → {status, exit_code, duration_s, out, err,
  truncated, total_bytes, hits}, body = stdout + stderr
- ``read`` {path, max_bytes} → body = content; ``write`` {files: [(path, size), ...]}, body = contents joined

An ``OSError`` is answered as {error: (errno, message, path)}, anything else as {fault: text}: the runner is broken.

After every request everything but the runner is killed and reaped. If the host goes away (hang-up on stdin, also in
the middle of a call) the runner ends, and with it the container. The process is not dumpable: a program of the same
user can open neither ``/proc/1/fd`` nor its memory, so it cannot forge an answer. A system-call filter
(``runner_filter.py``), which every command inherits, keeps its limits and priority out of their reach as well.
A runner that cannot protect itself refuses to start (``python3-minimal`` has no ctypes: install ``python3``).
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import signal
import struct
import sys
from typing import Any

from agentft.sandbox.runner_call import Call
from agentft.sandbox.runner_files import read_file, wipe, write_files
from agentft.sandbox.runner_filter import become_undumpable, drop_capabilities, filter_system_calls
from agentft.sandbox.runner_processes import die, open_counters, processes, sweep

HEADER = struct.Struct(">II")


def main() -> None:
    """Protect the process, say hello, serve until the host hangs up.

    The configuration (JSON, the first argument) has ``workspace``; ``wipe``, the folders that a reset
    empties; optionally ``direct``, path of a socket; ``uid``, the user to become; ``rlimits``, name without RLIMIT_ →
    value; and ``watch`` {memory_bytes, pids}, limits to enforce by sampling where no cgroup does.
    """
    config = json.loads(sys.argv[1])
    os.umask(0o022)
    drop_privileges(config)
    protect()
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # from inside, PID 1 is immune to whatever it does not handle
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    os.chdir("/")
    config["wake"] = wake_read
    config["counters"] = [] if config.get("watch") else open_counters()
    direct = connect(config["direct"]) if "direct" in config else None
    hello = {"id": "hello", "uid": os.getuid(), "python": sys.version.split()[0], "direct": direct is not None}
    send(hello)
    if direct is not None:
        os.dup2(direct, 0)
        os.dup2(direct, 1)
        os.close(direct)
    while True:
        header_size, body_size = HEADER.unpack(read_exactly(HEADER.size))
        request = marshal.loads(read_exactly(header_size))
        answer, payload = handle(config, request, read_exactly(body_size))
        send({"id": request["id"], **answer}, payload)


def handle(config: dict[str, Any], request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """Return (answer, payload) of one request; whatever happens, nothing but the runner is left running."""
    try:
        op = request["op"]
        if op == "exec":
            try:
                with contextlib.closing(Call(config, request, body)) as call:
                    return call.run()
            except OSError as error:  # what a program does is never an error: something is wrong here
                return {"fault": f"{type(error).__name__}: {error}"}, b""
        if op == "read":
            return {}, read_file(config["workspace"], request["path"], request["max_bytes"])
        if op == "write":
            write_files(config["workspace"], request["files"], body)
        elif op == "reset":
            reset(config["wipe"])
        elif op != "ping":
            return {"fault": f"unknown op {op!r}"}, b""
        return {}, b""
    except OSError as error:
        return {"error": (error.errno or 0, error.strerror or str(error), str(error.filename or ""))}, b""
    except Exception as error:
        return {"fault": f"{type(error).__name__}: {error}"}, b""
    finally:
        sweep()


def reset(folders: list[str]) -> None:
    """Leave one process, empty folders and no System V objects; anything else is a fault (and ends this sandbox)."""
    sweep()
    for folder in folders:
        if os.path.isdir(folder):
            wipe(folder)
    for table in ("/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg"):
        if os.path.exists(table):
            with open(table, "rb") as file:
                if len(file.read().splitlines()) > 1:
                    raise RuntimeError(f"{table}: an object is left")
    if others := processes():
        raise RuntimeError(f"processes are left: {others}")


def drop_privileges(config: dict[str, Any]) -> None:
    """Give the workspace to the unprivileged user, become that user, set its limits."""
    uid = config.get("uid")
    if uid is not None:
        os.chown(config["workspace"], uid, uid)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if config.get("rlimits"):
        import resource

        for name, value in config["rlimits"].items():
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))


def connect(path: str) -> int | None:
    """Return a connection to the Unix domain socket of the host; None if there is no way."""
    import socket

    stream = socket.socket(socket.AF_UNIX)
    try:
        stream.connect(path)
    except OSError:
        stream.close()
        return None
    return stream.detach()


def protect() -> None:
    """Drop what is left of privileges, become undumpable, filter system calls; refuse to serve if that failed."""
    try:
        drop_capabilities()
        become_undumpable()
        filter_system_calls()
    except (ImportError, OSError) as error:
        sys.exit(f"runner: cannot protect itself: {error} (python3-minimal has no ctypes: install python3)")
    if os.getpid() != 1 or os.getuid() == 0 or os.stat("/proc/self/mem").st_uid == os.getuid():
        sys.exit("runner: must be PID 1, not root, and undumpable")


def read_exactly(size: int) -> bytes:
    """Read from the host; the end of the stream is the end of everything."""
    data = bytearray()
    while len(data) < size:
        chunk = os.read(0, min(size - len(data), 1 << 20))
        if not chunk:
            die()
        data += chunk
    return bytes(data)


def send(answer: dict[str, Any], payload: bytes = b"") -> None:
    """Write one frame to the host."""
    header = json.dumps(answer).encode("ascii")
    left = memoryview(HEADER.pack(len(header), len(payload)) + header + payload)
    while left:
        left = left[os.write(1, left) :]


if __name__ == "__main__":
    main()
