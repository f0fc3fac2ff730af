"""One command in a sandbox, from its start to its answer (standard library only; sent in like ``runner.py``)."""

from __future__ import annotations

import os
import select
import signal
import time
from typing import Any

from agentft.sandbox.runner_files import CHUNK_BYTES
from agentft.sandbox.runner_processes import die, die_first, limits_hit, processes, read_counters, reap, sweep

WATCH_INTERVAL_S = 0.03
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  # as it starts; its children get the default back


class Call:
    """One command from start to end: its pipes, its clock, its caps."""

    def __init__(self, config: dict[str, Any], request: dict[str, Any], stdin: bytes) -> None:
        self.config, self.request, self.stdin = config, request, stdin
        self.out, self.err = bytearray(), bytearray()
        self.streams: dict[int, bytearray] = {}  # descriptor → what is kept of it
        self.held: list[int] = []  # the other ends: while they are open, the end of the command wakes nobody twice
        self.input: int | None = None  # descriptor of the command's stdin, until all is fed
        self.cap, self.total = request["output_bytes"], 0
        self.hits: set[str] = set()  # limits of the container that were hit: oom, pids
        self.code: int | None = None  # of a command that ended by itself
        self.stopped = ""  # why it was stopped: timeout, output_limit, oom
        self.started = time.monotonic()

    def run(self) -> tuple[dict[str, Any], bytes]:
        """Run it; return the answer and stdout + stderr."""
        before = read_counters(self.config["counters"])
        try:
            pid = self.start()
        except BlockingIOError:
            raise RuntimeError("cannot start a process: the limit is reached although nothing runs") from None
        except (OSError, ValueError) as error:
            return self.not_started(error)
        die_first(pid)
        self.attend(pid)
        duration_s = time.monotonic() - self.started
        sweep()  # whoever could still write is dead
        for fd in self.streams:
            while self.take(fd):
                pass
        self.hits.update(limits_hit(self.config["counters"], before, read_counters(self.config["counters"])))
        return self.answer(duration_s)

    def start(self) -> int:
        """Start the command in a session of its own; return its process id.

        ``posix_spawnp`` rather than ``subprocess``, which takes longer for the same. It looks in the folders of this
        process's own PATH and starts where this process stands.
        """
        request, stdin = self.request, None
        actions: list[tuple[Any, ...]] = []
        try:
            if self.stdin:
                stdin, self.input = os.pipe()
                os.set_blocking(self.input, False)
                actions.append((os.POSIX_SPAWN_DUP2, stdin, 0))
            else:
                actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
            for number, kept in ((1, self.out), (2, self.err)):
                stream, end = os.pipe()
                self.streams[stream] = kept
                self.held.append(end)
                os.set_blocking(stream, False)
                actions.append((os.POSIX_SPAWN_DUP2, end, number))
            os.environ["PATH"] = request["env"].get("PATH", os.defpath)
            os.chdir(os.path.normpath(os.path.join(self.config["workspace"], request["cwd"])))
            return os.posix_spawnp(
                request["argv"][0],
                request["argv"],
                request["env"],
                file_actions=actions,
                setsid=True,
                setsigdef=IGNORED_BY_PYTHON,
            )
        finally:
            os.chdir("/")
            if stdin is not None:
                os.close(stdin)

    def close(self) -> None:
        """Close the pipes, whatever became of the command. Once."""
        for fd in (*self.streams, *self.held, *(() if self.input is None else (self.input,))):
            os.close(fd)

    def not_started(self, error: Exception) -> tuple[dict[str, Any], bytes]:
        """Answer as a shell does: 127 if there is no such command, else 126."""
        reason = error.strerror if isinstance(error, OSError) else str(error)
        subject = getattr(error, "filename", None) or self.request["argv"][0]
        self.err += f"{subject}: {reason}\n".encode("utf-8", "replace")
        self.total, self.code = len(self.err), 127 if isinstance(error, FileNotFoundError) else 126
        return self.answer(time.monotonic() - self.started)

    def attend(self, main_pid: int) -> None:
        """Feed stdin, collect output, until the command ends or has to be stopped."""
        poller, unsent, wake = select.poll(), memoryview(self.stdin), self.config["wake"]
        poller.register(0, 0)  # only hang-up is of interest
        poller.register(wake, select.POLLIN)
        for fd in self.streams:
            poller.register(fd, select.POLLIN)
        if self.input is not None:
            poller.register(self.input, select.POLLOUT)
        deadline, watch = self.started + self.request["timeout_s"], self.config.get("watch")
        while self.code is None and not self.stopped:
            wait_s = deadline - time.monotonic()
            if wait_s <= 0:
                if watch:  # a bomb may have left this process no time to look before
                    self.sample(watch)
                self.stopped = self.stopped or "timeout"
                break
            wait_s = min(wait_s, WATCH_INTERVAL_S) if watch else wait_s
            for fd, _event in poller.poll(wait_s * 1000):
                if fd == 0:
                    die()
                elif fd == wake:
                    os.read(fd, 4096)
                    if watch:  # before the dead are reaped: they count for the kernel's limit
                        self.count(len(processes()), watch)
                    self.code = reap(main_pid)
                elif fd in self.streams:
                    self.take(fd)
                else:
                    unsent = feed(fd, unsent)
                    if not unsent:
                        poller.unregister(fd)
                        os.close(fd)
                        self.input = None
            if self.total > self.cap:
                self.stopped = "output_limit"
            elif watch and self.code is None:
                self.sample(watch)

    def take(self, fd: int) -> bool:
        """Read once; keep what fits under the cap. False if there is nothing."""
        try:
            data = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return False
        self.streams[fd] += data[: max(0, self.cap - self.total)]
        self.total += len(data)
        return True

    def sample(self, limits: dict[str, int]) -> None:
        """Add up resident memory and threads of everything that runs; what ends meanwhile counts as one thread."""
        names = processes()
        pages, threads = 0, len(names)
        for name in names:
            try:
                with open(f"/proc/{name}/statm", "rb", buffering=0) as file:
                    pages += int(file.read(256).split()[1])
                threads += max(1, len(os.listdir(f"/proc/{name}/task"))) - 1
            except (OSError, IndexError):
                continue  # it has just ended
        if pages * os.sysconf("SC_PAGE_SIZE") > limits["memory_bytes"]:
            self.hits.add("oom")
            self.stopped = "oom"
        self.count(threads, limits)

    def count(self, threads: int, limits: dict[str, int]) -> None:
        """Note whether ``threads`` and this process are about all that the limit allows."""
        if threads >= limits["pids"] - 2:
            self.hits.add("pids")

    def answer(self, duration_s: float) -> tuple[dict[str, Any], bytes]:
        """Name what happened. A limit that was hit is the status, unless the program coped and ended with 0."""
        status, code = self.stopped or "nonzero", self.code
        if self.total > self.cap:
            status, code = "output_limit", None
        elif code == 0:
            status = "ok"
        elif "oom" in self.hits:
            status, code = "oom", None if code == 128 + signal.SIGKILL else code
        elif "pids" in self.hits:
            status = "pids"
        answer = {
            "status": status,
            "exit_code": code,
            "duration_s": duration_s,
            "out": len(self.out),
            "err": len(self.err),
            "truncated": self.total > self.cap,
            "total_bytes": self.total,
            "hits": sorted(self.hits),
        }
        return answer, bytes(self.out + self.err)


def feed(fd: int, unsent: memoryview) -> memoryview:
    """Write what the pipe takes; return the rest (nothing if the program closed its stdin)."""
    try:
        return unsent[os.write(fd, unsent[:CHUNK_BYTES]) :]
    except BlockingIOError:
        return unsent
    except OSError:
        return unsent[:0]
