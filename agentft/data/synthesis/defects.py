"""Defects of a package (floor 3): every change that the operators propose, kept only where it is a real, small change.

How "no kind above a tenth" is counted: over the sessions kept of one request, by ``Defect.kind``. ``cap_of`` is the
most that a kind may hold; drawing prefers the kind that has least (see ``agentft.data.synthesis.draw``).
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from agentft.data.synthesis.operators import OPERATORS, Site
from agentft.data.synthesis.source import FileEdit, Function, Source, apply_edit, edit_between, parse

KIND_SHARE = 0.1
MAX_EDIT_CHARS = 600


@dataclass(frozen=True)
class Defect:
    """One small change of one function: ``original.text[start:end]`` becomes ``text``."""

    kind: str
    original: Source
    function: Function
    start: int
    end: int
    text: str

    @property
    def path(self) -> str:
        """The file that is changed."""
        return self.original.path

    @cached_property
    def broken(self) -> Source:
        """The file with the defect in it."""
        text = self.original.text
        return Source(self.path, text[: self.start] + self.text + text[self.end :])

    @cached_property
    def identity(self) -> str:
        """A stable short hash of what is changed, where, and in what."""
        parts = (self.kind, self.path, str(self.start), str(self.end), self.text, self.original.text)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

    @cached_property
    def repair(self) -> FileEdit:
        """The edit that gives the original back."""
        end = self.start + len(self.text)
        return edit_between(self.broken, self.start, end, self.original.text[self.start : self.end])

    @property
    def broken_line(self) -> int:
        """The line of the broken file on which the repair happens (the line above, where lines are gone)."""
        return self.repair.line

    @property
    def inserts_lines(self) -> bool:
        """Whether the repair puts back whole lines."""
        return self.text == "" and self.original.text[self.start : self.end].endswith("\n")


def find_defects(original: Source, only: Function | None = None) -> list[Defect]:
    """Return what the operators propose for ``original`` (or one function of it), in the order of the text.

    Not every proposal is sound: ask ``is_sound`` for those that are drawn (it parses the whole file).
    """
    found: dict[tuple[int, int, str], Defect] = {}
    for function in original.functions if only is None else (only,):
        for site in _sites(original, function):
            for kind, operator in OPERATORS.items():
                for change in operator(site):
                    found.setdefault(change, Defect(kind, original, function, *change))
    return list(found.values())


def is_sound(defect: Defect) -> bool:
    """Whether the change parses, compiles, differs in meaning, and is undone exactly by one small edit."""
    edit = defect.repair
    if len(edit.old) + len(edit.new) > MAX_EDIT_CHARS or not re.search(r"\w", edit.old):
        return False
    if apply_edit(defect.broken, edit) != defect.original.text:
        return False
    try:
        changed = parse(defect.broken.text)
        compile(changed, defect.path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return ast.dump(changed) != defect.original.meaning


def alternatives(defect: Defect, others: list[Defect]) -> list[FileEdit]:
    """Return wrong repairs at the same place: edits of the broken file that give another defect instead of a repair."""
    edits: list[FileEdit] = []
    for other in others:
        same_place = (other.start, other.end) == (defect.start, defect.end) and other.start < other.end
        if same_place and other.text and other.text != defect.text and is_sound(other):
            edit = edit_between(defect.broken, defect.start, defect.start + len(defect.text), other.text)
            if apply_edit(defect.broken, edit) == other.broken.text and edit.new != edit.old:
                edits.append(edit)
    return edits


def cap_of(count: int) -> int:
    """Return how many of ``count`` kept sessions may be of one kind."""
    return max(1, int(count * KIND_SHARE))


def _sites(original: Source, function: Function) -> Iterator[Site]:
    stack: list[tuple[ast.AST, ast.AST]] = [(function.node, original.tree)]
    while stack:
        node, parent = stack.pop()
        yield Site(original, function, node, parent)
        skipped = _not_code(node)
        children = [child for child in ast.iter_child_nodes(node) if child not in skipped]
        stack += [(child, node) for child in reversed(children)]


def _not_code(node: ast.AST) -> list[ast.AST]:
    """Return the children that never decide what a function does: docstring, annotations, decorators."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        documented = ast.get_docstring(node, clean=False) is not None
        return [*node.decorator_list, *([node.returns] if node.returns else []), *(node.body[:1] if documented else [])]
    if isinstance(node, ast.arg | ast.AnnAssign):
        return [node.annotation] if node.annotation else []
    return []
