"""The results on disk: whole or not at all, whatever happens to the processes and the file."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import multiprocessing
import os
import random
import sqlite3
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentft.cli import main
from agentft.sandbox.base import ExecResult
from agentft.sandbox.cache_disk import FILE_NAME, DiskStore, clear, file_system

RESULTS = st.builds(
    ExecResult,
    status=st.sampled_from(["ok", "nonzero", "timeout", "oom", "pids", "output_limit"]),
    exit_code=st.none() | st.integers(0, 255),
    stdout=st.text(max_size=300),
    stderr=st.text(max_size=100),
    duration_s=st.floats(0, 1e6),
    truncated=st.booleans(),
    total_bytes=st.integers(0, 2**40),
    fields=st.dictionaries(
        st.text(max_size=8),
        st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.lists(st.integers(), max_size=3),
        max_size=4,
    ),
)


@functools.cache
def expected(number: int) -> ExecResult:
    """The result of a key in the tests that kill: large enough that pages overflow."""
    text = "".join(chr(97 + (number * 7 + i * i) % 26) for i in range(200 + 61 * number % 9000))
    return ExecResult(
        status="ok", exit_code=0, stdout=text, duration_s=number / 7, fields={"passed": number, "failed_tests": ["a"]}
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(result=RESULTS)
def test_a_result_comes_back_whole(tmp_path: Path, result: ExecResult) -> None:
    store = DiskStore(tmp_path, mib=1)
    store.put("k", "t", result)
    store.close()
    again = DiskStore(tmp_path, mib=1)
    assert again.get("k") == result
    again.close()


def test_what_json_would_change_is_not_kept(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, mib=1)
    for fields in ({"a": (1, 2)}, {"a": {1: 2}}, {"a": {1}}, {"a": float("nan")}):
        store.put("k", "t", ExecResult(status="ok", exit_code=0, fields=fields))
        assert store.get("k") is None
    store.put("k", "t", ExecResult(status="ok", exit_code=0, stdout=random.Random(1).randbytes(200_000).hex()))
    assert store.get("k") is None  # more than an eighth of all
    assert store.stats()["errors"] == 0
    store.close()


def test_the_last_writer_wins_and_tools_can_be_dropped(tmp_path: Path) -> None:
    one, other = DiskStore(tmp_path, mib=1), DiskStore(tmp_path, mib=1)
    one.put("k", "pytest_run", expected(1))
    other.put("k", "pytest_run", expected(2))
    other.put("l", "file_read", expected(3))
    assert one.get("k") == expected(2)
    one.drop_tool("pytest_run")
    assert (other.get("k"), other.get("l")) == (None, expected(3))
    other.remove("l")
    assert one.stats()["entries"] == 0
    one.close()
    one.close()
    other.close()


def test_the_oldest_use_goes_first_and_the_file_stays_below_its_limit(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, mib=1)
    text = [random.Random(number).randbytes(3000).hex() for number in range(600)]
    for number in range(600):
        store.put(f"{number}", "t", ExecResult(status="ok", exit_code=0, stdout=text[number]))
        if number % 10 == 0:
            time.sleep(0.002)  # the clock of uses counts milliseconds
            assert store.get("0") is not None
    assert os.path.getsize(tmp_path / FILE_NAME) <= 1.1 * 2**20
    stats = store.stats()
    assert 100 < stats["entries"] < 400
    assert 0.5 < stats["mib"] <= 1.0
    kept = [number for number in range(600) if store.get(f"{number}") is not None]
    assert kept == [0, *range(601 - len(kept), 600)]
    store.close()


def test_a_lowered_limit_is_kept_from_the_start(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, mib=4)
    for number in range(600):
        store.put(
            f"{number}", "t", ExecResult(status="ok", exit_code=0, stdout=random.Random(number).randbytes(3000).hex())
        )
    store.close()
    assert os.path.getsize(tmp_path / FILE_NAME) > 1.5 * 2**20
    store = DiskStore(tmp_path, mib=1)
    assert store.get("599") is not None
    store.close()
    assert os.path.getsize(tmp_path / FILE_NAME) <= 1.1 * 2**20


def write(folder: Path, first: int, tell: Connection) -> None:
    """What a writer does until it is killed: keep results, and say so."""
    store = DiskStore(folder, mib=2)
    for number in range(first, 10**9):
        store.put(f"key {number % 400}", "pytest_run", expected(number % 400))
        tell.send(number)


def test_killed_writers_leave_only_whole_results(tmp_path: Path) -> None:
    """Three processes write one file; at random moments one is killed with SIGKILL. Nothing said to be kept is lost."""
    chance, fork = random.Random(4), multiprocessing.get_context("fork")
    said: set[int] = set()

    def start(number: int) -> tuple[BaseProcess, Connection]:
        hear, tell = fork.Pipe(duplex=False)
        process = fork.Process(target=write, args=(tmp_path, number, tell), daemon=True)
        process.start()
        tell.close()
        return process, hear

    def kill(writer: tuple[BaseProcess, Connection]) -> None:
        process, hear = writer
        process.kill()
        with contextlib.suppress(EOFError):
            while True:
                said.add(hear.recv())
        process.join()

    writers = [start(137 * number) for number in range(3)]
    for number in range(24):
        time.sleep(chance.uniform(0.0, 0.05))
        kill(writers[number % 3])
        check_all(tmp_path, said)
        writers[number % 3] = start(chance.randrange(400))
    for writer in writers:
        kill(writer)
    assert len(said) > 100
    check_all(tmp_path, said)
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def check_all(folder: Path, said: set[int]) -> None:
    store = DiskStore(folder, mib=2)
    found = {number: store.get(f"key {number}") for number in range(400)}
    assert store.stats() | {"entries": 0, "mib": 0} == {"entries": 0, "mib": 0, "damaged": 0, "rebuilt": 0, "errors": 0}
    store.close()
    for number, result in found.items():
        assert result == expected(number) or (result is None and number not in {n % 400 for n in said})


def filled(folder: Path, count: int = 120) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    clear(folder)
    store = DiskStore(folder, mib=2)
    for number in range(count):
        store.put(f"key {number}", "t", expected(number))
    store.close()
    return folder / FILE_NAME


@functools.cache
def whole_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return filled(Path(folder)).read_bytes()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), cut=st.booleans())
def test_a_damaged_file_is_never_trusted(tmp_path: Path, seed: int, cut: bool) -> None:
    """Bytes overwritten or cut off at random: each key gives its own result or none, and the store works on."""
    chance, data = random.Random(seed), bytearray(whole_file())
    clear(tmp_path)
    if cut:
        del data[chance.randrange(len(data)) :]
    else:
        for _ in range(chance.choice([1, 10, 1000])):
            at = chance.randrange(len(data))
            data[at : at + 8] = chance.randbytes(min(8, len(data) - at))
    (tmp_path / FILE_NAME).write_bytes(data)
    store = DiskStore(tmp_path, mib=2)
    for number in range(120):
        assert store.get(f"key {number}") in (None, expected(number))
    for number in range(0, 120, 7):
        store.put(f"key {number}", "t", expected(number))
        rebuilt = store.stats()["rebuilt"]
        if (found := store.get(f"key {number}")) is None:
            assert store.stats()["rebuilt"] == rebuilt + 1  # damage that only this look has met: all is begun anew
            store.put(f"key {number}", "t", expected(number))
            found = store.get(f"key {number}")
        assert found == expected(number)
    assert store.stats()["errors"] == 0
    store.close()


def test_an_entry_that_is_not_as_it_was_written_is_removed_alone(tmp_path: Path) -> None:
    path = filled(tmp_path, 5)
    with sqlite3.connect(path) as connection:
        connection.execute(
            "UPDATE results SET body = (SELECT body FROM results WHERE key = 'key 1') WHERE key = 'key 0'"
        )
        connection.execute("UPDATE results SET body = 'text' WHERE key = 'key 2'")
        connection.execute("UPDATE results SET tool = CAST(x'ff' AS TEXT) WHERE key = 'key 3'")
    connection.close()
    store = DiskStore(tmp_path, mib=2)
    assert [store.get(f"key {number}") for number in range(5)] == [None, expected(1), None, None, expected(4)]
    stats = store.stats()
    assert (stats["damaged"], stats["rebuilt"], stats["errors"], stats["entries"]) == (3, 0, 0, 2)
    store.close()


def test_two_processes_find_one_damage_and_begin_anew_together(tmp_path: Path) -> None:
    path = filled(tmp_path)
    path.write_bytes(b"not a database" * 1000)
    one, other = DiskStore(tmp_path, mib=2), DiskStore(tmp_path, mib=2)
    one.put("k", "t", expected(1))
    assert other.get("k") == expected(1)
    assert (one.stats()["rebuilt"], other.stats()["rebuilt"]) == (1, 0)
    one.close()
    other.close()


def test_a_disk_that_cannot_be_used_costs_nothing_but_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        store = DiskStore(tmp_path / "file" / "below", mib=1)
    store.put("k", "t", expected(1))
    assert store.get("k") is None
    store.close()
    assert "no longer kept" in caplog.text


def test_threads_share_a_store(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, mib=8)
    wrong: list[int] = []

    def work(first: int) -> None:
        for number in range(first, 200, 4):
            store.put(f"key {number}", "t", expected(number))
            if store.get(f"key {number}") != expected(number):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.stats()["entries"] == 200
    store.close()


def test_cleared_results_are_gone_and_a_running_store_does_not_mind(tmp_path: Path) -> None:
    filled(tmp_path)
    store = DiskStore(tmp_path, mib=2)
    assert clear(tmp_path) > 0
    assert list(tmp_path.iterdir()) == []
    store.put("k", "t", expected(1))
    store.close()
    again = DiskStore(tmp_path, mib=2)
    assert again.get("key 1") is None
    again.close()


def test_the_verb_clears_a_run_or_a_shared_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path / "run" / "cache")
    filled(tmp_path / "shared")
    (tmp_path / "shared" / "mine.txt").write_text("not the cache's")
    assert main(["sandbox", "clean", "--cache", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] > 10_000
    assert main(["sandbox", "clean", "--cache", str(tmp_path / "shared")]) == 0
    assert "MiB freed" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["mine.txt"]
    assert main(["sandbox", "clean", "--cache", str(tmp_path / "nowhere")]) == 2


def test_the_file_system_of_a_folder_is_known(tmp_path: Path) -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(tmp_path / "not" / "there") not in ("", "proc")
