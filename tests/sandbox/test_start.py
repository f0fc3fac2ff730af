"""What a program finds when it starts, and what is kept of it when it ends: the same on every engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentft.sandbox.base import ExecRequest, ExecResult
from agentft.sandbox.container import BASE_ENV, Container

Shell = Callable[..., ExecResult]


def test_a_program_has_three_descriptors_and_its_own_session(box: Container) -> None:
    look = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1], os.getsid(0) == os.getpid())"
    result = box.exec(ExecRequest(argv=("python3", "-c", look)))
    assert result.stdout == "[0, 1, 2] True\n"  # the descriptor of the listing itself left out


def test_signals_that_python_ignores_have_their_default_again(sh: Shell) -> None:
    assert sh("yes | head -n 1; echo ${PIPESTATUS[0]}").stdout == "y\n141\n"  # 128 + SIGPIPE


@pytest.mark.parametrize(
    ("argv", "cwd", "code", "message"),
    [
        (("absent",), "", 127, "absent: No such file or directory\n"),
        (("./absent",), "", 127, "./absent: No such file or directory\n"),
        (("true",), "absent", 127, "/workspace/absent: No such file or directory\n"),
        (("true",), "data", 126, "/workspace/data: Not a directory\n"),
        (("./data",), "", 126, "./data: Permission denied\n"),
        (("/usr",), "", 126, "/usr: Permission denied\n"),
        (("tr\0ue",), "", 126, "tr\0ue: embedded null byte\n"),
    ],
)
def test_what_cannot_start_says_why(box: Container, argv: tuple[str, ...], cwd: str, code: int, message: str) -> None:
    box.write_files({"data": b"not a program"})
    result = box.exec(ExecRequest(argv=argv, cwd=cwd))
    assert (result.status, result.exit_code, result.stderr) == ("nonzero", code, message)


def test_programs_are_looked_for_in_the_path_of_the_call_from_its_folder(box: Container) -> None:
    box.write_files({"bin/tool": b"#!/bin/sh\npwd\n", "deep/here": b""})
    box.exec(ExecRequest(argv=("chmod", "+x", "bin/tool")))
    path = f"/workspace/bin:{BASE_ENV['PATH']}"
    assert box.exec(ExecRequest(argv=("tool",), cwd="deep", env={"PATH": path})).stdout == "/workspace/deep\n"
    assert box.exec(ExecRequest(argv=("../bin/tool",), cwd="deep")).stdout == "/workspace/deep\n"
    assert box.exec(ExecRequest(argv=("tool",))).exit_code == 127  # the path of one call is not that of the next


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(out=st.integers(0, 200_000), err=st.integers(0, 200_000), early=st.booleans())
def test_all_that_was_written_before_the_end_arrives(box: Container, out: int, err: int, early: bool) -> None:
    """Less or more than a pipe holds, the streams closed before the end or by it."""
    program = f"import os; os.write(1, b'o' * {out}); os.write(2, b'e' * {err}); {early} and os.closerange(1, 3)"
    result = box.exec(ExecRequest(argv=("python3", "-S", "-c", program)))
    assert (result.status, result.stdout, result.stderr) == ("ok", "o" * out, "e" * err)
