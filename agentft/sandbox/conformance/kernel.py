"""Checks of privileges (floor 2): what a program may ask of the kernel. Everything here is tried, not looked up."""

from __future__ import annotations

from agentft.sandbox.conformance.check import ATTEMPTS, Seen, Stage, check, expect, refused
from agentft.sandbox.runner_filter import CLONE, CLONE3, DENIED

NUMBERS = {  # name → number on x86_64 and on aarch64
    **DENIED,
    "clone": CLONE,
    "clone3": CLONE3,
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "quotactl": (179, 60),
    "reboot": (169, 142),
}
SYSTEM_CALLS = f"{ATTEMPTS}numbers = {NUMBERS!r}\ndef number(name): return numbers[name][here]\n"


def each(*names: str) -> str:
    """Return a program that makes the system calls with zeros for arguments."""
    lines = [f"call({name!r}, libc.syscall(number({name!r}), 0, 0, 0, 0, 0, 0), reached=True)\n" for name in names]
    return SYSTEM_CALLS + "".join(lines)


@check("privileges")
def unprivileged(stage: Stage) -> Seen:
    """Not root, every set of capabilities empty, no_new_privs set, system calls filtered, one user only."""
    code = (
        "import os\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "sets = [int(status[name], 16) for name in ('CapInh', 'CapPrm', 'CapEff', 'CapAmb')]\n"
        "print(os.getuid() != 0 and os.getgid() != 0, sets, int(status['NoNewPrivs']), int(status['Seccomp']),\n"
        "      len(set(status['Uid'].split())), 0 in os.getgroups())"
    )
    result = stage.python(code)
    return expect(result.stdout.strip() == "True [0, 0, 0, 0] 1 2 1 False", result, "uid > 0, CapEff 0, NoNewPrivs 1")


@check("privileges")
def becoming_root(stage: Stage) -> Seen:
    """setuid programs of the image and of one's own are inert; setuid, setgid and setgroups are refused."""
    code = ATTEMPTS + (
        "import shutil, subprocess\n"
        "for name in ('setuid', 'seteuid', 'setgid', 'setegid'): attempt(name, lambda: getattr(os, name)(0))\n"
        "attempt('groups', lambda: os.setgroups([0]))\n"
        "shutil.copy(shutil.which('id'), '/workspace/id'); attempt('chown', lambda: os.chown('/workspace/id', 0, 0))\n"
        "os.chmod('/workspace/id', 0o6755)\n"
        "own = subprocess.run(['/workspace/id', '-u'], capture_output=True).stdout\n"
        "found = subprocess.run('find / -xdev -perm /6000 -type f 2>/dev/null', shell=True, capture_output=True)\n"
        "for program in [path for path in found.stdout.decode().split() if path.endswith(('/su', '/sudo'))]:\n"
        "    asked = subprocess.run([program, 'root', '-c', 'id -u'], stdin=-3, capture_output=True, timeout=5)\n"
        "    if asked.stdout.strip() == b'0': granted.append(program)\n"
        "if int(own) == 0: granted.append('own')\n"
        "done()"
    )
    return refused(stage.python(code), 6)


@check("privileges")
def namespaces(stage: Stage) -> Seen:
    """No new namespace of any kind: unshare, clone, clone3 and setns are refused."""
    kinds = {"mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000}
    kinds |= {"pid": 0x20000000, "net": 0x40000000}
    code = SYSTEM_CALLS + (
        f"for name, flag in {kinds!r}.items():\n"
        "    call('unshare ' + name, libc.unshare(flag))\n"
        "    child = libc.syscall(number('clone'), flag | 17, 0, 0, 0, 0)\n"
        "    if child == 0: os._exit(0)\n"
        "    call('clone ' + name, child)\n"
        "    child = libc.syscall(number('clone'), flag | 0x10000000 | 17, 0, 0, 0, 0)\n"
        "    if child == 0: os._exit(0)\n"
        "    call('clone user + ' + name, child)\n"
        "arguments = (ctypes.c_uint64 * 8)(0x10000000, 0, 0, 0, 17, 0, 0, 0)\n"
        "child = libc.syscall(number('clone3'), arguments, 64)\n"
        "if child == 0: os._exit(0)\n"
        "call('clone3', child)\n"
        "for name in ('user', 'net', 'mnt'):\n"
        "    fd = os.open('/proc/self/ns/' + name, os.O_RDONLY)\n"
        "    call('setns ' + name, libc.setns(fd, 0))\n"
        "done()"
    )
    return refused(stage.python(code), 25)


@check("privileges")
def mounts(stage: Stage) -> Seen:
    """mount, umount, chroot, pivot_root and their newer forms are refused."""
    code = each("pivot_root", "open_tree", "move_mount", "fsopen", "mount_setattr", "open_by_handle_at") + (
        "os.makedirs('/workspace/root', exist_ok=True)\n"
        "call('mount', libc.mount(b'none', b'/workspace/root', b'tmpfs', 0, None))\n"
        "call('bind', libc.mount(b'/etc', b'/workspace/root', None, 4096, None))\n"
        "call('remount', libc.mount(None, b'/', None, 32 | 4096, None))\n"
        "call('proc', libc.mount(b'proc', b'/workspace/root', b'proc', 0, None))\n"
        "for path in (b'/proc', b'/workspace', b'/dev/shm'): call('umount', libc.umount2(path, 2))\n"
        "attempt('chroot', lambda: os.chroot('/workspace/root'))\n"
        "done()"
    )
    return refused(stage.python(code), 14)


@check("privileges")
def io_uring(stage: Stage) -> Seen:
    """io_uring (a second way to every system call) is closed."""
    return refused(stage.python(each("io_uring_setup", "io_uring_enter", "io_uring_register") + "done()"), 3)


@check("privileges")
def keyrings(stage: Stage) -> Seen:
    """The kernel's keyrings, which all containers of a user share, are closed."""
    code = each("request_key") + (
        "call('session', libc.syscall(number('keyctl'), 1, 0))\n"
        "call('add', libc.syscall(number('add_key'), b'user', b'agentft', b'x', 1, -4))\n"
        "call('read', libc.syscall(number('keyctl'), 11, -4, 0, 0), reached=True)\n"
        "done()"
    )
    return refused(stage.python(code), 4)


@check("privileges")
def bpf_perf_and_faults(stage: Stage) -> Seen:
    """bpf, perf_event_open and userfaultfd are closed."""
    code = each("bpf", "perf_event_open") + (
        "for flags in (0, 1): call('userfaultfd', libc.syscall(number('userfaultfd'), flags))\ndone()"
    )
    return refused(stage.python(code), 4)


@check("privileges")
def tracing(stage: Stage) -> Seen:
    """ptrace, also of one's own children, and reading other processes' memory are closed."""
    code = each("process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "process_madvise")
    return refused(stage.python(code + "call('traceme', libc.ptrace(0, 0, None, None))\ndone()"), 6)


@check("privileges")
def kernel_modules_and_reboot(stage: Stage) -> Seen:
    """Loading modules or another kernel, reboot, swap and quota are refused."""
    names = ("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot")
    code = each(*names) + (
        "call('swapon', libc.swapon(b'/workspace', 0), reached=True)\n"
        "call('swapoff', libc.swapoff(b'/workspace'), reached=True)\n"
        "call('reboot', libc.reboot(0x1234567))\n"
        "done()"
    )
    return refused(stage.python(code), 9)


@check("privileges")
def clock(stage: Stage) -> Seen:
    """The time cannot be changed."""
    code = ATTEMPTS + (
        "import time\n"
        "attempt('settime', lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()))\n"
        "pair = (ctypes.c_long * 2)(int(time.time()), 0)\n"
        "call('settimeofday', libc.settimeofday(pair, None))\n"
        "zone = (ctypes.c_int * 2)(0, 0)\n"
        "call('zone', libc.settimeofday(None, zone))\n"
        "state = ctypes.create_string_buffer(256); ctypes.memmove(state, ctypes.byref(ctypes.c_uint(0x4000)), 4)\n"
        "call('adjtimex', libc.adjtimex(state))\n"
        "done()"
    )
    return refused(stage.python(code), 4)


@check("privileges")
def host_name(stage: Stage) -> Seen:
    """The host name is not the host's and cannot be changed."""
    code = ATTEMPTS + (
        "attempt('sethostname', lambda: __import__('socket').sethostname('agentft'))\n"
        "call('domain', libc.setdomainname(b'x', 1))\n"
        "done()"
    )
    import socket

    named = stage.sh("cat /proc/sys/kernel/hostname").stdout.strip()
    seen = refused(stage.python(code), 2)
    return Seen(seen.held and named != socket.gethostname(), f"{seen.text}; it is named {named}")


@check("privileges")
def calls_of_other_architectures(stage: Stage) -> Seen:
    """32-bit and x32 calls, whose numbers differ, are no way around the filter."""
    code = SYSTEM_CALLS + (
        "import mmap\n"
        "if os.uname().machine == 'x86_64':\n"
        "    def raw(instruction, number, argument):\n"
        "        # push rbx; mov eax, number; mov ebx, argument; mov edi, argument; int 0x80 or syscall; pop rbx; ret\n"
        "        body = b'\\x53\\xb8' + number.to_bytes(4, 'little') + b'\\xbb' + argument.to_bytes(4, 'little')\n"
        "        body += b'\\xbf' + argument.to_bytes(4, 'little') + instruction + b'\\x5b\\xc3'\n"
        "        page = mmap.mmap(-1, 4096, prot=7); page.write(body)\n"
        "        address = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "        got = ctypes.CFUNCTYPE(ctypes.c_int)(address)()\n"
        "        ctypes.set_errno(-got if got < 0 else 0)\n"
        "        return got\n"
        "    call('32-bit unshare', raw(b'\\xcd\\x80', 310, 0x10000000))\n"
        "    call('32-bit io_uring', raw(b'\\xcd\\x80', 425, 0), reached=True)\n"
        "    call('x32 unshare', raw(b'\\x0f\\x05', 0x40000000 + 272, 0x10000000))\n"
        "else: tried = 3\n"
        "done()"
    )
    return refused(stage.python(code), 3)


@check("privileges")
def kernel_secrets(stage: Stage) -> Seen:
    """The kernel's log, its memory and its addresses cannot be read."""
    code = SYSTEM_CALLS + (
        "buffer = ctypes.create_string_buffer(100)\n"
        "call('log', libc.klogctl(3, buffer, 100))\n"
        "for path in ('/proc/kcore', '/proc/kmsg', '/dev/kmsg', '/dev/mem'):\n"
        "    attempt(path, lambda: os.read(os.open(path, os.O_RDONLY), 1) or exec('raise OSError'))\n"
        "tried += 1\n"
        "try:\n"
        "    addresses = {line.split()[0].strip('0') for line in open('/proc/kallsyms')}\n"
        "except OSError: addresses = {''}\n"
        "if addresses - {''}: granted.append('addresses')\n"
        "done()"
    )
    return refused(stage.python(code), 6)
