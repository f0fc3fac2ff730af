"""Settings of algorithms and curriculum that cannot work or cannot take effect are errors, with the key to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentft.config.load import InvalidConfigError
from agentft.train.check import load_run_config

YAML = Path(__file__).resolve().parents[2] / "yamls" / "agent" / "tiny-glm.yaml"
WARMUP = ("algorithms.length_warmup.enabled=true", "algorithms.length_warmup.start=128")

WRONG: dict[str, tuple[str, ...]] = {
    "algorithms.raspberry.window is out of range": ("algorithms.raspberry.window=0",),
    "algorithms.raspberry.p is out of range": ("algorithms.raspberry.p=1.5",),
    "algorithms.stochastic_depth.p is out of range": ("algorithms.stochastic_depth.p=1.0",),
    "algorithms.spikes.factor is out of range": ("algorithms.spikes.factor=0",),
    "algorithms.samples.every is out of range": ("algorithms.samples.every=-1",),
    "no rising shares": ("data.curriculum.widths=[0.5, 0.2]",),
    "the curriculum has no effect": ("data.curriculum.by=steps", "data.curriculum.widths=[1.0]"),
    "algorithms.length_warmup.until is not a time": ("algorithms.length_warmup.until=soon",),
    "the length warm-up has no effect": (*WARMUP, "algorithms.length_warmup.start=1024"),
    "the length warm-up ends with a jump": (*WARMUP, "algorithms.length_warmup.end=512"),
    "algorithms.raspberry has no effect": ("algorithms.raspberry.enabled=true", "feedback.backend=off"),
    "algorithms.raspberry has no effect: no call": (
        "algorithms.raspberry.enabled=true", "feedback.recorded.share=0", "feedback.policy.every=0"
    ),
    "algorithms.diversity has no effect": ("algorithms.diversity=true", "feedback.probe.every=0"),
    "algorithms.samples.every needs the whole model": (
        "algorithms.samples.every=9", "feedback.backend=off", "train.distributed.strategy=fsdp"
    ),
    "algorithms.early_stop has no effect": ("algorithms.early_stop.metric=code", "train.eval_interval=0ba"),
}  # fmt: skip

FINE: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "curriculum": ("data.curriculum.by=steps",),
    "length warm-up": WARMUP,
    "raspberry": ("algorithms.raspberry.enabled=true",),
    "early stop": ("algorithms.early_stop.metric=code", "train.eval_interval=1ep"),
    "spikes": ("algorithms.spikes.on_nan=stop", "algorithms.spikes.on_spike=skip"),
    "samples": ("algorithms.samples.every=10", "algorithms.monitors.activations=5", "algorithms.diversity=true"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_work_is_said(what: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        load_run_config(YAML, WRONG[what])
    assert [problem for problem in caught.value.problems if what in problem.what]
    assert "override" in str(caught.value)


@pytest.mark.parametrize("name", FINE)
def test_what_works_is_accepted(name: str) -> None:
    load_run_config(YAML, FINE[name])
