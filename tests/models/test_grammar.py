"""Sampling held to the grammar of a turn: whatever the logits, a finished turn parses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentft.config.schema import FeedbackPositionsConfig, TextConfig
from agentft.etai import Session
from agentft.models.grammar import TurnGrammar
from agentft.text.parse import parse_turn
from agentft.text.render import Renderer, session_texts
from agentft.text.vocab import Vocab, train_tokenizer
from agentft.tools import TOOLS, Parameter, ToolCall, ToolSpec

SESSION = Session.model_validate(
    {
        "session_id": "s",
        "user_instruction": "The sum in src/m.py is wrong, repair it.",
        "ide_context": {"open_files": ["src/m.py", "tests/test_m.py"]},
        "execution_trace": [
            {
                "step": 1,
                "thought": "Read it.",
                "tool_called": "file_read",
                "tool_args": {"path": "src/m.py", "start_line": 3, "end_line": 4},
                "execution_result": {
                    "exit_code": 0, "stdout": "3: def total(a, b):\n4:     return a - b\n", "start_line": 3,
                },
            },
            {
                "step": 2,
                "tool_called": "file_edit",
                "tool_args": {"path": "src/m.py", "line": 4, "old": "a - b", "new": "a + b"},
                "execution_result": {"exit_code": 0, "stdout": "ok\n"},
            },
        ],
        "final_output": "Done.",
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    vocab = Vocab.of(train_tokenizer(session_texts([SESSION]), 600))
    return Renderer(vocab, TextConfig(), FeedbackPositionsConfig())


def _write(renderer: Renderer, grammar: TurnGrammar, prompt: list[int], seed: int, limit: int) -> list[int]:
    """Write one turn by drawing uniformly from what the grammar allows; ends come early enough to finish."""
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(limit):
        scores = grammar(torch.tensor([ids]), torch.zeros(1, renderer.vocab.size + 7))[0]
        allowed = torch.nonzero(scores > -torch.inf)[:, 0]
        assert len(allowed), "a turn never runs into a wall"
        ending = [t for t in allowed.tolist() if t in renderer.vocab.special]
        prefer = ending and torch.rand((), generator=generator) < 0.5
        pool = torch.tensor(ending) if prefer else allowed
        ids.append(int(pool[torch.randint(len(pool), (), generator=generator)]))
        if ids[-1] in renderer.vocab.end_of_turn:
            return ids[len(prompt) :]
    raise AssertionError("the turn did not end")


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), step=st.sampled_from([1, 2, 3]))
def test_every_finished_turn_parses(renderer: Renderer, seed: int, step: int) -> None:
    draft = renderer.prompt(SESSION, step)
    grammar = TurnGrammar(renderer.vocab, renderer.specs, [draft.handles])
    turn = parse_turn(
        _write(renderer, grammar, list(draft.ids), seed, 4000), renderer.vocab, draft.handles, renderer.specs
    )
    assert turn.answer is not None or isinstance(turn.call, ToolCall), turn


def test_what_the_agent_really_wrote_is_allowed(renderer: Renderer) -> None:
    """Token by token, no recorded turn is forbidden (handles included)."""
    rendered = renderer.render(SESSION)
    ids, trained = rendered.input_ids.tolist(), rendered.loss_mask.tolist()
    checked = 0
    for at in range(1, len(ids)):
        if trained[at]:
            handles = renderer.prompt(SESSION, sum(step.tool_at <= at for step in rendered.steps) or 1).handles
            grammar = TurnGrammar(renderer.vocab, renderer.specs, [handles])
            assert ids[at] in grammar.next_tokens(0, ids[:at]), renderer.vocab.decode(ids[: at + 1])[-80:]
            checked += 1
    assert checked == sum(trained)


def test_handles_of_nothing_are_not_offered(renderer: Renderer) -> None:
    vocab, draft = renderer.vocab, renderer.prompt(SESSION, 2)
    grammar = TurnGrammar(vocab, renderer.specs, [draft.handles])
    begun = [*draft.ids, vocab.step, vocab.tool_start, *vocab.encode("file_edit"), vocab.args, vocab.arg]
    offered = grammar.next_tokens(0, [*begun, *vocab.encode("path"), vocab.val])
    assert set(vocab.files[:2]) <= offered
    assert not offered & set(vocab.files[2:])
    lines = [*begun, *vocab.encode("line"), vocab.json]
    assert not grammar.next_tokens(0, lines) & set(vocab.lines), "no file is named yet"
    named = [*begun, *vocab.encode("path"), vocab.val, vocab.files[0], vocab.arg, *vocab.encode("line"), vocab.json]
    assert grammar.next_tokens(0, named) & set(vocab.lines) == set(vocab.lines[: draft.handles.lines_in(0)])


def test_no_text_runs_on_for_ever(renderer: Renderer) -> None:
    vocab, draft = renderer.vocab, renderer.prompt(SESSION, 1)
    grammar = TurnGrammar(vocab, renderer.specs, [draft.handles], longest_text=3)
    word = vocab.encode("a")[0]
    thought = [*draft.ids, vocab.step, word, word]
    assert word in grammar.next_tokens(0, thought)
    assert grammar.next_tokens(0, [*thought, word]) == {vocab.tool_start}
    call = [*thought, vocab.tool_start, *vocab.encode("code_search"), vocab.args, vocab.arg, *vocab.encode("pattern")]
    assert grammar.next_tokens(0, [*call, vocab.val, word, word, word]) == {vocab.arg, vocab.tool_end}
    answer = [*draft.ids, vocab.trace_end, vocab.output, word, word, word]
    assert grammar.next_tokens(0, answer) == {vocab.eot}


def test_required_arguments_come_before_the_end(renderer: Renderer) -> None:
    vocab, draft = renderer.vocab, renderer.prompt(SESSION, 1)
    grammar = TurnGrammar(vocab, renderer.specs, [draft.handles])
    start = [*draft.ids, vocab.step, vocab.tool_start]
    assert grammar.next_tokens(0, [*start, *vocab.encode("file_read"), vocab.args]) == {vocab.arg}
    assert grammar.next_tokens(0, [*start, *vocab.encode("git_status"), vocab.args]) == {vocab.tool_end}
    assert grammar.next_tokens(0, [*start, *vocab.encode("pytest_run"), vocab.args]) == {vocab.arg, vocab.tool_end}


def test_only_the_given_tools_can_be_named(renderer: Renderer) -> None:
    vocab, draft = renderer.vocab, renderer.prompt(SESSION, 1)
    grammar = TurnGrammar(vocab, {"file_list": TOOLS["file_list"]}, [draft.handles])
    first = grammar.next_tokens(0, [*draft.ids, vocab.step, vocab.tool_start])
    assert first == {vocab.encode("file_list")[0]}


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(["integer", "boolean", "array", "object", "number"]))
def test_values_have_the_type_that_the_tool_wants(renderer: Renderer, seed: int, kind: str) -> None:
    """Types other than integer may wander before they close; what is accepted as closed is JSON."""
    tool = ToolSpec(name="t", description="", parameters=(Parameter(name="x", type=kind, description=""),))  # type: ignore[arg-type]
    draft = renderer.prompt(SESSION, 1)
    vocab = renderer.vocab
    grammar = TurnGrammar(vocab, {"t": tool}, [draft.handles])
    start = [*draft.ids, vocab.step, vocab.tool_start, *vocab.encode("t"), vocab.args, vocab.arg, *vocab.encode("x")]
    text = {"integer": "10", "boolean": "true", "array": "[1]", "object": '{"a": 1}', "number": "1.5"}[kind]
    written = list(vocab.encode(text))
    cut = seed % len(written)
    ids = [*start, vocab.json]
    for token in written[:cut]:
        assert token in grammar.next_tokens(0, ids)
        ids.append(token)
    closes = vocab.tool_end in grammar.next_tokens(0, [*start, vocab.json, *written])
    assert closes
    assert (vocab.tool_end in grammar.next_tokens(0, ids)) == _closed(vocab.decode(written[:cut]))


def _closed(text: str) -> bool:
    import json

    try:
        json.loads(text)
    except ValueError:
        return False
    return True
