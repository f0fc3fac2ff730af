"""``agentft import`` (floor 3): read documents, turn them into records, check them, write one file, report.

``import_paths`` is the function behind the verb and behind ``data_prep/import_sessions.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentft.data.importers.detect import IMPORTERS, check_format, detect
from agentft.data.importers.sources import Document, documents, expand
from agentft.errors import EXIT_OK, DataError
from agentft.etai import RecordError, Session, to_session
from agentft.etai_io import RejectFile, duplicate, rejected_path, write

_TABLE_FILES = 30


@dataclass
class FileReport:
    """What one file gave. ``null_exit_codes`` counts steps whose exit code the source does not know."""

    file: str
    formats: Counter[str] = field(default_factory=Counter)
    records: int = 0
    steps: int = 0
    null_exit_codes: int = 0
    rejected: int = 0

    def add(self, session: Session, format_name: str) -> None:
        """Count one kept session."""
        results = [step.execution_result for step in session.execution_trace]
        self.formats[format_name] += 1
        self.records += 1
        self.steps += len(results)
        self.null_exit_codes += sum(result is None or result.exit_code is None for result in results)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as a JSON object."""
        return {**vars(self), "formats": dict(sorted(self.formats.items()))}


@dataclass
class ImportReport:
    """What an import gave: one entry a file, refusals by reason, what had no place in a record, what was repaired."""

    output: Path
    rejects: Path
    files: list[FileReport] = field(default_factory=list)
    by_reason: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    first_rejection: str | None = None

    def total(self, name: str) -> int:
        """Return the sum of a count over all files (``records``, ``steps``, ``null_exit_codes``, ``rejected``)."""
        return sum(getattr(report, name) for report in self.files)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        counters = {name: {k: v for k, v in sorted(getattr(self, name).items()) if v} for name in _COUNTERS}
        totals = {name: self.total(name) for name in ("records", "steps", "null_exit_codes", "rejected")}
        return {
            "output": str(self.output),
            "rejects": str(self.rejects) if totals["rejected"] else None,
            **totals,
            **counters,
            "files": [report.to_json() for report in self.files],
        }


_COUNTERS = ("by_reason", "notes", "repaired")


def import_paths(
    paths: Sequence[str],
    output: str | Path,
    format: str = "auto",
    strict: bool = False,
    on_document: Callable[[ImportReport, int], None] | None = None,
) -> ImportReport:
    """Import sessions from files, folders, tables and hub data sets into one ETAI file.

    Args:
        paths: Files, folders, or ``hf:owner/name[:split]``.
        output: File to write (``.jsonl``, ``.jsonl.gz``, ``.jsonl.zst``); it appears whole or not at all.
        format: A name of ``detect.IMPORTERS``, or ``auto`` to look at each document.
        strict: Stop at the first document that is refused, instead of putting it into ``<output>.rejected.jsonl``.
        on_document: Called after every document with the report so far and the number of files to read.

    Raises:
        ConfigError: unknown format. DataError: a path is missing, nothing could be imported, the disk refuses.
    """
    check_format(format)
    files = [file for file in expand(list(paths)) if os.path.realpath(file) != os.path.realpath(output)]
    report = ImportReport(output=Path(output), rejects=rejected_path(Path(output)))
    with contextlib.closing(RejectFile(report.rejects)) as rejects:
        rejects.clear()
        run = _Run(report, rejects, format, strict, lambda: on_document and on_document(report, len(files)))
        write(output, run.sessions(files))
    return report


class _Run:
    """One import while it goes on: what was seen so far, and where refusals go."""

    def __init__(
        self, report: ImportReport, rejects: RejectFile, format_name: str, strict: bool, tick: Callable[[], object]
    ) -> None:
        self.report, self.rejects, self.format, self.strict, self.tick = report, rejects, format_name, strict, tick
        self.first_place: dict[str, str] = {}

    def sessions(self, files: list[str]) -> Iterator[Session]:
        """Yield every accepted session; raises ``DataError`` at the end if there was none."""
        for name in files:
            file = FileReport(file=name)
            self.report.files.append(file)
            try:
                for document in documents(name):
                    try:
                        session, format_name = self._accept(document)
                    except RecordError as error:
                        self._refuse(file, document, error.at(document.where))
                    else:
                        file.add(session, format_name)
                        yield session
                    self.tick()
            except DataError as error:
                if self.strict or isinstance(error, RecordError):
                    raise
                broken = RecordError(error.what, reason="unreadable_file", got=error.got, hint=error.hint)
                self._refuse(file, Document(file=name, where=error.where or name), broken.at(error.where or name))
        if not self.report.total("records"):
            raise DataError(
                "no session could be imported",
                where=", ".join(files[:3]) + (" …" if len(files) > 3 else ""),
                got=f"{self.report.total('rejected')} rejected; the first: {self.report.first_rejection}",
                hint=f"see {self.report.rejects}" if self.report.first_rejection else "the files are empty",
            )

    def _accept(self, document: Document) -> tuple[Session, str]:
        if document.error is not None:
            raise document.error
        name = detect(document.value) if self.format == "auto" else self.format
        notes, repairs = Counter[str](), Counter(document.repairs)
        session = to_session(IMPORTERS[name](document.value, notes), repairs)
        first = self.first_place.setdefault(session.session_id, document.where)
        if first != document.where:
            raise duplicate(session.session_id, f"at {first}")
        self.report.notes.update(notes)
        self.report.repaired.update(repairs)
        return session, name

    def _refuse(self, file: FileReport, document: Document, error: RecordError) -> None:
        if self.strict:
            raise error
        file.rejected += 1
        self.report.by_reason[error.reason] += 1
        self.report.first_rejection = self.report.first_rejection or str(error)
        text = document.text or ("" if document.value is None else json.dumps(document.value, default=str))
        self.rejects.add(error, file=document.file, line=document.line, text=text)


def import_sessions(arguments: Namespace) -> int:
    """Run ``agentft import``: a progress bar while it reads, a table (or ``--json``) when it is done."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=arguments.json) as progress:
        task, shown = progress.add_task("importing", total=None), 0.0

        def show(report: ImportReport, files: int) -> None:
            nonlocal shown
            if time.monotonic() < shown + 0.1:  # summing over all files at every document would be quadratic
                return
            shown = time.monotonic()
            text = f"importing: {report.total('records')} sessions, {report.total('rejected')} rejected"
            progress.update(task, description=text, total=files, completed=len(report.files) - 1)

        report = import_paths(arguments.paths, arguments.output, arguments.format, arguments.strict, show)
    if arguments.json:
        print(json.dumps(report.to_json()))
    else:
        print_report(report)
    return EXIT_OK


def print_report(report: ImportReport) -> None:
    """Print the table of an import: per file (per format if there are many files), then notes and where it went."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    many = len(report.files) > _TABLE_FILES
    table = Table()
    if not many:
        table.add_column("file", overflow="fold")
    table.add_column("format")
    for name in ("records", "steps", "no exit code", "rejected"):
        table.add_column(name, justify="right", no_wrap=True)
    names = _short_names([row.file for row in report.files])
    for name, row in zip(names, _by_format(report.files) if many else report.files, strict=False):
        counts = [row.records, row.steps, row.null_exit_codes, row.rejected]
        cells = [" + ".join(sorted(row.formats)) or "-", *map(str, counts)]
        table.add_row(*cells if many else (escape(name), *cells))
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = 120
    console.print(table)
    for title, counter in (("rejected", report.by_reason), ("left out", report.notes), ("repaired", report.repaired)):
        if counter.total():
            console.print(f"{title}: " + ", ".join(f"{k} {v}" for k, v in sorted(counter.items()) if v), markup=False)
    console.print(f"{report.total('records')} sessions in {report.output}", markup=False)
    if report.total("rejected"):
        console.print(f"{report.total('rejected')} refused, with reasons, in {report.rejects}", markup=False)


def _short_names(files: list[str]) -> list[str]:
    """Return the files relative to the folder that they share."""
    local = [os.path.abspath(file) for file in files if not file.startswith("hf:")]
    shared = os.path.dirname(local[0]) if len(local) == 1 else os.path.commonpath(local) if local else ""
    return [file if file.startswith("hf:") else os.path.relpath(file, shared) for file in files]


def _by_format(files: list[FileReport]) -> list[FileReport]:
    merged: dict[str, FileReport] = {}
    for file in files:
        row = merged.setdefault(" + ".join(sorted(file.formats)), FileReport(file="", formats=file.formats))
        for name in ("records", "steps", "null_exit_codes", "rejected"):
            setattr(row, name, getattr(row, name) + getattr(file, name))
    return list(merged.values())
