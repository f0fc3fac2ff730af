"""Two processes train like one: the same rows cut, the same failures known, the same layers skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import two_ranks_algorithms
from support_runs import on_two_ranks


@pytest.mark.slow
def test_two_ranks_train_like_one(tmp_path: Path) -> None:
    first, second = on_two_ranks(two_ranks_algorithms.__file__, tmp_path)
    alone = two_ranks_algorithms.run(tmp_path / "alone")
    assert first["curve"] == second["curve"]
    assert sum(alone["logged"]["stochastic_depth/skipped"]) > 0
    assert alone["logged"]["raspberry/failure_rate/file_edit"]
    assert alone["logged"]["length_warmup/cut_rows"][0] > 0
    assert first["logged"] == alone["logged"]
    for got, expected in zip(first["curve"], alone["curve"], strict=True):
        assert got == pytest.approx(expected, abs=1e-5)
