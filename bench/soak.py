"""Thousands of calls with every kind of ending: nothing is lost, nothing is left, nothing grows.

    python bench/soak.py                                  # 5,000 calls in one container, 20,000 over the pool
    python bench/soak.py --one 100 --pool 200 --json /tmp/soak.json
    python bench/soak.py --backend local

Every call prints a word of its own, and every result is compared with what it must be: a blank output, a result of
another call or a fabricated exit code cannot hide. Sessions over the pool also read back a file. Exit code 0 only if
every gate holds. docs/benchmarks.md says how to read it.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kit.measure import RESULTS, Gate, Samples, machine, report, wide_console
from rich.table import Table

import docker
from agentft.errors import AgentFTError
from agentft.sandbox.base import ExecRequest, ExecResult, Lease, Limits, Status
from agentft.sandbox.pool import Pool, open_sandbox

RUN_NAME = "bench-soak"
LIMITS = Limits(memory_mib=96, pids=64, output_bytes=200_000, workspace_mib=16, tmp_mib=16, shm_mib=4)
CALLS_A_SESSION = 10
WARM_UP = 0.2
MOST_MIB, MOST_RUNNER_MIB = 24.0, 4.0
MOST_DESCRIPTORS, MOST_THREADS = 12, 4  # connections and threads that are first needed to replace a container
SETTLE_S = 10.0
BIG = 100_000
console = wide_console()


@dataclass(frozen=True)
class Kind:
    """One way for a call to end. ``script`` prints ``@``, which stands for a word of this call alone."""

    share: float
    status: Status
    exit_code: int | None
    script: str
    stdout: str = "@\n"
    stderr: str = ""
    timeout_s: float | None = None
    exact: bool = True  # False: the program is stopped somewhere in its output
    argv: tuple[str, ...] = ("sh", "-c")


KINDS = {
    "ok": Kind(55, "ok", 0, "echo @"),
    "python": Kind(2, "ok", 0, "print('@')", argv=("python3", "-c")),
    "nonzero": Kind(15, "nonzero", 3, "echo @; echo why >&2; exit 3", stderr="why\n"),
    "killed": Kind(2, "nonzero", 137, "echo @; kill -9 $$"),
    "binary": Kind(8, "ok", 0, r"printf '\000\377\033[1m@\n\200'", "\0\ufffd\x1b[1m@\n\ufffd"),
    "large": Kind(4, "ok", 0, f"head -c {BIG} /dev/zero | tr '\\0' x; echo @", "x" * BIG + "@\n"),
    "survivors": Kind(8, "ok", 0, "setsid sleep 99 & (nohup sleep 99 >/dev/null 2>&1 &) ; (sleep 99 &) ; echo @"),
    "output_limit": Kind(2, "output_limit", None, "echo @; yes", "@\ny\ny\n", exact=False),
    "timeout": Kind(0.6, "timeout", None, "echo @; sleep 99", timeout_s=0.8),
    "oom": Kind(0.05, "oom", None, "print('@', flush=True)\nx = 'y' * (1 << 28)", argv=("python3", "-c")),
}


@dataclass
class Counts:
    """What came back, over all threads."""

    by_kind: Counter[str] = field(default_factory=Counter)
    blank: int = 0
    infra: int = 0
    wrong: list[str] = field(default_factory=list)
    left: int = 0  # processes, zombies included, that were still there in the next call

    def note(self, name: str, word: str, result: ExecResult) -> None:
        """Compare a result with what this kind of call must give."""
        kind = KINDS[name]
        expected = kind.stdout.replace("@", word)
        self.by_kind[name] += 1
        self.infra += result.status == "infra"
        self.blank += not result.stdout
        same = result.stdout == expected if kind.exact else result.stdout.startswith(expected)
        good = same and result.stderr == kind.stderr
        if not (good and (result.status, result.exit_code) == (kind.status, kind.exit_code)) and len(self.wrong) < 20:
            shown = (result.status, result.exit_code, result.stdout[:80], result.stderr[:200])
            self.wrong.append(f"{name}: {shown!r}")


@dataclass(frozen=True)
class State:
    """What must not grow: this process, and what the engine holds for it."""

    rss_mib: float
    fds: int
    threads: int
    containers: int
    volumes: int
    runner_mib: float | None = None

    @classmethod
    def now(cls, client: Any, lease: Lease | None = None) -> State:
        """Look at this process, the engine (if there is one) and the runner behind ``lease``."""
        gc.collect()
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        containers = volumes = 0
        if client is not None:
            labels = [container.attrs["Labels"] for container in client.containers.list(all=True, sparse=True)]
            containers = sum((label or {}).get("agentft.pid") == str(os.getpid()) for label in labels)
            volumes = len(client.volumes.list())
        runner = None if lease is None else _runner_mib(lease)
        fds = len(os.listdir("/proc/self/fd"))
        return cls(round(rss, 1), fds, threading.active_count(), containers, volumes, runner)

    @classmethod
    def settled(cls, client: Any, containers: int) -> State:
        """Look when at most ``containers`` are there, or after ten seconds: replacing and removing take a moment."""
        deadline = time.monotonic() + SETTLE_S
        while (state := cls.now(client)).containers > containers and time.monotonic() < deadline:
            time.sleep(0.2)
        return state


def main() -> int:
    options = _options()
    client = docker.from_env(timeout=60) if options.backend == "docker" else None
    samples, counts, states = Samples(), Counts(), dict[str, State]()
    context: dict[str, Any] = {"backend": options.backend, "machine": machine()}
    try:
        states["before"] = State.now(client)
        pool = open_sandbox(options.backend, options.image, workers=options.workers, limits=LIMITS, run_name=RUN_NAME)
        try:
            _one_container(pool, options.one, counts, states, client, samples)
            _over_the_pool(pool, options, counts, states, client, samples)
        finally:
            pool.close()
        del pool
        states["after"] = State.settled(client, states["before"].containers)
    except AgentFTError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        if client is not None:
            client.close()
    context |= {"by_kind": dict(counts.by_kind), "wrong": counts.wrong, "machine_after": machine()}
    context["states"] = {name: asdict(state) for name, state in states.items()}
    _show(counts, states, samples)
    return report(_gates(options, counts, states), samples, context, options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("docker", "local"), default="docker")
    parser.add_argument("--image", default="python", help="image as `agentft sandbox build` makes it")
    parser.add_argument("--one", type=int, default=5000, help="calls in one container")
    parser.add_argument("--pool", type=int, default=20000, help="calls over the pool")
    parser.add_argument("--workers", type=int, default=4, help="containers of the pool, and threads that use them")
    parser.add_argument("--quick", action="store_true", help="300 calls: a smoke run")
    parser.add_argument("--json", type=Path, default=RESULTS / "soak.json", help="where the figures go")
    options = parser.parse_args()
    if options.quick:
        options.one, options.pool = 100, 200
    return options


# The calls


def _one_container(
    pool: Pool, calls: int, counts: Counts, states: dict[str, State], client: Any, samples: Samples
) -> None:
    chance = random.Random(1)
    with pool.lease() as lease, console.status(f"{calls} calls in one container"):
        started = time.perf_counter()
        for number in range(calls):
            _call(lease, f"one{number}", chance, counts)
            if number == int(calls * WARM_UP):
                states["one container, warm"] = State.now(client, lease)
        samples.add("one container, calls/s", calls / (time.perf_counter() - started))
        states["one container, end"] = State.now(client, lease)


def _over_the_pool(
    pool: Pool,
    options: argparse.Namespace,
    counts: Counts,
    states: dict[str, State],
    client: Any,
    samples: Samples,
) -> None:
    sessions = max(1, options.pool // CALLS_A_SESSION)
    warm = int(sessions * WARM_UP)
    with ThreadPoolExecutor(options.workers) as threads, console.status(f"{options.pool} calls over the pool"):
        started = time.perf_counter()
        parts = [range(warm), range(warm, sessions)]
        for part, name in zip(parts, ("pool, warm", "pool, end"), strict=True):
            for own in threads.map(lambda number: _session(pool, number), part):
                counts.by_kind += own.by_kind
                counts.wrong += own.wrong
                counts.blank, counts.infra = counts.blank + own.blank, counts.infra + own.infra
                counts.left += own.left
            states[name] = State.settled(client, options.workers)
        samples.add("pool, calls/s", sessions * CALLS_A_SESSION / (time.perf_counter() - started))


def _session(pool: Pool, number: int) -> Counts:
    """Run ten calls in a leased container that must be clean, and read a file back."""
    chance, counts = random.Random(number), Counts()
    with pool.lease() as lease:
        seen = lease.exec(ExecRequest(argv=("sh", "-c", "ls -A /workspace /tmp /dev/shm | grep -v :$")))
        if seen.stdout.strip():
            counts.wrong.append(f"session {number} found files: {seen.stdout[:200]!r}")
        content = f"session {number}".encode()
        lease.write_files({"own.txt": content})
        for row in range(CALLS_A_SESSION):
            _call(lease, f"s{number}c{row}", chance, counts)
        if lease.read_file("own.txt") != content:
            counts.wrong.append(f"session {number} read another file")
    return counts


def _call(lease: Lease, word: str, chance: random.Random, counts: Counts) -> None:
    (name,) = chance.choices(list(KINDS), [kind.share for kind in KINDS.values()])
    kind = KINDS[name]
    request = ExecRequest(argv=(*kind.argv, kind.script.replace("@", word)), timeout_s=kind.timeout_s)
    counts.note(name, word, lease.exec(request))
    if name in ("survivors", "timeout", "oom"):
        counts.left += _processes(lease) - 2  # the runner and the shell that looks


def _processes(lease: Lease) -> int:
    """Return how many processes there are inside, zombies included."""
    result = lease.exec(ExecRequest(argv=("sh", "-c", "set -- /proc/[0-9]*; echo $#")))
    return int(result.stdout)


def _runner_mib(lease: Lease) -> float:
    """Return the resident memory of process 1 inside."""
    result = lease.exec(ExecRequest(argv=("grep", "VmRSS", "/proc/1/status")))
    return round(int(result.stdout.split()[1]) / 1024, 1)


# Report


def _gates(options: argparse.Namespace, counts: Counts, states: dict[str, State]) -> list[Gate]:
    warm, end, after = states["pool, warm"], states["pool, end"], states["after"]
    first, last = states["one container, warm"], states["one container, end"]
    grown = (last.runner_mib or 0.0) - (first.runner_mib or 0.0)
    sessions = max(1, options.pool // CALLS_A_SESSION)
    return [
        Gate("calls", counts.by_kind.total(), options.one + sessions * CALLS_A_SESSION, "higher"),
        Gate("wrong results", len(counts.wrong), 0, "lower"),
        Gate("blank outputs", counts.blank, 0, "lower"),
        Gate("lost (infra)", counts.infra, 0, "lower"),
        Gate("processes or zombies left behind a call", counts.left, 0, "lower"),
        Gate("containers beyond the pool's", end.containers - options.workers, 0, "lower"),
        Gate("containers left", after.containers - states["before"].containers, 0, "lower"),
        Gate("volumes left", after.volumes - states["before"].volumes, 0, "lower"),
        Gate("descriptors grown over the pool run", end.fds - warm.fds, MOST_DESCRIPTORS, "lower"),
        Gate("threads grown over the pool run", end.threads - warm.threads, MOST_THREADS, "lower"),
        Gate("descriptors left after close", after.fds - states["before"].fds, 4, "lower"),
        Gate("MiB grown over the pool run", round(end.rss_mib - warm.rss_mib, 1), MOST_MIB, "lower"),
        Gate("MiB grown in the runner", round(grown, 1), MOST_RUNNER_MIB, "lower"),
    ]


def _show(counts: Counts, states: dict[str, State], samples: Samples) -> None:
    table = Table("when", "RSS, MiB", "runner, MiB", "descriptors", "threads", "containers", "volumes")
    table.title, table.title_justify = "What must not grow", "left"
    for name, state in states.items():
        runner = "-" if state.runner_mib is None else f"{state.runner_mib:.1f}"
        rest = (state.fds, state.threads, state.containers, state.volumes)
        table.add_row(name, f"{state.rss_mib:.1f}", runner, *map(str, rest))
    console.print(table)
    kinds = ", ".join(f"{name} {count}" for name, count in counts.by_kind.most_common())
    console.print(f"{counts.by_kind.total()} calls: {kinds}")
    for name, rates in samples.raw.items():
        console.print(f"{name}: {rates[0]:.0f}")
    for wrong in counts.wrong[:10]:
        console.print(f"[red]wrong: {wrong}", markup=True)


if __name__ == "__main__":
    sys.exit(main())
