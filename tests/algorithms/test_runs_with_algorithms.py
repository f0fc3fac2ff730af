"""Whole runs with every algorithm on: killed and resumed they are what they were, and off there is nothing at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support_agent import make_model, make_renderer, sessions
from support_runs import make_shards

from agentft.config.load import load
from agentft.train.build_extras import build_extras
from agentft.train.run import main

REPO = Path(__file__).resolve().parents[2]
YAML = str(REPO / "yamls" / "agent" / "tiny-glm.yaml")
SMALL = (
    "loggers.tensorboard=false", "loggers.console=false", "data.batch_size=4", "data.microbatch_size=2",
    "data.calibration_split=null", "train.threads=1", "train.precision=fp32", "train.duration=2ep",
    "train.eval_interval=2ba", "train.checkpoints.interval=1ba", "train.checkpoints.autoresume=true",
    "feedback.backend=local", "feedback.probe.every=3", "feedback.probe.calls=2",
)  # fmt: skip
EVERYTHING = (
    "data.curriculum.by=steps", "data.curriculum.widths=[0.2, 0.6]",
    "algorithms.raspberry.enabled=true", "algorithms.raspberry.p=0.5", "algorithms.raspberry.window=3",
    "algorithms.length_warmup.enabled=true", "algorithms.length_warmup.start=200",
    "algorithms.length_warmup.end=1024", "algorithms.length_warmup.until=1ep",
    "algorithms.stochastic_depth.enabled=true", "algorithms.stochastic_depth.p=0.4", "algorithms.diversity=true",
    "algorithms.early_stop.metric=code", "algorithms.spikes.on_nan=stop", "algorithms.spikes.on_spike=log",
    "algorithms.monitors.learning_rate=true", "algorithms.monitors.speed=3", "algorithms.monitors.memory=true",
    "algorithms.monitors.activations=2", "algorithms.samples.every=3", "algorithms.samples.max_tokens=12",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, bubblewrap: None) -> Path:
    where = tmp_path_factory.mktemp("runs")
    make_shards(where, count=20, held_out=4)
    return where


def words(folder: Path, name: str) -> list[str]:
    return [YAML, f"run_name={name}", f"runs_dir={folder}", f"data.shards={folder / 'shards'}", *SMALL, *EVERYTHING]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A run of eight batches with everything on, from start to end."""
    assert main(words(folder, "whole")) == 0
    return folder / "whole"


@pytest.mark.slow
def test_everything_is_logged(whole: Path) -> None:
    metrics = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in metrics for name in line}
    expected = {
        "raspberry/anchors", "raspberry/failure_rate/file_edit", "length_warmup/length", "stochastic_depth/skipped",
        "diversity/snippets", "lr-DecoupledAdamW/group0", "speed/trained_tokens_per_s", "throughput/tokens_per_sec",
        "memory/peak_resident_gib", "activations/layer2/rms",
    }  # fmt: skip
    assert expected - names == set()
    assert (whole / "samples.txt").read_text().count("=== batch") == 4
    lengths = [line["length_warmup/length"] for line in metrics if "length_warmup/length" in line]
    assert lengths == [200.0, 400.0, 608.0, 816.0], "four batches an epoch, one epoch of warm-up"


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_as_if_nothing_had_been(folder: Path, whole: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = subprocess.Popen([sys.executable, str(REPO / "train.py"), *words(folder, "killed")], env=environment)
    losses = folder / "killed" / "losses.jsonl"
    deadline = time.monotonic() + 200
    while not (losses.exists() and len(losses.read_bytes().splitlines()) >= 3):
        assert started.poll() is None, "the run has ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started.kill()
    started.wait()
    assert main(words(folder, "killed")) == 0
    assert losses.read_bytes() == (whole / "losses.jsonl").read_bytes()


def test_by_default_there_is_nothing(tmp_path: Path) -> None:
    config = load(YAML)
    agent = make_model(make_renderer(sessions(2)))
    assert build_extras(config, tmp_path, model=agent, renderer=None, sessions=list, feedback=None) == ([], [])
