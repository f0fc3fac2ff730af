"""The connection past the engine: who gets it, who does not, what is left, and that every call works without it."""

from __future__ import annotations

import multiprocessing
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from sandbox_engines import make_engine

from agentft.errors import SandboxError
from agentft.sandbox import direct
from agentft.sandbox.base import ExecRequest
from agentft.sandbox.direct import DirectListener
from agentft.sandbox.docker import DockerEngine

ECHO = ExecRequest(argv=("sh", "-c", "echo out; echo err >&2; cat"), stdin=b"in")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of the test's own, its path longer than the address of a socket may be."""
    folder = tmp_path / ("deep" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def engine() -> Iterator[DockerEngine]:
    found = make_engine("docker")
    assert isinstance(found, DockerEngine)
    with closing(found):
        yield found


def test_one_connection_is_taken_and_nothing_is_left(temporary: Path) -> None:
    with DirectListener() as listener:
        assert stat.S_IMODE(listener.path.parent.stat().st_mode) == 0o700
        folder = os.open(listener.path.parent, os.O_PATH)
        short = f"/proc/self/fd/{folder}/{listener.path.name}"
        with socket.socket(socket.AF_UNIX) as runner, socket.socket(socket.AF_UNIX) as late:
            runner.connect(short)
            with listener.accept(time.monotonic() + 1) as stream:
                late.connect(short)  # waits to be accepted, until nobody listens any more
                listener.__exit__()
                with pytest.raises(ConnectionError):
                    late.sendall(b"x")
                stream.sendall(b"x")
                assert runner.recv(1) == b"x"
        os.close(folder)
    assert not list(temporary.iterdir())


def test_nobody_listens_any_more_also_where_a_forked_process_has_the_socket_open(temporary: Path) -> None:
    listener = DirectListener()
    kept = os.dup(listener._socket.fileno())
    linked = temporary / "linked"  # as a mount would, this keeps the file when the folder is gone
    os.link(listener.path, linked)
    listener.__exit__()
    listener.__exit__()
    folder = os.open(temporary, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as late, pytest.raises(ConnectionRefusedError):
        late.connect(f"/proc/self/fd/{folder}/{linked.name}")
    os.close(folder)
    os.close(kept)


def test_nobody_who_comes_is_an_error_in_time(temporary: Path) -> None:
    started = time.monotonic()
    with DirectListener() as listener, pytest.raises(TimeoutError):
        listener.accept(time.monotonic() + 0.1)
    assert time.monotonic() - started < 3


def hold_a_listener(folder: str, ready: Connection) -> None:
    tempfile.tempdir = folder
    with DirectListener():
        ready.send(True)
        threading.Event().wait()


def test_the_folder_of_a_killed_owner_is_removed_that_of_a_living_one_stays(temporary: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=hold_a_listener, args=(str(temporary), theirs))
    process.start()
    assert ours.poll(30)
    (killed,) = temporary.iterdir()
    with DirectListener() as living:
        direct.remove_leftovers()
        assert set(temporary.iterdir()) == {killed, living.path.parent}
        process.kill()
        process.join()
        direct.remove_leftovers()
        assert set(temporary.iterdir()) == {living.path.parent}


def test_starts_and_cleaners_side_by_side_never_meet(temporary: Path) -> None:
    """A cleaner that sees a folder before its owner has locked it takes nothing from the owner."""
    errors: list[Exception] = []
    done = threading.Event()

    def start_many() -> None:
        try:
            for _ in range(200):
                with DirectListener() as listener:
                    assert listener.path.is_socket()
        except Exception as error:  # a thread has nobody to raise to
            errors.append(error)

    def clean() -> None:
        while not done.is_set():
            direct.remove_leftovers()

    cleaners = [threading.Thread(target=clean) for _ in range(2)]
    starters = [threading.Thread(target=start_many) for _ in range(2)]
    for thread in (*cleaners, *starters):
        thread.start()
    for thread in starters:
        thread.join()
    done.set()
    for thread in cleaners:
        thread.join()
    assert not errors
    assert not list(temporary.iterdir())


@pytest.mark.engine
def test_a_container_on_this_machine_is_reached_past_its_engine(engine: DockerEngine, temporary: Path) -> None:
    assert engine.direct is None
    with closing(engine.start()) as box:
        assert engine.direct is True
        assert not list(temporary.iterdir())
        result = box.exec(ECHO)
        assert (result.status, result.stdout, result.stderr) == ("ok", "out\nin", "err\n")


def without_the_file(patch: pytest.MonkeyPatch) -> None:
    """The engine runs elsewhere, behind a socket that leads there."""

    def enter(listener: DirectListener) -> DirectListener:
        listener.path = Path("/not/here")
        return listener

    patch.setattr(DirectListener, "__enter__", enter)


def without_the_right(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Path, "chmod", lambda path, mode: os.chmod(path, 0o600))


def without_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tempfile, "tempdir", "/not/here")


def without_the_mount(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("agentft.sandbox.dialect.INSIDE", "/proc/not/here")


@pytest.mark.engine
@pytest.mark.parametrize("obstacle", [without_the_file, without_the_mount, without_the_right, without_room])
def test_where_it_is_not_possible_the_engine_relays(
    engine: DockerEngine, monkeypatch: pytest.MonkeyPatch, obstacle: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with monkeypatch.context() as patch:
        obstacle(patch)
        with closing(engine.start()) as box:
            assert engine.direct is False
            result = box.exec(ECHO)
            assert (result.status, result.stdout, result.stderr) == ("ok", "out\nin", "err\n")
    with closing(engine.start()) as box:
        assert engine.direct is False  # not tried again at every start
        assert box.exec(ECHO).status == "ok"


@pytest.mark.engine
def test_an_engine_that_starts_nothing_says_so_and_the_socket_is_tried_again(
    engine: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_image_id", "sha256:" + "0" * 64)
        with pytest.raises(SandboxError, match="could not be started"):
            engine.start()
    assert engine.direct is None  # that says nothing about the socket
    with closing(engine.start()):
        assert engine.direct is True
