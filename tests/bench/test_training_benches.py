"""The benchmarks of training as programs: small runs, whole reports, sides that agree. No timed assertion."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support_agent import sessions

from agentft.config.load import load

FIGURES = ("tokens_per_s", "peak_mib", "whole_mib", "step_tokens", "step_s")
REPO = Path(__file__).resolve().parents[2]
SIDES = ("fused", "agentft")


def bench(name: str, *options: str, to: Path) -> dict[str, Any]:
    """Run a benchmark on one thread; return what it wrote."""
    command = [sys.executable, str(REPO / "bench" / name), "--json", str(to), "--threads", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert to.exists(), done.stdout + done.stderr
    report: dict[str, Any] = json.loads(to.read_text())
    assert done.returncode == (0 if all(gate["ok"] for gate in report["gates"]) else 1)
    return report


def test_all_vocabulary_heads_give_the_same_loss_and_gradient(tmp_path: Path) -> None:
    options = ("--vocab", "3000", "--tokens", "96", "--width", "32", "--chunk", "16", "--steps", "1", "--repeats", "1")
    report = bench("vocab_head.py", *options, to=tmp_path / "vocab.json")
    gates = {gate["name"]: gate for gate in report["gates"]}
    assert gates["losses apart"]["ok"]
    assert gates["gradient norms apart"]["ok"]
    assert set(report["context"]["loss"]) == {"full logits", "chunked, all positions", "trained positions", "agentft"}
    samples = report["samples"]
    ratio = statistics.median(samples["full logits/step_s"]) / statistics.median(samples["agentft/step_s"])
    assert gates["full logits / agentft, time"]["value"] == pytest.approx(ratio)


def test_all_kinds_of_attention_give_the_same_output_and_gradients(tmp_path: Path) -> None:
    report = bench("attention.py", "--lengths", "30", "200", "--steps", "2", to=tmp_path / "attention.json")
    gates, samples = {gate["name"]: gate for gate in report["gates"]}, report["samples"]
    assert len(samples) == 2 * 2 * 3
    assert all(len(taken) == 2 for taken in samples.values())
    for kind in ("float32", "bfloat16"):
        assert gates[f"{kind}: farthest from float64"]["ok"]
        spent = {side: sum(statistics.median(samples[f"{kind}/{n}/{side}"]) for n in (30, 200)) for side in SIDES}
        ratio = spent["fused"] / spent["agentft"]
        assert gates[f"{kind}: fused / agentft, time"]["value"] == pytest.approx(ratio)


@pytest.mark.slow
def test_a_whole_run_and_the_bare_loop_train_on_the_very_same_rows(tmp_path: Path) -> None:
    options = ("--sessions", "16", "--batch", "2", "--max-tokens", "512", "--steps", "3", "--repeats", "1")
    sides = ("--only", "agentft", "--only", "bare loop", "--backend", "local")
    report = bench("train.py", *options, *sides, to=tmp_path / "train.json")
    assert report["context"]["failures"] == {}
    samples = report["samples"]
    assert samples["agentft/step_tokens"] == samples["bare loop/step_tokens"]
    gates = {gate["name"]: gate for gate in report["gates"]}
    ratio = samples["agentft/tokens_per_s"][0] / samples["bare loop/tokens_per_s"][0]
    assert gates["tokens/s: agentft / bare loop"]["value"] == pytest.approx(ratio)
    assert gates["tokens/s: agentft / TRL packed"]["value"] is None  # what did not run has no figure, and fails


@pytest.mark.slow
def test_one_side_alone_is_measured_and_shown(tmp_path: Path) -> None:
    options = ("--sessions", "16", "--batch", "2", "--max-tokens", "512", "--steps", "3", "--repeats", "1")
    report = bench("train.py", *options, "--only", "bare loop", "--backend", "local", to=tmp_path / "train.json")
    assert set(report["samples"]) == {f"bare loop/{name}" for name in FIGURES}
    assert all(gate["value"] is None and not gate["ok"] for gate in report["gates"])


@pytest.mark.slow
def test_an_ablation_compares_within_a_seed_and_does_not_repeat_what_is_done(tmp_path: Path, bubblewrap: None) -> None:
    runs, report = tmp_path / "runs", tmp_path / "ablation.json"
    finished = runs / "as-shipped-5" / "summary.json"
    finished.parent.mkdir(parents=True)
    heads = {"tool_accuracy": {"value": 2.0}, "outcome_auc": {"value": None}}
    finished.write_text(json.dumps({"heads": heads, "held_out": {"code_loss": 99.0}, "seconds": {"fit": 7.0}}))
    words = [sys.executable, str(REPO / "bench" / "ablation.py"), "--sessions", str(tmp_path / "sessions.jsonl")]
    words += ["--runs", str(runs), "--json", str(report), "--seed", "5", "--only", "distillation", "--duration", "1ba"]
    words += ["--holdout", "held-out", "feedback.backend=local", "train.precision=fp32"]
    names = ["calc"] * 12 + ["held-out"] * 4
    made = [session.model_copy(update={"repository": name}) for session, name in zip(sessions(16), names, strict=True)]
    (tmp_path / "sessions.jsonl").write_text("".join(session.model_dump_json() + "\n" for session in made))
    done = subprocess.run(words, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())["found"]
    assert set(found) == {"as shipped", "distillation"}
    assert found["as shipped"]["5"]["code_loss"] == 99.0
    started = load(runs / "distillation-5" / "config.yaml")
    assert (started.loss.distill.start, started.seed, started.train.duration) == (0.1, 5, "1ba")
    summary = json.loads((runs / "distillation-5" / "summary.json").read_text())
    assert found["distillation"]["5"]["code_loss"] == summary["held_out"]["code_loss"] > 0
    assert f"{summary['held_out']['code_loss'] - 99:+.2f}" in done.stdout


@pytest.mark.parametrize(
    ("value", "base", "digits", "shown"),
    [
        (0.2, 0.1, 2, "+.10"),
        (0.0, 0.05, 2, "-.05"),
        (10.5, 0.0, 2, "+10.50"),
        (8.5, 99.0, 2, "-90.50"),
        (20.0, 0.0, 0, "+20"),
        (None, 1.0, 2, "-"),
    ],
)
def test_a_difference_loses_its_leading_zero_and_nothing_else(
    value: float | None, base: float, digits: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(REPO / "bench"))
    import ablation

    assert ablation._change(value, base, digits) == shown
