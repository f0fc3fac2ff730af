"""Stage pretrain from source files to an agent: what it learns, that it resumes exactly, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support_agent import sessions

from agentft.config.load import load
from agentft.config.schema import DataConfig
from agentft.data.corpus_shards import write_corpus
from agentft.data.loader import SessionDataset, build_loader, open_shards
from agentft.data.pretrain import build_objectives
from agentft.data.shards import write_shards
from agentft.text.vocab import load_tokenizer, tokenizer_fingerprint
from agentft.train.run import main

REPO = Path(__file__).resolve().parents[2]
YAML = str(REPO / "yamls" / "pretrain" / "tiny-pretrain.yaml")
AGENT_YAML = str(REPO / "yamls" / "agent" / "tiny-glm.yaml")
LIBRARY = Path(os.__file__).parent
SMALL = [
    "text.max_tokens=128",
    "text.result_tokens=50",
    "data.batch_size=4",
    "data.microbatch_size=2",
    "loggers.tensorboard=false",
]
SMALL += ["train.threads=1", "train.precision=fp32", "train.eval_interval=0ba", "optimizer.backbone_lr=3e-3"]
MIX = ["objectives.causal=0.4", "objectives.fim=0.3", "objectives.masked=0.15", "objectives.denoise=0.15"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of some of Python's own standard library, read where it is installed."""
    paths = [LIBRARY / name for name in ("json", "html", "csv.py", "shlex.py", "textwrap.py", "bisect.py")]
    folder = tmp_path_factory.mktemp("pretrain") / "shards"
    write_corpus(paths, folder, max_tokens=128, vocab_size=700)
    return folder


def _words(name: str, runs: Path, shards: Path, *more: str) -> list[str]:
    return [YAML, f"run_name={name}", f"runs_dir={runs}", f"data.shards={shards}", *SMALL, *more]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 32 batches, evaluated after every 8 of them."""
    runs = tmp_path_factory.mktemp("runs")
    more = ["train.duration=32ba", "train.eval_interval=8ba", "objectives.fim=0.5", "objectives.causal=0.5"]
    assert main(_words("learns", runs, corpus, *more)) == 0
    return runs / "learns"


def test_the_loss_falls_as_it_is_and_as_fill_in_the_middle(trained: Path) -> None:
    losses = [line["loss/code/raw"] for line in _lines(trained / "losses.jsonl")]
    assert sum(losses[-8:]) / 8 < losses[0] - 1
    evaluated = [line for line in _lines(trained / "metrics.jsonl") if "metrics/eval/code" in line]
    middles = [line for line in _lines(trained / "metrics.jsonl") if "metrics/eval/fim/code" in line]
    for lines, name in ((evaluated, "metrics/eval/code"), (middles, "metrics/eval/fim/code")):
        values = [line[name] for line in lines]
        assert len(values) == 4
        assert values[-1] < values[0] - 0.1, name
        assert values[-1] < losses[0] - 1, name
    summary = json.loads((trained / "summary.json").read_text())
    assert {"code", "fim/code"} <= set(summary["eval_loss"])
    assert summary["loss"]["intent"]["first"] is None
    for line in _lines(trained / "losses.jsonl"):
        assert all(line[f"loss/{name}/raw"] == 0 for name in ("intent", "tool", "cursor", "reward", "policy"))


def test_the_agent_stage_goes_on_from_it(trained: Path, tmp_path: Path) -> None:
    """The tokenizer carries over to the shards of sessions, the weights to the new agent, bit for bit."""
    lines = [session.model_dump_json() for session in sessions(12)]
    (tmp_path / "sessions.jsonl").write_text("\n".join(lines) + "\n")
    config = load(AGENT_YAML)
    write_shards(
        [tmp_path / "sessions.jsonl"],
        tmp_path / "shards",
        text=config.text,
        positions=config.model.feedback_positions,
        tokenizer=str(trained / "model"),
        holdout=[],
    )
    prints = [tokenizer_fingerprint(load_tokenizer(f)) for f in (trained / "model", tmp_path / "shards" / "tokenizer")]
    assert prints[0] == prints[1]
    words = [AGENT_YAML, "run_name=agent", f"runs_dir={tmp_path}", f"data.shards={tmp_path / 'shards'}"]
    words += ["model.preset=null", f"model.path={trained / 'model'}", "data.batch_size=4", "data.microbatch_size=4"]
    words += ["feedback.backend=off", "data.calibration_split=null", "train.duration=1ba", "train.eval_interval=0ba"]
    words += ["optimizer.backbone_lr=0", "loggers.tensorboard=false", "train.threads=1", "train.precision=fp32"]
    words += ["data.eval_split=train"]
    assert main(words) == 0
    before = load_file(trained / "model" / "model.safetensors")
    after = load_file(tmp_path / "agent" / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_killed_run_goes_on_exactly(corpus: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle, all four objectives on: the resumed curve is the uninterrupted one, bit for bit."""
    more = [*MIX, "train.duration=9ba", "text.max_tokens=160"]
    assert main(_words("whole", tmp_path, corpus, *more)) == 0
    saved = ["train.checkpoints.interval=2ba", "train.checkpoints.autoresume=true"]
    words = _words("killed", tmp_path, corpus, *more, *saved)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, str(REPO / "train.py"), *words], cwd=REPO, env=environment)
    losses, end = tmp_path / "killed" / "losses.jsonl", time.monotonic() + 200
    while time.monotonic() < end and process.poll() is None:
        if losses.exists() and len(losses.read_text().splitlines()) >= 5:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "summary.json").exists(), "killed before its end"
    assert main(words) == 0
    assert losses.read_bytes() == (tmp_path / "whole" / "losses.jsonl").read_bytes()


def test_samples_do_not_depend_on_workers_or_on_where_an_epoch_is_taken_up(corpus: Path) -> None:
    """What each row becomes in the second epoch: read through, by two loader processes, and after a resume."""
    config = load(YAML, [f"data.shards={corpus}", *SMALL, *MIX])
    objectives = build_objectives(config, load_tokenizer(corpus / "tokenizer"), open_shards(config.data))

    def epochs(workers: int, count: int, state: dict[str, Any] | None = None) -> list[dict[str, list[int]]]:
        data = DataConfig(shards=str(corpus), batch_size=4, num_workers=workers)
        spec = build_loader(data, "train", open_shards(data), shuffle=True, seed=17, transform=objectives)
        loader = spec.dataloader
        dataset = loader.dataset  # type: ignore[union-attr]
        assert isinstance(dataset, SessionDataset)
        if state is not None:
            dataset.load_state_dict(state)
        found = []
        for _ in range(count):
            rows = {}
            for batch in loader:  # type: ignore[union-attr]
                for row, name in enumerate(batch["session_id"]):
                    rows[name] = batch["input_ids"][row, : batch["lengths"][row]].tolist()
            found.append(rows)
        return found

    first, second = epochs(0, 2)
    assert second != first, "another epoch, other draws"
    assert epochs(2, 2) == [first, second]
    state = {
        "epoch": 1,
        "sample_in_epoch": 8,
        "num_canonical_nodes": 1,
        "shuffle_seed": 17,
        "initial_physical_nodes": 1,
    }
    (resumed,) = epochs(0, 1, state)
    assert len(resumed) == len(second) - 8
    assert resumed.items() <= second.items()


def test_what_does_not_fit_is_refused(
    corpus: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_words("short", tmp_path, corpus, "train.duration=1ba", "text.max_tokens=100")) == 2
    assert "the rows of the corpus may be longer than a sample" in capsys.readouterr().err
    words = [AGENT_YAML, "run_name=agent", f"runs_dir={tmp_path}", f"data.shards={corpus}", "feedback.backend=off"]
    assert main([*words, "train.duration=1ba"]) == 1
    assert "these shards hold no sessions" in capsys.readouterr().err
    from agentft.cli import main as cli

    assert cli(["eval", str(trained)]) == 2
    assert "no heads to evaluate" in capsys.readouterr().err
