"""Data jobs of several processes: the same global batches on any number of ranks, and a start after kill -9."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import support_corpus
import support_ranks

from agentft.config.schema import DataConfig
from agentft.data.corpus_shards import write_corpus
from agentft.data.loader import build_loader, open_shards
from agentft.data.shards import ShardReport
from agentft.data.shared_memory import clean_stale
from agentft.errors import DataError

SCRIPT = Path(__file__).with_name("support_ranks.py")
SHM = Path("/dev/shm")


def _start(ranks: int, *arguments: object) -> list[subprocess.Popen[str]]:
    """Start a job of ``ranks`` processes in a session of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "NODE_RANK": 0}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    processes = []
    for rank in range(ranks):
        environment = {**os.environ, **{k: str(v) for k, v in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}}
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
        )
    return processes


def _run(ranks: int, *arguments: object) -> tuple[list[list[str]], list[list[str]], dict[str, Any]]:
    """Run a job to its end; return its global batches, its last look ahead, and the state in which it stopped."""
    outputs = [process.communicate(timeout=150)[0] for process in _start(ranks, *arguments)]
    lines = [[json.loads(line) for line in output.splitlines() if line.startswith("{")] for output in outputs]
    batches = [_joined(part["ids"] for part in parts) for parts in zip(*(x[:-1] for x in lines), strict=True)]
    ahead = [_joined(parts) for parts in zip(*(x[-2]["ahead"] for x in lines), strict=True)]
    return batches, ahead, lines[0][-1]


def _joined(parts: Iterable[list[str]]) -> list[str]:
    return sorted(name for part in parts for name in part)


def _plain(folder: Path, epochs: int = 2) -> list[list[str]]:
    data = DataConfig(shards=str(folder), batch_size=8)
    loader = build_loader(data, "train", open_shards(data), shuffle=True, seed=17).dataloader
    return [sorted(batch["session_id"]) for _ in range(epochs) for batch in loader]


@pytest.mark.slow
def test_global_batches_do_not_depend_on_the_number_of_ranks(written: ShardReport) -> None:
    """Two ranks, stopped in the first epoch; one rank goes on; two ranks go on from there over the epoch's end."""
    plain = _plain(written.folder)
    batches, ahead, state = _run(2, written.folder, "--batches", 2, "--look", 4)
    assert batches == plain[:2]
    assert ahead == plain[2:6], "the look ahead crosses the end of the epoch on every rank"
    data = DataConfig(shards=str(written.folder), batch_size=8)
    loader = build_loader(data, "train", open_shards(data), shuffle=True, seed=17).dataloader
    loader.dataset.load_state_dict(state)
    assert sorted(next(iter(loader))["session_id"]) == plain[2]
    batches, _, _ = _run(2, written.folder, "--batches", 4, "--state", json.dumps(loader.dataset.state_dict(24, True)))
    assert batches == plain[3:7]


@pytest.mark.slow
def test_objectives_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """Two ranks over the end of an epoch make the same of each row as one rank does, and as one that goes on later."""
    lines = [
        {"content": support_corpus.MODULE + f"# {n}\n", "path": f"{n}.py", "language": "python"} for n in range(24)
    ]
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_corpus([tmp_path / "code.jsonl"], tmp_path / "shards", max_tokens=160, vocab_size=600)
    data = DataConfig(shards=str(tmp_path / "shards"), batch_size=8)
    transform = support_ranks.four_objectives(data.shards)

    def one_rank() -> Iterator[list[str]]:
        spec = build_loader(data, "train", open_shards(data), shuffle=True, seed=17, transform=transform)
        for _ in range(2):
            for batch in spec.dataloader:
                yield sorted(support_ranks.rows(batch))

    plain = list(one_rank())
    count = len(plain) // 2 + 1
    batches, _, state = _run(2, data.shards, "--corpus", "--batches", count)
    assert batches == plain[:count]
    spec = build_loader(data, "train", open_shards(data), shuffle=True, seed=17, transform=transform)
    spec.dataloader.dataset.load_state_dict(state)
    assert sorted(support_ranks.rows(next(iter(spec.dataloader)))) == plain[count]


@contextmanager
def _hanging(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A job that has read two batches and then does nothing; killed with all its processes at the end."""
    (process,) = _start(1, *arguments, "--batches", 2, "--hang")
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready"):
                break
        assert process.poll() is None
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def _segments_of(folder: Path) -> list[str]:
    return [path.name for path in SHM.glob("*_locals") if str(folder).encode() in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.skipif(not SHM.is_dir(), reason="this system has no /dev/shm")
def test_start_after_kill_with_another_job_alive(written: ShardReport, tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    with _hanging(theirs, "--remote", written.folder) as living:
        with _hanging(mine, "--remote", written.folder):
            assert _segments_of(mine)
            with pytest.raises(DataError, match=rf"another job that is alive[\s\S]*process {living.pid}"):
                open_shards(DataConfig(shards=str(theirs), remote=str(written.folder)))
        assert _segments_of(mine), "kill -9 leaves its shared memory"
        data = DataConfig(shards=str(mine), remote=str(written.folder), batch_size=8)
        meta = open_shards(data)
        assert not _segments_of(mine)
        assert _segments_of(theirs), "a living job keeps its own"
        loader = build_loader(data, "train", meta, shuffle=True, seed=17).dataloader
        assert [sorted(batch["session_id"]) for batch in loader] == _plain(written.folder, 1)
        assert living.poll() is None
    assert clean_stale([str(theirs / "train")]), "the other one was killed as well"
    assert not _segments_of(theirs)
