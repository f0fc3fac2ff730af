"""A file appears whole or not at all: whatever fails, and however many write at once."""

from __future__ import annotations

import json
import multiprocessing
import signal
import threading
import time
from pathlib import Path

import pytest
from support_agent import repair_session

from agentft import etai_io
from agentft.files import whole_file, write_json
from agentft.train.evaluate import add_to_summary


def test_the_new_takes_the_place_of_the_old_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "a.json"
    write_json(path, {"n": 1})
    write_json(path, {"n": 2, "text": "é\ud800"})
    assert json.loads(path.read_text()) == {"n": 2, "text": "é\ud800"}
    assert list(path.parent.iterdir()) == [path]


def write_half(path: Path, error: BaseException) -> None:
    with whole_file(path) as partial:
        partial.write_text("half")
        raise error


@pytest.mark.parametrize("error", [ValueError("x"), OSError("x"), KeyboardInterrupt()])
def test_what_fails_leaves_the_old(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(type(error)):
        write_half(path, error)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_said_in_json_costs_no_summary(tmp_path: Path) -> None:
    """Training's part of a summary is hours of work: an evaluation that fails to write leaves it."""
    write_json(tmp_path / "summary.json", {"loss": 1.0})
    with pytest.raises(TypeError):
        add_to_summary(tmp_path, {"heads": object()})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"loss": 1.0}
    add_to_summary(tmp_path, {"heads": 1})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"loss": 1.0, "heads": 1}


def test_many_threads_write_one_file_and_it_is_always_whole(tmp_path: Path) -> None:
    path, done, torn = tmp_path / "a.json", threading.Event(), list[str]()
    write_json(path, [0] * 5000)

    def look() -> None:
        while not done.is_set():
            text = path.read_text()
            if len(set(json.loads(text))) != 1:
                torn.append(text[:100])

    def write(number: int) -> None:
        for _ in range(20):
            write_json(path, [number] * 5000)

    reader = threading.Thread(target=look)
    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert not torn
    assert list(tmp_path.iterdir()) == [path]


def write_until_killed(path: Path) -> None:
    for number in range(1_000_000):
        write_json(path, [number] * 20_000)


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for _ in range(4):
        process = multiprocessing.get_context("fork").Process(target=write_until_killed, args=(path,))
        process.start()
        time.sleep(0.15)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert len(set(json.loads(path.read_text()))) == 1
    assert all(left.name.endswith(".partial") for left in tmp_path.iterdir() if left != path)


def test_two_threads_that_write_the_same_sessions_do_not_meet(tmp_path: Path) -> None:
    path, session = tmp_path / "s.jsonl", repair_session(1)
    errors: list[BaseException] = []

    def write() -> None:
        try:
            for _ in range(20):
                etai_io.write(path, [session])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [read.session_id for read in etai_io.read(path)] == [session.session_id]
    assert list(tmp_path.iterdir()) == [path]
