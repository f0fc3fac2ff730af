from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from agentft.errors import AgentFTError, SandboxError
from agentft.etai import InlineWorkspace
from agentft.feedback.executions import WATCHED_BATCHES, WINDOW, Executions, WaitWatch
from agentft.feedback.trace import OUTPUT_CHARS
from agentft.sandbox.base import ExecResult
from agentft.tools import ToolCall

FILES = InlineWorkspace(files={})
CALLS = [ToolCall("git_status"), ToolCall("git_diff")]
GOOD = [ExecResult(status="ok", exit_code=0, duration_s=0.5), ExecResult(status="ok", exit_code=0, cached=True)]


class Scripted:
    """Answers each request with what ``answer`` makes of a fresh future."""

    def __init__(self, answer: Callable[[Future[Any]], None]) -> None:
        self.answer, self.submitted = answer, 0

    def submit(
        self, workspace: object, calls: tuple[ToolCall, ...], *, key: str, **more: object
    ) -> Future[list[ExecResult]]:
        self.submitted += 1
        future: Future[list[ExecResult]] = Future()
        self.answer(future)
        return future

    def close(self) -> None:
        """Nothing runs here."""


def take(answer: Callable[[Future[Any]], None], wait_s: float = 5) -> tuple[list[ExecResult], Executions]:
    executions = Executions(Scripted(answer), wait_s=wait_s)
    executions.submit("k", FILES, CALLS)
    return executions.take(["k"])["k"], executions


def test_results_are_counted() -> None:
    results, executions = take(lambda future: future.set_result(GOOD))
    assert results == GOOD
    assert executions.summary() == {"executions": 2, "by_status": {"ok": 2}, "median_ms": 500.0, "cache_hits": 1}
    assert executions.lost() == (0, 2)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda future: future.set_exception(SandboxError("no engine")), "no engine"),
        (lambda future: future.set_exception(OSError("broken pipe")), "OSError: broken pipe"),
        (lambda future: future.cancel(), "closed"),
        (lambda future: future.set_result(GOOD[:1]), "1 results for 2 calls"),
    ],
)
def test_every_failure_of_a_sandbox_is_lost_executions_with_a_reason(
    answer: Callable[[Future[Any]], None], reason: str
) -> None:
    results, executions = take(answer)
    assert [result.status for result in results] == ["infra", "infra"]
    assert executions.lost() == (2, 2)
    assert executions.last_loss is not None
    assert reason in executions.last_loss


def test_no_answer_in_time_is_lost_and_all_requests_share_one_deadline() -> None:
    executions = Executions(Scripted(lambda future: None), wait_s=0.2)
    for key in "abcdef":
        executions.submit(key, FILES, CALLS)
    started = time.monotonic()
    answers = executions.take("abcdef")
    assert time.monotonic() - started < 0.6
    assert {result.status for results in answers.values() for result in results} == {"infra"}
    assert 0.2 <= executions.wait_s < 0.6


def test_our_own_errors_pass_through() -> None:
    with pytest.raises(AgentFTError, match="left the path"):
        take(lambda future: future.set_exception(AgentFTError("this run has left the path")))


def test_a_key_is_submitted_once_and_may_come_again_after_it_was_taken() -> None:
    executor = Scripted(lambda future: future.set_result(GOOD))
    executions = Executions(executor, wait_s=1)
    for _ in range(3):
        executions.submit("k", FILES, CALLS)
    assert executor.submitted == 1
    executions.take(["k"])
    executions.submit("k", FILES, CALLS)
    assert executor.submitted == 2
    executions.drop()


def test_the_share_of_lost_executions_is_over_the_newest() -> None:
    lost = [ExecResult(status="infra", exit_code=None)] * 2
    answers = [lost] * 5 + [GOOD] * WINDOW
    executions = Executions(Scripted(lambda future: future.set_result(answers.pop(0))), wait_s=1)
    for number in range(5 + WINDOW):
        executions.submit(str(number), FILES, CALLS)
        executions.take([str(number)])
        if number == 4:
            assert executions.lost() == (10, 10)
    assert executions.lost() == (0, WINDOW)


def test_long_output_is_cut_before_anything_uses_it() -> None:
    long = [ExecResult(status="ok", exit_code=0, stdout="x" * 100_000), GOOD[1]]
    results, _ = take(lambda future: future.set_result(long))
    assert len(results[0].stdout) == OUTPUT_CHARS
    assert results[0].truncated
    assert results[0].total_bytes == 100_000


class OneWorker:
    """Runs requests one at a time, in order; each takes as long as ``hold`` says."""

    def __init__(self) -> None:
        self.pool, self.ran, self.hold = ThreadPoolExecutor(1), list[str](), threading.Event()

    def submit(
        self, workspace: object, calls: tuple[ToolCall, ...], *, key: str, **more: object
    ) -> Future[list[ExecResult]]:
        return self.pool.submit(self.run, key)

    def run(self, key: str) -> list[ExecResult]:
        self.hold.wait(5)
        self.ran.append(key)
        return GOOD

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


def test_what_is_needed_at_once_goes_before_what_has_not_started() -> None:
    worker = OneWorker()
    executions = Executions(worker, wait_s=5)
    for key in ("running", "later", "latest"):
        executions.submit(key, FILES, CALLS)
    with executions.at_once():
        executions.submit("now", FILES, CALLS)
    worker.hold.set()
    answers = executions.take(["now", "running", "latest", "later"])
    assert worker.ran == ["running", "now", "later", "latest"]
    assert all(results == GOOD for results in answers.values())
    assert executions.lost() == (0, 8)
    worker.close()


def test_waits_are_told_apart_by_their_cause() -> None:
    worker = OneWorker()
    executions = Executions(worker, wait_s=5)
    executions.submit("running", FILES, CALLS)
    threading.Timer(0.1, worker.hold.set).start()
    time.sleep(0.02)
    executions.take(["running"])
    assert executions.queued_s == 0.0
    assert executions.wait_s > 0.03
    worker.hold.clear()
    executions.submit("first", FILES, CALLS)
    executions.submit("queued", FILES, CALLS)
    threading.Timer(0.1, worker.hold.set).start()
    executions.take(["queued"])
    assert 0.03 < executions.queued_s < executions.wait_s
    executions.drop()
    worker.close()


def advice_of(waited_s: float, queued_s: float, monkeypatch: pytest.MonkeyPatch, prefetch: int = 2) -> list[str]:
    clock = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    watch = WaitWatch(prefetch)
    said = [watch.batch(waited_s, queued_s) for _ in range(2 * WATCHED_BATCHES)]
    return [advice for advice in said if advice is not None]


def test_waiting_is_advised_on_once_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert advice_of(0.04, 0.04, monkeypatch) == []
    assert advice_of(0.9, 0.9, monkeypatch, prefetch=0) == []
    (workers,) = advice_of(0.5, 0.4, monkeypatch)
    assert "10.0 s of the last 20.0 s" in workers
    assert "sandbox.workers" in workers
    (sooner,) = advice_of(0.5, 0.1, monkeypatch)
    assert "feedback.recorded.prefetch_batches" in sooner
