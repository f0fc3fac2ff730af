"""What a tool result looks like as tokens (floor 2): status, place, counts, messages, then the output.

The whole result stays within a budget of tokens: the output is cut in its middle, line by line, with a marker.
With handles on, what is shown is also labelled, so that the agent can point at it:

- ``<|file|><F1>`` after the status: the file that this result is about;
- ``<|cursor|><F1><L07>47``: the place that a failing run points at;
- ``text<L07>``: a line of ``file_read``, the label in place of its number;
- ``src/x.py:47<F1><L07>``: a place that the output mentions (a frame, a search hit, a linter's finding).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from agentft.etai import ExecutionResult
from agentft.text.handles import Handles
from agentft.text.vocab import LINE_HANDLES, Vocab
from agentft.tools import ToolCall, ToolSpec

COUNT_FIELDS = ("passed", "failed", "errors", "skipped")
PLACE_TOOLS = ("code_search", "pytest_run", "type_check", "lint_run")
"""Tools whose output lines may begin with ``path:line:``."""
NUMBER_SEPARATOR = ": "
"""Stands between number and text in the output of ``file_read``."""

_QUIET_STATUS = (None, "ok", "nonzero")
_NUMBERED = re.compile(rf"([1-9][0-9]*){NUMBER_SEPARATOR}(.*)\Z", re.DOTALL)
_LINE_PLACE = re.compile(r"([^\s:/<][^\s:]*):([1-9][0-9]{0,5})(?=:)")
_MESSAGE_TOKENS = 32
_CUT = " [... cut ...] "
_CHARACTERS_PER_TOKEN = 32
_LEAST_LINE = 16

Place = tuple[str, int]


@dataclass
class _Line:
    """One line of output: its pieces, each with the place that it ends in, or the number that a label replaces."""

    pieces: list[tuple[tuple[int, ...], Place | None]]
    number: int | None = None

    def cost(self) -> int:
        labels = sum(2 for _, place in self.pieces if place) + (self.number is not None)
        return sum(len(ids) for ids, _ in self.pieces) + labels


@dataclass
class ResultWriter:
    """Writes one result; ``ids`` are its tokens, ``cut`` is how many tokens of output did not fit."""

    vocab: Vocab
    handles: Handles
    budget: int
    ids: list[int] = field(default_factory=list)
    cut: int = 0

    def write(self, call: ToolCall | None, spec: ToolSpec | None, result: ExecutionResult) -> None:
        """Append the tokens of ``result`` from result-start to result-end, binding handles for what is shown."""
        name, text = call.name if call else "", output_text(result)
        self.ids += [self.vocab.result, *self.vocab.encode(status_line(result))]
        edited = _edited(call, result)
        file = None
        if edited is not None:
            self._place(*edited)
            text = ""  # the place says all of it
        else:
            file = self._subject(call, spec, result)
        if result.error_location is not None:
            self._place(result.error_location.file, result.error_location.line)
        numbered = name == "file_read" and result.exit_code == 0
        known = result.error_location
        named = None if self.handles.off or numbered or known is None else (known.file, known.line)
        leading = name in PLACE_TOOLS and not self.handles.off
        lines, far_lines, far_tokens = self._lines(text, file if numbered else None, named, leading)
        self._fit(lines, far_lines, far_tokens, file, (result.model_extra or {}).get("message"))
        self.ids.append(self.vocab.result_end)

    def _room(self) -> int:
        return self.budget - len(self.ids) - 1

    def _subject(self, call: ToolCall | None, spec: ToolSpec | None, result: ExecutionResult) -> int | None:
        if call is None or spec is None or result.exit_code != 0:
            return None
        path = next((call.args.get(p.name) for p in spec.parameters if p.refers_to == "file" and p.required), None)
        file = self.handles.bind_file(path) if isinstance(path, str) else None
        if file is not None:
            self.ids += [self.vocab.file, self.vocab.files[file]]
        return file

    def _place(self, path: str, number: int) -> None:
        file = self.handles.file(path)
        if file is not None and self.handles.path(file) == path:
            labels, text = [self.vocab.files[file], *self._line_label(file, number)], str(number)
            self.ids += [self.vocab.cursor, *labels, *self.vocab.encode(text)]
            return
        shown = self.vocab.encode(f"{path}:{number}")
        if len(shown) + 3 <= self._room():
            self.ids += [self.vocab.cursor, *shown, *self._labels((path, number))]

    def _line_label(self, file: int, number: int) -> list[int]:
        line = self.handles.bind_line(file, number)
        return [] if line is None else [self.vocab.lines[line]]

    def _labels(self, place: Place) -> list[int]:
        file = self.handles.bind_file(place[0])
        return [] if file is None else [self.vocab.files[file], *self._line_label(file, place[1])]

    def _lines(self, text: str, file: int | None, named: Place | None, leading: bool) -> tuple[list[_Line], int, int]:
        """Return the lines near both ends of ``text``, and how many lines and tokens lie between, unseen.

        ``file``: its lines are numbered. ``named``: a place to label. ``leading``: lines may begin with a place.
        """
        near = max(self.budget, _LEAST_LINE) * _CHARACTERS_PER_TOKEN
        far_lines = far_tokens = 0
        parts = [text]
        if len(text) > 2 * near:
            head, tail = text[:near], text[-near:]
            head = head[: head.rfind("\n")] if "\n" in head else head
            tail = tail[tail.find("\n") + 1 :] if "\n" in tail else "…" + tail  # half a line never passes for a whole
            parts, middle = [head, tail], text[len(head) : len(text) - len(tail)]
            far_lines, far_tokens = middle.count("\n"), len(middle) // 4
        mention = re.compile(rf"(?<![\w./-]){re.escape(f'{named[0]}:{named[1]}')}(?![0-9])") if named else None
        left = LINE_HANDLES - self.handles.lines_in(file) if file is not None else 0
        lines: list[_Line] = []
        for line in (line for part in parts for line in part.split("\n") if part):
            match = _NUMBERED.match(line) if file is not None else None
            if match is None:
                pieces = _pieces(line, mention, named, leading)
                lines.append(_Line([(self._encode(piece), place) for piece, place in pieces]))
                continue
            known = self.handles.line(file, int(match[1])) is not None
            left -= not known
            number = int(match[1]) if known or left >= 0 else None
            lines.append(_Line([(self._encode("\n" + (line if number is None else match[2])), None)], number))
        return lines, far_lines, far_tokens

    def _encode(self, text: str) -> tuple[int, ...]:
        ids, cut = shorten(self.vocab, text, max(_LEAST_LINE, self.budget // 3))
        self.cut += cut
        return ids

    def _fit(self, lines: Sequence[_Line], far_lines: int, far_tokens: int, file: int | None, message: object) -> None:
        """Append all lines, or those near both ends, after the message that may stand in what is cut."""
        costs = [line.cost() for line in lines]
        if not far_lines and not far_tokens and sum(costs) <= self._room():
            self._emit(lines, file)
            return
        if isinstance(message, str) and message.strip():
            ids, _ = shorten(self.vocab, "\n" + message.strip(), _MESSAGE_TOKENS)
            self.ids += ids if len(ids) <= self._room() // 2 else ()
        room = self._room() - len(self.vocab.encode(_left_out(len(lines) + far_lines)))
        head, tail, used = 0, len(lines), 0
        while head < tail and used + costs[head] <= room // 2:
            used += costs[head]
            head += 1
        while tail > head and used + costs[tail - 1] <= room:
            used += costs[tail - 1]
            tail -= 1
        self.cut += sum(costs[head:tail]) + far_tokens
        marker = self.vocab.encode(_left_out(tail - head + far_lines))
        self._emit(lines[:head], file)
        if len(marker) <= self._room() - sum(costs[tail:]):
            self.ids += marker
        self._emit(lines[tail:], file)

    def _emit(self, lines: Sequence[_Line], file: int | None) -> None:
        for line in lines:
            for ids, place in line.pieces:
                self.ids += ids
                if place is not None:
                    self.ids += self._labels(place)
            if line.number is not None and file is not None:
                self.ids += self._line_label(file, line.number)


def status_line(result: ExecutionResult) -> str:
    """Return ``exit 0``, with the status where it says more than the code, and counts where the result has them."""
    parts = [f"exit {'null' if result.exit_code is None else result.exit_code}"]
    if result.status not in _QUIET_STATUS:
        parts.append(str(result.status)[:24])
    extra = result.model_extra or {}
    for name in COUNT_FIELDS:
        count = extra.get(name)
        if isinstance(count, int) and not isinstance(count, bool) and (count or name in ("passed", "failed")):
            parts.append(f"{name} {count}")
    return " ".join(parts)


def output_text(result: ExecutionResult) -> str:
    """Return stdout, then stderr under a heading where both are there; newlines at the end are left out."""
    stdout, stderr = result.stdout.rstrip("\n"), result.stderr.rstrip("\n")
    return f"{stdout}\n[stderr]\n{stderr}" if stdout and stderr else stdout or stderr


def format_error_result(reason: str) -> ExecutionResult:
    """Return what stands in a conversation for the result of a call that did not parse."""
    return ExecutionResult(exit_code=None, status="format_error", stderr=reason)


def shorten(vocab: Vocab, text: str, limit: int) -> tuple[tuple[int, ...], int]:
    """Return the ids of ``text``, cut in its middle to about ``limit`` tokens, and how many tokens went."""
    ids = vocab.encode(text)
    if len(ids) <= limit:
        return ids, 0
    marker = vocab.encode(_CUT)
    keep = int(len(text) * max(0, limit - len(marker)) / len(ids))
    while True:
        head, tail = text[: keep - keep // 2], text[len(text) - keep // 2 :]
        short = vocab.encode(head) + marker + vocab.encode(tail)
        if len(short) <= limit or keep == 0:
            return short, len(ids) - len(short) + len(marker)
        keep = int(keep * 0.93)


def _left_out(lines: int) -> str:
    return f"\n[... {lines} lines left out ...]"


def _edited(call: ToolCall | None, result: ExecutionResult) -> Place | None:
    """Return where ``file_edit`` changed the file, if that is all that its output says."""
    if call is None or call.name != "file_edit" or result.exit_code != 0 or result.stderr:
        return None
    path, line = call.args.get("path"), (result.model_extra or {}).get("start_line")
    if not isinstance(path, str) or not isinstance(line, int) or result.stdout != f"{path}: edited at line {line}\n":
        return None
    return path, line


def _pieces(
    line: str, mention: re.Pattern[str] | None, named: Place | None, leading: bool
) -> Iterator[tuple[str, Place | None]]:
    """Split ``line`` (a newline goes before it) after each place it mentions."""
    start, text = 0, "\n" + line
    first = _LINE_PLACE.match(line) if leading else None
    if first is not None:
        start = len("\n") + first.end()
        yield text[:start], (first[1], int(first[2]))
    for match in mention.finditer(text, start) if mention else ():
        yield text[start : match.end()], named
        start = match.end()
    if start < len(text):
        yield text[start:], None
