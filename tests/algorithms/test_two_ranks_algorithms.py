"""Two processes train like one: the same rows cut, the same failures known, the same layers skipped."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import two_ranks_algorithms


@pytest.mark.slow
def test_two_ranks_train_like_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "composer.cli.launcher", "-n", "2", "--master_port", str(port)]
    done = subprocess.run(
        [*launcher, two_ranks_algorithms.__file__, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"seen{rank}.json").read_text()) for rank in (0, 1))
    alone = two_ranks_algorithms.run(tmp_path / "alone")
    assert first["curve"] == second["curve"]
    assert sum(alone["logged"]["stochastic_depth/skipped"]) > 0
    assert alone["logged"]["raspberry/failure_rate/file_edit"]
    assert alone["logged"]["length_warmup/cut_rows"][0] > 0
    assert first["logged"] == alone["logged"]
    for got, expected in zip(first["curve"], alone["curve"], strict=True):
        assert got == pytest.approx(expected, abs=1e-5)
