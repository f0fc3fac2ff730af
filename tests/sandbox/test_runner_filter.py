"""The system-call filter, run by an interpreter of its instructions: what it lets through and what it answers."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentft.sandbox import runner_filter as rf


def run(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """Return what the kernel would do: ALLOW, or the error number."""
    words = [argument & (1 << 64) - 1 for argument in (*arguments, 0, 0, 0, 0, 0, 0)[:6]]
    data = struct.pack("<IIQ6Q", number, architecture or rf.ARCHITECTURES[machine], 0, *words)
    program, at, loaded = rf.filter_program(machine), 0, 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == rf.LOAD:
            loaded = struct.unpack_from("<I", data, operand)[0]
        elif code == rf.RETURN:
            return operand if operand == rf.ALLOW else operand - rf.ERRNO
        else:
            test = {rf.EQUAL: loaded == operand, rf.AT_LEAST: loaded >= operand, rf.ANY_BIT: bool(loaded & operand)}
            at += if_true if test[code] else if_false


@pytest.mark.parametrize("machine", rf.ARCHITECTURES)
def test_what_is_denied(machine: str) -> None:
    here = list(rf.ARCHITECTURES).index(machine)
    assert len(rf.filter_program(machine)) < 256
    for numbers in rf.DENIED.values():
        assert run(machine, numbers[here], 5) == errno.EPERM
    for numbers in rf.NOT_ON_THE_RUNNER.values():
        assert run(machine, numbers[here], 1) == errno.EPERM
        assert run(machine, numbers[here], (1 << 32) + 1) == errno.EPERM  # the kernel looks at the low word only
        assert run(machine, numbers[here], 0) == run(machine, numbers[here], 4711) == rf.ALLOW
    assert run(machine, rf.SETPRIORITY[here], 0, 1) == run(machine, rf.SETPRIORITY[here], 2, 0) == errno.EPERM
    assert run(machine, rf.SETPRIORITY[here], 0, 0) == run(machine, rf.SETPRIORITY[here], 0, 77) == rf.ALLOW
    assert run(machine, rf.IOPRIO_SET[here], 1, 1) == run(machine, rf.IOPRIO_SET[here], 3, 0) == errno.EPERM
    assert run(machine, rf.IOPRIO_SET[here], 1, 0) == rf.ALLOW
    assert run(machine, rf.CLONE3[here]) == errno.ENOSYS
    assert run(machine, rf.CLONE[here], 17) == run(machine, rf.CLONE[here], 0x3D0F00) == rf.ALLOW  # fork, a thread
    assert run(machine, rf.CLONE[here], 0x10000011) == errno.EPERM


@pytest.mark.parametrize("machine", rf.ARCHITECTURES)
@given(family=st.integers(0, 100))
def test_socket_families(machine: str, family: int) -> None:
    number = rf.SOCKET[list(rf.ARCHITECTURES).index(machine)]
    assert run(machine, number, family, 1, 0) == (rf.ALLOW if family in {1, 2, 10, 16} else errno.EAFNOSUPPORT)


@pytest.mark.parametrize("machine", rf.ARCHITECTURES)
@given(number=st.integers(0, 1000))
def test_everything_else_passes(machine: str, number: int) -> None:
    here = list(rf.ARCHITECTURES).index(machine)
    special = (*rf.DENIED.values(), *rf.NOT_ON_THE_RUNNER.values(), rf.CLONE3, rf.SOCKET, rf.SETPRIORITY, rf.IOPRIO_SET)
    if number not in {numbers[here] for numbers in special}:
        assert run(machine, number) == rf.ALLOW


def test_other_calling_conventions_do_not_exist() -> None:
    assert run("x86_64", 1, architecture=0x40000003) == errno.ENOSYS  # i386
    assert run("x86_64", rf.X32_BIT + 1) == errno.ENOSYS
    with pytest.raises(OSError, match="riscv64"):
        rf.filter_program("riscv64")
