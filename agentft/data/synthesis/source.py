"""One source file as text, tree and offsets (floor 3), and edits of it that keep its formatting.

Offsets are in characters from the start of the file; lines count from 1, columns from 0.
"""

from __future__ import annotations

import ast
import bisect
import functools
import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

PARSE_ATTEMPTS = 10
_PARSING = threading.Lock()
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_TOKEN = re.compile(r"\w+|\s+|[^\w\s]+")


def parse(text: str) -> ast.Module:
    """Return the tree of ``text`` (``SyntaxError``, ``ValueError``).

    One thread at a time: Python 3.11 counts the depth of all trees under construction in one place, and raises
    ``SystemError: AST constructor recursion depth mismatch`` when the collector lets other code in that builds or
    compiles one. Code that we do not call may do so too, and nothing is wrong with the text: it is parsed again.
    """
    with _PARSING:
        for _ in range(PARSE_ATTEMPTS - 1):
            with suppress(SystemError):
                return ast.parse(text)
        return ast.parse(text)


@dataclass(frozen=True)
class Function:
    """A module-level function or a method: where it starts (decorators included), its ``def``, its code, its end."""

    path: str
    qualname: str
    first_line: int
    def_line: int
    body_line: int
    end_line: int
    node: FunctionNode

    @property
    def name(self) -> str:
        """The bare name, as in ``def name``."""
        return self.node.name

    @property
    def key(self) -> str:
        """How the profile names it: path and first line."""
        return f"{self.path}:{self.first_line}"


@dataclass(frozen=True)
class FileEdit:
    """A ``file_edit`` call: ``old``, which starts on ``line`` and occurs once there, becomes ``new``."""

    path: str
    line: int
    old: str
    new: str

    def args(self) -> dict[str, str | int]:
        """Return the arguments of the tool call."""
        return {"path": self.path, "line": self.line, "old": self.old, "new": self.new}


class Source:
    """A parsed file; immutable by use."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return parse(self.text)

    @cached_property
    def meaning(self) -> str:
        """The syntax tree as text without positions: equal for files that differ only in layout."""
        return ast.dump(self.tree)

    @cached_property
    def lines(self) -> list[str]:
        """The lines without their line ends; ``lines[0]`` is line 1."""
        return self.text.split("\n")

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for line in self.lines:
            starts.append(starts[-1] + len(line) + 1)
        return starts

    def line_start(self, line: int) -> int:
        """Return the offset at which ``line`` starts."""
        return self._starts[line - 1]

    def position(self, offset: int) -> tuple[int, int]:
        """Return (line, column) of an offset."""
        line = bisect.bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1]

    def offset(self, line: int, byte_column: int) -> int:
        """Return the offset of a tree position (``ast`` columns count UTF-8 bytes)."""
        text = self.lines[line - 1]
        if not text.isascii():
            byte_column = len(text.encode()[:byte_column].decode("utf-8", "ignore"))
        return self._starts[line - 1] + byte_column

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the half-open offsets of a node."""
        start = self.offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        end = self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        return start, end

    def segment(self, node: ast.AST) -> str:
        """Return the text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        """Module-level functions and methods of module-level classes, in order."""
        found: list[Function] = []
        for node in self.tree.body:
            members = [(node, "")]
            if isinstance(node, ast.ClassDef):
                members = [(member, f"{node.name}.") for member in node.body]
            found += [self._function(item, prefix) for item, prefix in members if isinstance(item, FunctionNode)]
        return tuple(found)

    def function_at(self, line: int) -> Function | None:
        """Return the function that ``line`` belongs to."""
        return next((f for f in self.functions if f.first_line <= line <= f.end_line), None)

    def _function(self, node: FunctionNode, prefix: str) -> Function:
        code = code_statements(node)
        return Function(
            path=self.path,
            qualname=prefix + node.name,
            first_line=min([node.lineno, *(item.lineno for item in node.decorator_list)]),
            def_line=node.lineno,
            body_line=first_line_of(code[0]) if code else node.end_lineno or node.lineno,
            end_line=node.end_lineno or node.lineno,
            node=node,
        )


@functools.lru_cache(maxsize=128)
def source_of(path: str, text: str) -> Source:
    """Return the parsed file; the same text is parsed once."""
    return Source(path, text)


def first_line_of(statement: ast.stmt) -> int:
    """Return the first line of a statement, its decorators included."""
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(item.lineno for item in decorators)])


def code_statements(node: FunctionNode) -> list[ast.stmt]:
    """Return the statements of a function's body, its docstring left out."""
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


def edit_between(before: Source, start: int, end: int, replacement: str) -> FileEdit:
    """Return the smallest sensible ``file_edit`` that replaces ``before.text[start:end]`` by ``replacement``.

    The fragment grows token by token until it can be found on its line; whole inserted lines hang on a neighbour line.
    """
    if start == end and replacement.endswith("\n"):
        return _insert_lines(before, start, replacement.removesuffix("\n"))
    first, _ = before.position(start)
    last, _ = before.position(max(start, end - 1))
    low, high = before.line_start(first), before.line_start(last) + len(before.lines[last - 1])
    low = min(start, low + len(before.lines[first - 1]) - len(before.lines[first - 1].lstrip()))
    left, right = _grow(before, start, end, low, high)
    old = before.text[left:right]
    return FileEdit(before.path, first, old, before.text[left:start] + replacement + before.text[end:right])


def edit_from_to(before: Source, after: str) -> FileEdit:
    """Return the smallest sensible edit that turns ``before`` into ``after``: what lies between their common ends."""
    shorter = min(len(before.text), len(after))
    start = next((at for at in range(shorter) if before.text[at] != after[at]), shorter)
    same = 0
    while same < shorter - start and before.text[-1 - same] == after[-1 - same]:
        same += 1
    return edit_between(before, start, len(before.text) - same, after[start : len(after) - same])


def _grow(before: Source, start: int, end: int, low: int, high: int) -> tuple[int, int]:
    """Widen [start, end) inside [low, high) until the text is telling and unique on its line."""
    cuts = [low + match.start() for match in _TOKEN.finditer(before.text[low:high])] + [high]
    left, right = start, end
    to_right = True
    while not _is_telling(before, left, right):
        if (left, right) == (low, high):
            break
        if (to_right and right < high) or left == low:
            right = _trim_right(before, next(cut for cut in cuts if cut > right), cuts, high)
        else:
            left = _trim_left(before, max(cut for cut in cuts if cut < left), cuts, low)
        to_right = not to_right
    return left, right


def _trim_right(before: Source, right: int, cuts: list[int], high: int) -> int:
    return right if right == high or not before.text[right - 1].isspace() else next(cut for cut in cuts if cut > right)


def _trim_left(before: Source, left: int, cuts: list[int], low: int) -> int:
    return left if left == low or not before.text[left].isspace() else max(cut for cut in cuts if cut < left)


def _is_telling(before: Source, left: int, right: int) -> bool:
    old = before.text[left:right]
    if len(old) < 3 or not re.search(r"[^\W\d]", old) or old != old.strip():
        return False
    if old[0] in "=,.:)]}" or old[-1] in ".([{,":
        return False
    if re.search(r"\w", old[0]) and left > 0 and re.match(r"\w", before.text[left - 1]):
        return False
    if re.search(r"\w", old[-1]) and right < len(before.text) and re.match(r"\w", before.text[right]):
        return False
    return occurs_once(before, before.position(left)[0], old)


def occurs_once(before: Source, line: int, old: str) -> bool:
    """Whether ``old`` occurs exactly once starting on ``line``."""
    start = before.line_start(line)
    stop = start + len(before.lines[line - 1])
    hits = 0
    at = before.text.find(old, start)
    while at != -1 and at <= stop:
        hits += 1
        at = before.text.find(old, at + 1)
    return hits == 1


def apply_edit(before: Source, edit: FileEdit) -> str | None:
    """Return the text after ``edit``, by the rule of the tool; None where ``old`` is not there exactly once."""
    if not edit.old or not occurs_once(before, edit.line, edit.old):
        return None
    at = before.text.index(edit.old, before.line_start(edit.line))
    return before.text[:at] + edit.new + before.text[at + len(edit.old) :]


def _insert_lines(before: Source, start: int, inserted: str) -> FileEdit:
    line, _ = before.position(start)
    following = before.lines[line - 1] if line <= len(before.lines) else ""
    above = line - 1
    while above > 1 and not before.lines[above - 1].strip():
        above -= 1
    indent = following[: len(following) - len(following.lstrip())]
    if above < line - 1 and following.strip() and inserted.startswith(indent) and inserted[len(indent)] != " ":
        return FileEdit(before.path, line, following.strip(), f"{inserted[len(indent) :]}\n{following}")
    anchor = before.lines[above - 1].strip() + "\n" * (line - 1 - above)
    return FileEdit(before.path, above, anchor, f"{anchor}\n{inserted}")
