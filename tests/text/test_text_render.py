"""Rendering: what is trained, where the anchors are, positions, and what truncation may never take."""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from text_samples import calls, sessions, small_vocab, texts

from agentft.config.schema import FeedbackPositionsConfig, TextConfig
from agentft.errors import DataError
from agentft.etai import ErrorLocation, ExecutionResult, IdeContext, Session, TraceStep
from agentft.text.handles import Handles
from agentft.text.parse import FormatError, parse_turn, to_text
from agentft.text.render import Renderer, outcome, session_texts
from agentft.text.rendered import Kind, Rendered
from agentft.text.vocab import STRUCTURE_TOKENS
from agentft.tools import TOOL_INDEX, ToolCall

WIDE = TextConfig(max_tokens=100_000, result_tokens=50_000)
START = 10_000_000
ON, OFF = FeedbackPositionsConfig(enabled=True, start=START), FeedbackPositionsConfig(enabled=False)


def renderer(text: TextConfig = WIDE, positions: FeedbackPositionsConfig = ON) -> Renderer:
    return Renderer(small_vocab(), text, positions)


def turn_spans(rendered: Rendered) -> list[tuple[int, int]]:
    ids, vocab = rendered.input_ids.tolist(), small_vocab()
    return [(max(i for i in range(s.tool_at) if ids[i] == vocab.step), s.call_end) for s in rendered.steps]


@given(sessions())
@settings(max_examples=80, deadline=None)
def test_trained_spans_are_exactly_what_the_agent_wrote(session: Session) -> None:
    rendered, vocab = renderer().render(session), small_vocab()
    handles = Handles.from_table(rendered.handles)
    trained = 0
    assert len(rendered.steps) == len(session.execution_trace)
    for step, (start, end) in zip(session.execution_trace, turn_spans(rendered), strict=True):
        mask = rendered.loss_mask[start:end]
        assert not mask.any() if step.mistake else mask.all()
        trained += 0 if step.mistake else end - start
        turn = parse_turn(rendered.input_ids[start:end], vocab, handles)
        assert turn.thought == (step.thought or None)
        assert turn.call == ToolCall(step.tool_called, step.tool_args)
    start = rendered.cursor_at - 1
    assert rendered.loss_mask[start:].all()
    assert parse_turn(rendered.input_ids[start:], vocab, handles).answer == session.final_output
    assert rendered.loss_mask.sum() == trained + len(rendered.input_ids) - start


@given(sessions())
@settings(max_examples=60, deadline=None)
def test_anchors_masks_and_kinds(session: Session) -> None:
    rendered, vocab = renderer().render(session), small_vocab()
    ids, mask = rendered.input_ids, rendered.loss_mask
    assert ids[rendered.intent_at] == vocab.trace_start
    assert ids[rendered.cursor_at] == vocab.output
    assert ids[-1] == vocab.eot
    for anchor, step in zip(rendered.steps, session.execution_trace, strict=True):
        assert ids[anchor.tool_at] == vocab.tool_start
        assert anchor.call_start == anchor.tool_at
        assert ids[anchor.call_end - 1] == vocab.tool_end
        assert anchor.tool == TOOL_INDEX[step.tool_called]
        assert (anchor.result_at < 0) == (step.execution_result is None)
        assert anchor.result_at < 0 or (ids[anchor.result_at] == vocab.result and anchor.result_at == anchor.call_end)
        np.testing.assert_equal(anchor.outcome, outcome(step.execution_result))
    mistaken = np.isin(rendered.kinds, [Kind.MISTAKE])
    assert not mask[np.isin(rendered.kinds, [Kind.RESULT, Kind.CONTEXT, Kind.INSTRUCTION, Kind.STRUCTURE])].any()
    assert mask[np.isin(ids, vocab.end_of_turn) & ~mistaken].all()
    assert not mask[mistaken].any()


@given(sessions())
@settings(max_examples=60, deadline=None)
def test_positions(session: Session) -> None:
    jumped, plain = renderer().render(session), renderer(positions=OFF).render(session)
    assert plain.position_ids.tolist() == list(range(len(plain.input_ids)))
    fed_back = jumped.kinds == Kind.RESULT
    assert jumped.position_ids[~fed_back].tolist() == list(range(int((~fed_back).sum())))
    assert jumped.position_ids[fed_back].tolist() == list(range(START, START + int(fed_back.sum())))
    assert (jumped.input_ids == plain.input_ids).all()
    assert (jumped.loss_mask == plain.loss_mask).all()


@given(sessions())
@settings(max_examples=60, deadline=None)
def test_special_ids_come_from_structure_only(session: Session) -> None:
    rendered, vocab = renderer().render(session), small_vocab()
    ids = rendered.input_ids.tolist()
    steps, results = len(rendered.steps), sum(s.execution_result is not None for s in session.execution_trace)
    expected = {"context": 1, "instruction": 1, "trace_start": 1, "trace_end": 1, "output": 1, "eot": 1, "pad": 0}
    expected |= {"step": steps, "tool_start": steps, "args": steps, "tool_end": steps, "file_tree": 0, "diff_hunk": 0}
    expected |= {
        "result": results,
        "result_end": results,
        "arg": sum(len(s.tool_args) for s in session.execution_trace),
    }
    assert {name: ids.count(getattr(vocab, name)) for name in expected} == expected


@given(sessions())
@settings(max_examples=80, deadline=None)
def test_handles_are_invertible_to_the_text_form(session: Session) -> None:
    with_handles = renderer().render(session)
    without = renderer(dataclasses.replace(WIDE, handles=False)).render(session)
    vocab = small_vocab()
    assert not set(without.input_ids.tolist()) & {*vocab.files, *vocab.lines}
    assert without.handles == {}
    text = to_text(with_handles.input_ids, vocab, Handles.from_table(with_handles.handles))
    assert text == to_text(without.input_ids, vocab, Handles(off=True))


@given(sessions())
@settings(max_examples=60, deadline=None)
def test_turn_by_turn_equals_whole(session: Session) -> None:
    one = renderer()
    whole = one.render(session)
    ids = whole.input_ids.tolist()
    draft = one.prompt(session, 1)
    for number, (step, (start, end)) in enumerate(
        zip(session.execution_trace, turn_spans(whole), strict=True), start=1
    ):
        assert one.render_prompt(session, number).input_ids.tolist() == ids[:start]
        call = one.append_agent(draft, ids[start:end], mistake=step.mistake)
        assert isinstance(call, ToolCall)
        if step.execution_result is not None:
            branch = draft.copy()
            new_ids, positions = one.append_result(draft, call, step.execution_result)
            assert new_ids.tolist() == draft.ids[-len(new_ids) :]
            assert positions.tolist() == draft.positions[-len(new_ids) :]
            assert len(branch) + len(new_ids) == len(draft)
    one.append_agent(draft, ids[whole.cursor_at - 1 :])
    grown = draft.finish()
    for name in ("input_ids", "loss_mask", "position_ids", "kinds"):
        assert getattr(grown, name).tolist() == getattr(whole, name).tolist(), name
    np.testing.assert_equal(
        [dataclasses.astuple(s) for s in grown.steps], [dataclasses.astuple(s) for s in whole.steps]
    )
    assert (grown.intent_at, grown.cursor_at, grown.handles) == (whole.intent_at, whole.cursor_at, whole.handles)


@given(sessions(), texts())
@settings(max_examples=60, deadline=None)
def test_truncation_never_loses_the_answer(session: Session, extra: str) -> None:
    vocab = small_vocab()
    session = session.model_copy(update={"user_instruction": session.user_instruction + " please" * 60 + extra})
    least = renderer().least_tokens(session)
    full = len(renderer().render(session).input_ids)
    previous = None
    for limit in sorted({least, least + 7, (least + full) // 2, full - 1, full}):
        if limit < least:
            continue
        rendered = renderer(dataclasses.replace(WIDE, max_tokens=limit)).render(session)
        assert len(rendered.input_ids) <= limit
        assert vocab.decode(rendered.input_ids[rendered.cursor_at + 1 : -1].tolist()) == session.final_output
        assert rendered.input_ids[-1] == vocab.eot
        assert rendered.input_ids[rendered.intent_at] == vocab.trace_start
        assert rendered.dropped.steps == len(session.execution_trace) - len(rendered.steps)
        previous = rendered
    assert previous is not None
    assert len(previous.input_ids) == full
    with pytest.raises(DataError, match="do not fit"):
        renderer(dataclasses.replace(WIDE, max_tokens=least - 1)).render(session)


def long_session(steps: int = 4) -> Session:
    lines = "".join(f"{n}:     value_{n} = {n}\n" for n in range(1, 80))
    read = ExecutionResult(exit_code=0, stdout=lines)
    trace = [
        TraceStep(step=n, tool_called="file_read", tool_args={"path": "src/a.py"}, execution_result=read)
        for n in range(1, steps + 1)
    ]
    return Session(session_id="s", user_instruction="fix it", execution_trace=trace, final_output="done")


def test_results_shrink_before_the_oldest_steps_go() -> None:
    session = long_session()
    seen = []
    for limit in range(700, renderer().least_tokens(session) - 1, -9):
        config = TextConfig(max_tokens=limit, result_tokens=160)
        rendered = renderer(config).render(session)
        seen.append(rendered.dropped.steps)
        assert [anchor.step for anchor in rendered.steps] == [1, 2, 3, 4][rendered.dropped.steps :]
        assert ("earlier steps left out" in small_vocab().decode(rendered.input_ids.tolist())) == (seen[-1] > 0)
        if seen[-1] == 0:
            assert rendered.dropped.result_tokens > 4 * (600 - limit // 4)
    assert seen == sorted(seen)
    assert {0, 2, 3, 4} <= set(seen)


def test_a_long_instruction_is_cut_in_its_middle_and_counted() -> None:
    session = long_session(2).model_copy(update={"user_instruction": "first word " + "please " * 300 + "last word"})
    rendered, vocab = renderer(TextConfig(max_tokens=400)).render(session), small_vocab()
    text = vocab.decode(rendered.input_ids[: rendered.intent_at].tolist())
    assert "<|instruction|>first word" in text
    assert text.endswith("last word")
    assert " [... cut ...] " in text
    assert rendered.dropped.instruction_tokens > 500
    assert len(rendered.steps) > 0


def test_a_cut_result_keeps_both_ends_its_marker_and_its_budget() -> None:
    rendered, vocab = renderer(TextConfig(result_tokens=120)).render(long_session(1)), small_vocab()
    anchor = rendered.steps[0]
    end = rendered.input_ids.tolist().index(vocab.result_end)
    text = vocab.decode(rendered.input_ids[anchor.result_at : end + 1].tolist())
    assert end + 1 - anchor.result_at <= 120
    assert text.startswith("<|result|>exit 0<|file|><F0>\n    value_1 = 1<L00>\n")
    assert "lines left out ...]" in text
    assert "value_79 = 79<L" in text
    assert "value_40" not in text
    assert rendered.dropped.result_tokens > 200


def test_labels_places_and_counts_in_a_result() -> None:
    result = ExecutionResult(
        exit_code=1,
        status="nonzero",
        stdout="E  assert 1 == 2\nsrc/a.py:17: AssertionError\nsrc/a.py:170: other",
        error_location=ErrorLocation(file="src/a.py", line=17),
        passed=3,
        failed=1,
    )
    step = TraceStep(step=1, tool_called="pytest_run", execution_result=result)
    context = IdeContext(open_files=["src/a.py"])
    session = Session(session_id="s", user_instruction="x", ide_context=context, execution_trace=[step])
    text = small_vocab().decode(renderer().render(session).input_ids.tolist())
    assert "<|result|>exit 1 passed 3 failed 1<|cursor|><F0><L00>17\nE  assert" in text
    assert "src/a.py:17<F0><L00>: AssertionError\nsrc/a.py:170<F0><L01>: other<|result_end|>" in text


def test_search_hits_and_edits_can_be_pointed_at() -> None:
    hits = ExecutionResult(exit_code=0, stdout="src/a.py:7:def f(x):\nsrc/b.py:9:f(1)\n", matches=2)
    edit = ExecutionResult(exit_code=0, stdout="src/a.py: edited at line 7\n", start_line=7)
    args = {"path": "src/a.py", "line": 7, "old": "x", "new": "y"}
    trace = [
        TraceStep(step=1, tool_called="code_search", tool_args={"pattern": "f"}, execution_result=hits),
        TraceStep(step=2, tool_called="file_edit", tool_args=args, execution_result=edit),
    ]
    session = Session(session_id="s", user_instruction="x", execution_trace=trace)
    text = small_vocab().decode(renderer().render(session).input_ids.tolist())
    assert "exit 0\nsrc/a.py:7<F0><L00>:def f(x):\nsrc/b.py:9<F1><L00>:f(1)<|result_end|>" in text
    assert "<|arg|>path<|val|><F0><|arg|>line<|json|><L00><|arg|>old" in text
    assert "<|result|>exit 0<|cursor|><F0><L00>7<|result_end|>" in text


def test_outcome_is_never_invented() -> None:
    assert outcome(ExecutionResult(exit_code=0)) == 1.0
    assert outcome(ExecutionResult(exit_code=3)) == 0.0
    assert outcome(ExecutionResult(status="timeout")) == 0.0
    assert math.isnan(outcome(ExecutionResult(exit_code=1, status="infra")))
    assert math.isnan(outcome(ExecutionResult()))
    assert math.isnan(outcome(None))


def test_unknown_tools_render_but_have_no_row() -> None:
    step = TraceStep(step=1, tool_called="str_replace_editor", tool_args={"a": [1, None], "b": "x"})
    session = Session(session_id="s", user_instruction="x", execution_trace=[step])
    one = renderer()
    rendered = one.render(session)
    assert rendered.steps[0].tool == -1
    assert rendered.steps[0].runs_code is False
    turn = parse_turn(rendered.input_ids[rendered.intent_at + 1 : rendered.steps[0].call_end], one.vocab, Handles())
    assert isinstance(turn.call, FormatError)


def test_a_conversation_that_reaches_the_reserved_positions_is_an_error() -> None:
    close = FeedbackPositionsConfig(enabled=True, start=20)
    with pytest.raises(DataError, match="reaches the positions"):
        renderer(positions=close).render(long_session())


def test_thoughts_can_be_left_out() -> None:
    step = TraceStep(step=1, thought="think", tool_called="git_status")
    session = Session(session_id="s", user_instruction="x", execution_trace=[step])
    text = renderer(dataclasses.replace(WIDE, show_thoughts=False)).render(session)
    assert "think" not in small_vocab().decode(text.input_ids.tolist())


def test_a_malformed_turn_is_appended_and_gets_a_result() -> None:
    one, vocab = renderer(), small_vocab()
    draft = one.prompt(Session(session_id="s", user_instruction="x"), 1)
    call = one.append_agent(draft, [vocab.step, vocab.tool_start, *vocab.encode("nonsense"), vocab.tool_end])
    assert isinstance(call, FormatError)
    ids, positions = one.append_result(draft, call, ExecutionResult(status="format_error", stderr=call.reason))
    assert vocab.decode(ids.tolist()).startswith("<|result|>exit null format_error\n")
    assert positions[0] == START
    assert draft.steps[-1].result_at == len(draft) - len(ids)


@given(calls())
@settings(max_examples=30, deadline=None)
def test_session_texts_hold_what_the_agent_wrote(call: ToolCall) -> None:
    step = TraceStep(step=1, thought="because", tool_called=call.name, tool_args=dict(call.args))
    session = Session(session_id="s", user_instruction="do", execution_trace=[step], final_output="fin")
    pieces = list(session_texts([session]))
    wanted = {"do", "because", "fin", call.name, *call.args, *(v for v in call.args.values() if isinstance(v, str))}
    assert wanted - {""} <= set(pieces)


def test_huge_outputs_are_not_encoded_whole() -> None:
    result = ExecutionResult(exit_code=0, stdout="line of output\n" * 400_000 + "x" * 1_000_000)
    step = TraceStep(step=1, tool_called="shell_run", tool_args={"command": "ls"}, execution_result=result)
    session = Session(session_id="s", user_instruction="x", execution_trace=[step])
    began = time.perf_counter()
    rendered = renderer(TextConfig()).render(session)
    assert time.perf_counter() - began < 2
    assert len(rendered.input_ids) < 300
    assert rendered.dropped.result_tokens > 1_000_000


def test_a_thousand_sessions_take_seconds() -> None:
    one, session = renderer(TextConfig()), long_session(3)
    began = time.perf_counter()
    for _ in range(1000):
        one.render(session)
    assert time.perf_counter() - began < 20


def test_structure_tokens_are_fields() -> None:
    assert len({getattr(small_vocab(), token[2:-2]) for token in STRUCTURE_TOKENS}) == len(STRUCTURE_TOKENS)
