from __future__ import annotations

import pytest
from support_agent import InProcessExecutor, lost, make_model, sessions
from support_known import KNOWN

from agentft.errors import DataError
from agentft.evals.replay import path_accuracy
from agentft.models.agent_model import AgentModel
from agentft.text.render import Renderer


def test_an_agent_that_knows_the_repair_reaches_it_in_three_steps(learned: AgentModel, renderer: Renderer) -> None:
    executor = InProcessExecutor()
    accuracy = path_accuracy(learned, renderer, KNOWN, executor)
    assert (accuracy.value, accuracy.same_files, accuracy.count, accuracy.lost) == (1.0, 1.0, 4, 0)
    assert (accuracy.calls, accuracy.parse_ok, accuracy.edits) == (12, 12, 4)  # run, read, edit
    assert accuracy.repaired == tuple(session.session_id for session in KNOWN)
    assert accuracy.as_dict()["value"] == 1.0
    assert learned.training
    executor.close()


def test_two_steps_are_too_few_for_a_repair_of_three(learned: AgentModel, renderer: Renderer) -> None:
    executor = InProcessExecutor()
    accuracy = path_accuracy(learned, renderer, KNOWN, executor, steps=2)
    assert (accuracy.value, accuracy.edits, accuracy.calls) == (0.0, 0, 8)
    executor.close()


def test_an_untrained_agent_repairs_nothing_and_breaks_nothing(renderer: Renderer) -> None:
    executor = InProcessExecutor()
    accuracy = path_accuracy(make_model(renderer), renderer, KNOWN, executor)
    assert (accuracy.value, accuracy.same_files, accuracy.count) == (0.0, 0.0, 4)
    executor.close()


def test_another_repair_that_passes_counts_but_is_not_the_same_file(learned: AgentModel, renderer: Renderer) -> None:
    """The human of this session wrote ``b + a``; the agent writes ``a + b``: the tests pass, the file differs."""
    other = KNOWN[0].model_copy(deep=True)
    good = other.execution_trace[2]
    assert good.tool_called == "file_edit"
    good.tool_args["new"] = "b + a"
    executor = InProcessExecutor()
    accuracy = path_accuracy(learned, renderer, [other], executor)
    assert (accuracy.value, accuracy.same_files) == (1.0, 0.0)
    executor.close()


def test_changing_what_judges_is_no_repair(learned: AgentModel, renderer: Renderer) -> None:
    """The agent repairs calc.py; the human repaired another file, and the last run names calc.py as one of its own."""
    other = KNOWN[0].model_copy(deep=True)
    other.execution_trace[-1].tool_args["targets"] = "test_calc.py calc.py"
    other.execution_trace[2].tool_args["path"] = "elsewhere.py"
    executor = InProcessExecutor()
    accuracy = path_accuracy(learned, renderer, [other], executor)
    assert (accuracy.value, accuracy.edits, accuracy.tampered) == (0.0, 1, 1)
    executor.close()


def test_sessions_in_which_the_human_changed_the_tests_are_left_out(learned: AgentModel, renderer: Renderer) -> None:
    other = KNOWN[0].model_copy(deep=True)
    other.execution_trace[2].tool_args["path"] = "test_calc.py"
    executor = InProcessExecutor()
    assert path_accuracy(learned, renderer, [other, KNOWN[1]], executor).count == 1
    executor.close()


def test_what_the_sandbox_loses_is_not_counted(learned: AgentModel, renderer: Renderer) -> None:
    executor = InProcessExecutor(lambda key: lost() if key.startswith("path/2/calc/1/") else None)
    accuracy = path_accuracy(learned, renderer, KNOWN, executor)
    assert (accuracy.value, accuracy.count, accuracy.lost) == (1.0, 3, 1)
    executor.close()


def test_sessions_that_cannot_be_executed_are_left_out(learned: AgentModel, renderer: Renderer) -> None:
    foreign = KNOWN[0].model_copy(update={"workspace": None})
    executor = InProcessExecutor()
    assert path_accuracy(learned, renderer, [foreign, KNOWN[1]], executor).count == 1
    with pytest.raises(DataError, match="no session can be replayed"):
        path_accuracy(learned, renderer, [foreign], executor)
    executor.close()


def test_the_world_of_these_tests_is_consistent() -> None:
    for session in sessions(6):
        codes = [step.execution_result.exit_code for step in session.execution_trace if step.execution_result]
        assert codes[0] == 1
        assert codes[-1] == 0
