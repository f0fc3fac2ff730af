"""Monitors and stops: their figures are right, and none of them changes a loss."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from composer.callbacks import ActivationMonitor, LRMonitor, SpeedMonitor
from composer.core import Callback
from support_agent import learn_by_heart, make_model, make_renderer, sessions
from support_algorithms import SAMPLED, Result, train

from agentft.algorithms.diversity import DiversityMonitor, measure, parse_python, snippets
from agentft.algorithms.early_stop import EarlyStop
from agentft.algorithms.monitors import LayerOutputs, ProcessMemory, TokenSpeed
from agentft.algorithms.samples import Samples, generate
from agentft.config.algorithms import EarlyStopConfig, SamplesConfig
from agentft.tools import ToolCall


def test_unique_nodes_by_hand() -> None:
    found = measure(["x = 1"])
    assert (found.parsed, found.nodes, found.unique) == (1, 4, 4)  # Assign, Name, Store, Constant
    assert measure(["x = 1", "x = 1"]).unique_share == 0.5
    assert measure(["x = 1", "x = 2"]).unique == 6, "the constants and the assignments differ"
    assert measure(["x = True", "x = 1"]).unique == 6, "True is not 1"
    assert measure(["def f(:"]) == measure(["]"])
    assert measure([]).unique_share is None


@pytest.mark.parametrize("text", ["    return a + b\n", "  x = 1\n  y = 2\n", "yield", "a + b", "def f():\n    pass\n"])
def test_fragments_of_edits_parse(text: str) -> None:
    assert parse_python(text) is not None


@pytest.mark.parametrize("text", ["else:\n    pass", "\x00", "(" * 5000, "x ="])
def test_what_does_not_parse_is_no_error(text: str) -> None:
    assert parse_python(text) is None


def test_which_arguments_are_code() -> None:
    assert snippets(ToolCall("file_edit", {"path": "a.py", "old": "x", "new": "y", "line": 2})) == ["y"]
    assert snippets(ToolCall("file_write", {"path": "a.py", "content": "z"})) == ["z"]
    assert snippets(ToolCall("file_write", {"path": "a.json", "content": "{}"})) == []
    assert snippets(ToolCall("python_run", {"code": "  "})) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("monitors")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Result]:
    """One run with every monitor of ours, and one without any."""
    known = sessions(12)

    def make(feedback: Any) -> Any:
        samples = Samples(SamplesConfig(every=2, count=2, max_tokens=24), make_renderer(known), known, folder / "all")
        every: list[Callback] = [DiversityMonitor(feedback), samples, LRMonitor(), SpeedMonitor(window_size=2)]
        return [], [*every, TokenSpeed(2), ProcessMemory(), LayerOutputs(2)]

    return {
        "plain": train(folder / "plain", batches=4, microbatch=2, config=SAMPLED),
        "all": train(folder / "all", make, batches=4, microbatch=2, config=SAMPLED),
    }


def test_monitors_change_no_loss(runs: dict[str, Result]) -> None:
    assert runs["all"].curve == runs["plain"].curve
    assert all(torch.equal(runs["all"].weights[name], tensor) for name, tensor in runs["plain"].weights.items())


def test_figures_of_speed_memory_and_learning_rate(runs: dict[str, Result]) -> None:
    logged = runs["all"].logged
    assert len(logged["speed/trained_tokens_per_s"]) == 4
    assert all(value > 0 for value in logged["speed/context_tokens_per_s"] + logged["speed/sessions_per_s"])
    assert logged["lr-DecoupledAdamW/group0"] == [1e-3] * 4
    assert len(logged["throughput/tokens_per_sec"]) == 2
    assert 0.05 < logged["memory/resident_gib"][-1] <= logged["memory/peak_resident_gib"][-1] < 64


def test_outputs_of_the_layers(runs: dict[str, Result]) -> None:
    logged = runs["all"].logged
    layers = {name for name in logged if name.startswith("activations/")}
    assert layers == {f"activations/layer{n}/{what}" for n in (0, 1) for what in ("rms", "max")}
    assert all(len(logged[name]) == 2 for name in layers), "in batches 0 and 2 of 4"
    assert 0 < logged["activations/layer0/rms"][0] < logged["activations/layer0/max"][0]


def test_probe_calls_are_measured_when_they_come_back(runs: dict[str, Result]) -> None:
    """Probes start after batches 2 and 4 and come back when the run ends; what this model writes is seldom code."""
    logged = runs["all"].logged
    assert len(logged["probe/calls"]) == 2
    assert len(logged["diversity/snippets"]) == 1


def test_each_probe_call_is_measured_once() -> None:
    edit = SimpleNamespace(call=ToolCall("file_edit", {"path": "a.py", "old": "", "new": "x = 1"}))
    feedback = SimpleNamespace(probed=[])
    monitor, logged = DiversityMonitor(cast(Any, feedback)), []
    state, logger = cast(Any, SimpleNamespace()), cast(Any, SimpleNamespace(log_metrics=logged.append))
    for probed in ([edit, edit], [], [edit]):
        feedback.probed = probed
        monitor.batch_end(state, logger)
    feedback.probed = [edit, edit, edit]  # two more when the run ends
    monitor.fit_end(state, logger)
    figures = {name: value for metrics in logged for name, value in metrics.items()}
    assert [m["diversity/unique_share"] for m in logged if "diversity/unique_share" in m] == [0.5, 1.0, 0.5]
    assert (figures["diversity/nodes"], figures["diversity/snippets"], figures["diversity/unparsed"]) == (8, 2, 0)


def test_samples_are_readable_and_repeat(runs: dict[str, Result], folder: Path) -> None:
    text = (folder / "all" / "samples.txt").read_text()
    lines = [json.loads(line) for line in (folder / "all" / "samples.jsonl").read_text().splitlines()]
    assert [(line["batch"], line["session_id"], line["turn"]) for line in lines] == [
        (2, "calc/0", 1), (2, "calc/1", 2), (4, "calc/0", 1), (4, "calc/1", 2)
    ]  # fmt: skip
    assert all(line["recorded"] in text and line["written"] in text for line in lines)
    assert "<|tool_start|>pytest_run" in lines[0]["recorded"]
    assert "test_calc fails, repair it" in lines[0]["prompt_end"]


def test_a_model_that_knows_its_sessions_writes_what_is_recorded() -> None:
    known = sessions(3)
    renderer = make_renderer(known)
    model = learn_by_heart(make_model(renderer), renderer, known)
    turns = [(known[0], 3), (known[0], len(known[0].execution_trace) + 1)]
    mode = model.training
    for sample in generate(model, renderer, turns, 64):
        assert sample["written"] == sample["recorded"]
        assert sample["stopped"]
    assert model.training == mode


def test_composers_activation_monitor_does_not_take_our_batches(tmp_path: Path) -> None:
    """Why there is LayerOutputs: a microbatch without outcome anchors has an empty output."""
    with pytest.raises((IndexError, AttributeError)):
        train(tmp_path, lambda _: ([], [_WithoutOutcomes(), ActivationMonitor(interval="1ba")]), batches=1)


class _WithoutOutcomes(Callback):
    def after_dataloader(self, state: Any, logger: Any) -> None:
        for key in ("outcome_at", "outcome_target", "outcome_mask"):
            state.batch[key] = state.batch[key][:0]


def stopping(config: EarlyStopConfig) -> tuple[EarlyStop, Any]:
    stop = EarlyStop(config)
    return stop, lambda _: ([], [stop])


def test_the_run_ends_when_the_loss_no_longer_falls(tmp_path: Path) -> None:
    """No evaluation is better by 100 than the first one; cursors are never there, which is no evaluation at all."""
    stop, make = stopping(EarlyStopConfig(metric="code", patience=2, min_delta=100.0))
    whole = train(tmp_path / "whole", make, batches=9, eval_interval="1ba", save_every=1)
    assert len(whole.curve) == 3
    assert stop.state_dict() == {"best": stop.best, "waited": 2}
    again, make = stopping(EarlyStopConfig(metric="code", patience=2, min_delta=100.0))
    load = tmp_path / "whole" / "checkpoints" / "ba2.pt"
    resumed = train(tmp_path / "resumed", make, batches=9, eval_interval="1ba", load=load)
    assert resumed.curve == whole.curve[2:], "the patience of a resumed run goes on"
    assert again.state_dict() == stop.state_dict()


@pytest.mark.parametrize("metric", ["code", "cursor"])
def test_the_run_goes_on_while_the_loss_falls_or_is_not_there(tmp_path: Path, metric: Any) -> None:
    _, make = stopping(EarlyStopConfig(metric=metric, patience=1))
    assert len(train(tmp_path, make, batches=3, eval_interval="1ba").curve) == 3
