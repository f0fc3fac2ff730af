"""What every test may ask for: the marker ``engine`` and a few shared, real things.

Tests marked ``engine`` skip with the reason where no Docker Engine answers; under ``CI=true`` they fail instead.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


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


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Apply the ``engine`` marker."""
    if item.get_closest_marker("engine") is None:
        return
    problem = engine_problem()
    if problem and os.environ.get("CI") == "true":
        pytest.fail(f"{problem} (CI=true needs one: make engine)", pytrace=False)
    if problem:
        pytest.skip(f"{problem}; `make engine` starts one as root")


@pytest.fixture
def in_repo(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in the root of the checkout; gives its path."""
    monkeypatch.chdir(REPO)
    return REPO
