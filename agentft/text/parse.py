"""From token ids back to what the agent meant (floor 2): the inverse of rendering. Malformed is data, never an error.

turn = parse_turn(ids, vocab, handles)         # one turn of the agent: a thought and a call, or the final answer
call = parse_call(ids, vocab, handles)         # one call, from tool-start to tool-end
text = to_text(rendered.input_ids, vocab, Handles.from_table(rendered.handles))   # the form without handles
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from agentft.text.handles import Handles
from agentft.text.results import NUMBER_SEPARATOR
from agentft.text.vocab import Vocab
from agentft.tools import TOOLS, FormatError, ToolCall, ToolSpec
from agentft.tools.check import has_type


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of the agent: ``thought`` and ``call``, or an ``answer``. A malformed turn has a ``FormatError``."""

    thought: str | None = None
    call: ToolCall | FormatError | None = None
    answer: str | None = None


class _MalformedError(Exception):
    """Internal: why the ids are no call; becomes a ``FormatError``."""


@dataclass(frozen=True)
class _Pointer:
    """A handle as it stands in a value: of a file, or of a line."""

    kind: str
    index: int


def parse_turn(ids: Sequence[int], vocab: Vocab, handles: Handles, tools: Mapping[str, ToolSpec] = TOOLS) -> Turn:
    """Read one turn: ``<|step|>thought`` and a call, or ``<|trace_end|><|output|>text<|eot|>``."""
    ids = [int(i) for i in ids]
    if ids[:2] == [vocab.trace_end, vocab.output]:
        end = ids.index(vocab.eot) if vocab.eot in ids else len(ids)
        if end == len(ids) - 1 and not _has_special(ids[2:end], vocab):
            return Turn(answer=vocab.decode(ids[2:end]))
        return Turn(call=FormatError(vocab.decode(ids), "the final answer does not end with <|eot|>"))
    if not ids or ids[0] != vocab.step:
        return Turn(call=FormatError(vocab.decode(ids), "a turn begins with <|step|> or <|trace_end|>"))
    if vocab.tool_start not in ids:
        return Turn(call=FormatError(vocab.decode(ids), "no call in this turn"))
    at = ids.index(vocab.tool_start)
    if _has_special(ids[1:at], vocab):
        return Turn(call=FormatError(vocab.decode(ids), "special token inside the thought"))
    return Turn(thought=vocab.decode(ids[1:at]) or None, call=parse_call(ids[at:], vocab, handles, tools))


def parse_call(
    ids: Sequence[int], vocab: Vocab, handles: Handles, tools: Mapping[str, ToolSpec] = TOOLS
) -> ToolCall | FormatError:
    """Read one call, ids from tool-start up to and with tool-end; handles become what they stand for."""
    ids = [int(i) for i in ids]
    try:
        name, raw = _split(ids, vocab)
        spec = tools.get(name)
        if spec is None:
            raise _MalformedError(f"unknown tool {name[:60]!r}")
        args = _resolve(raw, spec, handles)
        _check(args, spec)
    except _MalformedError as problem:
        return FormatError(vocab.decode(ids), str(problem))
    return ToolCall(name, args)


def _has_special(ids: Sequence[int], vocab: Vocab) -> bool:
    return any(token in vocab.special for token in ids)


def _split(ids: list[int], vocab: Vocab) -> tuple[str, list[tuple[str, Any]]]:
    """Return the tool's name and its arguments in order, pointers unresolved."""
    if not ids or ids[0] != vocab.tool_start:
        raise _MalformedError("a call begins with <|tool_start|>")
    if ids[-1] != vocab.tool_end:
        raise _MalformedError("the call is not closed by <|tool_end|>")
    body = ids[1:-1]
    if vocab.args not in body:
        raise _MalformedError("no <|args|> after the tool's name")
    at = body.index(vocab.args)
    name = _content(body[:at], vocab, "the tool's name")
    arguments: list[tuple[str, Any]] = []
    starts = [i for i, token in enumerate(body) if token == vocab.arg]
    if at + 1 != (starts[0] if starts else len(body)):
        raise _MalformedError("<|args|> is not followed by <|arg|> or <|tool_end|>")
    for start, end in pairwise([*starts, len(body)]):
        key, value = _argument(body[start + 1 : end], vocab)
        if any(key == known for known, _ in arguments):
            raise _MalformedError(f"argument {key[:60]!r} is given twice")
        arguments.append((key, value))
    return name, arguments


def _argument(ids: list[int], vocab: Vocab) -> tuple[str, Any]:
    at = next((i for i, token in enumerate(ids) if token in (vocab.val, vocab.json)), None)
    if at is None:
        raise _MalformedError("an argument has neither <|val|> nor <|json|>")
    key, value = _content(ids[:at], vocab, "an argument's name"), ids[at + 1 :]
    if ids[at] == vocab.val:
        if len(value) == 1 and value[0] in vocab.files:
            return key, _Pointer("file", vocab.files.index(value[0]))
        return key, _content(value, vocab, f"the value of {key[:60]!r}")
    if len(value) == 1 and value[0] in vocab.lines:
        return key, _Pointer("line", vocab.lines.index(value[0]))
    text = _content(value, vocab, f"the value of {key[:60]!r}")
    try:
        return key, json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _MalformedError(f"the value of {key[:60]!r} is not JSON: {error}") from None


def _content(ids: list[int], vocab: Vocab, what: str) -> str:
    if _has_special(ids, vocab):
        raise _MalformedError(f"special token inside {what}")
    return vocab.decode(ids)


def _resolve(raw: list[tuple[str, Any]], spec: ToolSpec, handles: Handles) -> dict[str, Any]:
    refers = {p.name: p.refers_to for p in spec.parameters}
    args: dict[str, Any] = {}
    for key, value in raw:
        if isinstance(value, _Pointer):
            if refers.get(key) != value.kind:
                raise _MalformedError(f"argument {key[:60]!r} cannot be a {value.kind} handle")
            if value.kind == "file":
                args[key] = handles.path(value.index)
                if args[key] is None:
                    raise _MalformedError(f"<F{value.index}> stands for no file yet")
                continue
        args[key] = value
    file = call_file(args, spec, handles)
    for key, value in args.items():
        if isinstance(value, _Pointer):
            args[key] = handles.number(file, value.index)
            if args[key] is None:
                raise _MalformedError(f"<L{value.index:02d}> stands for no line of this file yet")
    return args


def call_file(args: Mapping[str, Any], spec: ToolSpec, handles: Handles) -> int | None:
    """Return the handle of the file that a call is about (its first argument that refers to one), if it has one."""
    path = next((args.get(p.name) for p in spec.parameters if p.refers_to == "file"), None)
    return handles.file(path) if isinstance(path, str) else None


def _check(args: Mapping[str, Any], spec: ToolSpec) -> None:
    known = {p.name: p for p in spec.parameters}
    for key, value in args.items():
        if key not in known:
            raise _MalformedError(f"{spec.name} has no argument {key[:60]!r}")
        kind = known[key].type
        if not has_type(value, kind):
            raise _MalformedError(f"argument {key!r} is no {kind}")
    missing = [p.name for p in spec.parameters if p.required and p.name not in args]
    if missing:
        raise _MalformedError(f"{spec.name} lacks {', '.join(missing)}")


def to_text(ids: Sequence[int], vocab: Vocab, handles: Handles) -> str:
    """Return ids as text with special tokens by name and every handle resolved: what rendering without handles says."""
    return _TextForm(vocab, handles).read([int(i) for i in ids])


class _TextForm:
    """Walks over ids; knows whether it is in a call or a result, and which file the last handle named."""

    def __init__(self, vocab: Vocab, handles: Handles) -> None:
        self.vocab, self.handles = vocab, handles
        self.files = {token: i for i, token in enumerate(vocab.files)}
        self.lines = {token: i for i, token in enumerate(vocab.lines)}
        self.where = vocab.context
        self.file: int | None = None
        self.out: list[str] = []

    def read(self, ids: list[int]) -> str:
        vocab, at = self.vocab, 0
        while at < len(ids):
            token, before = ids[at], ids[at - 1] if at else -1
            if token in self.files:
                self._file(self.files[token], before)
            elif token in self.lines:
                self._line(self.lines[token], before, ids, at)
            elif token == vocab.file and self.where == vocab.result:
                pass  # the file of a result: said by the call
            elif token in vocab.special:
                self._special(token)
            else:
                end = at + 1
                while end < len(ids) and ids[end] not in vocab.special:
                    end += 1
                self.out.append(vocab.decode(ids[at:end]))
                at = end
                continue
            at += 1
        return "".join(self.out)

    def _special(self, token: int) -> None:
        vocab = self.vocab
        if token in (vocab.context, vocab.tool_start, vocab.result, vocab.trace_start):
            self.where = token
        elif token in (vocab.tool_end, vocab.result_end):
            self.where = vocab.trace_start
        if token == vocab.tool_start:
            self.file = None
        self.out.append(vocab.special[token])

    def _file(self, file: int, before: int) -> None:
        if before == self.vocab.file or self.where == self.vocab.tool_start:
            self.file = file
        known = self.handles.path(file)
        path = f"<F{file}>" if known is None else known
        if self.where == self.vocab.tool_start:
            self.out.append(path)
        elif before == self.vocab.cursor:
            self.out.append(path + ":")

    def _line(self, line: int, before: int, ids: list[int], at: int) -> None:
        if self.where == self.vocab.tool_start:
            number = self.handles.number(self._file_of_call(ids, at), line)
            self.out.append(f"<L{line:02d}>" if number is None else str(number))
        elif before not in self.files and self.out:
            number = self.handles.number(self.file, line)
            head, newline, text = self.out[-1].rpartition("\n")
            self.out[-1] = f"{head}{newline}{number}{NUMBER_SEPARATOR}{text}"

    def _file_of_call(self, ids: list[int], at: int) -> int | None:
        """The file of the call around ``at``: a file handle in it, or a path spelled out."""
        vocab = self.vocab
        start = max(i for i in range(at) if ids[i] == vocab.tool_start)
        end = next((i for i in range(at, len(ids)) if ids[i] == vocab.tool_end), len(ids))
        for i in range(start, end):
            if ids[i] in self.files:
                return self.files[ids[i]]
        for i in (i for i in range(start, end) if ids[i] == vocab.val):
            stop = next((j for j in range(i + 1, end) if ids[j] in vocab.special), end)
            file = self.handles.file(vocab.decode(ids[i + 1 : stop]))
            if file is not None:
                return file
        return None
