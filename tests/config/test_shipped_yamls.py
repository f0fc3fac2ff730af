"""Every shipped YAML is a run that could start, and so is every command in its comments."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from agentft.cli import build_parser
from agentft.config.load import InvalidConfigError, load
from agentft.train.check import load_run_config

REPO = Path(__file__).resolve().parents[2]
YAMLS = sorted(path for path in (REPO / "yamls").rglob("*.yaml") if path.parent.name != "tools")
MINIMAL = "{run_name: t, model: {path: m}, data: {shards: s}, train: {duration: 1ep, device: cpu}}"


def commands(path: Path) -> list[str]:
    """Return the commands in the comments of a YAML; a backslash at the end of a line joins it with the next."""
    comments = "\n".join(line[1:] for line in path.read_text().splitlines() if line.startswith("#"))
    return re.findall(r"^ {2,}((?:composer|agentft) .*)$", re.sub(r"\\\n *", "", comments), re.MULTILINE)


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_a_yaml_and_the_commands_in_it_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_run_config(path)
    for command in commands(path):
        program, *words = shlex.split(command.replace("[key=value ...]", ""), comments=True)
        if program == "agentft":
            if "$" not in command:
                build_parser().parse_args(words)
            continue
        yaml, *overrides = words[words.index("train.py") + 1 :]
        processes = int(words[words.index("-n") + 1]) if "-n" in words else 1
        whole = int(words[words.index("--world_size") + 1]) if "--world_size" in words else processes
        monkeypatch.setenv("WORLD_SIZE", str(whole))
        load_run_config(REPO / yaml, overrides)  # mostly this one; a stage may name the next
        monkeypatch.delenv("WORLD_SIZE")


@pytest.mark.parametrize("name", ["glm-4-9b", "glm-4.5-air", "kimi-k2", "moonlight", "qwen2.5-coder-7b"])
def test_full_size_models_train_with_the_defaults_of_the_project(name: str) -> None:
    config = load_run_config(REPO / "yamls" / "agent" / f"{name}.yaml")
    optimizer = config.optimizer
    assert (config.train.duration, config.train.precision) == ("24ep", "amp_bf16")
    assert (optimizer.backbone_lr, optimizer.betas, optimizer.weight_decay) == (5e-5, (0.9, 0.999), 0.01)
    assert (optimizer.decay, optimizer.decay_per_epoch) == ("step", 0.95)
    rates = (optimizer.intent_lr, optimizer.tool_lr, optimizer.reward_lr, optimizer.cursor_lr)
    assert rates == (1e-4, 5e-5, 2e-5, 3e-5)
    assert commands(REPO / "yamls" / "agent" / f"{name}.yaml")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.lora.rank=0"], r"model\.lora\.rank is out of range"),
        (["model.lora.alpha=0"], r"model\.lora\.alpha is out of range"),
        (["model.lora.dropout=1"], r"model\.lora\.dropout is out of range"),
        (["model.lora.rank=8", "model.path=null", "model.preset=tiny-glm"], "weights that were trained before"),
        (["model.quantize=nf4", "train.device=gpu"], "cannot be trained themselves"),
        (["model.quantize=nf4", "model.lora.rank=8"], "quantised weights need a GPU"),
        (["model.lora.frozen=bf16", "train.distributed.strategy=fsdp", "feedback.probe.every=0"], "one precision only"),
        (["optimizer.decay=step", "optimizer.decay_per_epoch=1.5"], r"optimizer\.decay_per_epoch is out of range"),
    ],
)
def test_settings_of_adapters_that_cannot_be_had_are_refused(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    load(path, ["model.lora.rank=8"])
    with pytest.raises(InvalidConfigError, match=message):
        load(path, overrides)
