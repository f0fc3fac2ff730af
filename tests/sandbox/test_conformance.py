"""What every engine must do, on each of them: results, limits, isolation, files."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from agentft.sandbox.base import ExecRequest, ExecResult
from agentft.sandbox.container import Container, Engine

Shell = Callable[..., ExecResult]


def python(code: str) -> ExecRequest:
    return ExecRequest(argv=("python3", "-c", code))


def test_ordinary_results(sh: Shell) -> None:
    result = sh("echo out; echo err >&2; exit 3")
    assert (result.status, result.exit_code, result.stdout, result.stderr) == ("nonzero", 3, "out\n", "err\n")
    assert (result.total_bytes, result.truncated, result.timed_out) == (8, False, False)
    assert sh("true").status == "ok"
    assert sh("cat", stdin=b"x" * 300_000).stdout == "x" * 300_000
    assert sh("head -c 10 >/dev/null", stdin=b"x" * 300_000).status == "ok"


@pytest.mark.parametrize(("signal", "code"), [("KILL", 137), ("TERM", 143), ("SEGV", 139)])
def test_a_signal_gives_128_plus_its_number(sh: Shell, signal: str, code: int) -> None:
    result = sh(f"kill -{signal} $$")
    assert (result.status, result.exit_code) == ("nonzero", code)


def test_commands_that_cannot_start_are_data(box: Container) -> None:
    assert box.exec(ExecRequest(argv=("no-such-program",))).exit_code == 127
    assert box.exec(ExecRequest(argv=("/etc/passwd",))).exit_code == 126
    assert box.exec(ExecRequest(argv=("true",), cwd="missing")).exit_code == 127
    assert box.exec(ExecRequest(argv=("echo", "a\0b"))).exit_code == 126
    assert box.exec(ExecRequest(argv=("echo", "x" * 3_000_000))).exit_code == 126
    assert box.exec(ExecRequest(argv=("true",))).status == "ok"


def test_binary_output_and_environment(box: Container, sh: Shell) -> None:
    assert sh(r"printf '\377\000a'").stdout == "\ufffd\0a"
    names = set(box.exec(ExecRequest(argv=("env",), env={"EXTRA": "1"})).stdout.split())
    assert "EXTRA=1" in names
    assert {line.split("=")[0] for line in names} <= {
        *("PATH", "HOME", "TMPDIR", "LANG", "TZ", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "EXTRA")
    }


def test_timeout_kills_every_survivor(sh: Shell) -> None:
    result = sh("setsid sleep 60 & (sleep 60 &) ; trap '' TERM; echo started; sleep 60", timeout_s=0.4)
    assert (result.status, result.exit_code, result.stdout) == ("timeout", None, "started\n")
    assert result.timed_out
    assert sh("ls /proc | grep -c '^[0-9]*$'").stdout.strip() in {"3", "4"}  # runner, bash, ls, grep


def test_a_daemon_does_not_outlive_its_call(sh: Shell) -> None:
    started = time.monotonic()
    assert sh("setsid sh -c 'sleep 0.3; echo late > /workspace/late' >/dev/null 2>&1 & echo done").stdout == "done\n"
    assert time.monotonic() - started < 3
    assert sh("sleep 0.5; ls /workspace").stdout == ""


def test_output_cap(sh: Shell, box: Container) -> None:
    result = sh("yes")
    assert (result.status, result.exit_code, result.truncated) == ("output_limit", None, True)
    assert len(result.stdout) == box.limits.output_bytes
    assert result.total_bytes > box.limits.output_bytes
    assert result.duration_s < 2
    whole = sh(f"head -c {box.limits.output_bytes} /dev/zero | tr '\\0' a")
    assert (whole.status, whole.truncated, len(whole.stdout)) == ("ok", False, box.limits.output_bytes)


def test_fork_bomb_is_over_at_the_deadline(engine: Engine) -> None:
    box = engine.start()
    try:
        result = box.exec(ExecRequest(argv=("bash", "-c", ":(){ :|:& };:; sleep 20"), timeout_s=1.0))
        assert result.status in {"pids", "timeout"}
        assert result.duration_s < 3
        assert box.hit_limits
        assert box.exec(ExecRequest(argv=("echo", "alive"))).stdout == "alive\n"
    finally:
        box.close()


def test_memory_is_limited(engine: Engine) -> None:
    box = engine.start()
    try:
        result = box.exec(python("a = bytearray(400 << 20)\nfor i in range(0, len(a), 4096): a[i] = 1\nprint('lived')"))
        assert (result.status, result.exit_code, result.stdout) == ("oom", None, "")
        assert box.hit_limits
        assert not box.reusable
        assert box.exec(ExecRequest(argv=("echo", "alive"))).stdout == "alive\n"
    finally:
        box.close()


def test_a_result_cannot_be_forged(box: Container) -> None:
    code = """
import os
for fd in range(3, 64):
    try: os.close(fd)
    except OSError: pass
tried = 0
for target in ('/proc/1/fd/0', '/proc/1/fd/1', '/proc/1/fd/2', '/proc/1/mem', '/proc/1/environ'):
    for mode in ('rb', 'wb'):
        try:
            open(target, mode).close()
            print('opened', target)
        except OSError:
            tried += 1
print(tried)
"""
    assert box.exec(python(code)).stdout == "10\n"


def test_the_runner_is_immune_to_signals(sh: Shell) -> None:
    assert "still here" in sh("for s in INT TERM KILL STOP HUP USR1 CHLD; do kill -$s 1; done; echo still here").stdout
    assert sh("echo next").stdout == "next\n"


def test_no_network(box: Container) -> None:
    code = """
import socket, os
print(sorted(os.listdir('/sys/class/net')) if os.path.isdir('/sys/class/net') else ['lo'])
for address in (('8.8.8.8', 53), ('172.17.0.1', 80), ('169.254.169.254', 80)):
    try:
        socket.create_connection(address, timeout=1)
        print('connected', address)
    except OSError: pass
"""
    assert box.exec(python(code)).stdout == "['lo']\n"


def test_no_privileges_and_a_read_only_system(sh: Shell) -> None:
    result = sh("id -u; grep CapEff /proc/self/status; grep NoNewPrivs /proc/self/status; ulimit -c")
    uid, capabilities, no_new, core = result.stdout.split("\n")[:4]
    assert int(uid) != 0
    assert (int(capabilities.split()[1], 16), no_new.split()[1], core) == (0, "1", "0")
    writes = ("/etc/x", "/usr/x", "/x", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/proc/1/oom_score_adj")
    for path in writes:
        assert sh(f"echo 1 > {path}").exit_code != 0, path
    assert sh("ls /var/run/docker.sock /run/docker.sock").exit_code != 0


def test_full_disk_and_large_files_are_the_programs_problem(sh: Shell) -> None:
    for folder in ("/workspace", "/tmp", "/dev/shm"):
        result = sh(f"for i in 1 2 3 4 5 6; do head -c 7000000 /dev/zero > {folder}/$i || exit 9; done")
        assert result.exit_code == 9, folder
        sh(f"rm -f {folder}/?")
    assert sh("head -c 9000000 /dev/zero > /tmp/large").exit_code != 0
    assert sh("echo ok").stdout == "ok\n"


def test_files_go_in_and_come_out(box: Container, sh: Shell) -> None:
    content = bytes(range(256)) * 100
    box.write_files({"a.txt": b"one", "deep/er/b.bin": content, "/workspace/c": b"", "ümlaut ü": b"u"})
    assert box.read_file("deep/er/b.bin") == content
    assert box.read_file("./a.txt") == box.read_file("/workspace/a.txt") == b"one"
    box.write_files({"a.txt": b"2"})
    assert sh("cat a.txt; stat -c %a a.txt").stdout == "2644\n"
    with pytest.raises(FileNotFoundError):
        box.read_file("missing")
    with pytest.raises(IsADirectoryError):
        box.read_file("deep")
    with pytest.raises(OSError, match="bytes, more than 100"):
        box.read_file("deep/er/b.bin", max_bytes=100)


@pytest.mark.parametrize(
    "path", ["../x", "a/../../x", "/etc/passwd", "", ".", "a\0b", "x\ud800", "/workspace/../etc/x"]
)
def test_paths_that_leave_the_workspace_are_refused(box: Container, path: str) -> None:
    for operation in (lambda: box.read_file(path), lambda: box.write_files({path: b"x"})):
        with pytest.raises(OSError):  # noqa: PT011 - which subclass depends on the path
            operation()
    assert box.broken is None


def test_links_fifos_and_devices_are_refused_without_blocking(box: Container, sh: Shell) -> None:
    sh("ln -s /etc/passwd link; ln -s /etc dir; mkfifo fifo; ln -s /dev/zero zero; mkdir real; ln -s real inner")
    for path in ("link", "dir/passwd", "fifo", "zero", "inner/x"):
        with pytest.raises(OSError):  # noqa: PT011
            box.read_file(path)
        with pytest.raises(OSError):  # noqa: PT011
            box.write_files({path: b"x"})
    sh("truncate -s 7M sparse")
    with pytest.raises(OSError, match="more than"):
        box.read_file("sparse")
    assert sh("ls real").stdout == ""


def test_nothing_is_left_for_the_next_session(box: Container, sh: Shell) -> None:
    sh(
        "mkdir -p a/b /tmp/c; echo 1 > a/b/x; echo 1 > /tmp/c/y; echo 1 > /dev/shm/z; chmod 000 a/b /tmp/c;"
        "chmod 500 a; chmod 000 /workspace"
    )
    box.reset()
    assert box.broken is None
    assert sh("ls -A /workspace /tmp /dev/shm").stdout == "/dev/shm:\n\n/tmp:\n\n/workspace:\n"
    assert sh("echo 1 > /workspace/new && cat /workspace/new").stdout == "1\n"


def test_a_shared_memory_object_costs_the_container(engine: Engine) -> None:
    box = engine.start()
    try:
        code = "import ctypes; print(ctypes.CDLL(None).shmget(77, 4096, 0o1666) >= 0)"
        assert box.exec(python(code)).stdout == "True\n"
        box.reset()
        assert not box.reusable
    finally:
        box.close()


def test_a_thousand_calls_leave_no_blank_and_no_zombie(box: Container) -> None:
    started = time.monotonic()
    for number in range(1000):
        result = box.exec(ExecRequest(argv=("echo", str(number))))
        assert (result.status, result.stdout) == ("ok", f"{number}\n")
    assert time.monotonic() - started < 60
    states = box.exec(ExecRequest(argv=("sh", "-c", "cat /proc/[0-9]*/stat | grep -c ') Z '"))).stdout
    assert states == "0\n"


def test_a_frozen_or_dead_sandbox_is_infra(engine: Engine) -> None:
    box = engine.start()
    box._kill()
    result = box.exec(ExecRequest(argv=("true",)))
    assert (result.status, result.exit_code) == ("infra", None)
    assert result.stderr
    assert not box.reusable
    box.close()
    assert box.exec(ExecRequest(argv=("true",))).status == "infra"
