"""How the runner protects itself (standard library only; sent into the sandbox together with ``runner.py``).

``become_undumpable()`` hides the runner's memory and descriptors from programs of the same user. What that does not
hide, a system-call filter does: the kernel lets every process of a user lower the limits and the priority of every
other (``prlimit(1, NOFILE, 0)`` would turn a program's failure into a failure of the sandbox). The filter is inherited
by every command, adds to whatever filter the engine has, and closes what an ordinary program never needs and kernels
keep failing at: namespaces, mounts, tracing, io_uring, keyrings, BPF, userfaultfd, odd socket families.

It is a list of what is denied: Docker's default profile, a list of what is allowed, stays in force beside it.
"""

from __future__ import annotations

import errno
import os
import struct

CAPABILITY_VERSION = 0x20080522
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 4, 38, 22, 2
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
X32_BIT = 0x40000000
NEW_NAMESPACES = 0x7E020000  # CLONE_NEW* of mount, cgroup, host name, IPC, user, PID and network
SOCKET_FAMILIES = (1, 2, 10, 16)  # UNIX, INET, INET6, NETLINK; not VSOCK (the hypervisor), ALG, PACKET, …

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
DENIED = {  # name → number on x86_64 and on aarch64
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "syslog": (103, 116),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
}
NOT_ON_THE_RUNNER = {  # calls whose first argument is a process id
    "prlimit64": (302, 261),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}
CLONE, CLONE3, SOCKET, SETPRIORITY, IOPRIO_SET = (56, 220), (435, 435), (41, 198), (141, 140), (251, 30)

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def become_undumpable() -> None:
    """Hide memory and descriptors from other processes of the same user. Raises ``OSError``, ``ImportError``."""
    _prctl(PR_SET_DUMPABLE, 0)


def drop_capabilities() -> None:
    """Empty every set of capabilities, the inheritable one included. Raises ``OSError``, ``ImportError``."""
    import ctypes

    header, sets = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset failed")


def filter_system_calls() -> None:
    """Install the filter for this process and all that it starts.

    Raises:
        OSError: the kernel has no such filters, or there is no table for this machine.
        ImportError: there is no ctypes.
    """
    import ctypes

    program = filter_program(os.uname().machine)
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    held = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(held)))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header))


def filter_program(machine: str) -> list[Instruction]:
    """Return the filter as BPF instructions. Raises ``OSError`` for a machine that it does not know."""
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    here = list(ARCHITECTURES).index(machine)
    no_such_call = (RETURN, 0, 0, ERRNO | errno.ENOSYS)
    refuse, allow = (RETURN, 0, 0, ERRNO | errno.EPERM), (RETURN, 0, 0, ALLOW)
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, ARCHITECTURES[machine]),
        no_such_call,  # 32-bit calls have other numbers
        (LOAD, 0, 0, NUMBER_AT),
    ]
    if machine == "x86_64":
        program += [(AT_LEAST, 0, 1, X32_BIT), no_such_call]

    def call(numbers: tuple[int, int], *body: Instruction) -> None:
        program.extend([(EQUAL, 0, len(body), numbers[here]), *body])

    def argument(index: int) -> Instruction:  # both machines are little-endian: the low word of an int comes first
        return (LOAD, 0, 0, ARGUMENTS_AT + 8 * index)

    for numbers in DENIED.values():
        call(numbers, refuse)
    for numbers in NOT_ON_THE_RUNNER.values():
        call(numbers, argument(0), (EQUAL, 0, 1, 1), refuse, allow)
    of_process, runner = (EQUAL, 1, 0, 0), (EQUAL, 0, 1, 1)
    call(SETPRIORITY, argument(0), of_process, refuse, argument(1), runner, refuse, allow)
    call(IOPRIO_SET, argument(0), (EQUAL, 1, 0, 1), refuse, argument(1), runner, refuse, allow)
    call(CLONE, argument(0), (ANY_BIT, 0, 1, NEW_NAMESPACES), refuse, allow)
    call(CLONE3, no_such_call)  # its flags are in memory, where no filter sees them; libc falls back to clone
    families = [step for family in SOCKET_FAMILIES for step in ((EQUAL, 0, 1, family), allow)]
    call(SOCKET, argument(0), *families, (RETURN, 0, 0, ERRNO | errno.EAFNOSUPPORT))
    return [*program, allow]


def _prctl(option: int, *arguments: int) -> None:
    import ctypes

    words = [ctypes.c_ulong(word) for word in (*arguments, 0, 0, 0, 0)[:4]]
    if ctypes.CDLL(None, use_errno=True).prctl(option, *words) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
