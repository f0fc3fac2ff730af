"""The benchmarks as programs: small runs, whole reports, ratios from the raw samples. No timed assertion."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]


def bench(name: str, *options: str, to: Path) -> tuple[int, dict[str, Any], str]:
    """Run a benchmark; return its exit code, what it wrote, and what it printed."""
    command = [sys.executable, str(REPO / "bench" / name), "--json", str(to), *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280, check=False)
    assert to.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(to.read_text()), done.stdout


def check_report(code: int, report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Check the contract of every report; return its gates by name."""
    assert set(report) == {"gates", "context", "samples"}
    for gate in report["gates"]:
        assert set(gate) == {"name", "value", "target", "better", "ok"}
        value, target = gate["value"], gate["target"]
        holds = value is not None and (value <= target if gate["better"] == "lower" else value >= target)
        assert gate["ok"] == holds
    assert code == (0 if all(gate["ok"] for gate in report["gates"]) else 1)
    assert report["context"]["machine"]["cores"] >= 1
    return {gate["name"]: gate for gate in report["gates"]}


@pytest.mark.engine
@pytest.mark.slow
def test_sandbox_bench_reports_every_path_and_its_ratios_come_from_the_samples(tmp_path: Path) -> None:
    code, report, printed = bench("sandbox.py", "--quick", "--no-peers", to=tmp_path / "new" / "sandbox.json")
    gates, samples = check_report(code, report), report["samples"]
    for path in ("floor", "agentft", "docker exec (SDK)", "docker run (SDK)"):
        for program in ("true", "python"):
            assert samples[f"{path}/{program}"]
            assert all(seconds > 0 for seconds in samples[f"{path}/{program}"])
    assert len(samples["floor/python"]) == len(samples["agentft/python"]) == 16
    assert len(samples["reset"]) == 10
    assert len(samples["acquire"]) == 100

    def ratio(name: str, to: str) -> float:
        return statistics.median(samples[name]) / statistics.median(samples[to])

    assert gates["warm python call / floor"]["value"] == pytest.approx(ratio("agentft/python", "floor/python"))
    assert gates["docker exec (SDK), true / ours"]["value"] == pytest.approx(
        ratio("docker exec (SDK)/true", "agentft/true")
    )
    assert gates["throughput at 1 / floor"]["value"] == pytest.approx(
        ratio("agentft calls/s at 1", "floor calls/s at 1")
    )
    assert gates["reset of 200 files, ms"]["value"] == pytest.approx(1000 * statistics.median(samples["reset"]))
    assert not any("SWE-ReX" in name for name in gates)
    assert report["context"]["floor"] in printed


def test_a_peer_that_cannot_run_is_a_failed_gate_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPO / "bench"))
    import sandbox

    samples = sandbox.Samples()
    for name in ("agentft/python", "agentft/true", "floor/python", "reset", "acquire"):
        samples.add(name, 0.01)
    for threads in sandbox.THREADS:
        samples.add(f"floor calls/s at {threads}", 100.0)
        samples.add(f"agentft calls/s at {threads}", 95.0)
    gates = {gate.name: gate for gate in sandbox._gates(samples, peers=True)}
    assert gates["warm python call / floor"].ok
    assert gates["throughput at 1 / floor"].value == pytest.approx(0.95)
    assert gates["SWE-ReX session, true / ours"].value is None
    assert not gates["SWE-ReX session, true / ours"].ok


def test_intervals_hold_the_figure_and_are_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPO / "bench"))
    from kit.measure import Samples

    samples = Samples()
    for number in range(50):
        samples.add("a", 10.0 + number % 7)
        samples.add("b", 5.0 + number % 3)
    median, ratio = samples.quantile("a"), samples.ratio("a", "b")
    assert median.low <= median.value == statistics.median(samples.raw["a"]) <= median.high
    assert ratio.low <= ratio.value <= ratio.high
    assert ratio == samples.ratio("a", "b")
    assert samples.quantile("a", 0.99).value > median.value


BACKENDS = [pytest.param("docker", marks=pytest.mark.engine), "local"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_three_hundred_calls_leave_nothing(backend: str, tmp_path: Path) -> None:
    code, report, printed = bench("soak.py", "--quick", "--backend", backend, to=tmp_path / "soak.json")
    check_report(code, report)
    assert code == 0, printed
    context = report["context"]
    assert context["wrong"] == []
    assert sum(context["by_kind"].values()) == 300
    assert {"ok", "nonzero", "timeout", "binary", "survivors", "output_limit", "large"} <= set(context["by_kind"])
    assert list(context["states"]) == [
        "before", "one container, warm", "one container, end", "pool, warm", "pool, end", "after",
    ]  # fmt: skip


@pytest.mark.engine
@pytest.mark.slow
def test_feedback_bench_trains_all_three_ways(tmp_path: Path) -> None:
    options = ("--steps", "3", "--repeats", "1", "--batch", "2", "--workers", "4", "--tool-s", "0.3", "--prefetch", "2")
    code, report, _ = bench("feedback_overhead.py", *options, to=tmp_path / "feedback.json")
    gates, samples = check_report(code, report), report["samples"]
    assert len(samples["off/step_s"]) == len(samples["prefetched/step_s"]) == 3
    assert len(samples["synchronous/step_s"]) == 4
    assert all(seconds > 0.3 for seconds in samples["synchronous/step_s"])  # it waits for its tools
    assert samples["prefetched/executions"][0] > samples["synchronous/executions"][0] / 2
    ratio = statistics.median(samples["prefetched/step_s"]) / statistics.median(samples["off/step_s"])
    assert gates["step with feedback / without (median)"]["value"] == pytest.approx(ratio)
    assert report["context"]["limits"]["tools_of_a_batch_s"] == pytest.approx(0.3 * 2 / 4)
