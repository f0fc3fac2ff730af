"""Samples read straight from the files equal those that Streaming's own reader gives."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from agentft.data.read import read_samples
from agentft.data.shards import ShardReport
from agentft.errors import DataError


def test_samples_equal_those_of_the_streaming_reader(written: ShardReport, tmp_path: Path) -> None:
    from streaming import StreamingDataset

    copy = shutil.copytree(written.folder / "train", tmp_path / "train", ignore=shutil.ignore_patterns("*.mds"))
    mine = list(read_samples(tmp_path, "train"))
    theirs = StreamingDataset(local=str(copy), shuffle=False, batch_size=1)
    assert len(mine) == len(theirs) == written.meta.sessions("train")
    for row, sample in enumerate(mine):
        expected = theirs[row]
        assert sample.keys() == expected.keys()
        for name, value in sample.items():
            assert np.array_equal(value, expected[name]), name


def test_missing_split_and_missing_shard_are_named(written: ShardReport, shards: Path) -> None:
    with pytest.raises(DataError, match=r"no split 'val'") as caught:
        list(read_samples(shards, "val"))
    assert "test, train" in str(caught.value)
    next((shards / "test").glob("*.mds*")).unlink()
    with pytest.raises(DataError, match="a shard is missing"):
        list(read_samples(shards, "test"))
