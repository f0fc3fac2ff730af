"""Publishing shards: to a real S3 server (SeaweedFS) and to a folder; wrong credentials, cuts, kills, other bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support_proxy import FailingProxy
from support_s3 import S3Server, make_client

from agentft import cli
from agentft.config.schema import FeedbackPositionsConfig, TextConfig
from agentft.data import shards as shards_module
from agentft.data.meta import load_meta
from agentft.data.remote import check_remote
from agentft.data.shards import write_shards
from agentft.data.storage import Digest, LocalStore, S3Store, StorageError, open_store
from agentft.data.upload import upload_shards
from agentft.data.verify import verify_shards
from agentft.errors import DataError

pytestmark = pytest.mark.s3


@pytest.fixture(scope="module")
def many(sessions_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards in many small files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_module, "SIZE_LIMIT_BYTES", 16 << 10)
        report = write_shards(
            [sessions_file],
            tmp_path_factory.mktemp("many") / "shards",
            text=TextConfig(max_tokens=512),
            positions=FeedbackPositionsConfig(),
            vocab_size=600,
            holdout=["iniconfig"],
        )
    assert sum(part.shards for part in report.meta.splits.values()) > 12
    return report.folder


def test_upload_then_again_sends_nothing(many: Path, bucket: str, s3: S3Server) -> None:
    first = upload_shards(many, f"s3://{bucket}/a/b", workers=4)
    keys = {item["Key"] for item in make_client(s3).list_objects_v2(Bucket=bucket)["Contents"]}
    local = {f"a/b/{path.relative_to(many).as_posix()}" for path in many.rglob("*") if path.is_file()}
    assert keys == local
    assert (first.uploaded, first.skipped) == (len(keys), 0)
    again = upload_shards(many, f"s3://{bucket}/a/b")
    assert (again.uploaded, again.skipped, again.size_bytes) == (0, len(keys), 0)
    assert load_meta(f"s3://{bucket}/a/b") == load_meta(many)
    check_remote(f"s3://{bucket}/a/b")


def test_indexes_come_last(many: Path, bucket: str, s3: S3Server) -> None:
    upload_shards(many, f"s3://{bucket}", workers=1)
    items = make_client(s3).list_objects_v2(Bucket=bucket)["Contents"]
    times = {item["Key"]: item["LastModified"] for item in items}
    indexes = [key for key in times if key.endswith("index.json")]
    assert len(indexes) == 2
    assert min(times[key] for key in indexes) >= max(when for key, when in times.items() if key not in indexes)


def test_local_folder_is_a_remote_too(many: Path, tmp_path: Path) -> None:
    report = upload_shards(many, str(tmp_path / "there"))
    assert report.uploaded > 12
    verify_shards(tmp_path / "there")
    assert upload_shards(many, str(tmp_path / "there")).uploaded == 0
    check_remote(str(tmp_path / "there"))


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_refused_clearly(
    many: Path, bucket: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(wrong, "not-this-one")
    for action in (lambda: upload_shards(many, f"s3://{bucket}/x"), lambda: check_remote(f"s3://{bucket}/x")):
        started = time.monotonic()
        with pytest.raises(StorageError, match="the object store refuses the credentials") as caught:
            action()
        assert time.monotonic() - started < 5
        assert "AWS_ACCESS_KEY_ID" in str(caught.value)
        assert "not-this-one" not in str(caught.value)


def test_no_credentials(many: Path, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StorageError, match="no credentials for the object store"):
        upload_shards(many, f"s3://{bucket}/x")


def test_missing_bucket(many: Path, bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StorageError, match="there is no bucket 'nowhere-at-all'"):
        upload_shards(many, "s3://nowhere-at-all/x")
    assert cli.main(["shards", "upload", str(many), "s3://nowhere-at-all/x"]) == 3
    assert capsys.readouterr().err.startswith("agentft: s3://nowhere-at-all/x: there is no bucket")


def test_unreachable_endpoint(many: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(StorageError, match=r"cannot reach the object store at http://127\.0\.0\.1:9"):
        upload_shards(many, f"s3://{bucket}/x")
    assert time.monotonic() - started < 10
    monkeypatch.setenv("S3_ENDPOINT_URL", "no url at all")
    with pytest.raises(StorageError, match="cannot reach the object store at no url at all"):
        upload_shards(many, f"s3://{bucket}/x")


def test_threads_that_write_one_object_do_not_take_each_other_s_file(tmp_path: Path) -> None:
    store, whole = LocalStore(tmp_path / "store"), tmp_path / "whole"
    whole.write_bytes(bytes(200_000))
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(store.put, "a/b", bytes(200_000)) for _ in range(200)]:
            done.result()
        for done in [pool.submit(LocalStore(tmp_path).fetch, "whole", tmp_path / "copy") for _ in range(200)]:
            done.result()
    assert (tmp_path / "store/a/b").read_bytes() == (tmp_path / "copy").read_bytes() == bytes(200_000)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["b", "copy", "whole"]


def test_other_addresses_are_refused(many: Path) -> None:
    with pytest.raises(DataError, match=r"cannot use this address[\s\S]*s3://BUCKET/PREFIX"):
        upload_shards(many, "gs://bucket/prefix")


def test_network_cut_publishes_nothing_and_the_next_try_goes_on(
    many: Path, bucket: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FailingProxy(s3.endpoint, objects=5, mode="cut") as proxy:
        monkeypatch.setenv("S3_ENDPOINT_URL", proxy.endpoint)
        with pytest.raises(StorageError, match="cannot reach the object store"):
            upload_shards(many, f"s3://{bucket}/x", workers=2)
    monkeypatch.setenv("S3_ENDPOINT_URL", s3.endpoint)
    there = open_store(f"s3://{bucket}/x").keys("")
    assert 3 <= len(there) <= 5
    assert not [key for key in there if key.endswith(".json") and not key.startswith("tokenizer")]
    with pytest.raises(DataError, match="no shards here"):
        check_remote(f"s3://{bucket}/x")
    assert len(there) <= upload_shards(many, f"s3://{bucket}/x").skipped <= 5
    check_remote(f"s3://{bucket}/x")


def test_kill_in_the_middle_leaves_no_index(many: Path, bucket: str, s3: S3Server) -> None:
    with FailingProxy(s3.endpoint, objects=6, mode="stall") as proxy:
        command = [
            sys.executable,
            "-m",
            "agentft.cli",
            "shards",
            "upload",
            str(many),
            f"s3://{bucket}/x",
            "--workers",
            "1",
        ]
        environment = {**os.environ, "S3_ENDPOINT_URL": proxy.endpoint}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        assert proxy.failed.wait(60)
        process.send_signal(signal.SIGKILL)
        assert process.wait(20) == -9
    there = open_store(f"s3://{bucket}/x").keys("")
    assert len(there) == 6
    assert not [key for key in there if key.endswith(("index.json", "meta.json"))]
    assert upload_shards(many, f"s3://{bucket}/x").skipped == len(there)


def test_upload_without_last_index_is_not_streamed(many: Path, bucket: str, s3: S3Server) -> None:
    upload_shards(many, f"s3://{bucket}/x")
    make_client(s3).delete_object(Bucket=bucket, Key="x/test/index.json")
    with pytest.raises(DataError, match="split 'test' is not published completely"):
        check_remote(f"s3://{bucket}/x")
    assert upload_shards(many, f"s3://{bucket}/x").uploaded == 1


def test_changed_object_is_seen_and_sent_again(many: Path, bucket: str, s3: S3Server) -> None:
    upload_shards(many, f"s3://{bucket}/x")
    client, key = make_client(s3), "x/train/shard.00001.mds.zstd"
    head = client.head_object(Bucket=bucket, Key=key)
    data = bytearray(client.get_object(Bucket=bucket, Key=key)["Body"].read())
    data[20] ^= 255
    client.put_object(Bucket=bucket, Key=key, Body=bytes(data), Metadata=head["Metadata"])  # same size, same note
    assert upload_shards(many, f"s3://{bucket}/x").uploaded == 1
    assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == (many / key[2:]).read_bytes()


def test_store_that_returns_other_bytes_is_not_trusted(many: Path, tmp_path: Path) -> None:
    class Careless(LocalStore):
        def put(self, key: str, data: bytes, digest: Digest | None = None) -> None:
            super().put(key, data[:-1] if key.startswith("train/shard") else data, digest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentft.data.upload.open_store", lambda uri: Careless(Path(uri)))
        with pytest.raises(StorageError, match="holds other bytes than it was given"):
            upload_shards(many, str(tmp_path / "there"))
    assert not (tmp_path / "there" / "meta.json").exists()


def test_server_checks_what_it_receives(bucket: str) -> None:
    store = open_store(f"s3://{bucket}")
    assert isinstance(store, S3Store)
    with pytest.raises(StorageError, match="BadDigest"):
        store.put("x", b"abc", Digest.of_bytes(b"abd"))
    assert store.read("x") is None


def test_other_shards_are_not_overwritten(many: Path, written, bucket: str) -> None:  # type: ignore[no-untyped-def]
    upload_shards(many, f"s3://{bucket}/x")
    with pytest.raises(DataError, match="other shards are published here"):
        upload_shards(written.folder, f"s3://{bucket}/x")
    assert load_meta(f"s3://{bucket}/x") == load_meta(many)


def test_damaged_shards_are_not_published(shards: Path, bucket: str, s3: S3Server) -> None:
    path = shards / "train" / "shard.00000.mds.zstd"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="wrong size"):
        upload_shards(shards, f"s3://{bucket}/x")
    assert "Contents" not in make_client(s3).list_objects_v2(Bucket=bucket)


def test_command_line(many: Path, bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["shards", "upload", str(many), f"s3://{bucket}/x", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["remote"] == f"s3://{bucket}/x"
    assert report["uploaded"] > 12
    assert cli.main(["shards", "upload", str(many), f"s3://{bucket}/x"]) == 0
    assert "0 files sent" in " ".join(capsys.readouterr().out.split())
