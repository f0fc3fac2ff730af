"""The runner: PID 1 of every sandbox (standard library only).

The host sends the source of this file and its siblings on the command line, so any image that has a Python 3.11 runs
it, and runner and host can never differ. It reads requests on stdin and answers on stdout.

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

import json
import marshal
import os
import select
import signal
import struct
import sys
import time
from typing import Any, NoReturn

from agentft.sandbox.runner_files import CHUNK_BYTES, read_file, wipe, write_files
from agentft.sandbox.runner_filter import become_undumpable, drop_capabilities, filter_system_calls

HEADER = struct.Struct(">II")
WATCH_INTERVAL_S = 0.03
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  # as it starts; its children get the default back
COUNTERS = (  # event, file of cgroup v2 or v1, key
    ("oom", "/sys/fs/cgroup/memory.events", b"oom_kill "),
    ("pids", "/sys/fs/cgroup/pids.events", b"max "),
    ("oom", "/sys/fs/cgroup/memory/memory.oom_control", b"oom_kill "),
    ("pids", "/sys/fs/cgroup/pids/pids.events", b"max "),
)


def main() -> None:
    """Protect the process, say hello, serve until the host hangs up.

    The configuration (JSON, the first argument) has ``workspace``; ``wipe``, the folders that a reset
    empties; optionally ``uid``, the user to become; ``rlimits``, name without RLIMIT_ → value; and ``watch``
    {memory_bytes, pids}, limits to enforce by sampling where no cgroup does.
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
    send({"id": "hello", "uid": os.getuid(), "python": sys.version.split()[0]})
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
                return Call(config, request, body).run()
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
            self.close()
            return self.not_started(error)
        die_first(pid)
        self.attend(pid)
        duration_s = time.monotonic() - self.started
        sweep()  # whoever could still write is dead
        for fd in self.streams:
            while self.take(fd):
                pass
        self.close()
        self.hits.update(limits_hit(self.config["counters"], before, read_counters(self.config["counters"])))
        return self.answer(duration_s)

    def start(self) -> int:
        """Start the command in a session of its own; return its process id.

        ``posix_spawnp`` rather than ``subprocess``, which takes a tenth of a millisecond more. It looks in the folders
        of this process's own PATH and starts where this process stands.
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
        """Close this side's ends of the pipes."""
        for fd in (*self.streams, *self.held, *(() if self.input is None else (self.input,))):
            os.close(fd)
        self.streams, self.held, self.input = {}, [], None

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


def feed(fd: int, unsent: memoryview) -> memoryview:
    """Write what the pipe takes; return the rest (nothing if the program closed its stdin)."""
    try:
        return unsent[os.write(fd, unsent[:CHUNK_BYTES]) :]
    except BlockingIOError:
        return unsent
    except OSError:
        return unsent[:0]


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


def die() -> NoReturn:
    """The host is gone: kill all and end, which ends the container."""
    sweep()
    os._exit(0)


if __name__ == "__main__":
    main()
