"""Packed rows give the step of padded rows, whatever fits into a pass, on one process and on two (spec: L3, D4)."""

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


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], dict[str, Any]]:
    """(processes, preset/case) → parameters after the step, what was logged, counts."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for processes, launcher in ((1, []), (2, ["-m", "composer.cli.launcher", "-n", "2"])):
        out = tmp_path_factory.mktemp("packing") / "out.pt"
        done = subprocess.run(
            [sys.executable, *launcher, "packing_worker.py", str(out)],
            cwd=HERE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        found |= {(processes, name): part for name, part in torch.load(out, weights_only=True).items()}
    return found


CASES = [(1, "tiny-glm/170"), (1, "tiny-glm/400"), (1, "tiny-kimi/170"), (2, "tiny-glm/400"), (2, "tiny-kimi/170")]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[1]}-{c[0]}process")
def test_losses_and_step_are_those_of_padded_rows(
    results: dict[tuple[int, str], dict[str, Any]], case: tuple[int, str]
) -> None:
    reference, got = results[1, f"{case[1].partition('/')[0]}/padded"], results[case]
    assert reference["logged"].keys() == got["logged"].keys()
    for name, value in reference["logged"].items():
        assert got["logged"][name] == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), name
    for name, tensor in reference["state"].items():
        assert torch.allclose(got["state"][name], tensor, atol=TOLERANCE, rtol=0), name
    assert got["samples"] == 8, "sessions are counted, not rows of tokens"
    assert got["share"] == 0 < reference["share"]


@pytest.mark.slow
def test_ranks_make_the_same_number_of_passes(results: dict[tuple[int, str], dict[str, Any]]) -> None:
    assert results[2, "tiny-glm/400"]["passes"] == 2 * 2, "the second rank's two sessions would fit into one pass"
    assert results[1, "tiny-glm/400"]["passes"] == 3
