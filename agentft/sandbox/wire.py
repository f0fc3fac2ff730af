"""The host's end of a runner's stream (floor 2): frames over a socket, with deadlines and a secret id per call.

One ``Wire`` serves every transport: Docker's attach stream (which wraps output in frames of its own, one per chunk
of stdout or stderr), the connection past the engine that may take its place (``direct.py``), and the socket pair of a
bubblewrap process. What arrives is not trusted: sizes are bounded, the header is parsed as JSON, and an answer that
does not repeat the call's id ends the sandbox.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import marshal
import secrets
import socket
import ssl
import struct
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

from agentft.errors import SandboxError

HEADER = struct.Struct(">II")
DOCKER_FRAME = struct.Struct(">BxxxI")
MARSHAL_VERSION = 2  # the one that every Python 3 reads
MAX_HEADER_BYTES = 1 << 20
MAX_NOISE_BYTES = 4096
LAST_WORDS_S = 0.5
RUNNER_MODULES = tuple(
    f"agentft.sandbox.runner{part}" for part in ("_files", "_filter", "_processes", "_call", "")
)  # in the order in which they import each other


@cache
def runner_source() -> str:
    """Return the program that a sandbox runs as PID 1: the runner's modules, installed under their own names."""
    sources = {name: (Path(__file__).parent / f"{name.rpartition('.')[2]}.py").read_text() for name in RUNNER_MODULES}
    return (
        "import sys, types\n"
        f"for name, source in {sources!r}.items():\n"
        "    sys.modules[name] = module = types.ModuleType(name)\n"
        "    exec(compile(source, name, 'exec'), module.__dict__)\n"
        "module.main()\n"
    )


@cache
def runner_version() -> str:
    """Return a short digest of the runner's source; part of every cache key."""
    return hashlib.sha256(runner_source().encode()).hexdigest()[:12]


def runner_command(config: dict[str, Any]) -> list[str]:
    """Return the command line of PID 1 (``python3`` must be on the sandbox's PATH)."""
    return ["python3", "-I", "-S", "-B", "-c", runner_source(), json.dumps(config)]


class Wire:
    """A stream to one runner. Calls are serial; only ``close`` may come from another thread.

    Any failure is a ``SandboxError`` and is final.
    """

    def __init__(self, stream: socket.socket, *, multiplexed: bool) -> None:
        """``multiplexed``: what is received is wrapped in Docker's frames (a container without a terminal)."""
        self._socket, self._multiplexed = stream, multiplexed
        self._relay: socket.socket | None = None
        self._raw, self._data, self.noise = bytearray(), bytearray(), bytearray()
        self._in_use = threading.Lock()
        self.ended = False  # the other end hung up

    def hello(self, deadline: float) -> dict[str, Any]:
        """Wait for the runner's first frame. ``deadline`` is on the clock of ``time.monotonic``."""
        with self._in_use:
            answer, _ = self._receive(deadline, max_body=0)
        if answer.get("id") != "hello":
            raise SandboxError("the sandbox did not start with the runner's greeting", got=answer)
        return answer

    def move(self, stream: socket.socket) -> None:
        """Go on over ``stream``, which leads to the same runner; what led there is kept for its last words."""
        self._relay, self._socket, self._multiplexed = self._socket, stream, False

    def request(
        self, header: dict[str, Any], body: bytes, *, deadline: float, max_body: int
    ) -> tuple[dict[str, Any], bytes]:
        """Send one request and return (answer, payload).

        Raises:
            SandboxError: the stream broke, the deadline passed, or the answer is not the runner's.
        """
        call_id = secrets.token_hex(16)
        text = marshal.dumps({"id": call_id, **header}, MARSHAL_VERSION)
        with self._in_use:
            try:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                self._socket.sendall(HEADER.pack(len(text), len(body)) + text + body)
            except OSError as cause:
                self._failed(cause)
                why = self._why(cause)
                raise SandboxError("the sandbox's stream broke while a request was sent", got=why) from cause
            answer, payload = self._receive(deadline, max_body)
        if not secrets.compare_digest(str(answer.get("id")), call_id):
            raise SandboxError("the sandbox sent an answer that does not belong to the call", got=answer)
        if "fault" in answer:
            raise SandboxError("the sandbox's runner failed", got=str(answer["fault"]))
        return answer, payload

    def hung_up(self) -> bool:
        """Whether the runner is known to be gone, without asking it anything. Costs microseconds."""
        with self._in_use:
            try:
                self._socket.settimeout(0)
                chunk = self._socket.recv(1 << 18)
            except (BlockingIOError, ssl.SSLWantReadError):
                return False
            except OSError:
                chunk = b""
            self._add(chunk)  # last words, if any
            if not chunk:
                self._end()
            return self.ended

    def close(self) -> None:
        """Hang up; the runner then ends by itself. Idempotent."""
        streams = [self._socket] if self._relay is None else [self._socket, self._relay]
        for stream in streams:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)  # wakes a call that waits
        with self._in_use:  # its descriptor must not be reused for another connection before that call has ended
            for stream in streams:
                stream.close()

    def _receive(self, deadline: float, max_body: int) -> tuple[dict[str, Any], bytes]:
        header_size, body_size = HEADER.unpack(self._take(HEADER.size, deadline))
        if header_size > MAX_HEADER_BYTES or body_size > max_body:
            raise SandboxError("the sandbox sent a frame that is too large", got=f"{header_size} + {body_size} bytes")
        text = self._take(header_size, deadline)
        try:
            answer = json.loads(text)
        except (ValueError, MemoryError, RecursionError) as cause:
            raise SandboxError("the sandbox sent a frame that cannot be read", got=text[:200]) from cause
        if not isinstance(answer, dict):
            raise SandboxError("the sandbox sent a frame that cannot be read", got=text[:200])
        return answer, self._take(body_size, deadline)

    def _take(self, size: int, deadline: float) -> bytes:
        while len(self._data) < size:
            try:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                chunk = self._socket.recv(1 << 18)
            except OSError as cause:
                self._failed(cause)
                raise SandboxError("the sandbox did not answer", got=self._why(cause)) from cause
            if not chunk:
                self._end()
                raise SandboxError("the sandbox ended", got=self._why(None))
            self._add(chunk)
        taken = bytes(self._data[:size])
        del self._data[:size]
        return taken

    def _failed(self, cause: OSError) -> None:
        """Note what a failure of the stream means: unless it is a matter of time, the runner is gone."""
        if not isinstance(cause, TimeoutError):
            self._end()

    def _end(self) -> None:
        """Note that the runner is gone, and what it said on stderr if its answers came another way."""
        self.ended = True
        if self._relay is not None:
            until = time.monotonic() + LAST_WORDS_S
            with contextlib.suppress(OSError):
                while (left_s := until - time.monotonic()) > 0:
                    self._relay.settimeout(left_s)
                    if not (chunk := self._relay.recv(1 << 18)):
                        break
                    self._raw += chunk
            self._demultiplex()

    def _add(self, chunk: bytes) -> None:
        if self._multiplexed:
            self._raw += chunk
            self._demultiplex()
        else:
            self._data += chunk

    def _demultiplex(self) -> None:
        """Move every complete Docker frame: stdout to the data, stderr (a dying runner's last words) to the noise."""
        start = 0
        while len(self._raw) - start >= DOCKER_FRAME.size:
            kind, size = DOCKER_FRAME.unpack_from(self._raw, start)
            end = start + DOCKER_FRAME.size + size
            if len(self._raw) < end:
                break
            payload = self._raw[start + DOCKER_FRAME.size : end]
            if kind == 1:
                self._data += payload
            elif len(self.noise) < MAX_NOISE_BYTES:
                self.noise += payload[:MAX_NOISE_BYTES]
            start = end
        del self._raw[:start]

    def _why(self, cause: OSError | None) -> str:
        reason = "" if cause is None else "timed out" if isinstance(cause, TimeoutError) else str(cause)
        return " ".join(part for part in (reason, self.noise.decode("utf-8", "replace").strip()) if part) or "no reason"
