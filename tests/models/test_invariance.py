"""The same global batch gives the same losses and the same step, however it is cut and over however many processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
TOLERANCE = 1e-5


def run_worker(out: Path, *launcher: str) -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *launcher, "invariance_worker.py", str(out)],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str, str, int], dict[str, Any]]:
    """(processes, stage, preset, microbatch) → parameters after the step, and the log."""
    folder = tmp_path_factory.mktemp("invariance")
    one = run_worker(folder / "one.pt")
    two = run_worker(folder / "two.pt", "-m", "composer.cli.launcher", "-n", "2")
    found = {}
    for processes, part in ((1, one), (2, two)):
        for key, result in part.items():
            stage, preset, microbatch = key.split("/")
            found[(processes, stage, preset, int(microbatch))] = result
    return found


CASES = [
    *((processes, "agent", "tiny-glm", microbatch) for processes in (1, 2) for microbatch in (1, 2, 4, 8)),
    *((processes, "agent", "tiny-kimi", microbatch) for processes in (1, 2) for microbatch in (2, 8)),
    *((processes, "pretrain", "tiny-glm", microbatch) for processes in (1, 2) for microbatch in (2, 8)),
    *((processes, "sft", "tiny-glm", microbatch) for processes in (1, 2) for microbatch in (2, 8)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[1]}-{c[2]}-{c[0]}process-microbatch{c[3]}")
def test_losses_and_step_do_not_depend_on_the_cut(
    results: dict[tuple[int, str, str, int], dict[str, Any]], case: tuple[int, str, str, int]
) -> None:
    reference, got = results[(1, case[1], case[2], 8)], results[case]
    assert reference["logged"].keys() == got["logged"].keys()
    for name, value in reference["logged"].items():
        assert got["logged"][name] == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), name
    for name, tensor in reference["state"].items():
        assert torch.allclose(got["state"][name], tensor, atol=TOLERANCE, rtol=0), name


@pytest.mark.slow
def test_every_component_took_part(results: dict[tuple[int, str, str, int], dict[str, Any]]) -> None:
    logged = results[(2, "agent", "tiny-glm", 2)]["logged"]
    for name in ("code", "intent", "tool", "cursor", "reward", "policy"):
        assert logged[f"loss/{name}/count"] > 0, name
        assert logged[f"loss/train/{name}"] == pytest.approx(logged[f"loss/{name}/raw"], rel=1e-5), name
    assert logged["gradnorm/all"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "least"), [("pretrain", 500), ("sft", 50)])
def test_without_sessions_the_language_model_alone_has_targets(
    results: dict[tuple[int, str, str, int], dict[str, Any]], stage: str, least: int
) -> None:
    logged = results[(2, stage, "tiny-glm", 2)]["logged"]
    counts = {name: logged[f"loss/{name}/count"] for name in ("code", "intent", "tool", "cursor", "reward", "policy")}
    assert counts.pop("code") > least
    assert set(counts.values()) == {0.0}
