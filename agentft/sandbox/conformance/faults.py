"""Checks of faults (floor 2): sandboxes that freeze or die, engines that go away, trainers that are killed.

What fails here is never the program: the call ends as infra, nothing is left, and work goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agentft.errors import SandboxError
from agentft.sandbox.base import ExecRequest, ExecResult
from agentft.sandbox.conformance.check import NotRunError, Seen, Stage, brief, check
from agentft.sandbox.conformance.engines import EngineSubject, descendants, engine_of, open_engine, remove_leftovers_of
from agentft.sandbox.owner import start_time
from agentft.sandbox.pool import Pool

OWN_DAEMON_ONLY = {
    "local": "there is no daemon",
    "podman": "tried with a dockerd only",
    "podman without control groups": "tried with a dockerd only",
}
TRAINER = """
import sys, threading
from agentft.sandbox.base import ExecRequest
from agentft.sandbox.conformance.engines import open_engine
from agentft.sandbox.pool import Pool
backend, image, host, run_name, mode = sys.argv[1:]
engine = open_engine(backend, image=image, run_name=run_name, host=host or None)
print("ready" if mode == "create" else "", flush=True)
pool = Pool(engine, 2)
with pool.lease() as busy, pool.lease() as idle:
    if mode == "call":
        call = ExecRequest(argv=("bash", "-c", "setsid sleep 7177 & exec sleep 7177"), timeout_s=100)
        threading.Thread(target=busy.exec, args=(call,), daemon=True).start()
        idle.exec(ExecRequest(argv=("sleep", "0.3")))
    print("ready", flush=True)
    threading.Event().wait()
"""


@contextmanager
def trainer(subject: EngineSubject, mode: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that holds two sandboxes (or is about to create them) and wait until it says so."""
    arguments = (subject.backend, subject.image, subject.host or "", f"{subject.run_name}-trainer", mode)
    command = [sys.executable, "-c", TRAINER, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            while (line := process.stdout.readline()) != b"ready\n":
                if not line:
                    raise SandboxError("the trainer did not start")
            yield process
        finally:
            process.kill()


def running_inside() -> list[str]:
    """Return this machine's processes that the trainer's call started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes() == b"sleep\0007177\0":
                found.append(path.parent.name)
    return found


def gone(left: Callable[[], list[str]], within_s: float) -> tuple[list[str], float]:
    """Wait until nothing is left; return what is left nevertheless, and the seconds it took."""
    started = time.monotonic()
    while found := left():
        if time.monotonic() - started > within_s:
            break
        time.sleep(0.05)
    return found, time.monotonic() - started


def killed_trainer(stage: Stage, mode: str) -> Seen:
    """SIGKILL a trainer; its sandboxes must be gone within 2 s (5 s are allowed on a busy machine)."""
    subject = engine_of(stage)

    inside: list[tuple[int, str | None]] = []

    def left() -> list[str]:
        alive = [f"process {pid}" for pid, started in inside if start_time(pid) == started]
        return [*subject.containers(f"{subject.run_name}-trainer"), *running_inside(), *alive]

    with trainer(subject, mode) as process:
        inside += [(pid, start_time(pid)) for pid in descendants(process.pid)]
        before = len(left())
        process.send_signal(signal.SIGKILL)
        process.wait()
        found, seconds = gone(left, 5)
    return Seen(not found and before >= 2, f"{before} before, {len(found)} left after {seconds:.1f} s")


@check("faults", engines_only=True)
def trainer_killed_when_idle(stage: Stage) -> Seen:
    """SIGKILL of the trainer ends its waiting sandboxes within seconds."""
    return killed_trainer(stage, "idle")


@check("faults", engines_only=True)
def trainer_killed_in_a_call(stage: Stage) -> Seen:
    """SIGKILL of the trainer ends its sandboxes and what runs in them within seconds."""
    return killed_trainer(stage, "call")


@check("faults", engines_only=True)
def trainer_killed_in_create(stage: Stage) -> Seen:
    """Whenever a trainer is killed while it creates sandboxes, the starts that follow remove what is left."""
    subject = engine_of(stage)
    delays, left = (0.0, 0.03, 0.08, 0.15, 0.25), []

    def after_a_start() -> list[str]:  # the engine may finish a creation when the first of them has looked
        remove_leftovers_of(subject)
        return subject.containers(f"{subject.run_name}-trainer")

    for delay in delays:
        with trainer(subject, "create") as process:
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            process.wait()
        found, _ = gone(after_a_start, 5)
        left += found
    return Seen(not left, f"killed {len(delays)} times, {len(left)} left")


@check("faults", engines_only=True)
def frozen_sandbox(stage: Stage) -> Seen:
    """A sandbox whose process 1 is stopped is ended at the host's deadline; its call is infra."""
    with stage.fresh() as box:
        engine_of(stage).freeze(box)  # type: ignore[arg-type]
        started = time.monotonic()
        result = box.exec(ExecRequest(argv=("true",), timeout_s=0.2))
        seconds = time.monotonic() - started
        held = (result.status, result.exit_code) == ("infra", None) and seconds < stage.limits.grace_s + 3
        return Seen(held and not box.reusable, f"{result.status} after {seconds:.1f} s")


@check("faults", engines_only=True)
def sandbox_killed_in_a_call(stage: Stage) -> Seen:
    """A sandbox that dies in mid-call gives infra without an exit code, at once, and is not used again."""
    with stage.fresh() as box:
        subject = engine_of(stage)
        results: list[ExecResult] = []
        call = threading.Thread(target=lambda: results.append(box.exec(ExecRequest(argv=("sleep", "9")))))
        call.start()
        time.sleep(0.5)
        started = time.monotonic()
        subject.kill(box)  # type: ignore[arg-type]
        call.join(timeout=12)
        seconds = time.monotonic() - started
        again = box.exec(ExecRequest(argv=("true",)))
        held = [r.status for r in (*results, again)] == ["infra", "infra"] and results[0].exit_code is None
        return Seen(held and seconds < 5, f"{brief(results[0])[:40]} after {seconds:.1f} s")


@check("faults", engines_only=True)
def sandbox_killed_when_idle(stage: Stage) -> Seen:
    """The pool notices a dead sandbox at the first call (infra) and gives another one afterwards."""
    subject = engine_of(stage)
    pool = _pool(subject, 1)
    try:
        with pool.lease() as first:
            first.exec(ExecRequest(argv=("true",)))
            subject.kill(first)
            time.sleep(0.2)
            lost = first.exec(ExecRequest(argv=("true",)))
        with pool.lease() as second:
            found = second.exec(ExecRequest(argv=("echo", "x")))
        return Seen(lost.status == "infra" and found.stdout == "x\n", f"{lost.status}, then {brief(found)}")
    finally:
        pool.close()


@check("faults", engines_only=True)
def sixty_four_threads(stage: Stage) -> Seen:
    """64 threads that share two sandboxes are all answered, each with its own result."""
    pool, wrong = _pool(engine_of(stage), 2), []

    def session(number: int) -> None:
        try:
            with pool.lease() as lease:
                result = lease.exec(ExecRequest(argv=("sh", "-c", f"echo {number}; ls -A")))
                lease.write_files({"left": b"x"})
            if result.stdout != f"{number}\n":
                wrong.append(brief(result))
        except Exception as error:  # a thread has nobody to raise to
            wrong.append(str(error))

    threads = [threading.Thread(target=session, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    alive = sum(thread.is_alive() for thread in threads)
    pool.close()
    return Seen(not wrong and not alive, f"{64 - alive - len(wrong)} of 64 right {wrong[:1] or ''}".strip())


@check("faults", engines_only=True)
def cancelled_call(stage: Stage) -> Seen:
    """Closing the pool ends a running call (infra) and everything in it; nothing races what comes next."""
    subject, results = engine_of(stage), list[ExecResult]()
    pool = _pool(subject, 1)
    with contextlib.ExitStack() as held:
        box = held.enter_context(pool.lease())
        call = threading.Thread(target=lambda: results.append(box.exec(ExecRequest(argv=("sleep", "7177")))))
        call.start()
        time.sleep(0.4)
        pool.close()
        call.join(timeout=5)
    found, seconds = gone(running_inside, 5)
    held_ = bool(results) and results[0].status == "infra" and not found and not call.is_alive()
    return Seen(held_, f"{results[0].status if results else 'no answer'}, {len(found)} left after {seconds:.1f} s")


@check("faults", not_promised=OWN_DAEMON_ONLY, engines_only=True)
def daemon_killed_and_started(stage: Stage) -> Seen:
    """Daemon gone: a call goes on or is infra, a start fails within seconds; daemon back: the same pool works."""
    dockerd = _daemon(stage)
    engine = open_engine("docker", image=engine_of(stage).image, run_name=engine_of(stage).run_name, host=dockerd.host)
    pool = Pool(engine, 1)
    try:
        with pool.lease() as lease:
            before = lease.exec(ExecRequest(argv=("echo", "1")))
            dockerd.kill()
            started = time.monotonic()
            during = lease.exec(ExecRequest(argv=("echo", "2")))
            lease.retire()
        refused = ""
        try:
            with pool.lease():
                pass
        except SandboxError as error:
            refused = error.what
        seconds = time.monotonic() - started
        dockerd.start()
        after = _first_success(pool)
        honest = during.status == "infra" or (during.status, during.stdout) == ("ok", "2\n")
        held = before.stdout == "1\n" and honest and bool(refused) and after == "ok"
        return Seen(held and seconds < 20, f"{during.status}, then “{refused}”, in {seconds:.1f} s; afterwards {after}")
    finally:
        pool.close()


@check("faults", not_promised=OWN_DAEMON_ONLY, engines_only=True)
def full_disk(stage: Stage) -> Seen:
    """Full disk of the engine: running sandboxes go on, endless output writes nothing to it, starts fail typed."""
    dockerd = _daemon(stage)
    engine = open_engine("docker", image=engine_of(stage).image, run_name=engine_of(stage).run_name, host=dockerd.host)
    box = engine.start()
    try:
        used = dockerd.used()
        for _ in range(3):
            box.exec(ExecRequest(argv=("yes",)))
        grown = dockerd.used() - used
        filler = dockerd.fill()
        running = box.exec(ExecRequest(argv=("sh", "-c", "echo x > /workspace/x && cat /workspace/x")))
        refused = "it started"
        try:
            engine.start().close()
        except SandboxError as error:
            refused = error.what
        filler.unlink()
        again = engine.start()
        after = again.exec(ExecRequest(argv=("echo", "after")))
        again.close()
        held = running.stdout == "x\n" and grown < 1 << 20 and after.stdout == "after\n"
        return Seen(held, f"{grown} bytes written by output; {brief(running)}; start: {refused}; then {brief(after)}")
    finally:
        box.close()
        engine.close()


@check("faults", engines_only=True)
def nothing_left(stage: Stage) -> Seen:
    """After the whole run containers, volumes, networks, processes, mounts and files are as before it."""
    subject = engine_of(stage)
    stage.end()

    def left() -> list[str]:
        now = subject.traces()
        more = [f"{kind}: {name}" for kind, names in now.items() for name in names - subject.before[kind]]
        return more + [f"bridge {name} is lost" for name in subject.before["bridges"] - now["bridges"]]

    found, _ = gone(left, 8)
    return Seen(not found, "; ".join(found[:5]) or f"{len(subject.before)} kinds as before")


def _pool(subject: EngineSubject, workers: int) -> Pool:
    return Pool(
        open_engine(subject.backend, image=subject.image, run_name=subject.run_name, host=subject.host), workers
    )


def _daemon(stage: Stage):  # type: ignore[no-untyped-def]
    """Return the stage's own dockerd, started when it is first needed; the stage closes it."""
    from agentft.sandbox.conformance.dockerd import OwnDockerd

    subject = engine_of(stage)
    if subject.name != "docker":
        raise NotRunError(f"no dockerd of {subject.name}")
    address = subject.host or os.environ.get("DOCKER_HOST") or ""
    if address.startswith("tcp"):
        raise NotRunError("the engine is on another machine")
    found = stage.held.get("dockerd")
    if found is None:
        found = stage.held["dockerd"] = OwnDockerd(subject.image, subject.host)
    return found


def _first_success(pool: Pool, within_s: float = 30.0) -> str:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with contextlib.suppress(SandboxError), pool.lease() as lease:
            result = lease.exec(ExecRequest(argv=("echo", "back")))
            if result.stdout == "back\n":
                return "ok"
        time.sleep(0.2)
    return ""
