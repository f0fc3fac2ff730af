"""A second stage with all against forgetting and repeating: YAML to losses, on two processes, and after a kill."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support_runs import launch, make_shards

from agentft.cli import main as agentft
from agentft.config.load import load
from agentft.losses import COMPONENTS
from agentft.models.agent_model import CompositeLoss
from agentft.schedules import TrainTime
from agentft.train.forgetting import build_distillation, build_earlier_rows, build_ewc, stage_data
from agentft.train.run import main

REPO = Path(__file__).resolve().parents[2]
YAML = str(REPO / "yamls" / "agent" / "tiny-glm.yaml")
SMALL = ["loggers.tensorboard=false", "data.batch_size=8", "data.microbatch_size=4", "train.eval_interval=0ba"]
SMALL += ["train.threads=1", "train.precision=fp32", "feedback.backend=off", "data.input_noise=0"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, a first stage trained on them, and the Fisher information of its weights."""
    folder = tmp_path_factory.mktemp("stages")
    make_shards(folder, count=24, held_out=0)
    shutil.copytree(folder / "shards", folder / "earlier")
    assert main(words(folder, "first", "train.duration=1ba")) == 0
    fisher = ["fisher", f"{folder}/first", "--shards", f"{folder}/earlier", "--samples", "4"]
    assert agentft([*fisher, "-o", f"{folder}/fisher.safetensors"]) == 0
    return folder


def words(folder: Path, name: str, *more: str) -> list[str]:
    return [YAML, f"run_name={name}", f"runs_dir={folder}", f"data.shards={folder}/shards", *SMALL, *more]


def second(folder: Path, name: str, *more: str) -> list[str]:
    """A stage with all of it on."""
    return words(
        folder,
        name,
        "train.duration=4ba",
        "model.preset=null",
        f"model.path={folder}/first/model",
        "forgetting.lm_share=0.1",
        f"forgetting.lm_shards={folder}/earlier",
        "forgetting.lm_rows=2",
        f"forgetting.replay.shards={folder}/earlier",
        "forgetting.replay.share=0.25",
        "forgetting.ewc.weight=10",
        f"forgetting.ewc.fisher={folder}/fisher.safetensors",
        "loss.distill.start=0.1",
        "feedback.distillation.max_calls=3",
        *more,
    )


def curve(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "losses.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(world: Path) -> Path:
    assert main(second(world, "whole")) == 0
    return world / "whole"


def test_off_builds_nothing() -> None:
    config = load(YAML)
    composite = CompositeLoss(config.loss, lm_share=config.forgetting.lm_share)
    nothing: Any = None
    assert build_earlier_rows(config, nothing) == build_ewc(config, nothing) == []
    assert build_distillation(config, composite, nothing, nothing, None) == []
    assert stage_data(config) is config.data
    assert tuple(composite.weights(TrainTime(batch=0, batches_per_epoch=1))) == COMPONENTS


def test_every_part_took_part(whole: Path) -> None:
    metrics = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss/lm/count", "loss/distill/count", "ewc/gradnorm", "distill/teacher_tokens"):
        assert [line[name] for line in metrics if name in line][-1] > 0, name
    weights = next(line for line in metrics if "loss/lm/weight" in line)
    assert weights["loss/lm/weight"] == pytest.approx(0.1)
    assert weights["loss/tool/weight"] == pytest.approx(0.9 * 0.2)
    assert {"loss/lm/raw", "loss/distill/raw"} <= curve(whole)[0].keys()
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["loss"]["lm"]["first"] > 0


@pytest.mark.slow
def test_two_processes_give_the_same_losses(world: Path, whole: Path) -> None:
    run = launch(second(world, "pair", "data.microbatch_size=2"), processes=2)
    assert run.wait(timeout=280) == 0, run.stdout and run.stdout.read()[-3000:]
    for alone, pair in zip(curve(whole), curve(world / "pair"), strict=True):
        assert pair == pytest.approx(alone, abs=2e-5)


@pytest.mark.slow
def test_a_killed_stage_goes_on_bit_for_bit(world: Path, whole: Path) -> None:
    command = second(world, "killed", "train.checkpoints.interval=1ba", "train.checkpoints.autoresume=true")
    run = launch(command, processes=1)
    until = time.monotonic() + 200
    while run.poll() is None and time.monotonic() < until:
        if len(list((world / "killed").glob("checkpoints/*"))) >= 3:
            break
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL, "it ended before it was killed"
    again = launch(command, processes=1)
    assert again.wait(timeout=280) == 0, again.stdout and again.stdout.read()[-3000:]
    assert curve(world / "killed") == curve(whole)


def test_fisher_information_of_other_weights_is_refused(
    world: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(second(world, "other", f"model.path={whole}/model")) == 1
    assert "was measured at other weights" in capsys.readouterr().err


def test_settings_without_effect_are_errors(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["forgetting.replay.share=0.1", f"forgetting.lm_shards={world}/shards", "model.preset=tiny-glm"]
    assert main([*second(world, "wrong", *wrong), "model.path=null"]) == 2
    said = capsys.readouterr().err
    assert "forgetting.replay.share=0.125 (1 rows)" in said
    assert "is what the run trains on anyway" in said
    assert "random weights (model.preset)" in said
