"""Where shards can live (floor 3): a local folder or an S3-compatible bucket behind one small interface.

``open_store("s3://bucket/prefix")`` or ``open_store("/some/folder")``. The endpoint comes from ``S3_ENDPOINT_URL``,
credentials from where boto3 looks for them. Every failure of a store is one ``StorageError`` with a cause and a hint.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from agentft.errors import EXIT_ENVIRONMENT, DataError
from agentft.files import whole_file

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5, 60
_REFUSED = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "403", "401", "InvalidToken", "ExpiredToken"}
_ABSENT = {"404", "NoSuchKey", "NotFound"}


class StorageError(DataError):
    """A store cannot be reached, refuses, or returns other bytes than it was given."""

    exit_code = EXIT_ENVIRONMENT


@dataclass(frozen=True, kw_only=True)
class Digest:
    """Size and checksums of a file: ``md5`` is what S3 calls the ETag of an object that was put in one piece."""

    size_bytes: int
    sha256: str
    md5: str

    @classmethod
    def of_bytes(cls, data: bytes) -> Digest:
        """Return the digest of ``data``."""
        return cls(
            size_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            md5=hashlib.md5(data, usedforsecurity=False).hexdigest(),
        )


class Store(Protocol):
    """A place that holds files by key (a path with forward slashes)."""

    @property
    def uri(self) -> str:
        """The address, as a user would write it."""

    def check(self) -> None:
        """Raise a StorageError unless the place exists and lets us in; answers in seconds."""

    def holds(self, key: str, digest: Digest) -> bool:
        """Return whether the object is there with exactly these bytes, by the store's own checksum where it has one."""

    def put(self, key: str, data: bytes, digest: Digest) -> None:
        """Store ``data``; the object appears whole or not at all."""

    def put_file(self, key: str, path: Path, sha256: str) -> None:
        """Store a file of any size unless it is there; it appears whole, and is what ``sha256`` says, or not at all."""

    def holds_file(self, key: str, size_bytes: int, sha256: str) -> bool:
        """Return whether a file that ``put_file`` stored is there, whole."""

    def read(self, key: str) -> bytes | None:
        """Return the object's bytes, or None when there is none."""

    def fetch(self, key: str, path: Path) -> None:
        """Copy an object of any size to ``path``, which appears whole or not at all."""

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with ``prefix``, sorted."""


def open_store(uri: str) -> Store:
    """Return the store that ``uri`` names: ``s3://bucket[/prefix]`` or a local folder.

    Raises:
        DataError: Another scheme.
    """
    parts = urlsplit(uri)
    if parts.scheme == "s3" and parts.netloc:
        return S3Store(parts.netloc, parts.path.strip("/"))
    if "://" in uri:
        raise DataError(
            "cannot use this address for shards",
            got=uri,
            expected="s3://BUCKET/PREFIX or a local folder",
            hint="GCS, OCI and others answer to S3 clients too: set S3_ENDPOINT_URL to their S3 address",
        )
    return LocalStore(Path(uri))


@dataclass(frozen=True)
class LocalStore:
    """A folder as a store."""

    root: Path

    @property
    def uri(self) -> str:
        """The folder's path."""
        return str(self.root)

    def check(self) -> None:
        """Raise unless the folder, or the nearest parent that exists, can be written to."""
        existing = next(path for path in (self.root, *self.root.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise StorageError("cannot write here", where=str(existing), expected="a folder that this user may write")

    def holds(self, key: str, digest: Digest) -> bool:
        """Compare size and SHA-256 of the file."""
        path = self.root / key
        if not path.is_file() or path.stat().st_size != digest.size_bytes:
            return False
        return Digest.of_bytes(path.read_bytes()) == digest

    def put(self, key: str, data: bytes, digest: Digest | None = None) -> None:
        """Write beside the target, then rename."""
        path = self.root / key
        with disk_errors(path), whole_file(path) as partial:
            partial.write_bytes(data)

    def put_file(self, key: str, path: Path, sha256: str) -> None:
        """Copy beside the target, compare, then rename."""
        if not self.holds_file(key, path.stat().st_size, sha256):
            _copy_whole(path, self.root / key, sha256)

    def holds_file(self, key: str, size_bytes: int, sha256: str) -> bool:
        """Compare size and SHA-256 of the file."""
        path = self.root / key
        return path.is_file() and path.stat().st_size == size_bytes and file_sha256(path) == sha256

    def read(self, key: str) -> bytes | None:
        """Return the file's bytes or None."""
        path = self.root / key
        return path.read_bytes() if path.is_file() else None

    def fetch(self, key: str, path: Path) -> None:
        """Copy beside the target, then rename."""
        if not (self.root / key).is_file():
            raise StorageError("there is no such file", where=f"{self.uri}/{key}")
        _copy_whole(self.root / key, path, None)

    def keys(self, prefix: str) -> list[str]:
        """List files below the folder."""
        names = (path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file())
        return sorted(name for name in names if name.startswith(prefix))


class S3Store:
    """A bucket and prefix behind boto3."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket, self.prefix = bucket, prefix
        self.endpoint = os.environ.get("S3_ENDPOINT_URL")
        with self._errors(self.uri):
            self._client = _s3_client(self.endpoint, attempts=4)

    @property
    def uri(self) -> str:
        """``s3://bucket/prefix``."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def check(self) -> None:
        """List one key with a single attempt: credentials, bucket and network are settled before any work."""
        with self._errors(self.uri):
            _s3_client(self.endpoint, attempts=1).list_objects_v2(Bucket=self.bucket, MaxKeys=1)

    def holds(self, key: str, digest: Digest) -> bool:
        """Compare size and the store's checksum; where it keeps none that fits, read the object back."""
        head = self._head(key)
        if head is None or head["ContentLength"] != digest.size_bytes:
            return False
        if head.get("Metadata", {}).get("sha256", digest.sha256) != digest.sha256:
            return False
        kept = head.get("ChecksumSHA256")
        if kept is not None:
            return bool(base64.b64decode(kept).hex() == digest.sha256)
        if head["ETag"].strip('"') == digest.md5:
            return True
        data = self.read(key)
        return data is not None and hashlib.sha256(data).hexdigest() == digest.sha256

    def put(self, key: str, data: bytes, digest: Digest) -> None:
        """Put in one piece with a checksum that the server compares with what it received."""
        checksum = base64.b64encode(bytes.fromhex(digest.sha256)).decode()
        with self._errors(f"{self.uri}/{key}"):
            self._client.put_object(
                Bucket=self.bucket,
                Key=self._key(key),
                Body=data,
                ChecksumSHA256=checksum,
                Metadata={"sha256": digest.sha256},
            )

    def put_file(self, key: str, path: Path, sha256: str) -> None:
        """Put in parts, each with a checksum that the server compares with what it received."""
        size_bytes, where = path.stat().st_size, f"{self.uri}/{key}"
        if self.holds_file(key, size_bytes, sha256):
            return
        from boto3.exceptions import S3UploadFailedError

        if file_sha256(path) != sha256:
            raise StorageError("the file has changed since it was written", where=str(path))
        more = {"Metadata": {"sha256": sha256}, "ChecksumAlgorithm": "SHA256"}
        with self._errors(where):
            try:
                self._client.upload_file(str(path), self.bucket, self._key(key), ExtraArgs=more)
            except S3UploadFailedError as error:
                raise error.__cause__ or error.__context__ or error from None
        if not self.holds_file(key, size_bytes, sha256):
            raise StorageError(
                "the object store holds other bytes than it was given", where=where, expected=f"{size_bytes} bytes"
            )

    def holds_file(self, key: str, size_bytes: int, sha256: str) -> bool:
        """Compare size and the checksum that was stored beside it."""
        head = self._head(key)
        return (
            head is not None
            and head["ContentLength"] == size_bytes
            and head.get("Metadata", {}).get("sha256") == sha256
        )

    def fetch(self, key: str, path: Path) -> None:
        """Download beside the target, then rename."""
        with disk_errors(path), self._errors(f"{self.uri}/{key}"), whole_file(path) as partial:
            self._client.download_file(self.bucket, self._key(key), str(partial))

    def read(self, key: str) -> bytes | None:
        """Return the object's bytes or None."""
        from botocore.exceptions import ClientError

        with self._errors(f"{self.uri}/{key}"):
            try:
                body = self._client.get_object(Bucket=self.bucket, Key=self._key(key))["Body"]
                return bytes(body.read())
            except ClientError as error:
                if error.response["Error"]["Code"] in _ABSENT:
                    return None
                raise

    def keys(self, prefix: str) -> list[str]:
        """List objects, page by page."""
        with self._errors(self.uri):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self._key(prefix))
            found = [item["Key"] for page in pages for item in page.get("Contents", [])]
        cut = len(self.prefix) + 1 if self.prefix else 0
        return sorted(key[cut:] for key in found)

    def _head(self, key: str) -> dict[str, Any] | None:
        from botocore.exceptions import ClientError

        with self._errors(f"{self.uri}/{key}"):
            try:
                head: dict[str, Any] = self._client.head_object(
                    Bucket=self.bucket, Key=self._key(key), ChecksumMode="ENABLED"
                )
                return head
            except ClientError as error:
                if error.response["Error"]["Code"] in _ABSENT:
                    return None
                raise

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    @contextmanager
    def _errors(self, where: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            raise self._refusal(error.response["Error"], where) from error
        except (BotoCoreError, ValueError) as error:
            raise self._failure(error, where) from error

    def _refusal(self, reply: dict[str, Any], where: str) -> StorageError:
        code, text = reply.get("Code", "?"), reply.get("Message", "")
        got = f"{code}: {text}" if text else code
        if code == "NoSuchBucket":
            return StorageError(
                f"there is no bucket {self.bucket!r}", where=where, got=got, hint=f"create it: s3://{self.bucket}"
            )
        if code in _REFUSED:
            hint = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and that they belong to S3_ENDPOINT_URL"
            return StorageError("the object store refuses the credentials", where=where, got=got, hint=hint)
        return StorageError("the object store refuses the request", where=where, got=got)

    def _failure(self, error: Exception, where: str) -> StorageError:
        from botocore.exceptions import NoCredentialsError, PartialCredentialsError

        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            return StorageError("no credentials for the object store", where=where, got=str(error), hint=hint)
        got = f"{type(error).__name__}: {error}"
        hint = "check S3_ENDPOINT_URL and the network, then repeat: what is already there is kept"
        endpoint = self.endpoint or "the default S3 endpoint"
        return StorageError(f"cannot reach the object store at {endpoint}", where=where, got=got, hint=hint)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy_whole(source: Path, target: Path, sha256: str | None) -> None:
    with disk_errors(target), whole_file(target) as partial:
        shutil.copyfile(source, partial)
        if sha256 is not None and file_sha256(partial) != sha256:
            raise StorageError("the file has changed since it was written", where=str(source))


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk (or quota, or file limit) into one clear error that says how much is free."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        existing = next(parent for parent in path.absolute().parents if parent.exists())
        free_mib = shutil.disk_usage(existing).free / 2**20
        raise StorageError(
            "no space left on the disk", where=str(path), got=f"{free_mib:.1f} MiB free", hint="make room and repeat"
        ) from error


def _s3_client(endpoint: str | None, *, attempts: int) -> Any:
    """Return a client; boto3's defaults would retry an unreachable endpoint for minutes."""
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        config=Config(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"total_max_attempts": attempts, "mode": "standard"},
            max_pool_connections=32,
        ),
    )
