"""The host's end of the stream against peers that behave badly."""

from __future__ import annotations

import json
import marshal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentft.errors import SandboxError
from agentft.sandbox.base import ExecRequest, Limits
from agentft.sandbox.container import Container
from agentft.sandbox.wire import HEADER, LAST_WORDS_S, Wire


def frame(answer: object, body: bytes = b"") -> bytes:
    header = json.dumps(answer).encode()
    return HEADER.pack(len(header), len(body)) + header + body


def docker_frames(data: bytes, size: int, kind: int = 1) -> bytes:
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    return b"".join(struct.pack(">BxxxI", kind, len(chunk)) + chunk for chunk in chunks)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def answer_once(theirs: socket.socket, peer: Callable[[str], bytes]) -> threading.Thread:
    def serve() -> None:
        request = theirs.recv(1 << 16)
        size, _ = HEADER.unpack(request[: HEADER.size])
        theirs.sendall(peer(marshal.loads(request[HEADER.size : HEADER.size + size])["id"]))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def ask(wire: Wire, *, within_s: float = 2.0, max_body: int = 1000) -> tuple[dict[str, object], bytes]:
    return wire.request({"op": "ping"}, b"", deadline=time.monotonic() + within_s, max_body=max_body)


def test_an_answer_and_its_payload(ends: tuple[socket.socket, socket.socket]) -> None:
    answer_once(ends[1], lambda call: frame({"id": call, "n": 1}, b"\0\xff"))
    answer, payload = ask(Wire(ends[0], multiplexed=False))
    assert (answer["n"], payload) == (1, b"\0\xff")


@given(size=st.integers(1, 40), noise=st.binary(min_size=1, max_size=20), body=st.binary(max_size=200))
@settings(deadline=None, max_examples=40)
def test_docker_frames_of_any_size_are_joined_and_stderr_is_kept_apart(size: int, noise: bytes, body: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire = Wire(ours, multiplexed=True)

        def peer(call: str) -> bytes:
            data = docker_frames(frame({"id": call}, body), size)
            return docker_frames(noise, 7, kind=2) + data

        answer_once(theirs, peer)
        assert ask(wire)[1] == body
        assert wire.noise == noise


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        (lambda call: frame({"id": "0" * 32, "status": "ok"}), "does not belong to the call"),
        (lambda call: frame({"status": "ok"}), "does not belong to the call"),
        (lambda call: frame({"id": call, "fault": "broken"}), "runner failed"),
        (lambda call: frame({"id": call}, b"x" * 2000), "too large"),
        (lambda call: HEADER.pack(1 << 30, 0), "too large"),
        (lambda call: HEADER.pack(4, 0) + b"\xff\xff\xff\xff", "cannot be read"),
        (lambda call: HEADER.pack(14, 0) + b"__import__('x'", "cannot be read"),
        (lambda call: HEADER.pack(3000, 0) + b"[" * 3000, "cannot be read"),
        (lambda call: frame([call]), "cannot be read"),
        (lambda call: b"\0\0", "did not answer"),
    ],
)
def test_what_is_not_the_runners_answer_is_refused(
    ends: tuple[socket.socket, socket.socket], peer: Callable[[str], bytes], reason: str
) -> None:
    answer_once(ends[1], peer)
    with pytest.raises(SandboxError, match=reason):
        ask(Wire(ends[0], multiplexed=False), within_s=0.5)


def test_the_end_of_the_stream_gives_the_runners_last_words(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].sendall(docker_frames(b"runner: must be PID 1", 100, kind=2))
    ends[1].shutdown(socket.SHUT_WR)
    with pytest.raises(SandboxError, match="must be PID 1"):
        Wire(ends[0], multiplexed=True).hello(time.monotonic() + 1)


def test_a_peer_that_does_not_read_cannot_hold_the_host(ends: tuple[socket.socket, socket.socket]) -> None:
    wire = Wire(ends[0], multiplexed=False)
    started = time.monotonic()
    with pytest.raises(SandboxError, match="broke while a request was sent"):
        wire.request({"op": "write"}, b"x" * 50_000_000, deadline=time.monotonic() + 0.3, max_body=0)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(("memory", "status"), [(True, "oom"), (False, "infra")])
def test_a_sandbox_that_ends_in_a_call_is_lost_unless_memory_ended_it(
    ends: tuple[socket.socket, socket.socket], memory: bool, status: str
) -> None:
    def serve() -> None:
        ends[1].recv(1 << 16)
        ends[1].close()

    threading.Thread(target=serve, daemon=True).start()
    wire = Wire(ends[0], multiplexed=False)
    box = Container(wire, Limits(), lambda: None, name="test", ended_for_memory=lambda: memory)
    result = box.exec(ExecRequest(argv=("true",)))
    assert (result.status, result.exit_code, box.reusable) == (status, None, False)
    assert wire.ended


def test_a_sandbox_that_is_late_is_lost_whatever_the_engine_says(ends: tuple[socket.socket, socket.socket]) -> None:
    limits = Limits(grace_s=0.1)
    box = Container(Wire(ends[0], multiplexed=False), limits, lambda: None, name="test", ended_for_memory=lambda: True)
    result = box.exec(ExecRequest(argv=("true",), timeout_s=0.1))
    assert (result.status, result.exit_code) == ("infra", None)
    assert "timed out" in result.stderr


def moved() -> tuple[Wire, socket.socket, socket.socket]:
    """Return a wire past an engine, the engine's end and the runner's end."""
    (ours, engine), (direct_end, runner) = socket.socketpair(), socket.socketpair()
    wire = Wire(ours, multiplexed=True)
    wire.move(direct_end)
    return wire, engine, runner


@pytest.mark.parametrize("noticed", ["sending", "waiting", "idle"])
def test_the_last_words_of_a_runner_come_over_the_relay(noticed: str) -> None:
    wire, engine, runner = moved()
    with closing(wire), engine, runner:
        engine.sendall(docker_frames(b"runner: out of luck", 100, kind=2))
        engine.shutdown(socket.SHUT_WR)
        runner.shutdown(socket.SHUT_RD if noticed == "sending" else socket.SHUT_WR)
        if noticed == "idle":
            assert wire.hung_up()
        else:
            with pytest.raises(SandboxError, match="was sent" if noticed == "sending" else "ended") as caught:
                wire.request({"op": "ping"}, b"", deadline=time.monotonic() + 2, max_body=0)
            assert "out of luck" in str(caught.value)
        assert wire.ended
        assert wire.noise == b"runner: out of luck"


def test_a_relay_that_never_ends_does_not_hold_the_host() -> None:
    wire, engine, runner = moved()
    with closing(wire), engine:
        runner.close()
        started = time.monotonic()
        assert wire.hung_up()
        assert time.monotonic() - started < LAST_WORDS_S + 3


def test_closing_hangs_up_on_both_and_wakes_a_call() -> None:
    wire, engine, runner = moved()
    reasons: list[str] = []

    def call() -> None:
        try:
            wire.request({"op": "ping"}, b"", deadline=time.monotonic() + 30, max_body=0)
        except SandboxError as error:
            reasons.append(error.what)

    with engine, runner:
        thread = threading.Thread(target=call)
        thread.start()
        assert runner.recv(1 << 16)
        wire.close()
        thread.join(timeout=5)
        assert reasons
        assert (engine.recv(1), runner.recv(1)) == (b"", b"")
