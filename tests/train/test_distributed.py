"""Two processes see the losses of one, with DDP and FSDP2, dense and mixture of experts; what they save is whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support_runs import SMALL, YAMLS, RunServer, make_shards

from agentft.train.checkpoint_file import read_checkpoint

FSDP = "train.distributed.strategy=fsdp"
WHOLE = ["train.distributed.fsdp.gradients=whole", "train.distributed.fsdp.reshard_after_forward=false"]
BASE = [*SMALL, "feedback.backend=off", "train.duration=3ba", "train.checkpoints.interval=2ba"]
RUNS: dict[str, tuple[str, int, list[str]]] = {
    # name → YAML, processes, overrides
    "glm-one": ("tiny-glm", 1, ["train.eval_interval=3ba"]),
    "glm-ddp": ("tiny-glm", 2, ["train.eval_interval=3ba"]),
    "glm-fsdp": ("tiny-glm", 2, [FSDP, "train.eval_interval=3ba"]),
    "glm-fsdp-whole": ("tiny-glm", 2, [FSDP, *WHOLE, "train.activation_checkpointing=true"]),
    "glm-fsdp-one": ("tiny-glm", 1, [FSDP]),
    "kimi-one": ("tiny-kimi", 1, []),
    "kimi-ddp": ("tiny-kimi", 2, []),
    "kimi-fsdp": ("tiny-kimi", 2, [FSDP]),
}
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, RunServer, Path]]:
    """Every run of ``RUNS``, done."""
    folder = tmp_path_factory.mktemp("distributed")
    shards = make_shards(folder)
    with RunServer(folder) as server:
        for name, (yaml, processes, more) in RUNS.items():
            server.run(_words(folder, shards, name, yaml, more), processes=processes)
        yield folder, server, shards


def _words(folder: Path, shards: Path, name: str, yaml: str, more: list[str]) -> list[str]:
    words = [str(YAMLS / f"{yaml}.yaml"), f"run_name={name}", f"runs_dir={folder}", f"data.shards={shards}"]
    return [*words, *BASE, *more]


def _lines(run: Path, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUNS if not name.endswith("-one") or "fsdp" in name])
def test_losses_and_gradients_are_those_of_one_process(runs: tuple[Path, RunServer, Path], name: str) -> None:
    folder = runs[0]
    reference = f"{name.partition('-')[0]}-one"
    losses, expected = _lines(folder / name, "losses.jsonl"), _lines(folder / reference, "losses.jsonl")
    assert len(losses) == 3
    for line, other in zip(losses, expected, strict=True):
        assert line == pytest.approx(other, rel=TOLERANCE, abs=TOLERANCE)
    norms = [
        [line for line in _lines(folder / run, "metrics.jsonl") if "gradnorm/backbone" in line]
        for run in (name, reference)
    ]
    for line, other in zip(*norms, strict=True):
        assert {key: line[key] for key in line if key.startswith("gradnorm/")} == pytest.approx(
            {key: other[key] for key in other if key.startswith("gradnorm/")}, rel=1e-4
        ), "a mean over the processes, not a sum"


@pytest.mark.slow
def test_evaluations_agree(runs: tuple[Path, RunServer, Path]) -> None:
    found = [json.loads((runs[0] / f"glm-{kind}" / "summary.json").read_text()) for kind in ("one", "ddp", "fsdp")]
    for other in found[1:]:
        assert other["eval_loss"] == pytest.approx(found[0]["eval_loss"], rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["glm", "kimi"])
def test_what_shared_out_processes_save_is_whole(runs: tuple[Path, RunServer, Path], kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from agentft.models.export import export, load_model

    run = runs[0] / f"{kind}-fsdp"
    saved = load_file(run / "model" / "model.safetensors")
    state = read_checkpoint(run / "checkpoints" / "ba3.safetensors")["state"]
    for name, tensor in saved.items():
        assert torch.equal(state["model"][f"backbone.{name}"], tensor), name
    moments = state["optimizers"]["DecoupledAdamW"]["state"]
    trained = {name: tensor for name, tensor in state["model"].items() if not name.endswith("e_score_correction_bias")}
    assert moments.keys() == trained.keys()
    assert all(moments[name]["exp_avg"].shape == tensor.shape for name, tensor in trained.items())
    export(run, tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    ours = load_model(run / "model")
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, ours.backbone(ids).logits)


@pytest.mark.slow
def test_one_process_goes_on_where_two_that_shared_the_model_stopped(runs: tuple[Path, RunServer, Path]) -> None:
    folder, server, shards = runs
    run = folder / "glm-fsdp"
    copy = folder / "again" / "glm-fsdp"
    shutil.copytree(run, copy)
    (copy / "summary.json").unlink()
    listed = json.loads((copy / "checkpoints" / "checkpoints.json").read_text())
    listed["checkpoints"] = [entry for entry in listed["checkpoints"] if entry["batch"] == 2]
    (copy / "checkpoints" / "checkpoints.json").write_text(json.dumps(listed))
    more = ["train.checkpoints.autoresume=true", "train.eval_interval=3ba"]
    server.run(_words(folder / "again", shards, "glm-fsdp", "tiny-glm", more))
    for line, other in zip(_lines(copy, "losses.jsonl"), _lines(run, "losses.jsonl"), strict=True):
        assert line == pytest.approx(other, rel=TOLERANCE, abs=TOLERANCE)


def test_what_needs_the_whole_model_is_refused(tmp_path: Path) -> None:
    from agentft.config.load import InvalidConfigError, load

    words = [f"data.shards={tmp_path}", FSDP, "feedback.policy.every=4", "feedback.probe.every=4"]
    with pytest.raises(InvalidConfigError) as refused:
        load(YAMLS / "tiny-glm.yaml", words)
    assert "feedback.policy.every needs the whole model" in str(refused.value)
    assert "feedback.probe.every needs the whole model" in str(refused.value)
    with pytest.raises(InvalidConfigError, match=r"fsdp\.gradients has no effect"):
        load(YAMLS / "tiny-glm.yaml", [f"data.shards={tmp_path}", "train.distributed.fsdp.gradients=whole"])
