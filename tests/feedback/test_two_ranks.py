"""Two processes: each rank has its own executor and trace; the global batch decides, not how it is shared out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import two_ranks
from support_agent import InProcessExecutor
from support_runs import on_two_ranks

from agentft.feedback.trace import read_traces


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What two ranks saw: one run with recorded calls, one with sampled calls too, and the replay of that."""
    folder = tmp_path_factory.mktemp("pair")
    return folder, on_two_ranks(two_ranks.__file__, folder)


@pytest.mark.slow
def test_two_ranks_train_like_one(pair: Any, tmp_path: Path) -> None:
    folder, seen = pair
    alone = two_ranks.train(tmp_path, InProcessExecutor(), two_ranks.RECORDED)
    assert seen[0]["recorded"]["totals"] == seen[1]["recorded"]["totals"]
    assert seen[0]["recorded"]["totals"] == pytest.approx(alone["totals"], abs=1e-5)
    files = [folder / "recorded" / "traces" / f"rank{rank}.jsonl" for rank in (0, 1)]
    lines = [{line.key: line.advantage for line in read_traces(file)} for file in files]
    assert not lines[0].keys() & lines[1].keys()
    together = {line.key: line.advantage for line in read_traces(tmp_path)}
    assert {**lines[0], **lines[1]} == pytest.approx(together, abs=1e-6)


@pytest.mark.slow
def test_two_ranks_with_sampled_calls_replay_bit_for_bit(pair: Any) -> None:
    for seen in pair[1]:
        assert seen["replayed"]["losses"] == seen["sampled"]["losses"]
        assert seen["sampled"]["summary"]["probe"]["calls"] == 2  # one call a rank, after batch 2 and at the end
