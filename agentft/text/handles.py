"""Handles (floor 2): which file and line each reserved token stands for in one session.

A file gets the next of ``<F0>``…``<F15>`` when the session first shows it, a line the next of its file's
``<L00>``…``<L95>``. A binding never changes, so the table at the end of a session reads every earlier token.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

from agentft.text.vocab import FILE_HANDLES, LINE_HANDLES

_KEY = re.compile(r"<F(\d+)>(?:<L(\d+)>)?\Z")


class Handles:
    """Two-way table of file and line handles. ``off=True`` never binds anything."""

    def __init__(self, *, off: bool = False) -> None:
        self.off = off
        self._paths: list[str] = []
        self._files: dict[str, int] = {}
        self._numbers: list[list[int]] = []
        self._lines: list[dict[int, int]] = []

    def copy(self) -> Handles:
        """Return an independent copy."""
        other = Handles(off=self.off)
        other._paths, other._files = self._paths.copy(), self._files.copy()
        other._numbers = [numbers.copy() for numbers in self._numbers]
        other._lines = [lines.copy() for lines in self._lines]
        return other

    def bind_file(self, path: str) -> int | None:
        """Return the handle of ``path``, a new one at first sight; None when there is none left."""
        known = self.file(path)
        if known is not None or self.off or len(self._paths) == FILE_HANDLES:
            return known
        self._files[_normal(path)] = len(self._paths)
        self._paths.append(path)
        self._numbers.append([])
        self._lines.append({})
        return len(self._paths) - 1

    def bind_line(self, file: int, number: int) -> int | None:
        """Return the handle of line ``number`` (from 1), a new one at first sight; None when there is none left."""
        known = self._lines[file].get(number)
        if known is not None or len(self._numbers[file]) == LINE_HANDLES:
            return known
        self._lines[file][number] = len(self._numbers[file])
        self._numbers[file].append(number)
        return len(self._numbers[file]) - 1

    def file(self, path: str) -> int | None:
        """Return the handle of the file that ``path`` names (``./a`` and ``a`` are one file), if it has one."""
        return self._files.get(_normal(path))

    def line(self, file: int | None, number: int) -> int | None:
        """Return the handle of line ``number`` of the file with handle ``file``, if it has one."""
        return None if file is None else self._lines[file].get(number)

    def lines_in(self, file: int) -> int:
        """Return how many lines of a file have a handle."""
        return len(self._numbers[file])

    def path(self, file: int) -> str | None:
        """Return the path as it was shown first, or None if the handle is free."""
        return self._paths[file] if file < len(self._paths) else None

    def paths(self) -> tuple[str, ...]:
        """Return the files that have a handle, as they were shown first."""
        return tuple(self._paths)

    def number(self, file: int | None, line: int) -> int | None:
        """Return the line number behind a line handle of a file, or None if it is free."""
        if file is None or file >= len(self._paths) or line >= len(self._numbers[file]):
            return None
        return self._numbers[file][line]

    def table(self) -> dict[str, str]:
        """Return the bindings as text: ``"<F1>"`` → path, ``"<F1><L07>"`` → line number."""
        table: dict[str, str] = {}
        for file, path in enumerate(self._paths):
            table[f"<F{file}>"] = path
            table.update({f"<F{file}><L{i:02d}>": str(number) for i, number in enumerate(self._numbers[file])})
        return table

    @classmethod
    def from_table(cls, table: Mapping[str, str]) -> Handles:
        """Return the handles that ``table()`` described."""
        handles = cls()
        for key, value in table.items():
            match = _KEY.match(key)
            assert match is not None, key
            if match[2] is None:
                handles.bind_file(value)
            else:
                handles.bind_line(int(match[1]), int(value))
        return handles


def _normal(path: str) -> str:
    return posixpath.normpath(path) if path else path
