"""Results are reused only where they must be equal, and hits are checked by running some of them again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from scripted_sandbox import ScriptedSandbox

from agentft.etai import InlineWorkspace
from agentft.sandbox.base import ExecResult, Limits, Verdict
from agentft.sandbox.cache import ResultCache, first_difference, lineage_keys
from agentft.sandbox.cache_disk import DiskStore
from agentft.sandbox.executor import LiveExecutor
from agentft.sandbox.session_run import SessionRun
from agentft.tools import ToolCall

OK = ExecResult(status="ok", exit_code=0, stdout="x")
WORKSPACE = InlineWorkspace(files={"a.txt": "one\n", "b.txt": "two\n"})
READ = ToolCall("file_read", {"path": "a.txt"})
LINT = ToolCall("lint_run", {"path": "a.txt"})
EDIT = ToolCall("file_edit", {"path": "a.txt", "old": "one", "new": "three"})


def test_the_cache_is_bounded_and_keeps_only_what_may_be_repeated() -> None:
    cache = ResultCache(memory_mib=0.0025)  # two entries
    for key, result in (
        ("timeout", ExecResult(status="timeout", exit_code=None)),
        ("infra", ExecResult(status="infra", exit_code=None)),
        ("cut", ExecResult(status="ok", exit_code=0, truncated=True)),
    ):
        assert cache.claim(key) is None
        cache.settle(key, result)
        assert cache.get(key) is None
    for key in "abc":
        cache.settle(key, OK)
    assert cache.get("a") is None
    found = cache.get("c")
    assert found is not None
    assert (found.cached, found.stdout) == (True, "x")
    assert cache.stats()["entries"] == 2
    cache.settle("long", ExecResult(status="ok", exit_code=0, stdout="x" * 5000))
    assert cache.stats()["entries"] == 0  # nothing is larger than all


def test_a_claim_is_given_to_one_and_its_end_is_told_to_all() -> None:
    cache = ResultCache()
    assert cache.claim("k") is None
    second, third = cache.claim("k"), cache.claim("k")
    assert isinstance(second, Future)
    assert second is third
    cache.settle("k", None)
    assert second.result(timeout=1) is None
    assert cache.claim("k") is None
    cache.settle("k", OK)
    settled = cache.claim("k")
    assert settled is not None
    assert settled.done()


def test_verdicts_and_disabled_tools_have_keys_of_their_own() -> None:
    def keys(calls: tuple[ToolCall, ...], **options: object) -> list[str | None]:
        return lineage_keys("image", Limits(), WORKSPACE, calls, **options)  # type: ignore[arg-type]

    as_call, as_verdict = keys((EDIT, LINT)), keys((EDIT,), verdict=Verdict(LINT))
    assert as_call[0] == as_verdict[0]
    assert as_call[1] != as_verdict[1]
    assert keys((READ, LINT, EDIT), disabled={"lint_run"})[1:] == [None, None]
    assert keys((READ, LINT, EDIT), disabled={"lint_run"})[0] == keys((READ,))[0]


def test_a_later_process_finds_what_an_earlier_one_kept(tmp_path: Path) -> None:
    first = ResultCache(disk=DiskStore(tmp_path, mib=1))
    first.settle("k", OK, "file_read")
    first.close()
    second = ResultCache(disk=DiskStore(tmp_path, mib=1))
    found = second.get("k", "file_read")
    assert found is not None
    assert (found.cached, found.stdout) == (True, "x")
    assert second.stats()["from_disk"] == 1
    assert second.get("k") is not None
    assert second.stats()["from_disk"] == 1  # from memory now
    second.close()


def test_about_the_share_of_the_hits_is_due_and_always_the_same() -> None:
    def drawn(seed: int) -> list[bool]:
        cache = ResultCache(verify_share=0.1, seed=seed)
        for number in range(100):
            cache.settle(str(number), OK)
        return [cache.due(str(number)) for _ in range(20) for number in range(100)]

    first = drawn(1)
    assert 130 < sum(first) < 270  # 2,000 hits
    assert first == drawn(1)
    assert first != drawn(2)
    assert not any(ResultCache().due(str(number)) for number in range(1000))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"status": "nonzero"}, "status was ok, now nonzero"),
        ({"exit_code": 3}, "exit_code was 0, now 3"),
        ({"stdout": "a\nc\n"}, "line 2 of stdout was 'b', now 'c'"),
        ({"stdout": "a\n"}, "stdout had 2 lines, now 1"),
        ({"stderr": "w"}, "stderr had 0 lines, now 1"),
        ({"duration_s": 9.0}, None),
        ({"stdout": "a\nb\n", "cached": True}, None),
    ],
)
def test_the_first_difference_is_named_and_time_never_counts(change: dict[str, object], said: str | None) -> None:
    kept = ExecResult(status="ok", exit_code=0, stdout="a\nb\n")
    again = ExecResult(**{"status": "ok", "exit_code": 0, "stdout": "a\nb\n", **change})  # type: ignore[arg-type]
    assert first_difference(kept, again) == said


def test_addresses_and_temporary_names_are_no_difference() -> None:
    kept = ExecResult(status="ok", exit_code=0, stdout="<A object at 0x7f12> /tmp/tmpabcd1234")
    again = ExecResult(status="ok", exit_code=0, stdout="<A object at 0x9999> /tmp/tmpzzzz9876")
    assert first_difference(kept, again) is None


@pytest.fixture
def sandbox() -> ScriptedSandbox:
    return ScriptedSandbox(workers=2)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_hits_are_run_again_behind_the_answer(sandbox: ScriptedSandbox, tmp_path: Path) -> None:
    cache = ResultCache(disk=DiskStore(tmp_path, mib=1), verify_share=1.0)
    executor = LiveExecutor(sandbox, 2, cache=cache)
    for _ in range(3):
        results = executor.submit(WORKSPACE, (READ, EDIT, READ), key="k").result(timeout=10)
        assert [result.stdout for result in results][::2] == ["1: one\n", "1: three\n"]
    wait_for(lambda: executor.stats()["cache"]["verified"] == 6)
    stats = executor.stats()
    assert (stats["executions"], stats["cache_hits"], stats["cache"]["mismatches"]) == (3, 6, 0)
    executor.close()


def test_a_tool_that_does_not_repeat_is_no_longer_cached(
    sandbox: ScriptedSandbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The linter of this sandbox says another thing each time."""
    sandbox.drifting.add("lint")
    store = DiskStore(tmp_path, mib=1)
    executor = LiveExecutor(sandbox, 2, cache=ResultCache(disk=store, verify_share=1.0))
    calls = (READ, LINT)
    with caplog.at_level(logging.WARNING):
        first = executor.submit(WORKSPACE, calls, key="k").result(timeout=10)
        again = executor.submit(WORKSPACE, calls, key="k").result(timeout=10)
        assert [result.cached for result in again] == [True, True]
        assert again[1].stdout == first[1].stdout
        wait_for(lambda: bool(caplog.messages))
    assert executor.stats()["cache"]["disabled"] == ["lint_run"]
    assert len(caplog.messages) == 1
    assert "lint_run does not repeat" in caplog.text
    assert "line 1 of stdout was 'run 1', now 'run 2'" in caplog.text
    assert store.stats()["entries"] == 1
    later = executor.submit(WORKSPACE, calls, key="k").result(timeout=10)
    assert [result.cached for result in later] == [True, False]
    assert later[1].stdout == "run 3\n"
    assert executor.stats()["cache"]["mismatches"] == 1
    executor.close()


def test_rebuilding_a_state_checks_what_it_repeats(sandbox: ScriptedSandbox) -> None:
    """A hit that has to be repeated for a later call is compared without being asked to."""
    sandbox.drifting.add("lint")
    executor = LiveExecutor(sandbox, 1)
    executor.submit(WORKSPACE, (LINT,), key="k").result(timeout=10)
    longer = executor.submit(WORKSPACE, (LINT, READ), key="k").result(timeout=10)
    assert [result.cached for result in longer] == [True, False]
    assert executor.stats()["cache"]["disabled"] == ["lint_run"]
    executor.close()


def test_what_the_sandbox_loses_says_nothing_about_a_tool(sandbox: ScriptedSandbox) -> None:
    executor = LiveExecutor(sandbox, 2, cache=ResultCache(verify_share=1.0))
    executor.submit(WORKSPACE, (LINT,), key="k").result(timeout=10)
    sandbox.fail_next = 100
    assert executor.submit(WORKSPACE, (LINT,), key="k").result(timeout=10)[0].cached
    wait_for(lambda: executor.stats()["checks_left"] == 1)
    assert executor.stats()["cache"] | {"mib": 0} == {
        "entries": 1, "mib": 0, "from_disk": 0, "verified": 0, "mismatches": 0, "disabled": [], "disk": None
    }  # fmt: skip
    executor.close()


def test_a_check_stops_at_the_next_call_when_it_has_to_make_room() -> None:
    go_on, written = threading.Event(), 0

    def third(what: str) -> bool:
        nonlocal written
        written += what == "write"
        if what == "write" and written == 4:  # the workspace and three calls
            go_on.clear()
        return False

    sandbox, cache = ScriptedSandbox(workers=1, breaks=third), ResultCache()
    calls = tuple(ToolCall("file_write", {"path": "a.txt", "content": f"{number}"}) for number in range(10))
    run = SessionRun(sandbox, cache, WORKSPACE, calls)
    go_on.set()
    assert run.check(9, OK, go_on) == "stopped"
    assert written == 4
    go_on.set()
    assert run.check(9, OK, go_on) == "done"
    assert written == 15
    assert cache.stats()["mismatches"] == 1  # the text of OK is another


def test_a_stopped_check_goes_on_later(sandbox: ScriptedSandbox) -> None:
    executor = LiveExecutor(sandbox, 1, cache=ResultCache(verify_share=1.0))
    calls = (*[ToolCall("lint_run", {"path": f"{number}"}) for number in range(6)], READ)
    executor.submit(WORKSPACE, calls, key="k").result(timeout=10)
    sandbox.pause_s = 0.01
    executor.submit(WORKSPACE, calls, key="k").result(timeout=10)
    for number in range(5):
        executor.submit(WORKSPACE, (ToolCall("lint_run", {"path": f"other {number}"}),), key="k").result(timeout=10)
    wait_for(lambda: executor.stats()["cache"]["verified"] == 7)
    assert executor.stats()["checks_left"] == 0
    executor.close()
