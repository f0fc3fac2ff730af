"""Chats as tokens: equal to apply_chat_template, trained exactly where the assistant wrote, anchors of sessions."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from chat_samples import BAD, POSITIONS, TEXT, TWO_TURNS, WITH_CALL, applied, chat, parts, renderer_with, result, spans
from hypothesis import given, settings
from hypothesis import strategies as st
from support_agent import repair_session

from agentft.config.schema import FeedbackPositionsConfig, TextConfig
from agentft.errors import ConfigError, DataError
from agentft.etai import CursorTarget
from agentft.text.chat import ChatRenderer, Conversation
from agentft.text.chat_session import session_messages
from agentft.text.chat_template import Message, assistant, call_of, user
from agentft.text.rendered import Kind
from agentft.tools import TOOL_INDEX

GOOD = ("plain", "chatml", "functioncall", "wants_text", "wants_object", "injects_system", "tools_as_user")


@pytest.mark.parametrize("name", [*GOOD, "strips_whitespace", "ends_with_next_role"])
@pytest.mark.parametrize("conversation", [TWO_TURNS, WITH_CALL], ids=["two turns", "call"])
def test_ids_are_those_of_apply_chat_template(name: str, conversation: Conversation) -> None:
    renderer = renderer_with(name)
    rendered = renderer.render(conversation)
    ids, expected = rendered.input_ids.tolist(), applied(renderer, conversation)
    assert ids[: len(expected)] == expected
    closing = [] if renderer.template.end.own else [renderer.template.end.before_user]
    assert ids[len(expected) :] == closing
    assert 0 < rendered.loss_mask.sum() < len(ids)
    assert rendered.position_ids.tolist() == list(range(len(ids)))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plain", ["hello there<|end|>", "see you<|end|>"]),
        ("chatml", ["hello there<|im_end|>", "see you<|im_end|>"]),
        ("functioncall", [" hello there <|eot|>", " see you <|eot|>"]),
        ("ends_with_next_role", ["hello there<|user|>", "see you<|user|>"]),
        ("injects_system", ["hello there<|end|>", "see you<|end|>"]),
    ],
)
def test_trained_is_what_the_assistant_wrote_and_the_end_of_its_turn(name: str, said: list[str]) -> None:
    renderer = renderer_with(name)
    assert spans(renderer, renderer.render(TWO_TURNS)) == said


def test_calls_in_the_text_templates() -> None:
    chatml, text = renderer_with("chatml"), renderer_with("functioncall")
    call = '{"name": "add", "arguments": {"a": 1, "b": "x y"}}'
    assert spans(chatml, chatml.render(WITH_CALL))[0] == f"<|tool|>{call}<|/tool|><|im_end|>"
    assert spans(text, text.render(WITH_CALL))[0] == f" <functioncall> {call} <|eot|>"
    assert "FUNCTION RESPONSE: 3" in text.template.text(WITH_CALL.messages)


def test_a_call_ends_with_the_mark_of_the_result_where_only_roles_end_turns() -> None:
    renderer = renderer_with("ends_with_next_role")
    with_mark = renderer.template.text([user("x")]).replace("<|user|>", "<|tool|>")
    assert with_mark.startswith("<|tool|>")
    assert spans(renderer, renderer.render(WITH_CALL)) == [' call add {"a": 1, "b": "x y"}<|tool|>', "It is 3.<|user|>"]
    cut = dataclasses.replace(WITH_CALL, messages=WITH_CALL.messages[:2])
    assert spans(renderer, renderer.render(cut)) == [' call add {"a": 1, "b": "x y"}<|tool|>']


def test_thinking_that_is_stripped_later_gets_parts_of_their_own() -> None:
    renderer = renderer_with("strips_thinking")
    thought = chat(
        user("hi"), assistant("<think>a greeting</think>hello"), user("bye"), assistant("<think>an end</think>bye")
    )
    whole, first = parts(renderer, thought)
    assert spans(renderer, whole) == ["<think>an end</think>bye<|end|>"]
    assert spans(renderer, first) == ["<think>a greeting</think>hello<|end|>"]
    assert whole.input_ids.tolist() == applied(renderer, thought)
    beginning = dataclasses.replace(thought, messages=thought.messages[:2])
    assert first.input_ids.tolist() == applied(renderer, beginning)
    assert [record.session_id for record, _ in renderer.parts(thought)] == ["chat", "chat#2"]
    with pytest.raises(DataError, match="earlier turns in another way"):
        renderer.render(thought)


def test_a_last_turn_with_an_end_of_its_own_gets_a_part_for_each_turn() -> None:
    renderer = renderer_with("other_last_end")
    assert [spans(renderer, part) for part in parts(renderer, TWO_TURNS)] == [
        ["see you<|final|>"],
        ["hello there<|final|>"],
    ]


@pytest.mark.parametrize(
    ("name", "conversation", "why"),
    [
        ("merges_roles", chat(user("hi"), assistant("a"), assistant("b")), r"messages\[2\]: the prompt that the chat"),
        ("prompt_thinks", TWO_TURNS, r"messages\[3\]: the prompt that the chat template writes for this turn is not"),
        ("knows_no_tools", WITH_CALL, r"messages\[1\]: the chat template does not show a call"),
        ("refuses_two_users", chat(user("a"), user("b"), assistant("c")), r"messages\[1\] \(user\).*refuses a turn"),
        ("chatml", chat(user("hi"), assistant("\nhello")), r"messages\[1\]: a token reaches over the border"),
        ("plain", chat(user("say <|end|>"), assistant("no")), r"messages\[0\] \(user\): a turn spells out a special"),
        ("plain", chat(assistant("hello"), user("hi"), assistant("x")), "a conversation begins with the user"),
        ("plain", chat(user("hi")), "no turn of the assistant is trained"),
        ("plain", chat(user("hi"), {**assistant("no"), "weight": 0}), "no turn of the assistant is trained"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_turn(name: str, conversation: Conversation, why: str) -> None:
    with pytest.raises(DataError, match=why):
        list(renderer_with(name).parts(conversation))


def test_merged_users_are_exact() -> None:
    renderer = renderer_with("merges_roles")
    conversation = chat(user("one"), user("two"), assistant("three"))
    assert spans(renderer, renderer.render(conversation)) == ["three<|end|>"]


def test_a_template_without_an_end_of_turn_is_refused() -> None:
    with pytest.raises(ConfigError, match="closes a turn of the assistant with no special token"):
        renderer_with("no_end_at_all")


def test_a_turn_of_weight_0_is_shown_and_not_trained() -> None:
    renderer = renderer_with("plain")
    conversation = chat(user("a"), {**assistant("wrong"), "weight": 0}, user("no"), assistant("right"))
    rendered = renderer.render(conversation)
    assert spans(renderer, rendered) == ["right<|end|>"]
    assert rendered.input_ids.tolist() == applied(renderer, conversation)


def test_a_system_prompt_is_never_made_up_and_never_left_out() -> None:
    renderer = renderer_with("injects_system")
    text = renderer.template.text(TWO_TURNS.messages)
    assert text.startswith("<|user|>hi")
    own = chat({"role": "system", "content": "Be kind."}, *TWO_TURNS.messages)
    assert renderer.template.text(own.messages).startswith("<|system|>Be kind.<|end|><|user|>hi")
    listed = renderer.template.text(TWO_TURNS.messages, [{"type": "function", "function": {"name": "add"}}])
    assert listed.startswith("<|system|><|end|><|user|>hi")  # tools may stand in the system prompt: it is empty


# --- properties ---------------------------------------------------------------------------------------------------

WORDS = st.text(
    st.characters(codec="utf-8", exclude_characters="<>|", exclude_categories=("Cs",)), min_size=1, max_size=24
)
SAID = st.one_of(
    WORDS, st.sampled_from(["x = 1\n\ty", " leading", "trailing ", "a  b", '{"a": "<b>"}', "äöü 漢字 🙂", "</think>"])
)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(SAID)})
    for _ in range(draw(st.integers(1, 4))):
        messages.append(user(draw(SAID)))
        for number in range(draw(st.integers(0, 2))):
            arguments = draw(
                st.dictionaries(st.sampled_from("abc"), st.one_of(SAID, st.integers(), st.none()), max_size=2)
            )
            messages += [
                assistant(draw(st.just("") | SAID), [call_of("add", arguments, number)]),
                result(draw(SAID), number),
            ]
        answer = assistant(draw(SAID))
        messages.append({**answer, "weight": 0} if draw(st.integers(0, 5)) == 0 else answer)
    return chat(*messages)


def _written(renderer: ChatRenderer, conversation: Conversation, number: int) -> str:
    """What the template writes for one turn, by its own difference of texts."""
    before = renderer.template.text(conversation.messages[:number], prompt=True)
    after = renderer.template.text(conversation.messages[: number + 1])
    assert after.startswith(before)
    written, mark = after[len(before) :], renderer.template.end.own
    return written[: written.rindex(mark) + len(mark)] if mark else written


@pytest.mark.parametrize(
    "name", [*GOOD, "strips_whitespace", "ends_with_next_role", "strips_thinking", "other_last_end"]
)
@settings(max_examples=40, deadline=None)
@given(conversation=conversations())
def test_every_trained_span_is_what_the_assistant_wrote(name: str, conversation: Conversation) -> None:
    renderer = _RENDERERS.setdefault(name, renderer_with(name))
    wanted = [
        number
        for number, message in enumerate(conversation.messages)
        if message["role"] == "assistant" and message.get("weight", 1)
    ]
    try:
        found = list(renderer.parts(conversation))
    except DataError as error:
        refused = error.what
    else:
        refused = ""
    if refused:
        assert any(reason in refused for reason in REASONS), refused
        return
    trained: list[str] = []
    for record, rendered in found:
        assert isinstance(record, Conversation)
        ids = rendered.input_ids.tolist()
        shown = dataclasses.replace(record, messages=record.messages[: max(_assistants(record)) + 1])
        expected = applied(renderer, shown)
        assert ids[: len(expected)] == expected
        assert len(ids) - len(expected) in (0, 1)
        assert 0 < rendered.loss_mask.sum() < len(ids)
        trained += spans(renderer, rendered)
    assert sorted(map(_unmarked, trained)) == sorted(_written(renderer, conversation, number) for number in wanted)


REASONS = (
    "a token reaches over the border",
    "no turn of the assistant is trained",
    "spells out a special token",
    "changes what this turn says",
    "does not show",
    "in another way for other values",
)


def _unmarked(said: str) -> str:
    """A span without the mark of the next role."""
    return re.sub(r"<\|(user|tool|assistant)\|>\Z", "", said)


_RENDERERS: dict[str, ChatRenderer] = {}


def _assistants(record: Conversation) -> list[int]:
    return [row for row, m in enumerate(record.messages) if m["role"] == "assistant" and m.get("weight", 1)]


# --- sessions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["plain", "chatml", "functioncall", "ends_with_next_role", "tools_as_user", "wants_object"]
)
def test_anchors_of_a_session(name: str) -> None:
    session = repair_session(2, mistake=True)
    renderer = renderer_with(name)
    rendered = renderer.render(session)
    ids, tokenizer = rendered.input_ids.tolist(), renderer.template.tokenizer
    prompt = renderer.template.text(session_messages(session, thoughts=True)[:1], prompt=True)
    assert tokenizer.decode(ids[: rendered.intent_at + 1]) == prompt
    assert tokenizer.decode(ids[rendered.cursor_at + 1 :]).lstrip().startswith(session.final_output)
    assert [step.step for step in rendered.steps] == [step.step for step in session.execution_trace]
    for anchor, step in zip(rendered.steps, session.execution_trace, strict=True):
        assert anchor.tool == TOOL_INDEX[step.tool_called]
        assert tokenizer.decode(ids[anchor.tool_at + 1 :]).lstrip(' "').startswith(step.tool_called)
        assert step.tool_called not in tokenizer.decode(ids[anchor.call_start : anchor.tool_at + 1])
        assert anchor.mistake == step.mistake
        assert set(rendered.loss_mask[anchor.call_start : anchor.call_end]) == {not step.mistake}
        assert tokenizer.decode(ids[anchor.result_at + 1 :]).lstrip().startswith("exit ")
        assert step.execution_result is not None
        assert anchor.outcome == float(step.execution_result.exit_code == 0)
        assert anchor.call_end <= anchor.result_at + 1
    kinds = {Kind(kind) for kind in rendered.kinds}
    assert {Kind.CALL, Kind.RESULT, Kind.OUTPUT, Kind.INSTRUCTION} <= kinds


def test_a_session_whose_turns_need_parts_keeps_each_target_once() -> None:
    session = repair_session(1).model_copy(
        update={"cursor_target": CursorTarget(file="calc.py", line=2), "intents": ["fix_test_failure"]}
    )
    found = list(renderer_with("other_last_end").parts(session))
    assert len(found) == len(session.execution_trace) + 1
    (whole, rendered), *others = found
    assert whole is session
    assert rendered.steps == ()
    assert rendered.cursor_at > 0
    assert sorted(step.step for _, part in others for step in part.steps) == [s.step for s in session.execution_trace]
    assert all(part.intents is None and part.cursor_target is None for part, _ in others)  # type: ignore[union-attr]
    assert len({part.session_id for part, _ in found}) == len(found)


def test_results_count_their_positions_from_the_reserved_range() -> None:
    renderer = renderer_with("plain", positions=FeedbackPositionsConfig(enabled=True, start=4096))
    rendered = renderer.render(repair_session(0))
    results = rendered.kinds == Kind.RESULT
    assert results.any()
    assert rendered.position_ids[results].tolist() == list(range(4096, 4096 + int(results.sum())))
    assert rendered.position_ids[~results].tolist() == list(range(int((~results).sum())))
    plain = renderer_with("plain").render(repair_session(0))
    assert np.array_equal(plain.input_ids, rendered.input_ids)


def test_tools_are_listed_on_request() -> None:
    without, with_tools = (
        renderer_with("chatml", dataclasses.replace(TEXT, list_tools=listed, max_tokens=20000))
        for listed in (False, True)
    )
    session = repair_session(0)
    shorter, longer = without.render(session), with_tools.render(session)
    text = with_tools.template.tokenizer.decode(longer.input_ids)
    assert all(f'"name": "{name}"' in text for name in TOOL_INDEX)
    assert spans(without, shorter) == spans(with_tools, longer)


# --- fitting ------------------------------------------------------------------------------------------------------


def _fitting(name: str, limit: int, results: int = 40) -> ChatRenderer:
    return renderer_with(
        name, TextConfig(template="chat", handles=False, max_tokens=limit, result_tokens=results), POSITIONS
    )


def test_results_shrink_then_the_oldest_goes_and_the_answer_stays() -> None:
    messages: list[Message] = []
    for number in range(4):
        messages += [
            user(f"question {number}"),
            assistant("", [call_of("add", {"a": number})]),
            result("line of output\n" * 60),
            assistant(f"answer {number}"),
        ]
    conversation = chat(*messages)
    long = _fitting("plain", 4000, 2000)
    whole = long.render(conversation)
    assert whole.dropped.result_tokens == 0
    lengths = []
    for limit in (900, 400, 200, 120):
        renderer = _fitting("plain", limit, 2000 if limit == 900 else 100)
        rendered = renderer.render(conversation)
        assert len(rendered.input_ids) <= limit
        assert spans(renderer, rendered)[-1] == "answer 3<|end|>"
        assert rendered.dropped.result_tokens > 0
        lengths.append(rendered.dropped.steps)
    assert lengths == sorted(lengths)
    assert lengths[-1] > 0


def test_the_oldest_calls_of_one_exchange_go_and_are_counted() -> None:
    session = repair_session(2, mistake=True)
    renderer = _fitting("plain", 330)
    rendered = renderer.render(session)
    assert len(rendered.input_ids) <= 330
    assert rendered.dropped.steps > 0
    text = renderer.template.tokenizer.decode(rendered.input_ids)
    assert "earlier steps left out" in text
    assert text.endswith(f"{session.final_output}<|end|>")
    assert rendered.steps[-1].step == len(session.execution_trace)


def test_what_does_not_fit_at_all_is_refused() -> None:
    with pytest.raises(DataError, match="does not fit"):
        list(_fitting("plain", 16).parts(chat(user("a long question " * 20), assistant("yes"))))


def test_every_template_here_is_tried() -> None:
    tried = {*GOOD, "strips_whitespace", "ends_with_next_role", "strips_thinking", "other_last_end", "merges_roles"}
    tried |= {"prompt_thinks", "knows_no_tools", "refuses_two_users", "no_end_at_all"}
    assert set(BAD) <= tried
