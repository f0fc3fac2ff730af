"""Plans: parameters as published and as built, memory as measured, and a command that says what it does not know."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from agentft.cli import main
from agentft.config.schema import LoraConfig, ModelConfig
from agentft.errors import ModelError
from agentft.models.adapters import attach
from agentft.models.backbone import preset_config
from agentft.report.plan import ALLOCATOR
from agentft.report.plan_memory import Setup, lora_parameters, step_memory
from agentft.report.plan_models import model_shape
from agentft.report.plan_trace import trace_step

REPO = Path(__file__).resolve().parents[2]
YAMLS = REPO / "yamls" / "agent"
WORKER = Path(__file__).with_name("plan_worker.py")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("glm-4-9b", 9.40), ("moonlight", 15.96), ("qwen2.5-coder-7b", 7.616), ("smollm2-135m", 0.1345)],
)
def test_published_models_have_their_published_size(name: str, billions: float) -> None:
    assert model_shape(ModelConfig(path=f"models/{name}"), vocab_size=None).parameters / 1e9 == pytest.approx(
        billions, rel=1e-3
    )


def test_a_model_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        model_shape(ModelConfig(path=str(tmp_path)), vocab_size=None)


def measured(*, gives_back: bool = True, **changes: object) -> dict[str, float]:
    """Train a tiny agent in a process of its own; return what it took and what was planned.

    ``gives_back``: the allocator gives memory back at once, so that what is resident is what was asked for.
    """
    asked = {"preset": "tiny-glm", "rows": 4, "tokens": 2048, "vocab": 4096, "trained": 600, "chunk": 256}
    asked |= {"packed": True, "amp": False, "recompute": False, "passes": 1, **changes}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if gives_back:
        env |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, str(WORKER), json.dumps(asked)], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_planned_peak_is_the_measured_one() -> None:
    found = measured()
    assert found["planned_parameters"] == found["parameters"]
    assert found["planned_mib"] == pytest.approx(found["measured_mib"], rel=0.15)


def test_the_allocator_as_it_is_lies_between_low_and_high() -> None:
    found = measured(gives_back=False, passes=2)
    low, expected, high = (factor * found["planned_mib"] for factor in ALLOCATOR["cpu"])
    assert low < found["measured_mib"] < high
    assert expected == pytest.approx(found["measured_mib"], rel=0.15)


def test_what_saves_memory_saves_it_in_the_plan() -> None:
    shape = model_shape(ModelConfig(path="models/glm-4-9b"), vocab_size=None)

    def peak(**changes: object) -> float:
        settings = {"tokens": 8192, "longest": 8192, "trained": 2000, "amp": True, **changes}
        return max(step_memory(shape, Setup(**settings)).phases().values())  # type: ignore[arg-type]

    assert peak(recompute=True) < peak()
    assert peak(chunk=256) < peak(chunk=0)
    assert peak(ranks=8, sharded=True) < peak(ranks=8)
    assert peak(lora_rank=16, frozen_bytes=2.0) < peak()
    assert peak(lora_rank=16, frozen_bytes=0.52) < peak(lora_rank=16, frozen_bytes=2.0)
    assert peak(ranks=8) > peak()  # buckets of data parallelism


@pytest.mark.parametrize("preset", ["tiny-glm", "tiny-kimi"])
@pytest.mark.parametrize("targets", [[], ["o_proj"], ["gate_proj", "up_proj", "gate_up_proj"]])
def test_adapters_are_counted_on_the_layers_that_get_one(preset: str, targets: list[str]) -> None:
    model = ModelConfig(preset=preset)
    shape = model_shape(model, vocab_size=512)
    here = {name.split("/")[0].split(".")[-1] for name in shape.linears}
    wanted = [target for target in targets if target in here]
    backbone = AutoModelForCausalLM.from_config(preset_config(preset, 512))
    attach(backbone, LoraConfig(rank=4, targets=wanted, train_embeddings=False), [], seed=1)
    built = sum(p.numel() for name, p in backbone.named_parameters() if "lora_" in name)
    assert lora_parameters(shape, 4, wanted) == built > 0


def test_an_adapter_on_a_layer_that_is_not_there_is_refused_by_the_plan_too() -> None:
    with pytest.raises(ModelError, match=r"model\.lora\.targets"):
        lora_parameters(model_shape(ModelConfig(preset="tiny-glm"), vocab_size=512), 4, ["wqkv"])


@pytest.mark.parametrize("name", ["tiny-glm", "tiny-kimi", "glm-4-9b", "qwen2.5-coder-7b", "moonlight"])
def test_every_shipped_yaml_can_be_planned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(YAMLS / f"{name}.yaml"), "train.duration=100ba", "--throughput", "1000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["phases_gib"]) == {"load", "forward", "backward", "optimiser", "save"}
    for phase in found["phases_gib"].values():
        assert 0 < phase["low"] < phase["expected"] < phase["high"]
    assert found["work"]["steps"] == 100
    assert found["work"]["hours"] == pytest.approx(found["work"]["tokens"] / 1000 / 3600)
    assert found["not_counted"]


def test_a_run_that_does_not_fit_is_a_missed_gate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(YAMLS / "glm-4-9b.yaml"), "model.lora=null", "--gpu-memory", "80"]) == 4
    assert "does not fit" in capsys.readouterr().out


def test_the_trace_agrees_on_what_the_formulas_know() -> None:
    shape = model_shape(ModelConfig(preset="tiny-glm"), vocab_size=4096)
    setup = Setup(tokens=2048, longest=512, trained=600, packed=False, chunk=0)
    found, planned = trace_step(shape, setup), step_memory(shape, setup)
    assert found["Parameter"] * 2**30 == pytest.approx(shape.parameters * 4)
    assert found["Optstate"] * 2**30 == pytest.approx(shape.parameters * 8, rel=0.01)
    assert found["Total"] * 2**30 == pytest.approx(max(planned.phases().values()), rel=0.35)
    with pytest.raises(ModelError, match="experts"):
        trace_step(model_shape(ModelConfig(preset="tiny-kimi"), vocab_size=4096), setup)
