"""A run that is killed with SIGKILL, wherever that is, and goes on leaves what the uninterrupted run leaves."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support_runs import SMALL, YAMLS, RunServer, make_shards, wait_for

BATCHES = 9  # three epochs of three batches; checkpoints fall on ends of epochs and between them
SEED = 20
TIMES = ("duration_s", "feedback/wait_ms", "time/", "train.log")
ALGORITHMS = [
    "data.curriculum.by=steps",
    "algorithms.raspberry.enabled=true",
    "algorithms.stochastic_depth.enabled=true",
    "algorithms.length_warmup={enabled: true, start: 96, end: 1024, until: 2ep}",
    "algorithms.spikes.on_spike=log",
]
VARIANTS: dict[str, list[str]] = {
    "policy": ["feedback.policy.every=2", "feedback.policy.calls=2", "train.eval_interval=1ep"],
    "algorithms": ALGORITHMS,
}


@dataclass
class Place:
    """Where the runs of this module are: their folder, shards, and the server that starts them."""

    folder: Path
    shards: Path
    server: RunServer

    def words(self, name: str, *more: str, parent: str = "runs") -> list[str]:
        """Return the command of a run that may go on from its checkpoints."""
        words = [str(YAMLS / "tiny-glm.yaml"), f"run_name={name}", f"runs_dir={self.folder / parent}"]
        words += [f"data.shards={self.shards}", *SMALL, f"train.duration={BATCHES}ba", "data.num_workers=0"]
        return [*words, "train.checkpoints.interval=2ba", "train.checkpoints.autoresume=true", *more]

    def killed(self, name: str, words: list[str], at: list[int], *, processes: int = 1) -> None:
        """Start the run and kill it once ``losses.jsonl`` has a line of each batch of ``at``, again and again."""
        chance = random.Random(SEED)
        losses = self.folder / "runs" / name / "losses.jsonl"
        for batch in at:
            run = self.server.start(words, processes=processes)
            wait_for(lambda batch=batch, run=run: _batches(losses) >= batch or run.ended())
            wait_for(lambda: False, chance.random() * 0.4)  # wherever in the next batch or checkpoint that may be
            run.kill()
            assert run.wait() == [-9] * processes, run.output()


def _batches(losses: Path) -> int:
    return len(losses.read_bytes().splitlines()) if losses.is_file() else 0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, bubblewrap: None) -> Iterator[Place]:
    """Shards, and a server of runs."""
    folder = tmp_path_factory.mktemp("resume")
    shards = make_shards(folder)
    with RunServer(folder) as server:
        yield Place(folder, shards, server)


@pytest.fixture(scope="module")
def traced(place: Place) -> Path:
    """A run that nothing has stopped, with a sandbox; others repeat its executions."""
    place.server.run(place.words("traced", "feedback.backend=local", *VARIANTS["policy"]))
    return place.folder / "runs" / "traced"


def _plain(lines: bytes) -> list[dict[str, Any]]:
    """Return JSON lines without what depends on the time of day or the name of the run."""
    found = [json.loads(line) for line in lines.splitlines()]
    return [{key: value for key, value in line.items() if key != "run" and not key.startswith(TIMES)} for line in found]


def _same(one: Path, other: Path) -> None:
    """Check that two runs have left the same, bit for bit where no time is in it."""
    assert (one / "losses.jsonl").read_bytes() == (other / "losses.jsonl").read_bytes()
    assert _plain((one / "metrics.jsonl").read_bytes()) == _plain((other / "metrics.jsonl").read_bytes())
    traces = sorted(path.name for path in (other / "traces").iterdir())
    assert sorted(path.name for path in (one / "traces").iterdir()) == traces
    for name in traces:
        mine, theirs = ((run / "traces" / name).read_bytes() for run in (one, other))
        assert _plain(mine) == _plain(theirs), name
    weights = [load_file(run / "model" / "model.safetensors") for run in (one, other)]
    assert all(weights[0][name].equal(tensor) for name, tensor in weights[1].items())
    summaries = [json.loads((run / "summary.json").read_text()) for run in (one, other)]
    for key in ("batches", "loss", "eval_loss", "tokens", "probe"):
        assert summaries[0][key] == summaries[1][key], key


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_killed_at_random_points_a_run_ends_as_the_uninterrupted_one(place: Place, traced: Path, variant: str) -> None:
    whole = traced
    if variant != "policy":
        whole = place.folder / "runs" / f"{variant}-whole"
        place.server.run(place.words(whole.name, "feedback.backend=local", *VARIANTS[variant]))
    points = sorted(random.Random(f"{SEED}/{variant}").sample(range(1, BATCHES), 3 if variant == "policy" else 2))
    name = f"{variant}-killed"
    words = place.words(name, "feedback.backend=replay", f"feedback.replay_from={whole}", *VARIANTS[variant])
    place.killed(name, words, points)
    place.server.run(words)
    _same(place.folder / "runs" / name, whole)


@pytest.mark.slow
def test_two_processes_go_on_as_two_and_as_one(place: Place, traced: Path) -> None:
    more = ["feedback.backend=replay", f"feedback.replay_from={traced}"]
    place.server.run(place.words("two-whole", *more), processes=2)
    words = place.words("two", *more)
    place.killed("two", words, [random.Random(SEED).randrange(4, BATCHES)], processes=2)
    whole, two, one = (place.folder / part for part in ("runs/two-whole", "runs/two", "as-one/two"))
    shutil.copytree(two, one)
    place.server.run(words, processes=2)
    _same(two, whole)

    place.server.run(place.words("two", *more, parent="as-one"))
    curves = [[json.loads(line) for line in (run / "losses.jsonl").read_text().splitlines()] for run in (one, whole)]
    assert len(curves[0]) == BATCHES
    for line, other in zip(*curves, strict=True):
        assert line == pytest.approx(other, rel=1e-5, abs=1e-5)
    keys = [
        sorted(
            (line["batch"], line["key"]) for path in (run / "traces").iterdir() for line in _plain(path.read_bytes())
        )
        for run in (one, whole)
    ]
    assert keys[0] == keys[1], "the same samples in the same batches"


def test_a_run_that_is_going_on_is_left_alone(place: Place, tmp_path: Path) -> None:
    off = ["feedback.backend=off", f"runs_dir={tmp_path}", "train.duration=500ba"]
    first = place.server.start(place.words("alive", *off))
    losses = tmp_path / "alive" / "losses.jsonl"
    try:
        assert wait_for(lambda: _batches(losses) > 0 or first.ended())
        assert not first.ended(), first.output()
        second = place.server.start(place.words("alive", *off))
        assert second.wait() == [2]
        assert "another process is training this run" in second.output()
    finally:
        first.kill()
        first.wait()


def test_what_decides_about_the_losses_may_not_change(place: Place, traced: Path) -> None:
    again = place.server.start(place.words("traced", "feedback.backend=local", *VARIANTS["policy"]))
    assert again.wait() == [0]
    assert "this run is finished" in again.output()
    copy = place.folder / "changed" / "traced"
    shutil.copytree(traced, copy)
    (copy / "summary.json").unlink()
    words = place.words("traced", "feedback.backend=off", "optimizer.clip_norm=2", parent="changed")
    other = place.server.start(words)
    assert other.wait() == [2]
    assert "optimizer.clip_norm: 1.0 -> 2.0" in other.output()
    assert "feedback.policy.every: 2 -> 0" in other.output()
