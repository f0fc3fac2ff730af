"""Results from an earlier process: the same losses bit for bit, whether they are computed, kept, or run again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support_agent import make_renderer, repair_session
from support_training import train_agent

from agentft.config.schema import FeedbackConfig, ProbeConfig, RewardConfig
from agentft.feedback.reward import credit, standing
from agentft.feedback.trace import read_traces
from agentft.sandbox.base import ExecResult, Limits
from agentft.sandbox.cache import ResultCache
from agentft.sandbox.cache_disk import DiskStore
from agentft.sandbox.executor import LiveExecutor
from agentft.sandbox.pool import open_sandbox


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is missing")
def test_losses_do_not_depend_on_where_results_come_from(tmp_path: Path) -> None:
    known = [repair_session(number) for number in range(3)]
    renderer = make_renderer(known)

    def train(name: str, verify_share: float) -> tuple[list[float], dict[str, int]]:
        sandbox = open_sandbox("local", workers=2, limits=Limits(), run_name="test-reuse")
        cache = ResultCache(disk=DiskStore(tmp_path / "cache", mib=4), verify_share=verify_share)
        config = FeedbackConfig(probe=ProbeConfig(every=0))
        seen, feedback, _ = train_agent(
            tmp_path / name, LiveExecutor(sandbox, 2, cache=cache), config,
            renderer=renderer, known=known, batches=2, batch_size=3,
        )  # fmt: skip
        summary = feedback.summary()
        assert summary["executor"]["cache"]["mismatches"] == 0
        return seen.losses, summary["sandbox"]

    cold, ran = train("cold", 0.0)
    warm, reused = train("warm", 0.0)
    checked, _ = train("checked", 1.0)
    assert warm == cold
    assert checked == cold
    assert ran["cache_hits"] < ran["executions"]
    assert reused["cache_hits"] == reused["executions"] == ran["executions"]
    assert all(line.cached for line in read_traces(tmp_path / "warm"))


def test_a_verdict_over_tampered_tests_is_never_a_reward() -> None:
    config = RewardConfig()
    edit = ExecResult(status="ok", exit_code=0)
    clean = ExecResult(status="ok", exit_code=0, fields={"tampered": []})
    tampered = ExecResult(status="ok", exit_code=0, fields={"tampered": [{"path": "conftest.py", "kind": "x"}]})
    assert credit("file_edit", edit, clean, config) == config.passed
    assert standing(tampered) == "failed"
    assert credit("file_edit", edit, tampered, config) == config.failed
