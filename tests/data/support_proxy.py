"""A TCP proxy that fails like a network: after a number of stored objects it cuts or stalls every connection."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Literal
from urllib.parse import urlsplit


class FailingProxy:
    """Forwards to ``target`` until ``objects`` PUT requests have passed, then fails as ``mode`` says.

    ``endpoint`` is its own address. Use as a context manager.
    """

    def __init__(self, target: str, objects: int, mode: Literal["cut", "stall"]) -> None:
        parts = urlsplit(target)
        self._target, self._left, self._mode = (parts.hostname, parts.port), objects, mode
        self._lock, self._sockets = threading.Lock(), list[socket.socket]()
        self.failed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> FailingProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close([self._listener, *self._sockets])

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.failed.is_set() and self._mode == "cut":
                    self._close([client])
                    continue
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                threading.Thread(target=self._forward, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._forward, args=(server, client, False), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, count: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if count and data.startswith(b"PUT ") and not self._may_pass():
                    self.failed.set()
                if self.failed.is_set():
                    if self._mode == "cut":
                        self._close([self._listener, *self._sockets])
                    return
                sink.sendall(data)
        if not self.failed.is_set():
            self._close([source, sink])

    def _may_pass(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0

    @staticmethod
    def _close(sockets: list[socket.socket]) -> None:
        for item in sockets:
            with suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
            item.close()
