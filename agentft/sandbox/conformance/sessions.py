"""Checks between sessions (floor 2): what one session leaves, the next one must not find."""

from __future__ import annotations

from agentft.sandbox.conformance.check import Seen, Stage, brief, check, expect

SYSTEM_V = (
    "import ctypes\n"
    "libc = ctypes.CDLL(None)\n"
    "made = (libc.shmget(77, 4096, 0o1666), libc.semget(77, 1, 0o1666), libc.msgget(77, 0o1666))\n"
    "print(min(made) >= 0)"
)


@check("sessions")
def left_files(stage: Stage) -> Seen:
    """Workspace, temporary folder, shared memory and message queues are empty in the next session."""
    stage.sh(
        "for d in /workspace /tmp /dev/shm /dev/mqueue /var/tmp; do mkdir -p $d/a/b; echo x > $d/a/b/left;"
        "echo x > $d/.left; ln -s /etc $d/link; mkfifo $d/pipe; done 2>/dev/null; chmod 000 /tmp/a /workspace/a"
    )
    stage.next_session()
    left = stage.sh("ls -A /workspace /tmp /dev/shm; ls -A /dev/mqueue /var/tmp 2>/dev/null")
    names = [line for line in left.stdout.splitlines() if line and not line.endswith(":")]
    return expect(not names and left.status != "infra", left, "nothing")


@check("sessions")
def shared_memory_objects(stage: Stage) -> Seen:
    """System V memory, semaphores and queues, which no folder shows, are not there in the next session."""
    made = stage.python(SYSTEM_V)
    stage.next_session()
    left = stage.sh("cat /proc/sysvipc/shm /proc/sysvipc/sem /proc/sysvipc/msg | wc -l")
    return Seen(
        made.stdout == "True\n" and left.stdout.strip() == "3", f"made; then {brief(left)} (3 lines of heading)"
    )


@check("sessions")
def message_queues(stage: Stage) -> Seen:
    """POSIX queues and named semaphores are not there in the next session."""
    code = (
        "import ctypes, os\n"
        "name = {name}\n"
        "try: libc = ctypes.CDLL('librt.so.1')\n"
        "except OSError: libc = ctypes.CDLL(None)\n"
        "queue = libc.mq_open(b'/agentft', {flags}, 0o600, None)\n"
        "print(queue >= 0)"
    )
    stage.python(code.format(name="'first'", flags="os.O_CREAT | os.O_RDWR"))
    stage.python("import multiprocessing as m, os; s = m.get_context('fork').Semaphore(1); open('/dev/shm/sem.x', 'w')")
    stage.next_session()
    again = stage.python(code.format(name="'second'", flags="os.O_RDWR"))
    left = stage.sh("ls -A /dev/shm")
    return Seen(again.stdout == "False\n" and not left.stdout, f"{brief(again)}; {brief(left)}")


@check("sessions")
def poisoned_interpreter(stage: Stage) -> Seen:
    """Start files of Python and the shell in the home folder do not reach the next session."""
    stage.python(
        "import os, site\n"
        "folder = site.getusersitepackages(); os.makedirs(folder, exist_ok=True)\n"
        "open(folder + '/usercustomize.py', 'w').write('print(\"poisoned\")')\n"
        "open(folder + '/x.pth', 'w').write('import sys; print(\"poisoned\")')\n"
        "for name in ('.bashrc', '.profile', '.bash_profile', '.gitconfig', '.pythonrc'):\n"
        "    open(os.path.join(os.environ['HOME'], name), 'w').write('echo poisoned')\n"
    )
    stage.next_session()
    result = stage.sh("ls -A ~; bash -lic true; python3 -c 'print(1)'; git config --list 2>/dev/null")
    return expect(result.stdout == "1\n" and "poisoned" not in result.stderr, result)


@check("sessions")
def left_processes(stage: Stage) -> Seen:
    """No process of one session runs in the next one."""
    stage.sh("setsid sleep 50 & (sleep 50 &) ; nohup sleep 50 >/dev/null 2>&1 &")
    stage.next_session()
    result = stage.sh("grep -l sleep /proc/[0-9]*/comm 2>/dev/null | wc -l")
    return expect(result.stdout.strip() == "0", result, "none")


@check("sessions")
def listening_sockets(stage: Stage) -> Seen:
    """A server that one session started answers nobody in the next one."""
    stage.python(
        "import os, socket, time\n"
        "s = socket.socket(); s.bind(('127.0.0.1', 8099)); s.listen(); u = socket.socket(socket.AF_UNIX)\n"
        "u.bind('\\0agentft-session'); u.listen()\n"
        "if os.fork() == 0: os.setsid(); time.sleep(50)"
    )
    stage.next_session()
    result = stage.python(
        "import socket\n"
        "for kind, address in ((socket.AF_INET, ('127.0.0.1', 8099)), (socket.AF_UNIX, '\\0agentft-session')):\n"
        "    try: socket.socket(kind).connect(address); print('answers')\n"
        "    except OSError: pass"
    )
    return expect(result.status == "ok" and not result.stdout, result, "nobody answers")


@check("sessions")
def used_up(stage: Stage) -> Seen:
    """A sandbox that ran out of memory or processes is not given to another session."""
    size = stage.limits.memory_mib * 3 // 2 << 20
    with stage.fresh() as box:
        first = stage.python(f"a = b'x' * {size}", box=box)
        return Seen(first.status == "oom" and not box.reusable, f"{first.status}, reusable: {box.reusable}")
