"""One caught defect with all that a session needs to know of it (floor 3), and the places that the agent may look at.

Everything here is computed from text; nothing runs.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from agentft.data.synthesis.defects import Defect, alternatives, find_defects, is_sound
from agentft.data.synthesis.package import Package
from agentft.data.synthesis.profile import Profile
from agentft.data.synthesis.screen import Verdict
from agentft.data.synthesis.source import FileEdit, Function, Source, apply_edit, edit_between, source_of

WINDOW = 14
_ERROR_NAME = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Warning|Iteration|Interrupt|Exit)")


@dataclass(frozen=True)
class Window:
    """Lines of a file that are read together, both ends included."""

    path: str
    start: int
    end: int

    def shows(self, path: str, line: int) -> bool:
        """Whether ``line`` of ``path`` is among them."""
        return path == self.path and self.start <= line <= self.end


@dataclass(frozen=True)
class Case:
    """A defect that real tests catch."""

    package: Package
    profile: Profile
    defect: Defect
    verdict: Verdict
    seed: int

    @property
    def session_id(self) -> str:
        """Stable over runs: package and defect."""
        return f"synth-{self.package.name}-{self.defect.identity}"

    @cached_property
    def test(self) -> str:
        """The failing test that the session is about; one named after the function if there is one."""
        name = self.name.strip("_").lower()
        return min(self.verdict.failing, key=lambda t: (name not in t.lower(), len(t), t))

    @property
    def test_file(self) -> str:
        """The file of ``test``."""
        return self.test.split("::", 1)[0]

    @property
    def name(self) -> str:
        """The name of the broken function."""
        return self.defect.function.name

    @property
    def broken(self) -> Source:
        """The broken file."""
        return self.defect.broken

    @cached_property
    def function(self) -> Function:
        """The broken function, with the lines of the broken file."""
        line = self.broken.position(self.defect.start)[0]
        found = self.broken.function_at(line) or self.broken.function_at(self.line)
        return found or self.defect.function

    @property
    def line(self) -> int:
        """The line of the broken file where the repair happens."""
        return self.defect.repair.line

    @cached_property
    def files(self) -> dict[str, str]:
        """The workspace with the defect: what the test file and the broken file need, no more."""
        files = self.package.workspace([self.test_file, self.defect.path])
        return {**files, self.defect.path: self.broken.text}

    @cached_property
    def error(self) -> str | None:
        """The exception that the test ends in; None for a failed assertion."""
        message = (self.verdict.errors or {}).get(self.test, "")
        match = _ERROR_NAME.match(message)
        return None if match is None or match.group(0) == "AssertionError" else match.group(0)

    @property
    def intent(self) -> str:
        """What kind of work the repair is."""
        if self.defect.kind == "function_removed":
            return "implement_function"
        return "debug_runtime_error" if self.error else "fix_test_failure"

    @cached_property
    def neighbour(self) -> str | None:
        """A fast test of the same file that passes with the defect."""
        unrelated = [t.node_id for t in self.profile.unrelated(self.defect.function, self.test_file)]
        choices = [*self.verdict.passing, *unrelated][:6]
        return random.Random(self.seed).choice(choices) if choices else None

    @cached_property
    def around_def(self) -> list[Window]:
        """The reads that start at ``def`` and go on, at most once, where the first stops before the fault."""
        first = window_from(self.broken, self.function.def_line)
        if self.line > first.end:
            return [first, window_from(self.broken, first.end + 1)]
        return [first]

    @property
    def test_window(self) -> Window | None:
        """The lines of the failing test."""
        source = source_of(self.test_file, self.files[self.test_file])
        wanted = ".".join(self.test.split("::")[1:])
        found = next((f for f in source.functions if f.qualname == wanted), None)
        return None if found is None else window_from(source, found.def_line)

    def shown(self, windows: Iterable[Window]) -> bool:
        """Whether the place of the repair is in one of ``windows``."""
        return any(window.shows(self.defect.path, self.line) for window in windows)

    @cached_property
    def caller(self) -> tuple[Function, Window] | None:
        """A function that the failing test enters, that calls the broken one, and whose read shows that call."""
        test = next(t for t in self.profile.tests if t.node_id == self.test)
        for path in (path for path in self.package.sources if path in self.files):
            original = source_of(path, self.package.files[path])
            now = source_of(path, self.files[path])
            for function in original.functions:
                if function.key in test.calls and function.name != self.name and not function.name.startswith("__"):
                    moved = next((f for f in now.functions if f.qualname == function.qualname), None)
                    window = window_from(now, moved.def_line) if moved else None
                    calls = _call_lines(moved, self.name)
                    visible = window is not None and any(window.shows(path, line) for line in calls)
                    if window is not None and visible and not self.shown([window]):
                        return function, window
        return None

    def wrong_here(self, rng: random.Random) -> FileEdit | None:
        """Return a wrong edit of the broken line: another wrong text at the same place, or a change of another part."""
        same = find_defects(self.defect.original, self.defect.function)
        edits = alternatives(self.defect, same)
        if one_line(self.defect) and not self.defect.inserts_lines:
            others = [
                other
                for other in find_defects(self.broken, self.function)
                if self.broken.position(other.start)[0] == self.line and one_line(other)
            ]
            others = [other for other in rng.sample(others, min(3, len(others))) if is_sound(other)]
            edits += [edit_between(self.broken, other.start, other.end, other.text) for other in others]
        right = self.defect.original.text
        edits = [edit for edit in edits if apply_edit(self.broken, edit) not in (None, right)]
        return rng.choice(edits) if edits else None

    def wrong_nearby(self, windows: Sequence[Window]) -> list[Defect]:
        """Changes of correct lines of the same function that ``windows`` show; all are one-line changes."""
        start, end = self.defect.start, self.defect.start + len(self.defect.text)
        last = self.broken.position(max(start, end - 1))[0]
        found = []
        for other in find_defects(self.broken, self.function):
            line = self.broken.position(other.start)[0]
            apart = line < self.line or line > last + self.defect.inserts_lines
            visible = any(window.shows(self.defect.path, line) for window in windows)
            if apart and visible and one_line(other) and other.kind != "function_removed":
                found.append(other)
        return found


def one_line(defect: Defect) -> bool:
    """Whether the change replaces part of one line."""
    old = defect.original.text[defect.start : defect.end]
    return "\n" not in old and "\n" not in defect.text


def window_from(source: Source, line: int) -> Window:
    """Return the lines from ``line`` on."""
    return Window(source.path, line, min(line + WINDOW - 1, max(1, len(source.lines) - 1)))


def window_around(source: Source, line: int, size: int = WINDOW) -> Window:
    """Return the lines around ``line``."""
    start = max(1, line - size // 2)
    return Window(source.path, start, min(start + size - 1, max(1, len(source.lines) - 1)))


def _call_lines(function: Function | None, name: str) -> list[int]:
    if function is None:
        return []
    lines = []
    for node in ast.walk(function.node):
        if isinstance(node, ast.Call):
            target = node.func
            called = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", None)
            if called == name:
                lines.append(node.lineno)
    return lines
