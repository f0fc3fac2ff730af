"""Calls that a model writes again: by heart, untrained, against other sessions, and what they are compared with."""

from __future__ import annotations

from typing import Any

import pytest
from support_agent import make_model, repair_session
from support_known import KNOWN

from agentft.etai import Session
from agentft.evals.calls import call_metrics, file_of
from agentft.evals.facts import session_facts
from agentft.evals.metrics import Metric
from agentft.models.agent_model import AgentModel
from agentft.text.render import Renderer
from agentft.tools import TOOLS, ToolCall

TRAIN = [session_facts(session) for session in KNOWN]


def measured(model: AgentModel, renderer: Renderer, *sessions: Session, grammar: bool = False) -> dict[str, Metric]:
    shown = [(session, session_facts(session)) for session in sessions]
    return call_metrics(model, renderer, TRAIN, shown, grammar=grammar)


def test_an_agent_that_knows_its_sessions_writes_every_call_again(learned: AgentModel, renderer: Renderer) -> None:
    for grammar in (False, True):
        found = measured(learned, renderer, *KNOWN, grammar=grammar)
        assert {name: metric.value for name, metric in found.items()} == dict.fromkeys(found, 1.0)
        assert {name: metric.count for name, metric in found.items()} == dict.fromkeys(found, 16)
    assert learned.training
    tool, file = found["right_tool"].baselines, found["right_file"].baselines
    assert tool == {"majority": 0.5, "bigram_exit": 1.0}  # run, read, edit, run
    assert file["last_file"] == 1 / 4  # run test_calc.py, read calc.py, edit calc.py, run test_calc.py
    assert 0 < (file["chance"] or 0) < 1


@pytest.mark.parametrize(
    ("upto", "change", "wrong"),
    [
        (1, {"tool_args": {"targets": "test_calc.py::test_calc"}}, {"same_call"}),
        (1, {"tool_args": {"targets": "calc.py"}}, {"same_call", "right_file"}),
        (2, {"tool_called": "file_write"}, {"same_call", "right_tool"}),
        (3, {"tool_args": {"path": "calc.py", "line": 2, "old": "a - b", "new": "b + a"}}, {"same_call"}),
    ],
)
def test_another_tool_file_or_text_is_wrong_where_it_differs(
    learned: AgentModel, renderer: Renderer, upto: int, change: dict[str, Any], wrong: set[str]
) -> None:
    """The human's last call is another one than the agent's: what stands before it is the same."""
    *before, last = KNOWN[0].execution_trace[:upto]
    other = KNOWN[0].model_copy(update={"execution_trace": [*before, last.model_copy(update=change)]})
    found = measured(learned, renderer, other)
    assert {name for name, metric in found.items() if metric.value != 1.0} == wrong
    assert all(found[name].value == (upto - 1) / upto for name in wrong)


def test_mistakes_are_no_model_to_follow(learned: AgentModel, renderer: Renderer) -> None:
    session = repair_session(2, mistake=True)
    assert measured(learned, renderer, session)["parsed"].count == len(session.execution_trace) - 1


def test_an_untrained_agent_parses_with_the_grammar_only(renderer: Renderer) -> None:
    model = make_model(renderer)
    free, held = measured(model, renderer, KNOWN[0]), measured(model, renderer, KNOWN[0], grammar=True)
    assert [free[name].value for name in ("parsed", "right_tool", "right_file", "same_call")] == [0.0] * 4
    assert (held["parsed"].value, held["same_call"].value) == (1.0, 0.0)


def test_no_session_gives_no_figure(learned: AgentModel, renderer: Renderer) -> None:
    assert [(metric.value, metric.count) for metric in measured(learned, renderer).values()] == [(None, 0)] * 4


@pytest.mark.parametrize(
    ("call", "file"),
    [
        (ToolCall("file_read", {"path": "a.py"}), "a.py"),
        (ToolCall("pytest_run", {"targets": "tests/a.py::T::t tests/b.py"}), "tests/a.py"),
        (ToolCall("pytest_run", {"targets": " "}), None),
        (ToolCall("pytest_run", {}), None),
        (ToolCall("unknown", {"path": "a.py"}), None),
    ],
)
def test_which_file_a_call_names(call: ToolCall, file: str | None) -> None:
    assert file_of(call, TOOLS) == file
