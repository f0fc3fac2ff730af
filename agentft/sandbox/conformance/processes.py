"""Checks of processes (floor 2): survivors, bombs, and attacks on process 1."""

from __future__ import annotations

import time

from agentft.sandbox.conformance.check import ATTEMPTS, Seen, Stage, brief, check, refused
from agentft.sandbox.runner_filter import DENIED, IOPRIO_SET, NOT_ON_THE_RUNNER

BEAT = "while true; do echo x >> /workspace/beat; sleep 0.05; done"
"""A survivor that can be noticed: it writes to the workspace all the time."""

OTHERS = """
import os
mine = os.getpid()
others = [pid for pid in os.listdir('/proc') if pid.isdigit() and int(pid) not in (1, mine)]
print(len(others), *(open(f'/proc/{pid}/cmdline').read().replace(chr(0), ' ')[:40] for pid in others))
"""


def survivors(stage: Stage, start: str, timeout_s: float = 10.0) -> Seen:
    """Run what leaves a survivor behind; then nothing may run, and nothing may be written any more."""
    first = stage.sh(start, timeout_s=timeout_s)
    others = stage.python(OTHERS)
    growth = stage.sh(
        "a=$(cat beat 2>/dev/null | wc -l); sleep 0.3; b=$(cat beat 2>/dev/null | wc -l); echo $((b - a))"
    )
    held = first.status != "infra" and others.stdout.strip() == "0" and growth.stdout == "0\n"
    text = f"{first.status}; {others.stdout.strip()} others; {growth.stdout.strip()} writes later"
    return Seen(held, text if others.stdout else f"{text}; {brief(others)}")


@check("processes")
def survivor_by_setsid(stage: Stage) -> Seen:
    """A process in a session of its own ends with its call."""
    return survivors(stage, f"setsid bash -c '{BEAT}' >/dev/null 2>&1 & sleep 0.2")


@check("processes")
def survivor_by_double_fork(stage: Stage) -> Seen:
    """A daemon by the book (fork, setsid, fork, streams closed) ends with its call."""
    return survivors(stage, f"(setsid bash -c '({BEAT}) >/dev/null 2>&1 </dev/null &' &) ; sleep 0.2")


@check("processes")
def survivor_by_nohup(stage: Stage) -> Seen:
    """nohup and disown do not save a process."""
    return survivors(stage, f"nohup bash -c '{BEAT}' >/dev/null 2>&1 & disown; sleep 0.2")


@check("processes")
def survivor_at_exit(stage: Stage) -> Seen:
    """A process started by an exit handler, after the program's work, ends with the call."""
    code = f"import atexit, subprocess as s; atexit.register(lambda: s.Popen(['setsid', 'bash', '-c', '''{BEAT}''']))"
    return survivors(stage, f'python3 -c "{code}" >/dev/null 2>&1')


@check("processes")
def survivors_of_a_timeout(stage: Stage) -> Seen:
    """After a timeout the whole tree is dead, also what left its session and its process group."""
    return survivors(stage, f"setsid bash -c '{BEAT}' & ({BEAT}) & sleep 60", timeout_s=0.5)


@check("processes")
def ignored_signals(stage: Stage) -> Seen:
    """A program that ignores every signal, and one that stops itself, are ended at the deadline."""
    ignore = "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    ignore += "    except (OSError, ValueError): pass\ntime.sleep(60)"
    started = time.monotonic()
    results = [stage.python(ignore, timeout_s=0.7), stage.sh("kill -STOP $$", timeout_s=0.4)]
    seconds = time.monotonic() - started
    others = stage.python(OTHERS).stdout.strip()
    held = [result.status for result in results] == ["timeout"] * 2 and seconds < 4 and others == "0"
    return Seen(held, f"{results[0].status}, {results[1].status} after {seconds:.1f} s; {others} others")


@check("processes")
def fork_bomb(stage: Stage) -> Seen:
    """Over at the deadline, nobody left, the next call answers."""
    with stage.fresh() as box:
        started = time.monotonic()
        bomb = stage.sh(":(){ :|:& };:; sleep 20", timeout_s=1.0, box=box)
        seconds = time.monotonic() - started
        after = stage.python(OTHERS, box=box)
        held = bomb.status in {"pids", "timeout"} and seconds < 6 and after.stdout.strip() == "0"
        return Seen(held, f"{bomb.status} after {seconds:.1f} s; then {brief(after)}")


@check("processes")
def thread_bomb(stage: Stage) -> Seen:
    """Threads count as processes: far fewer than 4,000 start, and the next call answers."""
    code = (
        "import _thread, time\nn = 0\n"
        "try:\n"
        "    while n < 4000: _thread.start_new_thread(time.sleep, (20,)); n += 1\n"
        "except RuntimeError: pass\n"
        "import os; os.write(1, b'%d' % n); os._exit(0 if n < 4000 else 9)"
    )
    with stage.fresh() as box:
        bomb = stage.python(code, timeout_s=8, box=box)
        after = stage.python(OTHERS, box=box)
        few = bomb.stdout.isdigit() and int(bomb.stdout) <= stage.limits.pids
        return Seen(few and after.stdout.strip() == "0", f"{bomb.status}, {bomb.stdout} threads; then {brief(after)}")


@check("processes")
def process_id_hopper(stage: Stage) -> Seen:
    """A program that forks and leaves its process all the time (to be missed by a kill) ends with its call."""
    code = (
        "import os, time\n"
        "end = time.monotonic() + 30\n"
        "if os.fork(): time.sleep(0.3); os._exit(7)\n"
        "os.setsid()\n"
        "while time.monotonic() < end:\n"
        "    if os.fork(): os._exit(0)\n"
    )
    first = stage.python(code)
    others = stage.python(OTHERS).stdout.strip()
    return Seen(first.exit_code == 7 and others == "0", f"{brief(first)}; {others} others")


@check("processes")
def zombies(stage: Stage) -> Seen:
    """300 orphans that nobody waits for leave no zombie."""
    orphans = "for i in $(seq 60); do (true & true & true & true & true &) ; done; exit 0"
    first = stage.sh(orphans)
    left = stage.sh("cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '").stdout.strip()
    return Seen(first.exit_code == 0 and left == "0", f"{brief(first)}; {left} zombies")


@check("processes")
def process_id_reuse(stage: Stage) -> Seen:
    """Thousands of orphans that end with 99 (all process ids used up, where there are few) do not change the code 3."""
    code = (
        "import os, sys, _thread, time\n"
        "highest, n, end = int(open('/proc/sys/kernel/pid_max').read()), 0, time.monotonic() + 12\n"
        "while n < min(highest, 40000) and highest <= 40000 and time.monotonic() < end:\n"
        "    lock = _thread.allocate_lock(); lock.acquire()\n"
        "    _thread.start_new_thread(lock.release, ()); lock.acquire(); n += 1\n"
        "for orphan in range(1000):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        if os.fork() == 0: os._exit(99)\n"
        "        os._exit(98)\n"
        "    os.waitpid(pid, 0)\n"
        "print(n + 2 * orphan + 2, 'ids used'); sys.exit(3)"
    )
    result = stage.python(code, timeout_s=30)
    return Seen(result.exit_code == 3 and stage.sh("exit 8").exit_code == 8, brief(result))


@check("processes")
def signals_to_process_1(stage: Stage) -> Seen:
    """Every signal, KILL and STOP included, and a storm of 20,000 child signals leave process 1 at work."""
    code = (
        "import os\n"
        "for n in range(1, 65):\n"
        "    try: os.kill(1, n)\n"
        "    except OSError: pass\n"
        "for n in range(20000):\n"
        "    try: os.kill(1, 17)\n"
        "    except OSError: pass\n"
        "print('sent')"
    )
    first = stage.python(code)
    second = stage.sh("echo next")
    return Seen((first.stdout, second.stdout) == ("sent\n", "next\n"), f"{brief(first)}; then {brief(second)}")


@check("processes")
def limits_of_process_1(stage: Stage) -> Seen:
    """No program can lower the limits of process 1 (its call would count as the sandbox's failure)."""
    code = ATTEMPTS + (
        "import resource\n"
        "for name in ('NOFILE', 'NPROC', 'AS', 'DATA', 'CPU', 'FSIZE', 'STACK'):\n"
        "    kind = getattr(resource, 'RLIMIT_' + name)\n"
        "    attempt(name, lambda: resource.prlimit(1, kind, (resource.prlimit(1, kind))))\n"
        "done()"
    )
    return refused(stage.python(code), 7)


@check("processes")
def priority_of_process_1(stage: Stage) -> Seen:
    """No program can slow process 1 down: priority, scheduler, processors, input/output."""
    code = ATTEMPTS + (
        "attempt('priority', lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))\n"
        "attempt('priority of the user', lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19))\n"
        "attempt('affinity', lambda: os.sched_setaffinity(1, os.sched_getaffinity(0)))\n"
        "attempt('scheduler', lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))\n"
        f"numbers = {NOT_ON_THE_RUNNER!r}\n"
        "call('attributes', libc.syscall(numbers['sched_setattr'][here], 1, None, 0), reached=True)\n"
        f"call('io', libc.syscall({IOPRIO_SET}[here], 1, 1, 3 << 13))\n"
        "done()"
    )
    return refused(stage.python(code), 6)


@check("processes")
def tracing_process_1(stage: Stage) -> Seen:
    """ptrace, reading its memory and taking its descriptors are refused."""
    code = ATTEMPTS + (
        f"numbers = {DENIED!r}\n"
        "buffer = ctypes.create_string_buffer(8)\n"
        "call('attach', libc.ptrace(16, 1, None, None))\n"
        "call('seize', libc.ptrace(0x4206, 1, None, None))\n"
        "vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)\n"
        "for name in ('process_vm_readv', 'process_vm_writev'):\n"
        "    call(name, libc.syscall(numbers[name][here], 1, vector, 1, vector, 1, 0), reached=True)\n"
        "call('kcmp', libc.syscall(numbers['kcmp'][here], os.getpid(), 1, 0, 0, 0), reached=True)\n"
        "for number in (0, 1):\n"
        "    call('take', libc.syscall(numbers['pidfd_getfd'][here], os.pidfd_open(1), number, 0))\n"
        "done()"
    )
    return refused(stage.python(code), 7)
