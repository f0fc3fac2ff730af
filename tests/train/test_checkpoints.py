"""Checkpoints: what is written reads back equal, nothing is unpickled, the newest and best stay, the store is first."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_runs import SMALL, YAMLS, make_shards
from support_s3 import S3Server, make_client

from agentft.cli import main as cli
from agentft.config.checkpoints import CheckpointsConfig
from agentft.config.load import InvalidConfigError, load
from agentft.errors import AgentFTError, CheckpointError
from agentft.train import disk
from agentft.train.checkpoint_file import read_checkpoint, read_plain, strip_optimizer, write_checkpoint
from agentft.train.checkpoint_list import Kept, read_list, to_keep, write_list
from agentft.train.run import main

GO_ON = "train.checkpoints.autoresume=true"
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(value=PLAIN)
def test_plain_values_read_back_equal(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.mktemp("plain") / "a.safetensors"
    write_checkpoint(path, {"value": value})
    found = read_checkpoint(path)["value"]
    assert found == value
    assert type(found) is type(value)


def test_tensors_of_every_kind_read_back_bit_for_bit(tmp_path: Path) -> None:
    one = torch.randn(5, 3)
    content = {
        "float": one,
        "same": one,
        "turned": one.t(),
        "half": one.bfloat16(),
        "expanded": torch.tensor(2.5).expand(1),
        "nothing": torch.zeros(0, 4),
        "scalar": torch.tensor(7),
        "flags": torch.tensor([True, False]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "array": np.arange(4, dtype=np.uint32),
        "more": [float("nan"), -math.inf, timedelta(seconds=1.5), deque([1, 2]), {"~": 1}, {(1, 2): "x"}],
    }
    size, digest = write_checkpoint(tmp_path / "a.safetensors", content)
    assert (tmp_path / "a.safetensors").stat().st_size == size
    assert len(digest) == 64
    found = read_checkpoint(tmp_path / "a.safetensors")
    for name, value in content.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert found[name].shape == value.shape
            assert torch.equal(found[name], value), name
    assert np.array_equal(found["array"], content["array"])
    assert found["array"].dtype == np.uint32
    assert math.isnan(found["more"][0])
    assert found["more"][1:] == content["more"][1:]  # type: ignore[index]


def test_an_object_is_refused_where_it_stands(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="state/callbacks/0") as refused:
        write_checkpoint(tmp_path / "a.safetensors", {"state": {"callbacks": [object()]}})
    assert "builtins.object" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


class Bomb:
    """Creates a file where it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("pack", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_pickle_is_refused_and_does_not_run(tmp_path: Path, shards: Path, pack: Any, capsys: Any) -> None:
    went_off = tmp_path / "went-off"
    run = tmp_path / "bombed"
    words = [*_words("bombed", tmp_path, shards), GO_ON, "train.duration=2ba"]
    assert main(words) == 0
    (run / "summary.json").unlink()
    path = run / "checkpoints" / "ba2.safetensors"
    pack({"state": Bomb(went_off)}, path)
    capsys.readouterr()
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "pickles are never loaded" in said
    assert not went_off.exists()
    with path.open("rb") as file:  # the bomb is a real one
        torch.load(file, weights_only=False) if pack is torch.save else pickle.load(file)
    assert went_off.exists()


def test_a_torn_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, {"records": {"losses.jsonl": 7}, "tensor": torch.ones(1000)})
    assert read_plain(path, "records") == {"losses.jsonl": 7}
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        read_checkpoint(path)
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        read_checkpoint(tmp_path / "b.safetensors")


def test_stripping_leaves_everything_but_the_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    moments = {"Adam": {"state": {"w": {"exp_avg": torch.ones(100)}}}}
    before, _ = write_checkpoint(path, {"state": {"model": {"w": torch.ones(100)}, "optimizers": moments}, "rng": [1]})
    after, digest = strip_optimizer(path)
    assert after < before
    found = read_checkpoint(path)
    assert torch.equal(found["state"]["model"]["w"], torch.ones(100))
    assert found["rng"] == [1]
    assert "optimizers" not in found["state"]
    assert digest


def _kept(*metrics: float | None) -> list[Kept]:
    return [
        Kept(file=f"ba{batch}.safetensors", batch=batch, size_bytes=1, sha256="", metric=metric)
        for batch, metric in enumerate(metrics, 1)
    ]


@given(
    metrics=st.lists(st.none() | st.floats(0, 9), min_size=1, max_size=12),
    last=st.integers(1, 4),
    best=st.integers(0, 4),
)
def test_the_newest_and_the_best_are_kept(metrics: list[float | None], last: int, best: int) -> None:
    kept = _kept(*metrics)
    files = to_keep(kept, CheckpointsConfig(keep_last=last, keep_best=best))
    assert {entry.file for entry in kept[-last:]} <= files
    assert len(files) <= last + best
    measured = [entry for entry in kept if entry.metric is not None]
    outside = [entry.metric for entry in measured if entry.file not in files]
    top = sorted(measured, key=lambda e: (e.metric, e.batch))[:best]
    assert all(entry.file in files for entry in top)
    assert not top or all(value >= top[-1].metric for value in outside)  # type: ignore[operator]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of tiny sessions."""
    return make_shards(tmp_path_factory.mktemp("checkpoints"))


def _words(name: str, runs: Path, shards: Path, *more: str) -> list[str]:
    words = [str(YAMLS / "tiny-glm.yaml"), f"run_name={name}", f"runs_dir={runs}", f"data.shards={shards}"]
    return [*words, *SMALL, "feedback.backend=off", *more]


def test_a_run_keeps_the_best_and_strips_the_old(tmp_path: Path, shards: Path) -> None:
    keep = ["keep_last=1", "keep_best=1", "strip_optimizer=true", "interval=1ba"]
    more = [f"train.checkpoints.{key}" for key in keep]
    more += ["train.eval_interval=1ba", "train.duration=3ba", "optimizer.backbone_lr=0.2", "optimizer.warmup=2ba"]
    assert main(_words("best", tmp_path, shards, *more)) == 0
    folder = tmp_path / "best" / "checkpoints"
    kept = read_list(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*(e.file for e in kept), "checkpoints.json"])
    assert kept[-1].batch == 3
    assert [entry.optimizer for entry in kept] == [False] * (len(kept) - 1) + [True]
    lines = [json.loads(line) for line in (tmp_path / "best" / "metrics.jsonl").read_text().splitlines()]
    measured = {line["step"]: line["metrics/eval/code"] for line in lines if "metrics/eval/code" in line}
    assert min(measured, key=lambda batch: measured[batch]) in {entry.batch for entry in kept}
    assert all(entry.metric == measured[entry.batch] for entry in kept)
    for entry in kept:
        assert (folder / entry.file).stat().st_size == entry.size_bytes


@pytest.mark.s3
def test_checkpoints_are_uploaded_before_they_are_removed(
    tmp_path: Path, shards: Path, bucket: str, s3: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    store = f"train.checkpoints.upload=s3://{bucket}/kept"
    more = [store, "train.checkpoints.interval=1ba", "train.checkpoints.keep_last=1", "train.duration=3ba", GO_ON]
    assert main(_words("sent", tmp_path, shards, *more)) == 0
    run = tmp_path / "sent"
    assert [entry.batch for entry in read_list(run / "checkpoints")] == [3]
    client = make_client(s3)
    names = [item["Key"] for item in client.list_objects_v2(Bucket=bucket)["Contents"]]
    assert {f"kept/sent/checkpoints/ba{batch}.safetensors" for batch in (1, 2, 3)} <= set(names)
    assert "kept/sent/losses.jsonl" in names

    curve = (run / "losses.jsonl").read_bytes()
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints")  # a new machine, or a disk that was lost
    assert main(_words("sent", tmp_path, shards, *more[:-1], GO_ON)) == 0
    assert (run / "losses.jsonl").read_bytes() == curve

    client.delete_object(Bucket=bucket, Key="kept/sent/checkpoints/ba3.safetensors")
    capsys.readouterr()
    assert cli(["clean", str(run), "--yes"]) == 1
    assert "missing there: checkpoints/ba3.safetensors" in capsys.readouterr().err
    assert (run / "checkpoints" / "ba3.safetensors").is_file()
    assert cli(["clean", str(run), "--upload", f"s3://{bucket}/kept"]) == 1, "a person has to say yes"
    assert (run / "checkpoints" / "ba3.safetensors").is_file()
    assert cli(["clean", str(run), "--yes"]) == 0
    assert not (run / "checkpoints").exists()
    assert (run / "losses.jsonl").is_file()


def test_a_run_that_was_never_uploaded_is_not_cleaned(
    tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_words("here", tmp_path, shards, "train.duration=1ba")) == 0
    run, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    capsys.readouterr()
    assert cli(["clean", str(run), "--yes"]) == 2
    assert "was not uploaded anywhere" in capsys.readouterr().err
    assert cli(["clean", str(run), "--everything", "--upload", str(elsewhere), "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["store"] == str(elsewhere / "here")
    assert not run.exists()
    assert (elsewhere / "here" / "model" / "model.safetensors").is_file()
    assert read_list(elsewhere / "here" / "checkpoints")[0].batch == 1


def test_too_little_disk_is_said_before_the_run_starts(
    tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    backbone = tmp_path / "backbone"
    backbone.mkdir()
    save_file({"w": torch.zeros(1024, 1024)}, backbone / "model.safetensors")
    config = load(
        YAMLS / "tiny-glm.yaml",
        [f"data.shards={shards}", "model.preset=null", f"model.path={backbone}", "train.checkpoints.interval=1ep"],
    )
    weights, trained = disk.estimate(config)
    assert weights == trained == 4 * 2**20
    need = 3 * 3 * weights + weights + 2 * 2**30  # keep_last and the one that is being written, the model, slack
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, need))  # type: ignore[attr-defined]
    disk.require_room(config, tmp_path / "run", weights, trained)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, need - 1))  # type: ignore[attr-defined]
    with pytest.raises(AgentFTError, match="too little disk space for the checkpoints") as refused:
        disk.require_room(config, tmp_path / "run", weights, trained)
    assert refused.value.exit_code == 3
    assert "3 checkpoints of up to" in str(refused.value)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 2**30))  # type: ignore[attr-defined]
    assert main(_words("full", tmp_path, shards, "train.duration=1ba")) == 3
    assert "keep_last" in capsys.readouterr().err
    assert not (tmp_path / "full").exists()


def test_settings_that_cannot_take_effect_are_refused(tmp_path: Path) -> None:
    words = [f"data.shards={tmp_path}", "train.eval_interval=2ba"]
    cases = {
        "train.checkpoints.interval=0ba": "every 0 batches",
        "train.checkpoints.keep_last=0": "keep_last is out of range",
        "train.checkpoints={keep_best: 2, interval: 3ba}": "no evaluation falls together",
        "train.checkpoints={keep_best: 1, best_metric: loss}": "best_metric",
    }
    for override, expected in cases.items():
        with pytest.raises(InvalidConfigError, match=expected):
            load(YAMLS / "tiny-glm.yaml", [*words, override])
    load(YAMLS / "tiny-glm.yaml", [*words, "train.checkpoints={keep_best: 2, interval: 4ba}"])
    with pytest.raises(InvalidConfigError, match="cannot both go on and be removed"):
        load(YAMLS / "tiny-glm.yaml", [*words, GO_ON, "overwrite=true"])


def test_a_damaged_list_is_said(tmp_path: Path) -> None:
    write_list(tmp_path, _kept(1.0, None))
    assert [entry.metric for entry in read_list(tmp_path)] == [1.0, None]
    (tmp_path / "checkpoints.json").write_text("{")
    with pytest.raises(CheckpointError, match="list of checkpoints is damaged"):
        read_list(tmp_path)
