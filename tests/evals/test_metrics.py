"""Head metrics and their baselines on sessions small enough to count by hand."""

import math

import pytest

from agentft.etai import INTENTS, Session
from agentft.evals import baselines
from agentft.evals.facts import START, known_runs, known_tool_steps, session_facts
from agentft.evals.metrics import Predictions, head_metrics
from agentft.tools import TOOL_INDEX


def _session(name, steps, intents=("fix_test_failure",), target_line=10, caret=4):
    trace = [
        {
            "step": number,
            "tool_called": tool,
            "tool_args": {"path": "m.py", "line": line, "old": "a", "new": "b"} if tool == "file_edit" else {},
            "mistake": mistake,
            "execution_result": {"exit_code": code},
        }
        for number, (tool, code, mistake, line) in enumerate(steps, start=1)
    ]
    return session_facts(
        Session.model_validate(
            {
                "session_id": name,
                "user_instruction": "repair it",
                "execution_trace": trace,
                "intents": list(intents) if intents is not None else None,
                "cursor_target": {"file": "m.py", "line": target_line},
                "ide_context": {
                    "cursor_position": {"file": "m.py", "line": caret},
                    "viewport": {"scroll_top": 100.0, "zoom": 2.0, "line_height": 10.0, "char_width": 8.0},
                },
            }
        )
    )


REPAIR = [("pytest_run", 1, False, None), ("file_edit", 0, False, 12), ("pytest_run", 0, False, None)]
MISTAKEN = [
    ("pytest_run", 1, False, None),
    ("file_edit", 0, True, 8),
    ("pytest_run", 1, False, None),
    ("file_edit", 0, False, 10),
    ("pytest_run", 0, False, None),
]


def test_facts_follow_the_trace():
    steps = _session("s", MISTAKEN).steps
    assert [s.previous_tool for s in steps] == [START, "pytest_run", "file_edit", "pytest_run", "file_edit"]
    assert [s.previous_exit for s in steps] == [None, 1, 0, 1, 0]
    assert [s.run_index for s in steps] == [0, 1, 1, 2, 2]
    assert [s.first_after_edit for s in steps] == [False, False, True, False, True]
    assert len(known_tool_steps([_session("s", MISTAKEN)])) == 4, "the mistake is not measured"
    assert [s.passed for s in known_runs([_session("s", MISTAKEN)])] == [False, False, True]


def test_unknown_exit_codes_are_no_outcome():
    facts = _session("s", [("pytest_run", None, False, None)])
    assert known_runs([facts]) == []
    assert facts.steps[0].passed is None


def test_tool_baselines_by_hand():
    train = [_session("a", REPAIR), _session("b", MISTAKEN)]
    steps = known_tool_steps([_session("c", REPAIR)])
    assert baselines.majority_tool(train, steps) == ["pytest_run"] * 3
    assert baselines.bigram_tool(train, steps) == ["pytest_run", "file_edit", "pytest_run"]
    assert baselines.bigram_exit_tool(train, steps) == ["pytest_run", "file_edit", "pytest_run"]


def test_outcome_baselines_by_hand():
    train = [_session("a", REPAIR), _session("b", MISTAKEN)]
    runs = known_runs([_session("c", MISTAKEN)])
    assert baselines.rule_outcome(runs) == [0.0, 1.0, 1.0]
    # (0, no edit): 0 of 2 → 1/4; (1, edited): 1 of 2 → 2/4; (2, edited): 1 of 1 → 2/3.
    assert baselines.table_outcome(train, runs) == pytest.approx([1 / 4, 2 / 4, 2 / 3])


def test_intent_baselines():
    train = [
        _session(n, REPAIR, intents) for n, intents in (("a", INTENTS[:1]), ("b", INTENTS[:2]), ("c", INTENTS[1:2]))
    ]
    assert baselines.majority_intents(train)[:3] == [1.0, 1.0, 0.0]
    rare = [_session(n, REPAIR, INTENTS[i : i + 1]) for i, n in enumerate("abc")]
    assert sum(baselines.majority_intents(rare)) == 0
    assert sum(baselines.best_constant_intents(rare)) == 3, "naming all three gives F1 1/2, one gives 1/3"


def test_cursor_baselines_in_lines():
    train = [_session("a", REPAIR, target_line=10)]
    held = [_session("b", REPAIR, target_line=13, caret=4)]
    assert baselines.constant_cursor(train, held) == [3.0]
    assert baselines.caret_cursor(held) == [9.0]
    assert baselines.recent_edit_cursor(held) == [1.0]


def _perfect(session):
    return Predictions(
        intents={session.session_id: [float(name in session.intents) for name in INTENTS]},
        tools={(s.session_id, s.step): TOOL_INDEX[s.tool] for s in session.steps},
        outcomes={(s.session_id, s.step): float(bool(s.passed)) for s in session.steps if s.runs_code},
        cursor_y={session.session_id: (session.target_line - 1) * session.line_px - session.scroll_top},
    )


def test_a_perfect_model_scores_perfectly_and_the_strongest_baseline_is_named():
    train, held = [_session("a", REPAIR), _session("b", MISTAKEN)], _session("c", MISTAKEN)
    metrics = head_metrics(train, [held], _perfect(held))
    assert metrics["tool_accuracy"].value == 1.0
    assert metrics["intent_f1"].value == 1.0
    assert metrics["outcome_auc"].value == 1.0
    assert metrics["outcome_brier"].value == 0.0
    assert metrics["cursor_error_lines"].value == 0.0
    assert metrics["outcome_auc_after_edit"].count == 2
    table = metrics["outcome_auc"].as_dict()
    assert table["baseline"] == max(table["baselines"].values())
    cursor = metrics["cursor_error_lines"]
    assert cursor.baseline == min(cursor.baselines.values())


def test_silent_steps_are_measured_apart():
    session = Session.model_validate(
        {
            "session_id": "t",
            "user_instruction": "repair it",
            "execution_trace": [
                {"step": 1, "thought": "Run it.", "tool_called": "pytest_run", "execution_result": {"exit_code": 1}},
                {"step": 2, "tool_called": "file_read", "tool_args": {"path": "m.py"}},
            ],
        }
    )
    held = session_facts(session)
    said = Predictions(
        intents={},
        tools={("t", 1): TOOL_INDEX["pytest_run"], ("t", 2): TOOL_INDEX["pytest_run"]},
        outcomes={},
        cursor_y={},
    )
    metrics = head_metrics([_session("a", REPAIR)], [held], said)
    assert metrics["tool_accuracy"].value == 0.5
    assert metrics["tool_accuracy_silent"].value == 0.0
    assert metrics["tool_accuracy_silent"].count == 1


def test_one_outcome_only_has_no_auc():
    train = [_session("a", REPAIR)]
    held = _session("c", [("pytest_run", 1, False, None)])
    metric = head_metrics(train, [held], _perfect(held))["outcome_auc"]
    assert metric.value is None
    assert metric.baselines["rule"] is None


def test_steps_dropped_by_truncation_are_not_counted():
    train, held = [_session("a", REPAIR)], _session("c", MISTAKEN)
    said = _perfect(held)
    kept = {key: value for key, value in said.tools.items() if key[1] > 2}
    metrics = head_metrics(train, [held], Predictions(intents={}, tools=kept, outcomes={}, cursor_y={}))
    assert metrics["tool_accuracy"].count == 3
    assert metrics["intent_f1"].value is None
    assert metrics["outcome_brier"].value is None
    assert math.isnan(said.code_loss)
