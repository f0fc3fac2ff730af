"""Whatever a sandbox does: every request is answered once, with what a session from its start gives, or with infra."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import CancelledError, Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sandbox_engines import BACKENDS, make_engine
from scripted_sandbox import ScriptedSandbox

from agentft.errors import SandboxError
from agentft.etai import InlineWorkspace
from agentft.sandbox.base import ExecResult, Verdict
from agentft.sandbox.cache import ResultCache
from agentft.sandbox.executor import LiveExecutor
from agentft.sandbox.pool import Pool
from agentft.tools import ToolCall

WORKSPACE = InlineWorkspace(files={"a.txt": "one\n", "tests/test_a.py": "assert True\n"})
READ = ToolCall("file_read", {"path": "a.txt"})


def append(text: str) -> ToolCall:
    return ToolCall("shell_run", {"command": f"append a.txt {text}"})


CALLS = st.sampled_from(
    [
        READ,
        append("x"),
        append("y"),
        ToolCall("file_edit", {"path": "a.txt", "old": "one", "new": "two"}),
        ToolCall("file_write", {"path": "a.txt", "content": "one\nnew\n"}),
        ToolCall("file_read", {"path": "no.txt"}),
    ]
)


def what(results: list[ExecResult]) -> list[tuple[str, int | None, str, str]]:
    return [(result.status, result.exit_code, result.stdout, result.stderr) for result in results]


def undisturbed(calls: tuple[ToolCall, ...]) -> list[tuple[str, int | None, str, str]]:
    executor = LiveExecutor(ScriptedSandbox(workers=1), 1)
    results = executor.submit(WORKSPACE, calls, key="k").result(timeout=10)
    executor.close()
    return what(results)


@settings(max_examples=60, deadline=None)
@given(
    sessions=st.lists(st.lists(CALLS, min_size=1, max_size=6).map(tuple), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.02, 0.1, 0.4]),
    workers=st.integers(1, 3),
    verify=st.sampled_from([0.0, 1.0]),
)
def test_every_call_is_answered_once_and_truly(
    sessions: list[tuple[ToolCall, ...]], seed: int, share: float, workers: int, verify: float
) -> None:
    """Leases die at random points. No answer mixes two attempts, none is missing, none is invented."""
    chance = random.Random(seed)
    sandbox = ScriptedSandbox(workers=2, breaks=lambda what: chance.random() < share)
    executor = LiveExecutor(sandbox, workers, cache=ResultCache(verify_share=verify))
    answered: list[int] = []
    futures: list[Future[list[ExecResult]]] = []
    for number, calls in enumerate(sessions):
        future = executor.submit(WORKSPACE, calls, key=f"recorded/0/{number}/1")
        future.add_done_callback(lambda _, number=number: answered.append(number))  # type: ignore[misc]
        futures.append(future)
    for calls, future in zip(sessions, futures, strict=True):
        results, truth = what(future.result(timeout=20)), undisturbed(calls)
        assert len(results) == len(calls)
        lost = next((row for row, result in enumerate(results) if result[0] == "infra"), len(results))
        assert results[:lost] == truth[:lost]
        assert all(result[0] == "infra" and result[1] is None for result in results[lost:])
    executor.close()
    stats = executor.stats()
    assert sorted(answered) == list(range(len(sessions)))
    assert stats["executions"] + stats["cache_hits"] == sum(map(len, sessions))
    assert stats["retries"] <= len(sessions)
    assert stats["cache"]["mismatches"] == 0
    for lease in sandbox.leases:  # whatever ran in a container began with the session's files
        assert not lease.ran or "a.txt" in lease.files


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_cancelling_at_random_moments_loses_nobody_elses_answer(seed: int) -> None:
    chance = random.Random(seed)
    sandbox = ScriptedSandbox(workers=2)
    sandbox.pause_s = 0.002
    executor = LiveExecutor(sandbox, 2)
    calls = [tuple(append(f"{number}-{row}") for row in range(3)) for number in range(10)]
    futures = [executor.submit(WORKSPACE, each, key="k") for each in calls]
    cancelled = set()
    for number in chance.sample(range(10), 4):
        time.sleep(chance.uniform(0, 0.004))
        if futures[number].cancel():
            cancelled.add(number)
    for number, future in enumerate(futures):
        if number in cancelled:
            with pytest.raises(CancelledError):
                future.result(timeout=10)
        else:
            assert [result.status for result in future.result(timeout=10)] == ["ok"] * 3
    executor.close()


def test_a_full_queue_blocks_and_then_refuses() -> None:
    sandbox = ScriptedSandbox(workers=1)
    sandbox.pause_s = 0.3
    executor = LiveExecutor(sandbox, 1, max_waiting=2, submit_wait_s=10)
    futures = [executor.submit(WORKSPACE, (append("x"),), key="k")]
    while not futures[0].running():
        time.sleep(0.001)
    futures += [executor.submit(WORKSPACE, (append("x"),), key="k") for _ in range(2)]
    assert executor.stats()["waiting"] == 2
    started = time.monotonic()
    futures.append(executor.submit(WORKSPACE, (append("x"),), key="k"))
    assert time.monotonic() - started > 0.1  # until the first one was done
    executor._submit_wait_s = 0.05
    with pytest.raises(SandboxError, match="queue stays full"):
        executor.submit(WORKSPACE, (append("x"),), key="k")
    futures[-1].cancel()  # a cancelled request frees its place
    executor.submit(WORKSPACE, (append("x"),), key="k")
    assert [future.result(timeout=10)[0].status for future in futures[:3]] == ["ok"] * 3
    executor.close()
    with pytest.raises(SandboxError, match="closed"):
        executor.submit(WORKSPACE, (append("x"),), key="k")


def test_a_waiting_submit_ends_with_the_executor() -> None:
    sandbox = ScriptedSandbox(workers=1)
    sandbox.pause_s = 5.0
    executor = LiveExecutor(sandbox, 1, max_waiting=1, submit_wait_s=60)
    for _ in range(2):
        running = executor.submit(WORKSPACE, (append("x"),), key="k")
        time.sleep(0.05)
    refused: list[str] = []

    def wait() -> None:
        try:
            executor.submit(WORKSPACE, (append("x"),), key="k")
        except SandboxError as error:
            refused.append(error.what)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    executor.close()
    thread.join(timeout=5)
    assert refused == ["the executor is closed"]
    assert running.cancelled()


def test_a_lease_that_is_cancelled_is_ended_and_not_the_next_one() -> None:
    sandbox = ScriptedSandbox(workers=1)
    sandbox.pause_s = 0.5
    executor = LiveExecutor(sandbox, 1)
    future = executor.submit(WORKSPACE, (append("x"), append("y")), key="k")
    while not (future.running() and sandbox.leases):
        time.sleep(0.001)
    assert future.cancel()
    assert future.cancelled()
    started = time.monotonic()
    after = executor.submit(WORKSPACE, (append("z"),), key="k")
    sandbox.pause_s = 0.0
    assert after.result(timeout=10)[0].status == "ok"
    assert time.monotonic() - started < 0.4
    assert sandbox.leases[0].dead
    assert sandbox.leases[0].ran == []
    assert not sandbox.leases[1].dead
    assert (executor.stats()["cancelled"], executor.stats()["executions"], executor.stats()["retries"]) == (1, 1, 0)
    executor.close()


def test_whoever_waits_for_a_cancelled_computation_does_it_himself() -> None:
    sandbox = ScriptedSandbox(workers=2)
    sandbox.pause_s = 0.3
    executor = LiveExecutor(sandbox, 2)
    lint = ToolCall("lint_run", {"path": "a.txt"})
    first = executor.submit(WORKSPACE, (lint,), key="k")
    while not sandbox.leases:
        time.sleep(0.001)
    second = executor.submit(WORKSPACE, (lint,), key="k")
    time.sleep(0.05)
    first.cancel()
    assert second.result(timeout=10)[0].status == "ok"
    executor.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cancelled_call_ends_at_once_and_never_reaches_a_grade(backend: str) -> None:
    """A session that goes on writing is cancelled; its container is gone, and a grade sees nothing of it."""
    executor = LiveExecutor(Pool(make_engine(backend), 2), 2)
    files = InlineWorkspace(
        files={"test_a.py": "import os\n\ndef test():\n    assert os.listdir('.') == ['test_a.py']\n"}
    )
    busy = ToolCall("shell_run", {"command": "while :; do date > $RANDOM.txt; date > /tmp/x; sleep 0.01; done"})
    future = executor.submit(files, (busy,), key="k")
    while not future.running():
        time.sleep(0.01)
    time.sleep(0.3)
    assert future.cancel()
    started = time.monotonic()
    for _ in range(3):
        results = executor.submit(
            files, (ToolCall("file_list"),), key="k", verdict=Verdict(ToolCall("pytest_run"))
        ).result(60)
        assert [result.exit_code for result in results] == [0, 0]
        assert results[0].stdout == "test_a.py\n"
    assert time.monotonic() - started < 8  # the call alone would have gone on for 10 s
    assert executor.stats()["by_status"] == {"ok": 2}
    executor.close()
