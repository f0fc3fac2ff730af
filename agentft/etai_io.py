"""Read, write and check files of ETAI records (floor 0): strict about content, kind about the run.

    sessions = read("sessions.jsonl")          # .jsonl, .jsonl.gz, .jsonl.zst
    for session in sessions: ...
    print(sessions.report.summary())           # kept, rejected by reason, repaired
    write("out.jsonl.zst", some_sessions)      # atomic, the same bytes for the same sessions

A line that is no valid record goes to ``<name>.rejected.jsonl`` with its reason and reading goes on; ``strict``
raises at the first. ``write`` holds what it gets to the same rules, so whatever is written can be read. Outcomes:

========================  =============================================================================
bytes that are not UTF-8  replaced by U+FFFD, counted as ``non_utf8``
NUL, lone surrogates      replaced by U+FFFD in every string and key, counted as ``nul`` and ``surrogate``
long stdout or stderr     over 64 KiB: the middle is cut, a marker says how much, ``truncated`` is set,
                          ``total_bytes`` keeps the length before the cut (both streams); counted as ``cut``
CRLF                      as line end of the file: accepted; inside strings: kept as it is
empty trace               a valid record, counted as ``empty_traces``
blank line                skipped; it is no record
duplicate ``session_id``  rejected (``duplicate_id``), names the line of the first
steps out of order        rejected (``step_order``): the order of execution cannot be known afterwards;
                          steps are numbered 1, 2, 3… in the order in which they ran
NaN, Infinity, 1e999      rejected (``not_json``, ``not_finite``)
nesting over 100 levels   rejected (``too_deep``)
line over 512 MiB         rejected (``too_long``) without being held in memory
damaged compression       ``DataError`` for the file, with the line that was reached
========================  =============================================================================

``python -m agentft.etai_io > agentft/etai.schema.json`` regenerates the published JSON Schema.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from agentft.errors import DataError
from agentft.etai import RecordError, Session, parse_json, to_session
from agentft.files import whole_file

MAX_LINE_BYTES = 512 * 2**20
LINE_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_REJECTED_TEXT = 100_000


@dataclass(frozen=True, kw_only=True)
class JsonLine:
    """One line of a file: its number from 1, its text, and the decoded value or what is wrong with it."""

    number: int
    text: str
    value: object = None
    error: RecordError | None = None
    repairs: Counter[str] = field(default_factory=Counter)


def json_lines(path: Path) -> Iterator[JsonLine]:
    """Decode a file of JSON lines one by one; a bad line is yielded with its error, blank lines are skipped.

    Raises:
        DataError: the file cannot be opened, or its compression is damaged.
    """
    number = 0
    try:
        with _open_read(path) as stream:
            while raw := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(raw) > MAX_LINE_BYTES:
                    while (rest := stream.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                        pass
                    error = RecordError("line is too long", reason="too_long", expected=f"≤ {MAX_LINE_BYTES} bytes")
                    yield JsonLine(number=number, text="", error=error)
                elif raw.strip():
                    yield _decode(number, raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, number, error) from error


def _unreadable(path: Path, number: int, error: Exception) -> DataError:
    return DataError(
        "the file cannot be read, or its compression is damaged",
        where=f"{path}:{number}" if number else str(path),
        got=f"{type(error).__name__}: {error}",
        hint=f"{number} lines were read before that; fetch the file again" if number else None,
    )


def _decode(number: int, raw: bytes) -> JsonLine:
    repairs = Counter[str]()
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = raw.decode(errors="replace")
        repairs["non_utf8"] = text.count("\ufffd") - raw.count("\ufffd".encode())
    try:
        return JsonLine(number=number, text=text, value=parse_json(text), repairs=repairs)
    except RecordError as error:
        return JsonLine(number=number, text=text, error=error)


class RejectFile:
    """Collects what was refused, one JSON object a line; the file is made, or replaced, at the first refusal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream: IO[str] | None = None

    def clear(self) -> None:
        """Remove the file of an earlier run."""
        with self._explained():
            self.path.unlink(missing_ok=True)

    def add(self, error: RecordError, *, file: str, line: int | None, text: str) -> None:
        """Append one refused record: where, why, and its text (the first 100,000 characters)."""
        entry = {
            "file": file,
            "line": line,
            "field": error.field or None,
            "reason": error.reason,
            "message": str(error),
            "got": None if error.got is None else repr(error.got)[:400],
            "expected": error.expected,
            "record": text[:_REJECTED_TEXT],
        }
        with self._explained():
            if self._stream is None:
                self._stream = self.path.open("w", encoding="utf-8")
            self._stream.write(json.dumps(entry) + "\n")
            self._stream.flush()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                "cannot write the file of refused records",
                where=str(self.path),
                got=f"{type(error).__name__}: {error}",
                hint="name another place for it, or read in strict mode",
            ) from error

    def close(self) -> None:
        """Close the file, if one was opened."""
        if self._stream is not None:
            self._stream.close()


def rejected_path(path: Path) -> Path:
    """Return ``<name>.rejected.jsonl`` beside ``path``."""
    name = path.name
    for suffix in (".gz", ".zst", ".jsonl", ".json"):
        name = name.removesuffix(suffix)
    return path.with_name(f"{name}.rejected.jsonl")


@dataclass
class ReadReport:
    """What reading one file gave. ``repaired`` counts changes to the text of kept records (see the module's table)."""

    path: Path
    rejects: Path
    kept: int = 0
    empty_traces: int = 0
    by_reason: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)

    @property
    def rejected(self) -> int:
        """Number of refused lines."""
        return self.by_reason.total()

    def summary(self) -> str:
        """Return one line: what was kept, refused (and why, and where it went) and repaired."""
        text = f"{self.path}: {self.kept} kept, {self.rejected} rejected"
        if self.rejected:
            text += f" ({_counts(self.by_reason)}; see {self.rejects})"
        return text + (f", repaired: {_counts(self.repaired)}" if self.repaired.total() else "")


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items()) if count)


class Reader(Iterator[Session]):
    """The sessions of one file; ``report`` is complete once the iteration has ended."""

    def __init__(self, path: Path, *, strict: bool, rejects: Path) -> None:
        self.report = ReadReport(path=path, rejects=rejects)
        self._strict = strict
        self._sessions = self._read()

    def __next__(self) -> Session:
        return next(self._sessions)

    def _read(self) -> Iterator[Session]:
        report, first_line = self.report, dict[str, int]()
        with contextlib.closing(RejectFile(report.rejects)) as rejects:
            for line in json_lines(report.path):
                try:
                    session = self._accept(line, first_line)
                except RecordError as error:
                    located = error.at(f"{report.path}:{line.number}")
                    if self._strict:
                        raise located from None
                    report.by_reason[error.reason] += 1
                    rejects.add(located, file=str(report.path), line=line.number, text=line.text)
                    continue
                report.kept += 1
                report.empty_traces += not session.execution_trace
                report.repaired.update(line.repairs)
                yield session

    def _accept(self, line: JsonLine, first_line: dict[str, int]) -> Session:
        if line.error is not None:
            raise line.error
        session = to_session(line.value, line.repairs)
        first = first_line.setdefault(session.session_id, line.number)
        if first != line.number:
            raise duplicate(session.session_id, f"line {first}")
        return session


def duplicate(session_id: str, first: str) -> RecordError:
    """Return the error for a second record with an id; ``first`` names the place of the first."""
    return RecordError(
        "the id was used before",
        reason="duplicate_id",
        field="session_id",
        got=session_id,
        expected=f"an id of its own; the first record with this one is {first}",
    )


def read(path: str | Path, *, strict: bool = False, rejects: str | Path | None = None) -> Reader:
    """Iterate over the sessions of a ``.jsonl``, ``.jsonl.gz`` or ``.jsonl.zst`` file.

    Args:
        path: The file.
        strict: Raise at the first bad line instead of putting it aside.
        rejects: File for refused lines; ``<name>.rejected.jsonl`` beside the input if left out. It is made, or
            replaced, at the first refused line; reading a good file touches nothing (what an import refused stays).

    Raises:
        DataError: no such file, unknown suffix, damaged compression; in strict mode ``RecordError`` at a bad line.
    """
    source = Path(path)
    _require_suffix(source)
    if not source.is_file():
        raise DataError("no such file", where=str(source), hint="check the path")
    return Reader(source, strict=strict, rejects=Path(rejects) if rejects else rejected_path(source))


@dataclass
class WriteReport:
    """What was written: number of records and what had to be repaired in them."""

    path: Path
    written: int = 0
    repaired: Counter[str] = field(default_factory=Counter)


def write(path: str | Path, sessions: Iterable[Session]) -> WriteReport:
    """Write sessions, one a line, atomically: the file appears whole or not at all.

    The same sessions give the same bytes. Text is repaired and long outputs are cut as in reading.

    Raises:
        DataError: a session breaks a rule of the record (``RecordError``), or the disk refuses.
    """
    target = Path(os.path.realpath(path))
    _require_suffix(target)
    report, first = WriteReport(path=target), dict[str, int]()
    try:
        with whole_file(target) as temporary, _open_write(temporary, target.name) as stream:
            for number, session in enumerate(sessions, 1):
                if first.setdefault(session.session_id, number) != number:
                    raise duplicate(session.session_id, f"number {first[session.session_id]}").at(f"session {number}")
                checked = to_session(session.model_dump(), report.repaired)
                stream.write(json.dumps(checked.model_dump(), ensure_ascii=False, separators=(",", ":")).encode())
                stream.write(b"\n")
                report.written = number
    except OSError as error:
        raise DataError("cannot write the file", where=str(target), got=f"{type(error).__name__}: {error}") from error
    return report


def _require_suffix(path: Path) -> None:
    if not path.name.endswith(LINE_SUFFIXES):
        raise DataError(
            "unknown kind of file", where=str(path), got=path.name, expected=f"a name that ends in {_SUFFIX_TEXT}"
        )


_SUFFIX_TEXT = ", ".join(LINE_SUFFIXES)


@contextlib.contextmanager
def _open_read(path: Path) -> Iterator[BinaryIO]:
    with path.open("rb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=raw) as stream:
                yield cast(BinaryIO, stream)
        elif path.suffix == ".zst":
            yield cast(BinaryIO, io.BufferedReader(_Chunks(_zstd_chunks(raw)), 1 << 20))
        else:
            yield raw


def _zstd_chunks(raw: BinaryIO) -> Iterator[bytes]:
    """Decompress frame after frame; small reads bound what a hostile file can inflate to at once."""
    import zstandard

    decoder = None
    try:
        while data := raw.read(8192):
            while data:
                decoder = decoder or zstandard.ZstdDecompressor().decompressobj()
                yield decoder.decompress(data)
                data, decoder = (decoder.unused_data, None) if decoder.eof else (b"", decoder)
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from error
    if decoder is not None:
        raise EOFError("the last frame is cut short")


class _Chunks(io.RawIOBase):
    """Byte chunks as a readable file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            if (chunk := next(self._chunks, None)) is None:
                return 0
            self._rest = memoryview(chunk)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


@contextlib.contextmanager
def _open_write(path: Path, name: str) -> Iterator[BinaryIO]:
    """Open ``path`` for writing with the compression that ``name`` asks for; synced to disk when closed."""
    with path.open("wb") as raw:
        if name.endswith(".gz"):
            with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as stream:
                yield cast(BinaryIO, stream)
        elif name.endswith(".zst"):
            import zstandard

            with zstandard.ZstdCompressor(level=3).stream_writer(raw, closefd=False) as stream:
                yield cast(BinaryIO, stream)
        else:
            yield raw
        raw.flush()
        os.fsync(raw.fileno())


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of one record, generated from the types."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Session.model_json_schema()}


def schema_text() -> str:
    """Return ``json_schema`` as it is published in ``agentft/etai.schema.json``."""
    return json.dumps(json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
