"""Checks of what a call reports (floor 2): exit codes, output, the clock, and attempts to forge a result."""

from __future__ import annotations

import time

from agentft.sandbox.base import ExecRequest
from agentft.sandbox.conformance.check import ATTEMPTS, Seen, Stage, brief, check, expect, refused
from agentft.sandbox.direct import INSIDE


@check("results")
def exit_codes(stage: Stage) -> Seen:
    """Every ending has its own code: 0, 3, 126 and 127 if it cannot start, 128 + n after a signal; none is made up."""
    asked = ("true", "exit 3", "kill -KILL $$", "kill -TERM $$", "kill -SEGV $$")
    codes = [stage.sh(command).exit_code for command in asked]
    for argv in (("no-such-program",), ("/etc/passwd",)):
        codes.append(stage.box.exec(ExecRequest(argv=argv)).exit_code)
    return Seen(codes == [0, 3, 137, 143, 139, 127, 126], f"codes {codes}")


@check("results")
def streams_apart(stage: Stage) -> Seen:
    """stdout and stderr come back apart, in full, with the number of bytes."""
    result = stage.sh("echo out; echo err >&2; exit 3")
    held = (result.stdout, result.stderr, result.total_bytes) == ("out\n", "err\n", 8)
    return expect(held, result)


@check("results")
def binary_output(stage: Stage) -> Seen:
    """NUL bytes, terminal codes and invalid UTF-8 arrive as they are (invalid bytes replaced) and disturb nothing."""
    result = stage.sh(r"printf '\000\033[2J\033]0;x\007\377\376ok'")
    return expect(result.stdout == "\0\x1b[2J\x1b]0;x\x07\ufffd\ufffdok", result)


@check("results")
def one_line_of_10_mb(stage: Stage) -> Seen:
    """Stopped as output_limit; exactly the cap is kept and the cut is said."""
    result = stage.python("import sys; sys.stdout.write('x' * 10_000_000)")
    kept, cap = len(result.stdout), stage.limits.output_bytes
    held = result.status == "output_limit" and result.truncated and kept == cap and result.exit_code is None
    return expect(held, result, f"{result.status}, {kept} of {result.total_bytes}+ bytes kept")


@check("results")
def endless_output(stage: Stage) -> Seen:
    """`yes` on both streams is ended within 3 s as output_limit and fills nothing."""
    started = time.monotonic()
    result = stage.sh("yes & yes >&2", timeout_s=10)
    seconds = time.monotonic() - started
    kept = len(result.stdout) + len(result.stderr)
    held = result.status == "output_limit" and seconds < 3 and kept == stage.limits.output_bytes
    return expect(held, result, f"output_limit after {seconds:.1f} s, {kept} bytes kept")


@check("results")
def output_up_to_the_cap(stage: Stage) -> Seen:
    """Output of exactly the cap is whole, to its last byte."""
    cap = stage.limits.output_bytes
    result = stage.python(f"import sys; sys.stdout.write('x' * {cap - 4} + 'tail')")
    held = result.status == "ok" and not result.truncated and len(result.stdout) == cap
    return expect(held and result.stdout.endswith("tail"), result, f"{len(result.stdout)} bytes, nothing cut")


@check("results")
def timeout(stage: Stage) -> Seen:
    """Ended at its deadline (within a second), no exit code, output until then kept."""
    result = stage.sh("echo before; sleep 30", timeout_s=0.5)
    held = (result.status, result.exit_code, result.stdout) == ("timeout", None, "before\n")
    return expect(held and result.duration_s < 1.5, result, f"timeout after {result.duration_s:.2f} s")


@check("results")
def closed_streams(stage: Stage) -> Seen:
    """A program that closes its own streams is waited for; its exit code counts."""
    result = stage.sh("exec >&- 2>&- <&-; sleep 0.3; exit 5")
    return expect(result.exit_code == 5 and result.duration_s >= 0.3, result)


@check("results")
def waiting_for_input(stage: Stage) -> Seen:
    """A program that reads input that nobody sends gets its end at once."""
    result = stage.sh('cat; read line; echo "end $?"', timeout_s=5)
    return expect(result.stdout == "end 1\n", result)


@check("results")
def input_nobody_reads(stage: Stage) -> Seen:
    """5 MB of input to a program that does not read it, and to one that reads half, block nothing."""
    ignored = stage.sh("sleep 0.2; exit 4", stdin=b"x" * 5_000_000)
    half = stage.sh("head -c 2500000 | wc -c", stdin=b"x" * 5_000_000)
    return Seen(ignored.exit_code == 4 and half.stdout.strip() == "2500000", f"{brief(ignored)}; {brief(half)}")


@check("results")
def too_many_arguments(stage: Stage) -> Seen:
    """Arguments beyond ARG_MAX, a NUL in one and a folder that is not there are the program's errors (126, 127)."""
    requests = (
        ExecRequest(argv=("echo", "x" * 3_000_000)),
        ExecRequest(argv=("echo", *["y" * 1000] * 5000)),
        ExecRequest(argv=("echo", "a\0b")),
        ExecRequest(argv=("true",), cwd="missing"),
    )
    results = [stage.box.exec(request) for request in requests]
    codes = [result.exit_code for result in results]
    held = codes == [126, 126, 126, 127] and {result.status for result in results} == {"nonzero"}
    return Seen(held, f"codes {codes}" if held else "; ".join(map(brief, results)))


@check("results")
def three_hundred_calls(stage: Stage) -> Seen:
    """None of 300 calls in a row comes back blank, late or as another one's."""
    blank = 0
    for number in range(300):
        result = stage.box.exec(ExecRequest(argv=("echo", f"call {number}")))
        blank += (result.status, result.stdout) != ("ok", f"call {number}\n")
    return Seen(blank == 0, f"{blank} of 300 blank or wrong")


@check("results")
def forged_answer(stage: Stage) -> Seen:
    """The channel of the answers (descriptors, memory, files of process 1) cannot be opened from inside."""
    code = ATTEMPTS + (
        "for name in ('fd/0', 'fd/1', 'fd/2', 'mem', 'environ', 'maps', 'oom_score_adj', 'clear_refs'):\n"
        "    for mode in (os.O_RDONLY, os.O_WRONLY):\n"
        "        if (name, mode) == ('oom_score_adj', os.O_RDONLY): continue\n"
        "        attempt(name, lambda: os.close(os.open('/proc/1/' + name, mode)))\n"
        "attempt('list', lambda: os.listdir('/proc/1/fd'))\n"
        "done()"
    )
    return refused(stage.python(code), 16)


@check("results", engines_only=True)
def second_connection(stage: Stage) -> Seen:
    """The socket over which process 1 reached the host, where there is one, takes no other connection."""
    code = ATTEMPTS + (
        "import socket\n"
        f"for path in ({INSIDE!r}, '/proc/1/root' + {INSIDE!r}):\n"
        "    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):\n"
        "        attempt(path, lambda: socket.socket(socket.AF_UNIX, kind).connect(path))\n"
        "    attempt(path, lambda: os.unlink(path))\n"
        "done()"
    )
    return refused(stage.python(code), 8)


@check("results")
def forged_frame(stage: Stage) -> Seen:
    """A perfect imitation of a successful answer on stdout and stderr is output, not an answer."""
    code = (
        "import json, struct, sys\n"
        "answer = {'id': '0' * 32, 'status': 'ok', 'exit_code': 0, 'out': 0, 'err': 0, 'hits': []}\n"
        "answer = json.dumps(answer).encode()\n"
        "frame = struct.pack('>II', len(answer), 0) + answer\n"
        "docker = struct.pack('>BxxxI', 1, len(frame)) + frame\n"
        "for stream in (sys.stdout, sys.stderr): stream.buffer.write(docker + frame)\n"
        "sys.exit(6)"
    )
    result = stage.python(code)
    return expect(result.exit_code == 6 and "exit_code" in result.stdout, result, "nonzero 6, the frame as text")


@check("results")
def result_files(stage: Stage) -> Seen:
    """Files that claim success (reports, exit codes) change nothing: the exit code is the process's own."""
    code = (
        "for path in ('/tmp/exit_code', '/tmp/result.json', '/workspace/result.json', '/workspace/report.xml',\n"
        "             '/workspace/.report.json', '/workspace/exit_code', '/dev/shm/result'):\n"
        '    try: open(path, \'w\').write(\'{"exit_code": 0, "status": "ok", "passed": 9}\')\n'
        "    except OSError: pass\n"
        "raise SystemExit(1)"
    )
    result = stage.python(code)
    return expect((result.status, result.exit_code) == ("nonzero", 1), result)


@check("results")
def last_moment_fork(stage: Stage) -> Seen:
    """A child forked in the last moment neither delays the result nor speaks later nor lives on."""
    result = stage.sh("(sleep 1; echo late; echo late > late) & echo now; exit 4", timeout_s=10)
    later = stage.sh("sleep 1.2; ls")
    held = (result.exit_code, result.stdout, later.stdout) == (4, "now\n", "") and result.duration_s < 0.9
    return Seen(held, f"{brief(result)} after {result.duration_s:.2f} s; later {brief(later)}")


@check("results")
def killing_everything(stage: Stage) -> Seen:
    """kill(-1, SIGKILL) from inside reaches the program's own processes only, and is its own failure."""
    result = stage.sh("sleep 30 & kill -9 -1; kill -9 $$")
    return expect((result.status, result.exit_code) == ("nonzero", 137), result)
