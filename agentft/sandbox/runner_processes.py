"""Processes of a sandbox and what the kernel counts of their limits (standard library only; sent in like runner.py)."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

COUNTERS = (  # event, file of cgroup v2 or v1, key
    ("oom", "/sys/fs/cgroup/memory.events", b"oom_kill "),
    ("pids", "/sys/fs/cgroup/pids.events", b"max "),
    ("oom", "/sys/fs/cgroup/memory/memory.oom_control", b"oom_kill "),
    ("pids", "/sys/fs/cgroup/pids/pids.events", b"max "),
)


def open_counters() -> list[tuple[str, int, bytes]]:
    """Return the counters that there are here: event, descriptor of the file, key."""
    return [
        (event, os.open(path, os.O_RDONLY | os.O_CLOEXEC), key) for event, path, key in COUNTERS if os.path.exists(path)
    ]


def read_counters(counters: list[tuple[str, int, bytes]]) -> list[bytes]:
    """Return what each file of ``counters`` says."""
    return [os.pread(fd, 4096, 0) for _, fd, _ in counters]


def limits_hit(counters: list[tuple[str, int, bytes]], before: list[bytes], after: list[bytes]) -> set[str]:
    """Return the events whose counter moved between two readings (which are mostly equal, byte for byte)."""

    def count(text: bytes, key: bytes) -> int:
        return next((int(line[len(key) :]) for line in text.splitlines() if line.startswith(key)), 0)

    if before == after:
        return set()
    readings = zip(counters, before, after, strict=True)
    return {event for (event, _, key), old, new in readings if count(old, key) != count(new, key)}


def processes() -> list[str]:
    """Return the process ids of everything but the runner, ended ones that nobody has reaped included."""
    return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def sweep() -> None:
    """Kill and reap everything but the runner."""
    while True:
        try:
            os.kill(-1, signal.SIGKILL)
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            continue
        except ProcessLookupError:
            return  # nobody is left, not even a zombie


def reap(main_pid: int) -> int | None:
    """Reap what has ended; return the exit code of ``main_pid`` if it is among it (128 + n after signal n)."""
    main_code = None
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return main_code
            if pid == main_pid:
                code = os.waitstatus_to_exitcode(status)
                main_code = 128 - code if code < 0 else code
    except ChildProcessError:
        return main_code


def die_first(pid: int) -> None:
    """If memory runs out, the command is to go before the runner."""
    try:
        file = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return  # it has ended already
    try:
        os.write(file, b"1000")
    except OSError:
        pass  # it has ended now
    finally:
        os.close(file)


def die() -> NoReturn:
    """The host is gone: kill all and end, which ends the container."""
    sweep()
    os._exit(0)
