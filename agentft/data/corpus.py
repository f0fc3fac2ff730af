"""Documents of a corpus (floor 3): source files out of folders, single files and jsonl, cut into rows that fit.

    for found in read_documents(["repos/", "code.jsonl"], report):     # Document
        ...
    cut(document text, vocab, limit)                                    # half-open characters of each row

What cannot be used is in the report, each with its reason. Filters, licences and deduplication are no part of this.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import zstandard

from agentft.data.lexing import known_language, language_of
from agentft.errors import AgentFTError, DataError
from agentft.etai import Split, split_of
from agentft.text.vocab import Vocab

LARGEST_BYTES = 4 << 20
"""A file beyond this is data or generated, not source."""

TOOL_FOLDERS = frozenset({"__pycache__", "node_modules"})
"""Folders of tools; those whose name begins with a dot are left out too."""

JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst")


@dataclass(frozen=True, kw_only=True)
class Document:
    """One source file. ``session_id`` names it among all documents; ``language`` as ``lexing`` calls it.

    Documents of one ``split_key`` stay in one split: it is the repository, or the id where that is not known.
    """

    session_id: str
    repository: str
    split_key: str
    path: str
    language: str | None
    content: str


@dataclass(kw_only=True)
class ReadReport:
    """What reading found: documents, files left out by kind (reason → files), and refused documents (id, reason).

    ``splits`` are those that the documents' split keys fall into.
    """

    documents: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    repositories: Counter[str] = field(default_factory=Counter)
    splits: set[Split] = field(default_factory=set)


def dump_document(document: Document) -> str:
    """Return the document as one line of ASCII JSON."""
    return json.dumps(asdict(document), ensure_ascii=True)


def load_document(line: str) -> Document:
    """Return the document of ``dump_document``."""
    return Document(**json.loads(line))


def read_documents(paths: Sequence[str | Path], report: ReadReport) -> Iterator[Document]:
    """Yield the documents of folders, source files and jsonl files; count everything in ``report``.

    The repository of a file is the git checkout that it lies in, else the first folder (or file) below the given one;
    a line of jsonl says it itself (``repository``), else it is not known and each line stands for itself.

    Raises:
        DataError: A path is not there.
    """
    used: Counter[str] = Counter()
    for path in map(Path, paths):
        if not path.exists():
            raise DataError("no such file or folder", where=str(path))
        if path.is_dir():
            found = _folder(path, report)
        elif path.name.endswith(JSONL):
            found = _lines(path, report)
        else:
            found = _file(path, path.name, path.name, report)
        for document in found:
            used[document.session_id] += 1
            if used[document.session_id] > 1:
                document = Document(
                    **asdict(document) | {"session_id": f"{document.session_id}~{used[document.session_id]}"}
                )
            report.documents += 1
            report.repositories[document.repository] += 1
            report.splits.add(split_of(document.split_key))
            yield document


def cut(text: str, vocab: Vocab, limit: int) -> list[tuple[int, int]]:
    """Return the half-open characters of rows of at most ``limit`` tokens: together they are the text.

    A row ends at a blank line where there is one in its last quarter, else at the end of a line, else anywhere.
    """
    starts = np.array([start for start, _ in vocab.spans(text)], np.int64)
    rows: list[tuple[int, int]] = []
    at = 0
    while at < len(text):
        last = int(np.searchsorted(starts, at)) + limit
        end = len(text) if last >= len(starts) else _boundary(text, at, max(int(starts[last]), at + 1))
        while len(vocab.encode(text[at:end])) > limit and end - at > 1:
            end = _boundary(text, at, at + max(1, (end - at) * 15 // 16))
        rows.append((at, end))
        at = end
    return rows


def _boundary(text: str, at: int, end: int) -> int:
    blank = text.rfind("\n\n", at + (end - at) * 3 // 4, end)
    if blank >= 0:
        return blank + 2
    line = text.rfind("\n", at, end)
    return line + 1 if line >= 0 else end


def _folder(root: Path, report: ReadReport) -> Iterator[Document]:
    name = root.resolve().name
    for folder, subfolders, files in os.walk(root, onerror=lambda error: _unreadable(error, report)):
        here = Path(folder)
        for subfolder in [s for s in subfolders if s in TOOL_FOLDERS or s.startswith(".") or (here / s).is_symlink()]:
            subfolders.remove(subfolder)
            report.skipped["folder of a tool, or a link"] += 1
        subfolders.sort()
        git = _checkout(root, here)
        for file in sorted(files):
            path = (here / file).relative_to(root).as_posix()
            inside = git.relative_to(root).as_posix() if git is not None else path.partition("/")[0]
            yield from _file(here / file, path, name if inside == "." else f"{name}/{inside}", report)


def _checkout(root: Path, folder: Path) -> Path | None:
    """Return the nearest git checkout around ``folder`` at or below ``root``."""
    while True:
        if (folder / ".git").exists():
            return folder
        if folder == root:
            return None
        folder = folder.parent


def _unreadable(error: OSError, report: ReadReport) -> None:
    report.rejected.append((str(error.filename), f"the folder cannot be read: {error.strerror}"))


def _file(file: Path, path: str, repository: str, report: ReadReport) -> Iterator[Document]:
    language = language_of(path)
    if file.is_symlink() or not file.is_file():
        report.skipped["link or special file"] += 1
    elif language is None:
        report.skipped[f"no source: {file.suffix.lower() or 'no suffix'}"] += 1
    else:
        try:
            content = _text(file)
        except (OSError, DataError) as error:
            reason = error.what if isinstance(error, DataError) else f"cannot be read: {error.strerror}"
            report.rejected.append((str(file), reason))
            return
        whole = repository == path or repository.endswith(f"/{path}")
        yield Document(
            session_id=repository if whole else f"{repository}:{path}",
            repository=repository,
            split_key=repository,
            path=path,
            language=language,
            content=content,
        )


def _text(file: Path) -> str:
    if file.stat().st_size > LARGEST_BYTES:
        raise DataError(f"larger than {LARGEST_BYTES >> 20} MiB")
    try:
        return _checked(file.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 (byte {error.start})") from error


def _checked(text: str) -> str:
    """Return the text if it can be a document."""
    if not text.strip():
        raise DataError("empty")
    if "\0" in text:
        raise DataError("holds NUL characters")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"holds a lone surrogate (character {error.start})") from error
    if len(text) > LARGEST_BYTES:
        raise DataError(f"longer than {LARGEST_BYTES} characters")
    return text


def _lines(path: Path, report: ReadReport) -> Iterator[Document]:
    with _open(path) as lines:
        number = 0
        while True:
            number += 1
            where = f"{path}:{number}"
            try:
                line = lines.readline()
            except (OSError, EOFError, ValueError, zstandard.ZstdError) as error:
                report.rejected.append((where, f"the rest of the file cannot be read: {error}"))
                return
            if not line:
                return
            if not line.strip():
                report.skipped["empty line"] += 1
                continue
            try:
                yield _line(line, f"{path.name}:{number}")
            except AgentFTError as error:
                report.rejected.append((where, error.what))


def _line(line: str, name: str) -> Document:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise DataError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DataError(f"not an object but {type(fields).__name__}")
    content = fields.get("content")
    if not isinstance(content, str):
        raise DataError("`content` is missing" if content is None else "`content` is no text")
    texts = {key: _optional(fields, key) for key in ("path", "language", "repository")}
    language = texts["language"]
    known = known_language(language) if language else language_of(texts["path"] or "")
    both = texts["repository"] is not None and texts["path"] is not None
    return Document(
        session_id=f"{texts['repository']}:{texts['path']}" if both else name,
        repository=texts["repository"] or name.rpartition(":")[0],
        split_key=texts["repository"] or name,
        path=texts["path"] or name,
        language=known,
        content=_checked(content.removeprefix("\ufeff")),
    )


def _optional(fields: dict[str, Any], key: str) -> str | None:
    value = fields.get(key)
    if value is not None and not isinstance(value, str):
        raise DataError(f"`{key}` is no text")
    return value or None


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="strict")
    if path.suffix == ".zst":
        raw = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), closefd=True)
        return io.TextIOWrapper(raw, encoding="utf-8")
    return path.open(encoding="utf-8")
