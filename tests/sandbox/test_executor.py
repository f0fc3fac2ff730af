"""Sessions run from their start, in the background; results are reused only where they must be equal."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from sandbox_engines import LIMITS, make_engine

from agentft.errors import SandboxError
from agentft.etai import GitWorkspace, InlineWorkspace
from agentft.sandbox.base import ExecResult, Limits
from agentft.sandbox.cache import lineage_keys
from agentft.sandbox.container import Container
from agentft.sandbox.executor import LiveExecutor
from agentft.sandbox.pool import Pool
from agentft.tools import ToolCall

WORKSPACE = InlineWorkspace(files={"a.py": "x = 1\n", "test_a.py": "import a\ndef test():\n    assert a.x == 2\n"})
READ = ToolCall("file_read", {"path": "a.py"})
TEST = ToolCall("pytest_run")
EDIT = ToolCall("file_edit", {"path": "a.py", "old": "x = 1", "new": "x = 2"})
SHELL = ToolCall("shell_run", {"command": "echo x"})


class Breaking(Pool):
    """A pool whose first ``breaks`` leases die before they are used."""

    breaks = 0

    def _acquire(self) -> Container:
        container = super()._acquire()
        if self.breaks:
            self.breaks -= 1
            container._kill()
        return container


@pytest.fixture
def pool() -> Iterator[Breaking]:
    pool = Breaking(make_engine("local"), 2)
    yield pool
    pool.close()


@pytest.fixture
def executor(pool: Breaking) -> Iterator[LiveExecutor]:
    executor = LiveExecutor(pool, 4)
    yield executor
    executor.close()


def statuses(results: list[ExecResult]) -> list[str]:
    return [result.status for result in results]


def test_a_session_runs_from_its_start(executor: LiveExecutor) -> None:
    results = executor.submit(WORKSPACE, (READ, TEST, EDIT, TEST, SHELL), key="k").result(timeout=60)
    assert statuses(results) == ["ok", "nonzero", "ok", "ok", "ok"]
    assert results[1].fields["failed"] == results[3].fields["passed"] == 1
    stats = executor.stats()
    assert (stats["executions"], stats["cache_hits"], stats["retries"]) == (5, 0, 0)
    assert stats["by_status"] == {"ok": 4, "nonzero": 1}
    assert stats["median_ms"] > 0


def test_equal_lineages_are_served_from_the_cache(executor: LiveExecutor) -> None:
    first = executor.submit(WORKSPACE, (READ, TEST, EDIT, TEST), key="a").result(timeout=60)
    again = executor.submit(WORKSPACE, (READ, TEST, EDIT, TEST), key="b").result(timeout=60)
    assert [r.cached for r in first + again] == [False] * 4 + [True] * 4
    assert [(r.stdout, r.stderr, r.fields, r.duration_s) for r in again] == [
        (r.stdout, r.stderr, r.fields, r.duration_s) for r in first
    ]
    longer = executor.submit(WORKSPACE, (READ, TEST, EDIT, TEST, SHELL, TEST), key="c").result(timeout=60)
    assert [r.cached for r in longer] == [True] * 4 + [False] * 2
    assert longer[5].fields["passed"] == 1  # the edit was repeated before the first miss
    other = executor.submit(InlineWorkspace(files={"a.py": "x = 2\n"}), (READ,), key="d").result(timeout=60)
    assert (other[0].cached, other[0].stdout) == (False, "1: x = 2\n")


def test_what_is_not_deterministic_is_never_reused(executor: LiveExecutor) -> None:
    for _ in range(2):
        results = executor.submit(WORKSPACE, (SHELL, READ), key="k").result(timeout=60)
        assert [r.cached for r in results] == [False, False]


def test_equal_sessions_in_flight_are_computed_once(executor: LiveExecutor) -> None:
    slow = InlineWorkspace(files={"test_s.py": "import time\ndef test():\n    time.sleep(0.3)\n"})
    futures = [executor.submit(slow, (TEST, READ, TEST), key=str(number)) for number in range(8)]
    for future in futures:
        assert statuses(future.result(timeout=60)) == ["ok", "nonzero", "ok"]
    assert executor.stats()["executions"] == 3
    assert executor.stats()["cache_hits"] == 21


def test_a_lost_sandbox_is_retried_once(executor: LiveExecutor, pool: Breaking) -> None:
    pool.breaks = 1
    assert statuses(executor.submit(WORKSPACE, (READ, TEST), key="k").result(timeout=60)) == ["ok", "nonzero"]
    assert executor.stats()["retries"] == 1
    pool.breaks = 2
    lost = executor.submit(WORKSPACE, (EDIT, TEST), key="k").result(timeout=60)
    assert statuses(lost) == ["infra", "infra"]
    assert lost[0].exit_code is None
    assert executor.stats()["by_status"]["infra"] == 2
    found = executor.submit(WORKSPACE, (EDIT, TEST), key="k").result(timeout=60)
    assert [(r.status, r.cached) for r in found] == [("ok", False), ("ok", False)]


def test_a_workspace_that_is_not_inline_is_infra_with_the_reason(executor: LiveExecutor) -> None:
    git = GitWorkspace(url="u", commit="c")
    results = executor.submit(git, (READ, TEST), key="k").result(timeout=10)
    assert statuses(results) == ["infra", "infra"]
    assert "kind 'git' cannot be executed" in results[0].stderr


def test_close_cancels_what_waits(pool: Breaking) -> None:
    executor = LiveExecutor(pool, 1)
    nap = ToolCall("shell_run", {"command": "sleep 9"})
    running = executor.submit(WORKSPACE, (nap,), key="a")
    waiting = [executor.submit(WORKSPACE, (nap,), key="b") for _ in range(3)]
    threading.Event().wait(0.5)
    executor.close()
    executor.close()
    assert statuses(running.result(timeout=5)) == ["infra"]
    assert all(future.cancelled() for future in waiting)


def test_every_part_of_a_lineage_is_in_its_key() -> None:
    base = lineage_keys("image", LIMITS, WORKSPACE, (READ, TEST, SHELL, TEST))
    assert base[2:] == [None, None]
    assert len(set(base[:2])) == 2
    variants = [
        lineage_keys("other", LIMITS, WORKSPACE, (READ, TEST)),
        lineage_keys("image", Limits(), WORKSPACE, (READ, TEST)),
        lineage_keys("image", LIMITS, InlineWorkspace(files={}), (READ, TEST)),
        lineage_keys("image", LIMITS, WORKSPACE, (EDIT, TEST)),
        lineage_keys("image", LIMITS, WORKSPACE, (TEST, TEST)),
    ]
    assert len({keys[1] for keys in [base, *variants]}) == 6
    assert lineage_keys("image", LIMITS, WORKSPACE, (ToolCall("nothing"), READ)) == [None, None]


def test_a_pool_that_cannot_start_gives_infra() -> None:
    engine = make_engine("local")

    def away() -> Container:
        raise SandboxError("the engine is away")

    engine.start = away  # type: ignore[method-assign]
    executor = LiveExecutor(Pool(engine, 1), 1)
    results = executor.submit(WORKSPACE, (READ,), key="k").result(timeout=20)
    assert statuses(results) == ["infra"]
    assert "the engine is away" in results[0].stderr
    executor.close()
