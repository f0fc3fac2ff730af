"""How fast the sandbox is, beside a bare process, the Docker API and other sandboxes, in one interleaved run.

    python bench/sandbox.py                 # about four minutes
    python bench/sandbox.py --quick         # half a minute: does everything run, rough figures
    python bench/sandbox.py --no-peers --json /tmp/sandbox.json

Every round runs all paths, in a random order, so that whatever else the machine does hits all of them alike.
Medians with 95 % bootstrap intervals. Exit code 0 only if every gate holds. docs/benchmarks.md says how to read it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kit.floor import Floor, rate_of
from kit.measure import RESULTS, Gate, Samples, machine, report, wide_console
from kit.peers import PEERS, Peer, PeerError
from rich.markup import escape
from rich.table import Table

import docker
from agentft.errors import AgentFTError, SandboxError
from agentft.sandbox.base import ExecRequest, Lease, Limits
from agentft.sandbox.container import BASE_ENV
from agentft.sandbox.docker import DockerEngine, image_reference
from agentft.sandbox.images import ensure_image
from agentft.sandbox.pool import Pool, open_sandbox

PROGRAMS = {"true": ("true",), "python": ("python3", "-c", "pass")}
THREADS = (1, 2, 4, 8)
FLOOR, EXEC, RUN = "floor", "docker exec (SDK)", "docker run (SDK)"
OURS, RELAYED, LOCAL = "agentft", "agentft over the engine", "agentft bubblewrap"
FAST = (FLOOR, OURS, RELAYED, LOCAL)
FAST_PER_ROUND, ROUNDS_PER_RUN = 4, 5
FILES = {f"src/package{i // 20}/module{i}.py": b"VALUE = 1\n" * 40 for i in range(200)}
HARDENED: dict[str, Any] = {
    "network_mode": "none", "cap_drop": ["ALL"], "security_opt": ["no-new-privileges"], "user": "10001:10001",
    "read_only": True, "tmpfs": {"/workspace": "size=64m", "/tmp": "size=64m"}, "shm_size": "16m",
    "pids_limit": 128, "mem_limit": "512m", "memswap_limit": "512m", "nano_cpus": 1_000_000_000,
}  # fmt: skip
"""How the containers of the Docker API's own paths are locked down: as ours are."""

Call = Callable[[], float]
console = wide_console()


def main() -> int:
    options = _options()
    try:
        ensure_image(options.image)
        return _run(options)
    except AgentFTError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    image, quick = image_reference(options.image), options.quick
    samples, problems = Samples(), dict[str, str]()
    context: dict[str, Any] = {"image": image, "quick": quick, "machine": machine(), "peer_problems": problems}
    with ExitStack() as stack:
        client = docker.from_env(timeout=60)
        stack.callback(client.close)
        plain = client.containers.run(image, ["sleep", "infinity"], detach=True, environment=dict(BASE_ENV), **HARDENED)
        stack.callback(plain.remove, force=True, v=True)
        plain.reload()
        floor = stack.enter_context(Floor.of_container(plain.attrs["State"]["Pid"], BASE_ENV))
        context["floor"] = floor.what
        pool = _open(stack, "docker", options.image, max(THREADS))
        pools = {OURS: pool, RELAYED: _open_relayed(stack, options.image)}
        with ExitStack() as calls:
            paths = _own_paths(calls, floor, pools, problems)
            paths |= _docker_paths(client, plain, image)
            if options.peers:
                paths |= _peer_paths(calls, image, problems)
            _measure_calls(samples, paths, options.rounds)
        _measure_reset(samples, pool, 10 if quick else 60)
        _measure_acquire(samples, pool, 100 if quick else 1000)
        _measure_throughput(samples, floor, pools, *((1, 0.4) if quick else (8, 1.0)))
    context["machine_after"] = machine()
    _show_calls(samples, problems, context["floor"])
    _show_rest(samples)
    return report(_gates(samples, options.peers), samples, context, options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default="python", help="image as `agentft sandbox build` makes it")
    parser.add_argument("--rounds", type=int, help="rounds of all paths (default 60, with --quick 4)")
    parser.add_argument("--quick", action="store_true", help="few samples: a smoke run")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="without SWE-ReX and llm-sandbox")
    parser.add_argument("--json", type=Path, default=RESULTS / "sandbox.json", help="where the figures go")
    options = parser.parse_args()
    options.rounds = options.rounds or (4 if options.quick else 60)
    return options


# Paths: name → a call that returns seconds


def _open(stack: ExitStack, backend: Any, image: str, workers: int) -> Pool:
    pool = open_sandbox(backend, image, workers=workers, limits=Limits(), run_name="bench-sandbox")
    stack.callback(pool.close)
    return pool


def _open_relayed(stack: ExitStack, image: str) -> Pool:
    """Open a pool whose calls the engine relays, as it does for hosts on other machines."""
    engine = DockerEngine(image=image, limits=Limits(), run_name="bench-sandbox")
    engine.direct = False
    pool = Pool(engine, max(THREADS))
    stack.callback(pool.close)
    return pool


def _own_paths(stack: ExitStack, floor: Floor, pools: dict[str, Pool], problems: dict[str, str]) -> dict[str, Call]:
    paths: dict[str, Call] = {}
    for program, argv in PROGRAMS.items():
        paths[f"{FLOOR}/{program}"] = functools.partial(floor.call, argv)
    try:
        if shutil.which("bwrap") is None:
            raise SandboxError("bubblewrap is not installed")
        pools = pools | {LOCAL: _open(stack, "local", "", 1)}
    except SandboxError as error:
        problems[LOCAL] = error.what
    for name, pool in pools.items():
        lease = stack.enter_context(pool.lease())
        for program, argv in PROGRAMS.items():
            paths[f"{name}/{program}"] = functools.partial(_timed, functools.partial(_exec, lease, argv))
    return paths


def _docker_paths(client: Any, plain: Any, image: str) -> dict[str, Call]:
    def execute(argv: tuple[str, ...]) -> None:
        done = plain.exec_run(list(argv), demux=True)
        assert done.exit_code == 0, done

    def run(argv: tuple[str, ...]) -> None:
        client.containers.run(image, list(argv), environment=dict(BASE_ENV), remove=True, stderr=True, **HARDENED)

    paths: dict[str, Call] = {}
    for program, argv in PROGRAMS.items():
        paths[f"{EXEC}/{program}"] = functools.partial(_timed, functools.partial(execute, argv))
        paths[f"{RUN}/{program}"] = functools.partial(_timed, functools.partial(run, argv))
    return paths


def _peer_paths(stack: ExitStack, image: str, problems: dict[str, str]) -> dict[str, Call]:
    """Return the peers' calls; a peer that cannot run here goes to ``problems`` with its reason."""
    found: dict[str, Call] = {}
    for name, package in PEERS.items():
        try:
            console.print(f"starting {name}")
            peer = stack.enter_context(Peer(name, image))
            paths: dict[str, Call] = {}
            for path in package.paths:
                for program, argv in PROGRAMS.items():
                    if (path, program) != ("run", "true"):  # llm-sandbox's run takes Python code only
                        paths[f"{name} {path}/{program}"] = functools.partial(peer.call, path, argv)
            for call in paths.values():
                call()
            found |= paths
        except PeerError as error:
            problems[name] = str(error)
            console.print(f"[red]{name} cannot run here:[/] {escape(str(error))}")
    return found


def _timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _exec(lease: Lease, argv: tuple[str, ...]) -> None:
    result = lease.exec(ExecRequest(argv=argv))
    assert result.status == "ok", result


# Measurements


def _measure_calls(samples: Samples, paths: dict[str, Call], rounds: int) -> None:
    order, chance = list(paths), random.Random(1)
    for call in paths.values():
        call()  # warm
    with console.status("calls") as status:
        for turn in range(rounds):
            status.update(f"calls: round {turn + 1} of {rounds}")
            for part in range(FAST_PER_ROUND):
                chance.shuffle(order)
                for name in order:
                    fast, runs = name.startswith(FAST), name.startswith(RUN)
                    if fast or (part == 0 and not (runs and turn % ROUNDS_PER_RUN)):
                        samples.add(name, paths[name]())


def _measure_reset(samples: Samples, pool: Pool, count: int) -> None:
    """Time the reset of a workspace of 200 files that a program has just used."""
    with pool.lease() as lease:
        for _ in range(count):
            samples.add("write 200 files", _timed(functools.partial(lease.write_files, FILES)))
            _exec(lease, ("python3", "-c", "open('/tmp/left', 'w').write('x' * 100000)"))
            samples.add("reset", _timed(lease.reset))
        _exec(lease, ("true",))


def _measure_acquire(samples: Samples, pool: Pool, count: int) -> None:
    """Time taking a clean container from the warm pool; every lease runs a program."""
    for _ in range(count):
        context = pool.lease()
        started = time.perf_counter()
        with context as lease:
            samples.add("acquire", time.perf_counter() - started)
            _exec(lease, ("true",))


def _measure_throughput(samples: Samples, floor: Floor, pools: dict[str, Pool], repeats: int, seconds: float) -> None:
    argv = PROGRAMS["python"]
    for _ in range(repeats):
        for threads in THREADS:
            for name, pool in pools.items():
                with ExitStack() as stack:
                    leases = [stack.enter_context(pool.lease()) for _ in range(threads)]
                    rate = rate_of(lambda thread, to=leases: _exec(to[thread], argv), threads=threads, seconds=seconds)
                samples.add(f"{name} calls/s at {threads}", rate)
            samples.add(f"{FLOOR} calls/s at {threads}", floor.throughput(argv, threads=threads, seconds=seconds))


# Report


def _gates(samples: Samples, peers: bool) -> list[Gate]:
    gates = [Gate("warm python call / floor", _ratio(samples, f"{OURS}/python", f"{FLOOR}/python"), 1.25, "lower")]
    for threads in THREADS:
        if threads <= len(os.sched_getaffinity(0)):
            share = _ratio(samples, f"{OURS} calls/s at {threads}", f"{FLOOR} calls/s at {threads}")
            gates.append(Gate(f"throughput at {threads} / floor", share, 0.9, "higher"))
    gates.append(Gate("reset of 200 files, ms", samples.quantile("reset").value * 1000, 10, "lower"))
    gates.append(Gate("acquire p99, ms", samples.quantile("acquire", 0.99).value * 1000, 5, "lower"))
    documented = {name: f"{name} {package.documented}" for name, package in PEERS.items()} if peers else {}
    for path in (*documented.values(), EXEC, RUN):
        for program in PROGRAMS:
            gates.append(Gate(f"{path}, {program} / ours", _slower(samples, path, program), 5, "higher"))
    return gates


def _slower(samples: Samples, path: str, program: str) -> float | None:
    return _ratio(samples, f"{path}/{program}", f"{OURS}/{program}")


def _ratio(samples: Samples, name: str, to: str) -> float | None:
    return samples.ratio(name, to).value if name in samples else None


def _show_calls(samples: Samples, problems: dict[str, str], floor: str) -> None:
    table = Table("path", title="One warm call, ms: median [95 %]", title_justify="left")
    for program in PROGRAMS:
        for heading in (program, "/ floor", "/ ours"):
            table.add_column(heading, justify="right")
    peers = [f"{name} {path}" for name, package in PEERS.items() for path in package.paths]
    for path in (*FAST, EXEC, *peers, RUN):
        row = [path]
        if not any(f"{path}/{program}" in samples for program in PROGRAMS):
            continue
        for program in PROGRAMS:
            name = f"{path}/{program}"
            row.append(samples.quantile(name).show(2, 1000) if name in samples else "-")
            for base in (FLOOR, OURS):
                ratio = _ratio(samples, name, f"{base}/{program}")
                row.append("-" if ratio is None or path == base else f"{ratio:.2f}")
        table.add_row(*row)
    console.print(table)
    for name, problem in problems.items():
        console.print(f"[red]{name} could not be measured here:[/] {escape(problem.strip().splitlines()[-1])}")
    console.print(f"floor: {floor}; {machine()['cores']} cores, load {machine()['load_1min']}")
    if machine()["nice"] > 0:
        console.print("[yellow]This process is nice and so is its floor; containers belong to the engine and are not.")


def _show_rest(samples: Samples) -> None:
    table = Table("threads", FLOOR, title="python3 -c pass, calls/s", title_justify="left")
    for path in (OURS, RELAYED):
        table.add_column(path)
        table.add_column("share of the floor")
    for threads in THREADS:
        floor, *ours = (f"{path} calls/s at {threads}" for path in (FLOOR, OURS, RELAYED))
        shown = [text for path in ours for text in (samples.quantile(path).show(1), samples.ratio(path, floor).show(3))]
        table.add_row(str(threads), samples.quantile(floor).show(1), *shown)
    console.print(table)
    table = Table("step", "p50", "p99", title="Between sessions, ms", title_justify="left")
    for name in ("acquire", "reset", "write 200 files"):
        table.add_row(name, *(samples.quantile(name, share).show(2, 1000) for share in (0.5, 0.99)))
    console.print(table)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
