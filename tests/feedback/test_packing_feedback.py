"""Feedback on packed rows: fresh targets, policy spans, sampled rows and predictions land where they always do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support_agent import InProcessExecutor, make_renderer, sessions
from support_training import train_agent

from agentft.config.schema import FeedbackConfig, PolicyConfig, ProbeConfig, RecordedConfig
from agentft.feedback.trace import TraceLine, read_traces
from agentft.losses import COMPONENTS

KNOWN = sessions(8)
RENDERER = make_renderer(KNOWN)
CONFIG = FeedbackConfig(
    recorded=RecordedConfig(prefetch_batches=1), policy=PolicyConfig(every=2, calls=3), probe=ProbeConfig(every=0)
)


def _run(folder: Path, packing: Any) -> tuple[dict[str, list[float]], list[TraceLine]]:
    folder.mkdir()
    options: dict[str, Any] = {"renderer": RENDERER, "known": KNOWN, "batches": 2, "packing": packing}
    _, _, memory = train_agent(folder, InProcessExecutor(), CONFIG, **options)
    logged = {name: [float(value) for _, value in memory.data[f"loss/train/{name}"]] for name in COMPONENTS}
    return logged, list(read_traces(folder))


def test_packed_rows_feel_the_same_executions(tmp_path: Path) -> None:
    padded, lines = _run(tmp_path / "padded", "buckets")
    packed, own = _run(tmp_path / "packed", "pack")
    for name, values in padded.items():
        assert packed[name] == pytest.approx(values, rel=1e-4, abs=1e-5), name
    assert padded["policy"][0] != 0
    assert len(own) == len(lines)
    assert {line.source for line in own} == {"recorded", "policy"}
    for ours, theirs in zip(own, lines, strict=True):
        same = ("key", "source", "role", "session_id", "step", "tool", "args", "status", "reward", "advantage", "span")
        assert [getattr(ours, name) for name in same] == [getattr(theirs, name) for name in same]
        assert ours.predicted_reward == pytest.approx(theirs.predicted_reward, abs=2e-4)
        assert ours.tool_probs == pytest.approx(theirs.tool_probs, abs=2e-4)
