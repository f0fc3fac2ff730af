"""Fixtures of the data tests: small true-to-life sessions, and shards written from them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support_sessions import make_session, make_sessions

from agentft import etai_io
from agentft.config.schema import FeedbackPositionsConfig, TextConfig
from agentft.data.shards import ShardReport, write_shards
from agentft.etai import Session


@pytest.fixture(scope="session")
def sessions_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """69 sessions of three repositories, 23 each."""
    path = tmp_path_factory.mktemp("sessions") / "sessions.jsonl"
    etai_io.write(path, make_sessions(69))
    return path


@pytest.fixture(scope="session")
def written(sessions_file: Path, tmp_path_factory: pytest.TempPathFactory) -> ShardReport:
    """Shards of ``sessions_file``: 46 to train on, iniconfig held out. Do not change them: take ``shards``."""
    return write_shards(
        [sessions_file],
        tmp_path_factory.mktemp("written") / "shards",
        text=TextConfig(max_tokens=512),
        positions=FeedbackPositionsConfig(enabled=True),
        vocab_size=600,
        holdout=["iniconfig"],
    )


@pytest.fixture
def shards(written: ShardReport, tmp_path: Path) -> Path:
    """A copy of ``written`` that a test may damage, as it was before any loader unpacked it."""
    return Path(shutil.copytree(written.folder, tmp_path / "shards", ignore=shutil.ignore_patterns("*.mds")))


@pytest.fixture
def session_factory() -> Callable[[int, str], Session]:
    """``make_session``."""
    return make_session
