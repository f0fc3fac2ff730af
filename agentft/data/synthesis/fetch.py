"""Source distributions (floor 3): fetched through the ``unearth`` finder, kept by hash, read without unpacking.

No code of the package runs here: the archive is downloaded, checked against the index's hash and read member by
member into memory, so nothing of it is ever written to the host's file system.

Which index is asked is pip's own setting (``PIP_INDEX_URL``, ``PIP_EXTRA_INDEX_URL``, ``PIP_FIND_LINKS`` or pip's
configuration file), else the finder's default.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Protocol

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from agentft.errors import ConfigError, DataError, boundary

if TYPE_CHECKING:
    from unearth import Package as FoundPackage

MAX_ARCHIVE_BYTES = 50_000_000
MAX_MEMBERS = 10_000
MAX_MEMBER_BYTES = 20_000_000
MAX_TOTAL_BYTES = 100_000_000


@dataclass(frozen=True, kw_only=True)
class Sdist:
    """One source distribution in the cache; ``name`` is canonical (``more-itertools``)."""

    name: str
    version: str
    sha256: str
    path: Path


def cache_root() -> Path:
    """Return agentft's cache folder (``$XDG_CACHE_HOME/agentft`` or ``~/.cache/agentft``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentft"


def fetch_sdist(requirement: str, cache: Path | None = None) -> Sdist:
    """Return the source distribution that ``requirement`` (``name==version``) names, from the cache if it is there.

    Raises:
        ConfigError: the requirement does not parse.
        DataError: no source distribution matches, the index cannot be reached, or a hash differs.
    """
    try:
        wanted = Requirement(requirement)
    except InvalidRequirement as error:
        raise ConfigError(
            "not a package requirement", where="--package", got=requirement, expected="NAME==VERSION"
        ) from error
    folder = (cache or cache_root()) / "sdists"
    pinned = _pinned_version(wanted)
    if pinned is not None and (known := _cached(folder, canonicalize_name(wanted.name), pinned)):
        return known
    found = _find(wanted, requirement)
    return _download(found, folder)


def fetch_wheel(requirement: str, sha256: str, cache: Path | None = None) -> Path:
    """Return the wheel that ``requirement`` (``name==version``) names and whose hash is ``sha256``; nothing of it runs.

    Raises:
        DataError: no wheel matches, the index cannot be reached, or the hash differs.
    """
    wanted = Requirement(requirement)
    folder = (cache or cache_root()) / "wheels"
    known = _cached(folder, canonicalize_name(wanted.name), str(_pinned_version(wanted)))
    found = known or _download(_find(wanted, requirement, wheel=True), folder)
    if found.sha256 != sha256:
        raise DataError("the wheel is another one", where=str(found.path), got=found.sha256, expected=sha256)
    return found.path


def read_archive(path: Path) -> dict[str, bytes]:
    """Return the regular files of a ``.tar.*`` or ``.zip`` archive by path, without their common top folder.

    Raises:
        DataError: an absolute path, ``..``, a link, a device, a duplicate, or too many or too large members.
    """
    if not path.is_file():
        raise DataError("the archive is not a file", where=str(path))
    if path.stat().st_size > MAX_ARCHIVE_BYTES:
        raise DataError("the archive is too large", where=str(path), got=path.stat().st_size)
    read = _zip_members if path.suffix == ".zip" else _tar_members
    files: dict[str, bytes] = {}
    total = 0
    with boundary(f"the archive {path.name} cannot be read", error=DataError):
        for name, content in read(path):
            total += len(content)
            if total > MAX_TOTAL_BYTES:
                raise DataError("the archive unpacks to too much", where=str(path), expected=f"{MAX_TOTAL_BYTES} bytes")
            if name in files:
                raise DataError("the archive holds a path twice", where=f"{path}:{name}")
            files[name] = content
    return _without_top_folder(files)


def _pinned_version(wanted: Requirement) -> str | None:
    exact = [item.version for item in wanted.specifier if item.operator == "==" and not item.version.endswith(".*")]
    return exact[0] if len(exact) == 1 else None


def _cached(folder: Path, name: str, version: str) -> Sdist | None:
    for path in sorted(folder.glob(f"*/{name}=={version}/*")):
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        if path.parents[1].name == sha256:
            return Sdist(name=name, version=version, sha256=sha256, path=path)
        path.unlink()
    return None


def _find(wanted: Requirement, requirement: str, *, wheel: bool = False) -> FoundPackage:
    from unearth import PackageFinder

    finder = PackageFinder(
        index_urls=_pip_setting("index-url"),
        only_binary=[wanted.name] if wheel else (),
        no_binary=() if wheel else [wanted.name],
    )
    for location in _pip_setting("extra-index-url"):
        finder.add_index_url(location)
    for location in _pip_setting("find-links"):
        finder.add_find_links(location if "://" in location else Path(location).absolute().as_uri())
    with boundary(f"no index answered for {requirement}", error=DataError, hint="check pip's index settings"):
        match = next(iter(finder.find_matches(wanted)), None)
    if match is None:
        raise DataError(
            f"no {'wheel' if wheel else 'source distribution'} matches",
            where="--package",
            got=requirement,
            expected=f"a version for this Python that is published as {'.whl' if wheel else '.tar.gz or .zip'}",
        )
    return match


def _pip_setting(name: str) -> list[str]:
    """Return the values of one of pip's settings: environment first, then pip's configuration where pip is there."""
    variable = os.environ.get(f"PIP_{name.upper().replace('-', '_')}")
    if variable:
        return variable.split()
    pip = shutil.which("pip")
    if pip is None:
        return []
    answer = subprocess.run(
        [pip, "config", "get", f"global.{name}"], capture_output=True, text=True, timeout=30, check=False
    )
    return answer.stdout.split() if answer.returncode == 0 else []


def _download(found: FoundPackage, folder: Path) -> Sdist:
    from unearth import PackageFinder

    folder.mkdir(parents=True, exist_ok=True)
    name, version = canonicalize_name(found.name), str(found.version)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        with boundary(f"{found.link.filename} cannot be fetched", error=DataError):
            path = PackageFinder().download(found.link, temporary)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        expected = (found.link.hashes or {}).get("sha256")
        if expected is not None and expected != sha256:
            raise DataError("the hash differs from the index's", where=path.name, got=sha256, expected=str(expected))
        kept = folder / sha256 / f"{name}=={version}" / path.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, kept)
    return Sdist(name=name, version=version, sha256=sha256, path=kept)


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class _Limited:
    """A stream that refuses to give more than ``limit`` bytes: a bomb stops here, whatever its headers say."""

    def __init__(self, stream: _Readable, limit: int) -> None:
        self._stream, self._left = stream, limit

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size if size >= 0 else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise DataError("the archive unpacks to too much", expected=f"at most {MAX_TOTAL_BYTES} bytes")
        return data


def _tar_members(path: Path) -> Iterator[tuple[str, bytes]]:
    with _decompressed(path) as stream:
        limited = _Limited(stream, MAX_TOTAL_BYTES + MAX_MEMBERS * 1024)
        with tarfile.open(fileobj=limited, mode="r|") as archive:  # type: ignore[call-overload]
            for count, member in enumerate(archive, start=1):
                _check_member(path, member.name, member.size, count)
                if member.isdir():
                    continue
                if not member.isreg():
                    raise DataError("the archive holds a link or a device", where=f"{path}:{member.name}")
                content = archive.extractfile(member)
                yield _clean(member.name), content.read() if content is not None else b""


def _decompressed(path: Path) -> IO[bytes] | gzip.GzipFile:
    with path.open("rb") as stream:
        magic = stream.read(6)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.open(path)
    if magic.startswith(b"BZh"):
        return bz2.open(path)
    if magic.startswith(b"\xfd7zXZ"):
        return lzma.open(path)
    return path.open("rb")


def _zip_members(path: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        for count, member in enumerate(archive.infolist(), start=1):
            _check_member(path, member.filename, member.file_size, count)
            if member.is_dir():
                continue
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG):
                raise DataError("the archive holds a link or a device", where=f"{path}:{member.filename}")
            with archive.open(member) as stream:
                content = stream.read(MAX_MEMBER_BYTES + 1)
            _check_member(path, member.filename, len(content), count)
            yield _clean(member.filename), content


def _check_member(path: Path, name: str, size: int, count: int) -> None:
    where = f"{path}:{name}"
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if count > MAX_MEMBERS:
        raise DataError("the archive holds too many members", where=str(path), expected=f"at most {MAX_MEMBERS}")
    if size > MAX_MEMBER_BYTES:
        raise DataError("a member of the archive is too large", where=where, got=size, expected=f"{MAX_MEMBER_BYTES}")
    if not parts or "\0" in name or name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0]:
        raise DataError("a member of the archive leaves its folder", where=where)


def _clean(name: str) -> str:
    return str(PurePosixPath(name.replace("\\", "/")))


def _without_top_folder(files: dict[str, bytes]) -> dict[str, bytes]:
    tops = {name.split("/", 1)[0] for name in files}
    if len(tops) != 1 or any("/" not in name for name in files):
        return files
    return {name.split("/", 1)[1]: content for name, content in files.items()}
