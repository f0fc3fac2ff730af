"""Parsing calls back from ids: exact for every call, and malformed ids are data."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import PATHS, calls, small_vocab, texts, values

from agentft.config.schema import FeedbackPositionsConfig, TextConfig
from agentft.text.handles import Handles
from agentft.text.parse import parse_call, parse_turn, to_text
from agentft.text.render import Renderer
from agentft.tools import TOOLS, FormatError, Parameter, ToolCall, ToolSpec

KINDS = ("string", "integer", "number", "boolean", "array", "object")
CUSTOM = ToolSpec(
    name="my tool<|args|>",
    description="every type",
    parameters=tuple(Parameter(name=f"{kind} 1", type=kind, description="", required=False) for kind in KINDS),
)


def shown() -> Handles:
    handles = Handles()
    for path in PATHS:
        file = handles.bind_file(path)
        assert file is not None
        for number in range(1, 30, 2):
            handles.bind_line(file, number)
    return handles


def ids_of(call: ToolCall, handles: Handles, tools: tuple[ToolSpec, ...] = tuple(TOOLS.values())) -> list[int]:
    return Renderer(small_vocab(), TextConfig(), FeedbackPositionsConfig(), tools).call_ids(call, handles)


@given(calls(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_parsing_inverts_rendering(call: ToolCall, use_handles: bool) -> None:
    handles = shown() if use_handles else Handles(off=True)
    parsed = parse_call(ids_of(call, handles), small_vocab(), handles)
    assert isinstance(parsed, ToolCall)
    assert parsed == call
    assert parsed.canonical() == call.canonical()
    assert list(parsed.args) == list(call.args)


@given(st.fixed_dictionaries({}, optional={f"{kind} 1": values(kind) for kind in KINDS}))
@settings(max_examples=60, deadline=None)
def test_every_type_of_a_custom_tool(args: dict[str, Any]) -> None:
    call = ToolCall(CUSTOM.name, args)
    assert parse_call(ids_of(call, Handles(), (CUSTOM,)), small_vocab(), Handles(), {CUSTOM.name: CUSTOM}) == call


def test_calls_point_only_at_what_was_shown() -> None:
    handles, vocab = Handles(), small_vocab()
    call = ToolCall("file_read", {"start_line": 7, "path": "src/a.py", "end_line": 8})
    plain = vocab.decode(ids_of(call, handles))
    file = handles.bind_file("src/a.py")
    assert file == 0
    handles.bind_line(file, 7)
    pointed = vocab.decode(ids_of(call, handles))
    assert "<F0>" not in plain
    head = "<|tool_start|>file_read<|args|><|arg|>start_line<|json|><L00><|arg|>path<|val|><F0>"
    assert pointed == head + "<|arg|>end_line<|json|>8<|tool_end|>"
    assert to_text(ids_of(call, handles), vocab, handles) == plain
    other_spelling = ToolCall("file_read", {"path": "./src/a.py", "start_line": 7})
    assert "<val|>./src/a.py" in vocab.decode(ids_of(other_spelling, handles)).replace("<|val", "<val")
    assert parse_call(ids_of(other_spelling, handles), vocab, handles) == other_spelling


@given(st.lists(st.integers(0, small_vocab().size - 1), max_size=30))
@settings(max_examples=150, deadline=None)
def test_any_ids_are_data(ids: list[int]) -> None:
    vocab = small_vocab()
    for attempt in (ids, [vocab.tool_start, *ids, vocab.tool_end], [vocab.step, *ids]):
        assert isinstance(parse_call(attempt, vocab, shown()), ToolCall | FormatError)
        turn = parse_turn(attempt, vocab, shown())
        assert turn.call is not None or turn.answer is not None
        assert isinstance(to_text(attempt, vocab, shown()), str)


@given(calls(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_damaged_call_never_crashes(call: ToolCall, data: st.DataObject) -> None:
    vocab, handles = small_vocab(), shown()
    ids = ids_of(call, handles)
    at = data.draw(st.integers(0, len(ids) - 1))
    ids[at : at + data.draw(st.integers(0, 2))] = data.draw(
        st.lists(st.sampled_from(sorted(vocab.special)), max_size=2)
    )
    parsed = parse_call(ids, vocab, handles)
    if isinstance(parsed, ToolCall):
        assert parse_call(ids_of(parsed, handles), vocab, handles) == parsed


def broken(*parts: str | int) -> list[int]:
    return [i for part in parts for i in ([part] if isinstance(part, int) else small_vocab().encode(part))]


V = small_vocab()
READ = (V.tool_start, "file_read", V.args, V.arg, "path", V.val, "src/a.py")


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (broken("file_read"), "begins with"),
        (broken(*READ), "not closed"),
        (broken(V.tool_start, "file_read", V.tool_end), r"no <\|args\|>"),
        (broken(V.tool_start, "rm_rf", V.args, V.tool_end), "unknown tool 'rm_rf'"),
        (broken(V.tool_start, "file_read", V.args, V.tool_end), "lacks path"),
        (broken(V.tool_start, "file_read", V.args, "x", V.tool_end), "not followed"),
        (broken(*READ, V.arg, "path", V.val, "b", V.tool_end), "twice"),
        (broken(*READ, V.arg, "depth", V.json, "3", V.tool_end), "has no argument 'depth'"),
        (broken(*READ, V.arg, "start_line", V.json, "[3", V.tool_end), "is not JSON"),
        (broken(*READ, V.arg, "start_line", V.json, "true", V.tool_end), "is no integer"),
        (broken(*READ, V.arg, "start_line", V.val, "3", V.tool_end), "is no integer"),
        (broken(*READ, V.arg, "start_line", V.tool_end), "neither"),
        (broken(*READ, V.arg, "start_line", V.json, V.lines[95], V.tool_end), "<L95> stands for no line"),
        (broken(*READ, V.arg, "start_line", V.val, V.files[0], V.tool_end), "cannot be a file handle"),
        (broken(V.tool_start, "file_read", V.args, V.arg, "path", V.val, V.files[15], V.tool_end), "no file yet"),
        (broken(V.tool_start, "shell_run", V.args, V.arg, "command", V.json, V.lines[0], V.tool_end), "line handle"),
        (broken(*READ, V.result, V.tool_end), "special token inside the value"),
    ],
)
def test_reasons(ids: list[int], reason: str) -> None:
    parsed = parse_call(ids, V, shown())
    assert isinstance(parsed, FormatError)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(parsed.reason)
    assert parsed.text == V.decode(ids)


@given(texts(), calls())
@settings(max_examples=60, deadline=None)
def test_turns(thought: str, call: ToolCall) -> None:
    handles = shown()
    turn = parse_turn([V.step, *V.encode(thought), *ids_of(call, handles)], V, handles)
    assert (turn.thought, turn.call, turn.answer) == (thought or None, call, None)
    answer = parse_turn([V.trace_end, V.output, *V.encode(thought), V.eot], V, handles)
    assert (answer.thought, answer.call, answer.answer) == (None, None, thought)


@pytest.mark.parametrize(
    "ids",
    [
        [],
        broken("hello"),
        broken(V.step, "hello"),
        broken(V.step, "a", V.result, V.tool_start, "git_status", V.args, V.tool_end),
        broken(V.trace_end, V.output, "half an ans"),
        broken(V.trace_end, V.output, "a", V.step, "b", V.eot),
    ],
)
def test_malformed_turns(ids: list[int]) -> None:
    assert isinstance(parse_turn(ids, V, shown()).call, FormatError)


def test_handles_run_out() -> None:
    handles = Handles()
    assert [handles.bind_file(f"f{i}") for i in range(18)] == [*range(16), None, None]
    assert [handles.bind_line(0, i + 1) for i in range(98)] == [*range(96), None, None]
    again = Handles.from_table(handles.table())
    assert again.table() == handles.table()
    assert handles.bind_file("./f3") == 3
    copy = handles.copy()
    copy.bind_line(1, 5)
    assert handles.number(1, 0) is None
