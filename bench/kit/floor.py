"""The floor: the same program from the same file system, started by a bare subprocess on the host.

A helper process changes its root to that of a running container (``/proc/<pid>/root``) and from then on only does
what any caller would: ``subprocess.run`` with both streams captured. Same binaries, same overlay, same environment as
in the sandbox; no namespace, no seccomp filter, no control group, no limit on output, nobody who cleans up. That needs
root and an engine on this host; otherwise the floor is the host's own python3, and the report says so.

    with Floor.of_container(pid) as floor:
        seconds = floor.call(("python3", "-c", "pass"))
        rate = floor.throughput(("python3", "-c", "pass"), threads=2, seconds=2.0)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class Floor:
    """A helper process that runs programs without any isolation and tells how long they took."""

    def __init__(self, root: str | None, env: Mapping[str, str], what: str) -> None:
        """``root``: the folder that is the programs' root; ``what``: how the report names this floor."""
        self.what = what
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, json.dumps({"root": root, "env": dict(env)})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @classmethod
    def of_container(cls, pid: int, env: Mapping[str, str]) -> Floor:
        """Return the floor in the file system of the container whose first process is ``pid`` on this host."""
        root = f"/proc/{pid}/root"
        if os.getuid() == 0 and Path(root, "usr/bin/python3").exists():
            return cls(root, env, "bare subprocess in the container's own file system (chroot)")
        return cls(None, env, "bare subprocess with the host's own python3 (another build than the image's)")

    def call(self, argv: tuple[str, ...]) -> float:
        """Run a program; return the seconds it took, start and collection of output included."""
        return float(self._ask(argv=argv)["seconds"])

    def throughput(self, argv: tuple[str, ...], *, threads: int, seconds: float) -> float:
        """Run a program over and over in ``threads`` threads; return calls a second."""
        return float(self._ask(argv=argv, threads=threads, seconds=seconds)["rate"])

    def __enter__(self) -> Floor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def rate_of(call: Any, *, threads: int, seconds: float) -> float:
    """Return how often ``call(thread)`` ends per second when ``threads`` threads repeat it for ``seconds``."""
    counts, begin = [0] * threads, threading.Barrier(threads + 1)
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        begin.wait()
        try:
            while time.perf_counter() < end:
                call(thread)
                counts[thread] += 1
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    started = time.perf_counter()
    end = started + seconds
    begin.wait()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    return sum(counts) / (time.perf_counter() - started)


def _serve() -> None:
    config = json.loads(sys.argv[1])
    if config["root"] is not None:
        os.chroot(config["root"])
    os.chdir("/")

    def run(argv: list[str]) -> None:
        done = subprocess.run(argv, capture_output=True, env=config["env"], check=False)
        if done.returncode != 0:
            raise SystemExit(f"the floor's program failed: {argv} {done.returncode} {done.stderr!r}")

    for line in sys.stdin:
        request = json.loads(line)
        argv = request["argv"]
        if "threads" in request:
            rate = rate_of(lambda thread, argv=argv: run(argv), threads=request["threads"], seconds=request["seconds"])
            print(json.dumps({"rate": rate}), flush=True)
            continue
        started = time.perf_counter()
        run(argv)
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    _serve()
