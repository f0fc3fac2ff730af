"""Source distributions are read safely: hostile archives are refused, nothing is ever written to disk."""

from __future__ import annotations

import gzip
import hashlib
import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from agentft.data.synthesis import fetch
from agentft.data.synthesis.fetch import fetch_sdist, read_archive
from agentft.errors import ConfigError, DataError


def tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def plain(name: str, content: bytes = b"x = 1\n") -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(name), content


def special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


def test_a_good_archive_gives_its_files_without_the_top_folder(tmp_path: Path) -> None:
    path = tar(tmp_path / "a-1.tar.gz", special("a-1", tarfile.DIRTYPE), plain("a-1/a.py"), plain("a-1/t/b.py", b"y"))
    before = sorted(tmp_path.rglob("*"))
    assert read_archive(path) == {"a.py": b"x = 1\n", "t/b.py": b"y"}
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "member",
    [
        plain("/etc/passwd"),
        plain("a/../../up.py"),
        plain("..\\up.py"),
        plain("C:/up.py"),
        special("a/link", tarfile.SYMTYPE, "/etc/passwd"),
        special("a/link", tarfile.LNKTYPE, "a/a.py"),
        special("a/device", tarfile.CHRTYPE),
        special("a/device", tarfile.BLKTYPE),
        special("a/pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda member: f"{member[0].name}-{member[0].type!r}",
)
def test_members_that_leave_the_folder_or_are_no_files_are_refused(
    tmp_path: Path, member: tuple[tarfile.TarInfo, bytes]
) -> None:
    with pytest.raises(DataError):
        read_archive(tar(tmp_path / "a.tar.gz", plain("a/a.py"), member))


def test_too_many_too_large_and_doubled_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="twice"):
        read_archive(tar(tmp_path / "a.tar.gz", plain("a/a.py"), plain("a/a.py")))
    monkeypatch.setattr(fetch, "MAX_MEMBERS", 3)
    with pytest.raises(DataError, match="too many"):
        read_archive(tar(tmp_path / "b.tar.gz", *(plain(f"a/{n}.py") for n in range(4))))
    monkeypatch.setattr(fetch, "MAX_MEMBER_BYTES", 10)
    with pytest.raises(DataError, match="too large"):
        read_archive(tar(tmp_path / "c.tar.gz", plain("a/a.py", b"0" * 11)))
    monkeypatch.setattr(fetch, "MAX_MEMBER_BYTES", 1000)
    monkeypatch.setattr(fetch, "MAX_TOTAL_BYTES", 1500)
    with pytest.raises(DataError, match="too much"):
        read_archive(tar(tmp_path / "d.tar.gz", plain("a/a.py", b"0" * 900), plain("a/b.py", b"0" * 900)))


def test_a_bomb_is_stopped_while_it_is_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_TOTAL_BYTES", 1_000_000)
    monkeypatch.setattr(fetch, "MAX_MEMBERS", 10)
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 50_000_000
    bomb = tmp_path / "bomb.tar.gz"
    bomb.write_bytes(gzip.compress(header.tobuf() + b"0" * 50_000_000))
    with pytest.raises(DataError):
        read_archive(bomb)


@pytest.mark.parametrize("name", ["../up.py", "/up.py", "a\\..\\..\\up.py"])
def test_zip_archives_obey_the_same_rules(tmp_path: Path, name: str) -> None:
    good, bad, link = tmp_path / "good.zip", tmp_path / "bad.zip", tmp_path / "link.zip"
    with zipfile.ZipFile(good, "w") as archive:
        archive.writestr("a-1/a.py", "x")
        archive.writestr("a-1/b.py", "y")
    assert read_archive(good) == {"a.py": b"x", "b.py": b"y"}
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr(name, "x")
    with pytest.raises(DataError):
        read_archive(bad)
    info = zipfile.ZipInfo("a/link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(link, "w") as archive:
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(DataError, match="link"):
        read_archive(link)


def test_garbage_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(b"\x1f\x8bnot gzip at all")
    with pytest.raises(DataError, match=r"a\.tar\.gz"):
        read_archive(path)
    with pytest.raises(DataError, match="not a file"):
        read_archive(tmp_path / "missing.tar.gz")


def test_a_requirement_that_does_not_parse_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match="requirement"):
        fetch_sdist("not a package")


def test_the_cache_is_used_by_hash_and_a_damaged_file_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = tar(tmp_path / "a-1.tar.gz", plain("a-1/a.py")).read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    kept = tmp_path / "sdists" / sha256 / "a==1" / "a-1.tar.gz"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(content)
    found = fetch_sdist("A==1", cache=tmp_path)
    assert (found.name, found.version, found.sha256, found.path) == ("a", "1", sha256, kept)
    kept.write_bytes(content + b"!")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "empty").as_uri())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (tmp_path / "empty").as_uri())
    with pytest.raises(DataError):
        fetch_sdist("a==1", cache=tmp_path)
    assert not kept.exists()


def test_the_index_named_by_pips_environment_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "index" / "tiny-thing"
    page.mkdir(parents=True)
    sdist = tar(page / "tiny_thing-0.3.tar.gz", plain("tiny_thing-0.3/a.py"))
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    (page / "index.html").write_text(f'<a href="tiny_thing-0.3.tar.gz#sha256={digest}">tiny_thing-0.3.tar.gz</a>')
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (tmp_path / "index").as_uri())
    found = fetch_sdist("Tiny.Thing==0.3", cache=tmp_path / "cache")
    assert (found.name, found.sha256) == ("tiny-thing", digest)
    assert read_archive(found.path) == {"a.py": b"x = 1\n"}
