"""Files of records: suffixes, atomic and repeatable writing, the report, and what happens to nasty content."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from agentft import etai_io
from agentft.errors import DataError
from agentft.etai import MAX_OUTPUT_BYTES, RecordError, Session, to_session
from agentft.etai_io import read, rejected_path, write


def session(session_id: str = "s", output: str = "ok", **fields: Any) -> Session:
    trace = [{"step": 1, "tool_called": "shell_run", "execution_result": {"exit_code": 0, "stdout": output}}]
    return Session.model_validate(
        {"session_id": session_id, "user_instruction": "Do it.", "execution_trace": trace, **fields}
    )


def raw_line(session_id: str, stdout: bytes) -> bytes:
    """Return a record as bytes whose stdout is put in without any escaping."""
    text = session(session_id, "@@").model_dump_json().encode()
    return text.replace(b"@@", stdout)


def stdout_of(record: Session) -> str:
    result = record.execution_trace[0].execution_result
    assert result is not None
    return result.stdout


@pytest.mark.parametrize("name", ["s.jsonl", "s.jsonl.gz", "s.jsonl.zst"])
def test_what_is_written_is_read_and_the_bytes_repeat(tmp_path: Path, name: str) -> None:
    sessions = [session(f"s{i}", "line\r\n☃ \\u0000 …" * i) for i in range(50)]
    report = write(tmp_path / name, sessions)
    assert report.written == 50
    assert report.repaired.total() == 0
    first = (tmp_path / name).read_bytes()
    assert list(read(tmp_path / name)) == sessions
    write(tmp_path / name, iter(sessions))
    assert (tmp_path / name).read_bytes() == first
    assert os.listdir(tmp_path) == [name]


def test_compression_of_others_is_read(tmp_path: Path) -> None:
    lines = [session(f"s{i}").model_dump_json().encode() + b"\n" for i in range(3)]
    frames = zstandard.ZstdCompressor()
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames.compress(line) for line in lines))
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(gzip.compress(line) for line in lines))
    for name in ("a.jsonl.zst", "a.jsonl.gz"):
        assert [s.session_id for s in read(tmp_path / name)] == ["s0", "s1", "s2"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_compression_is_one_error_with_the_line_reached(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    write(path, [session(f"s{i}", os.urandom(3000).hex()) for i in range(40)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="its compression is damaged") as caught:
        list(read(path))
    assert caught.value.where is not None
    assert 5 < int(caught.value.where.rpartition(":")[2]) < 40
    path.write_bytes(b"plain text, not compressed")
    with pytest.raises(DataError, match="its compression is damaged"):
        list(read(path))


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    write(path, [session("old")])

    def breaks() -> Iterator[Session]:
        yield session("new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(path, breaks())
    with pytest.raises(RecordError, match="session 2: session_id: the id was used before"):
        write(path, [session("twice"), session("twice")])
    with pytest.raises(RecordError, match="a value is no JSON value"):
        write(path, [session("odd", execution_trace=[{"step": 1, "tool_called": "t", "tool_args": {"x": {1, 2}}}])])
    assert [s.session_id for s in read(path)] == ["old"]
    assert os.listdir(tmp_path) == ["s.jsonl"]


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from agentft.etai import Session; from agentft.etai_io import write\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "rows = (Session(session_id=str(i), user_instruction='x' * 500) for i in range(1000))\n"
        "write(sys.argv[1], rows)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "s.jsonl")], capture_output=True, text=True)
    assert "DataError" in done.stderr
    assert "cannot write the file" in done.stderr
    assert os.listdir(tmp_path) == []


def test_paths_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="a name that ends in"):
        read(tmp_path / "s.csv")
    with pytest.raises(DataError, match="a name that ends in"):
        write(tmp_path / "s.json", [])
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(DataError, match="cannot write the file of refused records"):
        list(read(tmp_path / "bad.jsonl", rejects=tmp_path / "no" / "folder.jsonl"))


def test_the_report_counts_and_a_good_file_touches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.gz"
    good, empty = session("a").model_dump_json(), Session(session_id="b", user_instruction="Hi").model_dump_json()
    path.write_bytes(gzip.compress("\n".join(["nonsense", good, "", empty, good, "  "]).encode()))
    reader = read(path)
    assert [s.session_id for s in reader] == ["a", "b"]
    report = reader.report
    assert (report.kept, report.rejected, report.empty_traces) == (2, 2, 1)
    assert report.rejects == rejected_path(path) == tmp_path / "in.rejected.jsonl"
    assert report.summary() == (
        f"{path}: 2 kept, 2 rejected (duplicate_id 1, not_json 1; see {tmp_path / 'in.rejected.jsonl'})"
    )
    assert [json.loads(line)["line"] for line in report.rejects.read_text().splitlines()] == [1, 5]
    before = report.rejects.read_bytes()
    write(path, [session("a")])
    again = read(path)
    assert len(list(again)) == 1
    assert (again.report.rejected, report.rejects.read_bytes()) == (0, before)
    path.write_bytes(gzip.compress(b"other nonsense"))
    assert list(read(path)) == []
    assert "other nonsense" in report.rejects.read_text()
    assert len(report.rejects.read_text().splitlines()) == 1
    (tmp_path / "bad.jsonl").write_text("nonsense\n")
    assert list(read(tmp_path / "bad.jsonl", rejects=tmp_path / "elsewhere.jsonl")) == []
    assert (tmp_path / "elsewhere.jsonl").exists()
    assert not (tmp_path / "bad.rejected.jsonl").exists()


NASTY = {
    "not utf-8": (b"caf\xe9 \xff\xfe", "caf\ufffd \ufffd\ufffd", {"non_utf8": 3}),
    "a real U+FFFD is not counted": ("\ufffd".encode() + b"\xe9", "\ufffd\ufffd", {"non_utf8": 1}),
    "escaped NUL": (b"a\\u0000b", "a\ufffdb", {"nul": 1}),
    "raw NUL": (b"a\x00b", "a\ufffdb", {"nul": 1}),
    "lone surrogates": (b"\\ud83d \\ude00\\ud83d", "\ufffd \ufffd\ufffd", {"surrogate": 3}),
    "a surrogate pair is a character": (b"\\ud83d\\ude00", "\U0001f600", {}),
    "CRLF inside": (b"one\\r\\ntwo", "one\r\ntwo", {}),
    "raw control characters": (b"tab\there \x1b[0m", "tab\there \x1b[0m", {}),
}


@pytest.mark.parametrize(("raw", "expected", "repaired"), NASTY.values(), ids=NASTY.keys())
def test_nasty_text_has_a_defined_outcome(tmp_path: Path, raw: bytes, expected: str, repaired: dict[str, int]) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + raw_line("a", raw) + b"\r\n" + raw_line("b", b"fine") + b"\r\n")
    reader = read(path, strict=True)
    assert [stdout_of(s) for s in reader] == [expected, "fine"]
    assert +reader.report.repaired == Counter(repaired)


def test_writing_repairs_text_too(tmp_path: Path) -> None:
    dirty = session("s", "a\x00\ud800", repository="r\x00")
    report = write(tmp_path / "s.jsonl", [dirty])
    assert dict(report.repaired) == {"nul": 2, "surrogate": 1}
    [clean] = read(tmp_path / "s.jsonl", strict=True)
    assert (stdout_of(clean), clean.repository) == ("a\ufffd\ufffd", "r\ufffd")


def test_a_hundred_megabytes_are_cut_in_the_middle(tmp_path: Path) -> None:
    size = 100_000_000
    path = tmp_path / "s.jsonl"
    path.write_bytes(raw_line("a", b"start " + b"x" * (size - 10) + b" end") + b"\n" + raw_line("b", b"fine"))
    reader = read(path, strict=True)
    long, short = reader
    result = long.execution_trace[0].execution_result
    assert result is not None
    assert result.truncated
    assert result.total_bytes == size
    assert len(result.stdout) <= MAX_OUTPUT_BYTES
    assert result.stdout.startswith("start xxx")
    assert result.stdout.endswith("x end")
    assert f" of {size} bytes cut ...]\n" in result.stdout
    assert dict(reader.report.repaired) == {"cut": 1}
    assert stdout_of(short) == "fine"


def test_cutting_keeps_characters_whole_and_known_lengths() -> None:
    def cut(**result: Any) -> dict[str, Any]:
        trace = [{"step": 1, "tool_called": "t", "execution_result": result}]
        record = to_session({"session_id": "s", "user_instruction": "i", "execution_trace": trace})
        assert record == to_session(record.model_dump())
        found = record.execution_trace[0].execution_result
        assert found is not None
        return found.model_dump()

    snow = cut(stdout="a" + "☃" * 30_000, stderr="☃" * 30_000)
    assert snow["total_bytes"] == 180_001
    for name, total in (("stdout", 90_001), ("stderr", 90_000)):
        assert len(snow[name].encode()) <= MAX_OUTPUT_BYTES
        assert "\ufffd" not in snow[name]
        removed = int(snow[name].split("[... ")[1].split(" ")[0])
        marker = f"\n[... {removed} of {total} bytes cut ...]\n"
        assert len(snow[name].encode()) - len(marker) + removed == total
    assert cut(stdout="x" * 70_000, total_bytes=5_000_000)["total_bytes"] == 5_000_000
    exact = cut(stdout="x" * MAX_OUTPUT_BYTES)
    assert (exact["truncated"], exact["total_bytes"]) == (False, None)


def test_a_line_beyond_the_limit_is_refused_without_being_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etai_io, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "s.jsonl"
    path.write_bytes(raw_line("long", b"x" * 5000) + b"\n" + raw_line("short", b"x") + b"\n" + b"y" * 4000)
    reader = read(path)
    assert [s.session_id for s in reader] == ["short"]
    assert dict(reader.report.by_reason) == {"too_long": 2}


def test_keys_that_become_equal_are_refused() -> None:
    trace = [{"step": 1, "tool_called": "t", "tool_args": {"a\x00": 1, "a\ufffd": 2}}]
    with pytest.raises(RecordError, match="two keys of an object become the same"):
        to_session({"session_id": "s", "user_instruction": "i", "execution_trace": trace})
