"""Reading shards: order, look-ahead, sizes, errors; local and streamed from a real S3 server."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support_s3 import S3Server, make_client

from agentft.config.schema import DataConfig
from agentft.data.loader import SessionLoader, build_loader, open_shards
from agentft.data.shards import ShardReport
from agentft.data.upload import upload_shards
from agentft.errors import ConfigError, DataError


def _loader(
    folder: Path, *, split: Any = "train", shuffle: bool = True, seed: int = 17, train: bool = True, **data: Any
) -> SessionLoader:
    config = DataConfig(shards=str(folder), **{"batch_size": 8, **data})
    spec = build_loader(config, split, open_shards(config), shuffle=shuffle, seed=seed, train=train)
    assert isinstance(spec.dataloader, SessionLoader)
    return spec.dataloader


def _epochs(loader: SessionLoader, count: int) -> list[list[list[str]]]:
    return [[batch["session_id"] for batch in loader] for _ in range(count)]


def test_every_epoch_is_whole_batches_without_repeats(written: ShardReport) -> None:
    epochs = _epochs(_loader(written.folder), 6)
    rests = []
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [8] * 5
        ids = [name for batch in epoch for name in batch]
        assert len(set(ids)) == 40
        rests.append(frozenset(ids))
    assert len(set(rests)) > 1, "another rest is left out in another epoch"
    assert len({tuple(map(tuple, epoch)) for epoch in epochs}) == 6


def test_order_depends_on_the_seed_and_nothing_else(written: ShardReport) -> None:
    assert _epochs(_loader(written.folder), 2) == _epochs(_loader(written.folder), 2)
    assert _epochs(_loader(written.folder), 1) != _epochs(_loader(written.folder, seed=18), 1)


def test_evaluation_reads_every_row_in_the_order_of_the_shards(written: ShardReport) -> None:
    loader = _loader(written.folder, split="test", shuffle=False, train=False)
    first, second = _epochs(loader, 2)
    assert first == second
    assert [len(batch) for batch in first] == [8, 8, 7]
    assert len({name for batch in first for name in batch}) == 23
    assert len(loader) == 3


def test_looking_ahead_changes_nothing_and_is_exact(written: ShardReport) -> None:
    plain = [batch for epoch in _epochs(_loader(written.folder), 3) for batch in epoch]
    loader, seen = _loader(written.folder), 0
    assert _ahead(loader, 7) == plain[:7], "also before the first batch, and beyond the end of the epoch"
    for _ in range(3):
        for batch in loader:
            assert batch["session_id"] == plain[seen]
            seen += 1
            expected = plain[seen : seen + 4]
            assert _ahead(loader, 4)[: len(expected)] == expected
    assert seen == 15
    assert [(u.epoch, u.batch) for u in loader.upcoming(2)] == [(3, 0), (3, 1)]


def _ahead(loader: SessionLoader, count: int) -> list[list[str]]:
    return [[sample["session_id"] for sample in coming.samples] for coming in loader.upcoming(count)]


def test_upcoming_samples_are_the_rows_with_record_and_steps(written: ShardReport) -> None:
    loader = _loader(written.folder)
    (coming,) = loader.upcoming(1)
    batch = next(iter(loader))
    assert [sample["record"] for sample in coming.samples] == batch["record"]
    assert [sample["anchors"]["steps"] for sample in coming.samples] == batch["steps"]
    assert loader.upcoming(3)[0].samples is loader.upcoming(3)[0].samples, "kept until the batch has passed"


def test_loader_processes_give_the_same_order(written: ShardReport) -> None:
    loader = _loader(written.folder, num_workers=2)
    assert _epochs(loader, 2) == _epochs(_loader(written.folder), 2)
    assert _ahead(loader, 3) == _epochs(_loader(written.folder), 3)[2][:3]


def test_resume_in_mid_epoch_and_between_epochs(written: ShardReport) -> None:
    plain = [batch for epoch in _epochs(_loader(written.folder), 4) for batch in epoch]
    for stop in (0, 1, 4, 5, 7, 10, 12):
        loader, states = _loader(written.folder), {}
        states[0] = loader.dataset.state_dict(0, True)
        for seen, _ in enumerate(_draw(loader, 15), 1):
            loader.upcoming(3)
            states[seen] = loader.dataset.state_dict(seen % 5 * 8, True)  # as Composer counts: from 0 in a new epoch
        resumed = _loader(written.folder)
        resumed.dataset.load_state_dict(states[stop])
        assert _ahead(resumed, 2) == plain[stop : stop + 2]
        assert [batch["session_id"] for batch in _draw(resumed, 15 - stop)] == plain[stop:15]


def _draw(loader: SessionLoader, count: int) -> Iterator[dict[str, Any]]:
    drawn = 0
    while drawn < count:
        for batch in loader:
            yield batch
            drawn += 1
            if drawn == count:
                return


def test_data_spec_counts_rows_and_tokens(written: ShardReport) -> None:
    config = DataConfig(shards=str(written.folder), batch_size=8, packing="buckets")
    spec = build_loader(config, "train", open_shards(config), shuffle=False, seed=1)
    batch = next(iter(spec.dataloader))
    assert spec.num_samples == 40
    assert spec.get_num_samples_in_batch(batch) == 8
    assert spec.get_num_tokens_in_batch(batch) == int(batch["lengths"].sum())
    parts = spec.split_batch(batch, 3)
    assert [len(part["session_id"]) for part in parts] == [3, 3, 2]
    assert sum(spec.get_num_samples_in_batch(part) for part in parts) == 8
    assert batch["input_ids"].dtype == torch.int64


def test_samples_are_decoded_and_writable(written: ShardReport) -> None:
    sample = _loader(written.folder).dataset[0]
    assert isinstance(sample["anchors"], dict)
    assert isinstance(sample["record"], str)
    assert sample["input_ids"].dtype == np.int32
    sample["input_ids"][0] = 1


def test_packed_shards_stay_where_they_are(shards: Path) -> None:
    _epochs(_loader(shards), 1)
    assert (shards / "train" / "shard.00000.mds.zstd").exists(), "else they could no longer be verified or uploaded"


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_shard_ends_the_epoch_with_its_name(shards: Path, workers: int) -> None:
    path = shards / "train" / "shard.00000.mds.zstd"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"shard is damaged") as caught:
        _epochs(_loader(shards, num_workers=workers), 1)
    assert "train/shard.00000.mds.zstd" in str(caught.value)


def test_missing_shard_is_an_error_not_a_short_epoch(shards: Path) -> None:
    (shards / "train" / "shard.00000.mds.zstd").unlink()
    with pytest.raises(DataError, match="a shard cannot be read"):
        _epochs(_loader(shards), 1)


def test_two_jobs_may_unpack_the_same_folder_at_once(shards: Path) -> None:
    loaders = [_loader(shards), _loader(shards)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda loader: _epochs(loader, 1), loaders, timeout=60)
    assert first == second == _epochs(_loader(shards), 1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"split": "val"}, DataError, r"the split 'val' is empty[\s\S]*train \(46 sessions\), test \(23 sessions\)"),
        ({"batch_size": 47}, DataError, r"smaller than one global batch[\s\S]*at most 46"),
        ({"num_canonical_nodes": 0}, ConfigError, r"data.num_canonical_nodes"),
    ],
)
def test_what_cannot_work_is_refused(
    written: ShardReport, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _loader(written.folder, **change)


def test_no_shards_here(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no shards here"):
        _loader(tmp_path)


@pytest.mark.s3
def test_streamed_from_s3_equals_local(written: ShardReport, bucket: str, tmp_path: Path) -> None:
    upload_shards(written.folder, f"s3://{bucket}/x")
    streamed = _loader(tmp_path / "copy", remote=f"s3://{bucket}/x")
    local = _loader(written.folder)
    for _ in range(2):
        for theirs, ours in zip(streamed, local, strict=True):
            assert theirs.keys() == ours.keys()
            for key, value in ours.items():
                same = torch.equal(theirs[key], value) if isinstance(value, torch.Tensor) else theirs[key] == value
                assert same, key
    assert (tmp_path / "copy" / "tokenizer" / "tokenizer.json").exists()
    test = _loader(tmp_path / "copy", remote=f"s3://{bucket}/x", split="test", shuffle=False, train=False)
    assert _epochs(test, 1) == _epochs(_loader(written.folder, split="test", shuffle=False, train=False), 1)


@pytest.mark.s3
def test_second_start_uses_the_local_copy(written: ShardReport, bucket: str, s3: S3Server, tmp_path: Path) -> None:
    upload_shards(written.folder, f"s3://{bucket}/x")
    first = _epochs(_loader(tmp_path / "copy", remote=f"s3://{bucket}/x"), 1)
    client = make_client(s3)
    client.delete_object(Bucket=bucket, Key="x/train/shard.00000.mds.zstd")
    assert _epochs(_loader(tmp_path / "copy", remote=f"s3://{bucket}/x"), 1) == first


@pytest.mark.s3
@pytest.mark.parametrize("trouble", ["damaged", "missing"])
def test_trouble_in_the_store_is_a_clear_error(
    written: ShardReport, bucket: str, s3: S3Server, tmp_path: Path, trouble: str
) -> None:
    upload_shards(written.folder, f"s3://{bucket}/x")
    client, key = make_client(s3), "x/train/shard.00000.mds.zstd"
    if trouble == "missing":
        client.delete_object(Bucket=bucket, Key=key)
    else:
        data = bytearray(client.get_object(Bucket=bucket, Key=key)["Body"].read())
        data[-20] ^= 1
        client.put_object(Bucket=bucket, Key=key, Body=bytes(data))
    started = time.monotonic()
    with pytest.raises(DataError, match=r"shard is damaged|a shard cannot be read") as caught:
        _epochs(_loader(tmp_path / "copy", remote=f"s3://{bucket}/x"), 1)
    assert "shard.00000.mds.zstd" in str(caught.value)
    assert time.monotonic() - started < 30


def test_failure_of_every_background_thread_ends_the_epoch(
    written: ShardReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both threads fetch; when both fail at the same shard, nobody is left to count the other out."""
    loader = _loader(written.folder)
    both = threading.Barrier(2, timeout=20)

    def broken(shard_id: int, blocking: bool = True) -> None:
        both.wait()
        raise OSError(f"shard {shard_id} is gone")

    dataset = loader.dataset
    monkeypatch.setattr(dataset, "prepare_shard", broken)
    dataset._shard_states[:] = 1  # remote: nothing is here yet
    with pytest.raises(DataError, match="is gone"):
        _epochs(loader, 1)


@pytest.mark.s3
def test_wrong_credentials_are_refused_before_streaming(
    written: ShardReport, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_shards(written.folder, f"s3://{bucket}/x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-this-one")
    started = time.monotonic()
    with pytest.raises(DataError, match="refuses the credentials"):
        _loader(tmp_path / "copy", remote=f"s3://{bucket}/x")
    assert time.monotonic() - started < 5


def test_local_copy_of_other_shards_is_refused(written: ShardReport, shards: Path, tmp_path: Path) -> None:
    (shards / "meta.json").write_text((shards / "meta.json").read_text().replace('"rejected": 0', '"rejected": 1'))
    with pytest.raises(DataError, match="the local copy belongs to other shards"):
        _loader(shards, remote=str(written.folder))


def test_streamed_from_a_folder(written: ShardReport, tmp_path: Path) -> None:
    source = Path(shutil.copytree(written.folder, tmp_path / "source", ignore=shutil.ignore_patterns("*.mds")))
    assert _epochs(_loader(tmp_path / "copy", remote=str(source)), 1) == _epochs(_loader(written.folder), 1)
