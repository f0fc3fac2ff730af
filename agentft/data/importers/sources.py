"""Where documents come from (floor 3): files, folders, parquet and arrow tables, data sets of the hub.

Everything is a stream: one document at a time is held. Tables and the hub are read by ``datasets``, imported only
when they are asked for; code of a data set is never run.
"""

from __future__ import annotations

import gzip
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentft.data.importers.detect import split
from agentft.errors import DataError, boundary
from agentft.etai import RecordError, parse_json
from agentft.etai_io import LINE_SUFFIXES, json_lines

_WHOLE_SUFFIXES = (".traj", ".json", ".json.gz")
_TABLE_SUFFIXES = {".parquet": "parquet", ".arrow": "arrow"}
_HUB = re.compile(r"hf:([\w.-]+/[\w.-]+)(?::([\w.\[\]%:-]+))?")


@dataclass(frozen=True, kw_only=True)
class Document:
    """One candidate session: the file it is from, its place there, its value or what is wrong with it.

    ``text`` is the line or file as read, where there is one to show.
    """

    file: str
    where: str
    line: int | None = None
    value: object = None
    error: RecordError | None = None
    text: str = ""
    repairs: Counter[str] = field(default_factory=Counter)


def expand(paths: list[str]) -> list[str]:
    """Return every file and hub id behind ``paths``; folders give their files of known kinds, sorted.

    Raises:
        DataError: a path does not exist, a folder holds nothing to read, or a hub id is malformed.
    """
    found: list[str] = []
    for name in paths:
        path = Path(name)
        if name.startswith("hf:"):
            _hub_id(name)
            found.append(name)
        elif path.is_dir():
            inside = sorted(str(Path(folder) / file) for folder, _, files in os.walk(path) for file in files)
            inside = [file for file in inside if _is_readable(Path(file).name)]
            if not inside:
                raise DataError("nothing to import in this folder", where=name, expected=f"files named {_KINDS}")
            found += inside
        elif path.exists():
            found.append(name)
        else:
            raise DataError("no such file or folder", where=name, hint="a data set of the hub is hf:owner/name[:split]")
    return list(dict.fromkeys(found))


_KINDS = ", ".join((*_WHOLE_SUFFIXES, *LINE_SUFFIXES, *_TABLE_SUFFIXES))


def _is_readable(name: str) -> bool:
    if name.startswith(".") or name.endswith(".rejected.jsonl"):
        return False
    return name.endswith((*_WHOLE_SUFFIXES, *LINE_SUFFIXES, *_TABLE_SUFFIXES))


def documents(name: str) -> Iterator[Document]:
    """Yield the documents of one file or hub id.

    Raises:
        DataError: the source as a whole cannot be read.
    """
    path = Path(name)
    if name.startswith("hf:"):
        hub, split_name = _hub_id(name)
        yield from _rows(name, hub, split=split_name)
    elif path.suffix in _TABLE_SUFFIXES:
        yield from _rows(name, _TABLE_SUFFIXES[path.suffix], split="train", data_files=str(path.resolve()))
    elif name.endswith(LINE_SUFFIXES):
        yield from _lines(path)
    else:
        yield from _whole(path)


def _hub_id(name: str) -> tuple[str, str]:
    match = _HUB.fullmatch(name)
    if not match:
        raise DataError("malformed id of a data set", where=name, expected="hf:owner/name or hf:owner/name:split")
    return match[1], match[2] or "train"


def _lines(path: Path) -> Iterator[Document]:
    for line in json_lines(path):
        where = f"{path}:{line.number}"
        shared: dict[str, Any] = {"file": str(path), "line": line.number, "text": line.text}
        if line.error:
            yield Document(where=where, error=line.error, **shared)
        else:
            repairs = line.repairs
            for place, value in split(line.value, where):
                yield Document(where=place, value=value, repairs=repairs, **shared)
                repairs = Counter()


def _whole(path: Path) -> Iterator[Document]:
    """Read a file that is one JSON value; one that turns out to hold lines is read as lines."""
    repairs = Counter[str]()
    with boundary("the file cannot be read", error=DataError, hint=f"file: {path}"):
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    text = raw.removeprefix(b"\xef\xbb\xbf").decode(errors="replace")
    repairs["non_utf8"] = text.count("\ufffd") - raw.count("\ufffd".encode())
    try:
        value = parse_json(text)
    except RecordError as error:
        if "Extra data" in str(error) and path.suffix != ".gz":
            yield from _lines(path)
        else:
            yield Document(file=str(path), where=str(path), error=error, text=text)
        return
    for where, item in split(value, str(path)):
        yield Document(file=str(path), where=where, value=item, text="", repairs=repairs)
        repairs = Counter()


def _rows(name: str, source: str, **options: Any) -> Iterator[Document]:
    """Stream the rows of a table. Columns and fields that are null count as absent, as a table fills them in."""
    hint = "check the name and the split" if name.startswith("hf:") else "check that the file is whole"
    with boundary(f"{name}: the data set cannot be read", error=DataError, hint=hint):
        import datasets

        rows = iter(datasets.load_dataset(source, streaming=True, **options))
    number = 0
    while True:
        with boundary(f"{name}: the data set broke off at row {number}", error=DataError, hint=hint):
            row = next(rows, None)
        if row is None:
            return
        number += 1
        for place, value in split(_without_nulls(row), f"{name}:{number}"):
            yield Document(file=name, where=place, line=number, value=value)


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
