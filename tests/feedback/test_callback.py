from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import Callback, State, Time, Timestamp
from composer.loggers import InMemoryLogger, Logger
from support_agent import InProcessExecutor, ListLoader, lost, make_renderer, sessions
from support_training import Seen, Trained, train_agent

from agentft.config.schema import FeedbackConfig, PolicyConfig, ProbeConfig, RecordedConfig
from agentft.errors import AgentFTError, RewardError, SandboxError
from agentft.feedback.callback import ExecutionFeedback
from agentft.feedback.trace import TraceLine, read_traces
from agentft.sandbox.base import Executor
from agentft.sandbox.replay import ReplayExecutor

KNOWN = sessions(8)
RENDERER = make_renderer(KNOWN)
FULL = FeedbackConfig(
    recorded=RecordedConfig(prefetch_batches=2),
    policy=PolicyConfig(every=2, calls=3),
    probe=ProbeConfig(every=3, calls=2),
)


def train(folder: Path, executor: Executor, config: FeedbackConfig = FULL, **options: Any) -> Trained:
    return train_agent(folder, executor, config, renderer=RENDERER, known=KNOWN, **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Seen, ExecutionFeedback, InMemoryLogger]:
    folder = tmp_path_factory.mktemp("runs") / "first"
    return (folder, *train(folder, InProcessExecutor()))


def test_two_runs_with_one_seed_are_equal_bit_for_bit(run: Any, tmp_path: Path) -> None:
    seen, _, _ = train(tmp_path, InProcessExecutor())
    assert seen.losses == run[1].losses
    assert len(set(seen.losses)) > 5


def test_a_replay_is_equal_bit_for_bit_and_writes_the_same_trace(run: Any, tmp_path: Path) -> None:
    executor = ReplayExecutor(run[0])
    seen, feedback, _ = train(tmp_path, executor)
    assert seen.losses == run[1].losses
    assert executor.stats()["replayed"] == feedback.summary()["sandbox"]["executions"]
    first, second = ([line for line in read_traces(folder) if line.source != "probe"] for folder in (run[0], tmp_path))
    assert [(a.key, a.reward, a.advantage, a.stdout) for a in first] == [
        (b.key, b.reward, b.advantage, b.stdout) for b in second
    ]


def test_a_replay_of_another_run_stops_with_the_key(run: Any, tmp_path: Path) -> None:
    with pytest.raises(AgentFTError, match="recorded/5/"):
        train(tmp_path, ReplayExecutor(run[0]), batches=7)


def test_every_execution_is_one_trace_line(run: Any) -> None:
    folder, _, feedback, _ = run
    lines = list(read_traces(folder))
    summary = feedback.summary()
    assert summary["traces"] == {"path": str(folder / "traces"), "lines": len(lines)}
    assert sum(line.status is not None for line in lines) == summary["sandbox"]["executions"]
    assert len({line.key for line in lines}) == len(lines)
    expected = {
        f"recorded/{batch}/{session.session_id}/{step.step}"
        for batch in range(5)
        for session in KNOWN[4 * (batch % 2) :][:4]
        for step in session.execution_trace
    }
    assert {line.key for line in lines if line.source == "recorded"} == expected


def test_recorded_lines_say_what_the_heads_predicted(run: Any) -> None:
    recorded = [line for line in read_traces(run[0]) if line.source == "recorded"]
    for line in recorded:
        assert line.predicted_reward is not None
        assert 0 < line.predicted_reward < 1
        assert line.tool_probs is not None
        assert sum(line.tool_probs.values()) == pytest.approx(1, abs=2e-3)
        assert line.intents is not None
        assert len(line.intents) == 12


def test_policy_weight_covers_exactly_the_tokens_of_credited_calls(run: Any) -> None:
    folder, seen, _, _ = run
    lines = list(read_traces(folder))
    tool_start, tool_end = RENDERER.vocab.tool_start, RENDERER.vocab.tool_end
    for number, batch in enumerate(seen.batches):
        expected = torch.zeros_like(batch["policy_weight"])
        rows = {row_id: row for row, row_id in enumerate(batch["session_id"])}
        for line in (line for line in lines if line.batch == number and line.source != "probe"):
            row = rows.get(line.key if line.source == "policy" else line.session_id)
            if line.advantage is None or row is None or line.span is None:
                continue
            assert batch["input_ids"][row, line.span[0]] == tool_start or not line.parse_ok
            assert batch["input_ids"][row, line.span[1] - 1] == tool_end or not line.parse_ok
            expected[row, line.span[0] : line.span[1]] = line.advantage
        assert torch.equal(batch["policy_weight"], expected)
        assert (batch["policy_weight"] != 0).any()


def test_credit_follows_the_next_run(run: Any) -> None:
    """In the session with a wrong edit: the edit before the failing run is worth less than the one before the pass."""
    lines = {line.step: line for line in read_traces(run[0]) if line.key.startswith("recorded/0/calc/2/")}
    tools = [lines[step].tool for step in sorted(lines)]
    assert tools == ["pytest_run", "file_read", "file_edit", "pytest_run", "file_edit", "file_edit", "pytest_run"]
    assert lines[1].reward == -0.5
    assert lines[1].advantage is None  # a failing test run is information
    wrong, right = lines[3].advantage, lines[6].advantage
    assert wrong is not None
    assert right is not None
    assert wrong < 0 < right
    assert lines[3].reward == 1.0  # the edit itself was applied


def test_outcome_targets_are_the_fresh_results(run: Any) -> None:
    batch = run[1].batches[0]
    runs = [
        (row, step["result_at"], float(step["step"] == len(KNOWN[row].execution_trace)))
        for row in range(4)
        for step in batch["steps"][row]
        if step["runs_code"]
    ]
    found = {tuple(at): i for i, at in enumerate(batch["outcome_at"].tolist())}
    for row, column, passed in runs:
        at = found[row, column]
        assert batch["outcome_mask"][at] == 1
        assert batch["outcome_target"][at] == passed


def test_policy_rows_train_no_token_by_imitation(run: Any) -> None:
    batch = run[1].batches[2]
    extra = [row for row, name in enumerate(batch["session_id"]) if name.startswith("policy/2/")]
    assert len(extra) == 3
    for row in extra:
        assert (batch["labels"][row] == -100).all()
        assert not (batch["token_weight"][row] != 0).any()
        last = int(batch["lengths"][row]) - 1
        if batch["steps"][row]:
            assert batch["input_ids"][row, last] == RENDERER.vocab.result
            assert batch["steps"][row][0]["result_at"] == last
        assert row not in batch["intent_at"][:, 0].tolist()
    assert not any(name.startswith("policy/") for name in run[1].batches[1]["session_id"])


def test_probe_counts_and_metrics(run: Any) -> None:
    folder, _, feedback, memory = run
    probe = feedback.summary()["probe"]
    assert probe["calls"] == 4  # after batches 3 and 5 (the end)
    assert {"probe/calls", "probe/parse_ok", "probe/exit0", "probe/reward_mean"} <= memory.data.keys()
    assert {"feedback/executions", "feedback/wait_ms", "feedback/infra", "feedback/reward_mean"} <= memory.data.keys()
    calls = [line for line in read_traces(folder) if line.source == "probe" and line.role == "call"]
    assert len(calls) == 4
    assert all(line.advantage is None for line in calls)


def test_calls_run_ahead_of_their_batch(tmp_path: Path) -> None:
    executor = InProcessExecutor()
    loader = ListLoader(RENDERER, KNOWN, 4)
    feedback = ExecutionFeedback(
        FULL, executor=executor, upcoming=loader.upcoming, renderer=RENDERER, run_folder=tmp_path, seed=1
    )
    state: Any = type("At", (), {})()  # only a clock and an end are read
    state.timestamp, state.max_duration = Timestamp(batch=3), Time(5, "ba")
    feedback.before_dataloader(state, None)  # type: ignore[arg-type]
    assert {key.split("/")[1] for key in executor.keys} == {"3", "4"}  # two ahead were asked for; the run ends at 5
    feedback.close()
    assert executor.closed == 1
    feedback.close()
    assert executor.closed == 1


def test_nothing_runs_beyond_the_end_of_a_run_in_epochs(tmp_path: Path) -> None:
    executor = InProcessExecutor()
    train(tmp_path, executor, FeedbackConfig(probe=ProbeConfig(every=0)), duration="2ep")
    assert {key.split("/")[1] for key in executor.keys} == {"0", "1", "2", "3"}
    assert len(executor.keys) == len(set(executor.keys))
    assert {line.batch for line in read_traces(tmp_path)} == {0, 1, 2, 3}


def test_the_share_is_stable_and_the_rest_is_left_alone(tmp_path: Path) -> None:
    config = FeedbackConfig(recorded=RecordedConfig(share=0.5), probe=ProbeConfig(every=0))
    _, _, _ = train(tmp_path, InProcessExecutor(), config, batches=4)
    seen = [{line.session_id for line in read_traces(tmp_path) if line.batch == number} for number in range(4)]
    assert seen[0] == seen[2]
    assert seen[1] == seen[3]
    assert 0 < len(seen[0] | seen[1]) < 8


def test_lost_executions_are_masked_and_training_goes_on(run: Any, tmp_path: Path) -> None:
    executor = InProcessExecutor(lambda key: lost() if "/calc/1/" in key else None)
    config = FeedbackConfig(max_infra_share=0.9, probe=ProbeConfig(every=0))
    seen, feedback, memory = train(tmp_path, executor, config, batches=2)
    batch = seen.batches[0]
    runs = {step["result_at"] for step in batch["steps"][1] if step["runs_code"]}
    for at, (row, column) in enumerate(batch["outcome_at"].tolist()):
        assert batch["outcome_mask"][at] == float(
            row != 1 and column in {s["result_at"] for s in batch["steps"][row] if s["runs_code"]}
        )
    assert runs
    assert not (batch["policy_weight"][1] != 0).any()
    assert all(
        line.reward is None and line.advantage is None for line in read_traces(tmp_path) if line.status == "infra"
    )
    assert feedback.summary()["sandbox"]["by_status"]["infra"] == len(KNOWN[1].execution_trace)
    assert memory.data["feedback/infra"][0][1] == len(KNOWN[1].execution_trace)


class _Refuses(InProcessExecutor):
    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        raise SandboxError("the engine does not answer")


class _Raises(InProcessExecutor):
    def _run(self, *args: Any) -> Any:
        raise ConnectionResetError("peer is gone")


class _Sleeps(InProcessExecutor):
    def _run(self, *args: Any) -> Any:
        time.sleep(0.6)


@pytest.mark.parametrize(
    ("executor", "reason"),
    [(_Refuses, "does not answer"), (_Raises, "peer is gone"), (_Sleeps, "no result within 0.05 s")],
)
def test_a_dead_sandbox_stops_the_run_with_a_checkpoint(executor: type, reason: str, tmp_path: Path) -> None:
    config = FeedbackConfig(wait_s=0.05, probe=ProbeConfig(every=0))
    with pytest.raises(RewardError, match=reason):
        train(tmp_path, executor(), config, batches=3)
    assert list((tmp_path / "checkpoints").glob("ep*-ba2-*"))
    assert all(line.status == "infra" for line in read_traces(tmp_path))


def test_few_lost_executions_are_no_reason_to_stop(tmp_path: Path) -> None:
    calls = sum(len(session.execution_trace) for session in KNOWN[:3])
    assert calls < 20
    loader_share = FeedbackConfig(recorded=RecordedConfig(share=0.2), probe=ProbeConfig(every=0))
    _, feedback, _ = train(tmp_path, _Raises(), loader_share, batches=2)
    summary = feedback.summary()["sandbox"]
    assert 0 < summary["by_status"]["infra"] == summary["executions"] < 20


def test_feedback_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    """With dropout on, every draw shows: sampling for a probe must not change the losses of training."""
    quiet = FeedbackConfig(probe=ProbeConfig(every=0))
    probing = FeedbackConfig(probe=ProbeConfig(every=1, calls=2))
    first, _, _ = train(tmp_path / "a", InProcessExecutor(), quiet, batches=3, dropout=0.2)
    second, _, _ = train(tmp_path / "b", InProcessExecutor(), probing, batches=3, dropout=0.2)
    assert first.losses == second.losses


def test_a_crash_in_training_keeps_the_lines_and_closes(tmp_path: Path) -> None:
    class Crash(Callback):
        def after_backward(self, state: State, logger: Logger) -> None:
            if state.timestamp.batch.value == 1:
                raise FloatingPointError("boom")

    executor = InProcessExecutor()
    with pytest.raises(FloatingPointError):
        train(tmp_path, executor, batches=4, more=[Crash()])
    assert executor.closed == 1
    assert {line.batch for line in read_traces(tmp_path)} == {0, 1}


def test_trace_lines_are_typed(run: Any) -> None:
    assert all(isinstance(line, TraceLine) for line in read_traces(run[0]))
