from __future__ import annotations

import pytest
import torch
from support_agent import InProcessExecutor, learn_by_heart, make_model, make_renderer, repair_session

from agentft.config.schema import RewardConfig
from agentft.data.batch import collate, join, select_rows
from agentft.data.shards import sample_of
from agentft.feedback.executions import Executions
from agentft.feedback.judged import Judged, assign_advantages, credit_totals, write_targets
from agentft.feedback.sampling import (
    Plan,
    Sampled,
    judge_calls,
    plan_calls,
    predict,
    rows_of,
    sample_calls,
    submit_calls,
    without_intents,
)
from agentft.models.agent_model import AgentModel
from agentft.sandbox.calls import session_calls
from agentft.text.render import Renderer
from agentft.tools import FormatError, ToolCall

KNOWN = [repair_session(number) for number in range(3)]
READ, EDIT, TEST = 1, 2, 3  # places in the trace: run, read, edit, run


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return make_renderer(KNOWN)


@pytest.fixture(scope="module")
def learned(renderer: Renderer) -> AgentModel:
    return learn_by_heart(make_model(renderer), renderer, KNOWN)


def plan(number: int, index: int) -> Plan:
    calls = session_calls(KNOWN[number])
    assert calls is not None
    return Plan(session=KNOWN[number], calls=calls, index=index)


def sample(
    model: AgentModel, renderer: Renderer, plans: list[Plan], temperature: float = 0.0, grammar: bool = False
) -> list[Sampled]:
    return sample_calls(
        model,
        renderer,
        plans,
        source="policy",
        batch=7,
        temperature=temperature,
        generator=torch.Generator().manual_seed(1),
        grammar=grammar,
    )


def execute(sampled: list[Sampled]) -> list[list[Judged]]:
    executor = InProcessExecutor()
    executions = Executions(executor, wait_s=10)
    submit_calls(sampled, executions)
    judged = judge_calls(sampled, executions, source="policy", batch=7, config=RewardConfig())
    executor.close()
    return judged


def test_a_sampled_edit_is_run_behind_its_setup_and_judged_by_the_next_run(
    learned: AgentModel, renderer: Renderer
) -> None:
    sampled = sample(learned, renderer, [plan(0, EDIT)])
    (group,) = execute(sampled)
    assert [call.role for call in group] == ["setup", "setup", "call", "verdict"]
    assert [call.key for call in group] == [f"policy/7/calc/0/{step}" for step in (1, 2, 3, 4)]
    edit, verdict = group[2:]
    assert edit.call == ToolCall("file_edit", {"path": "calc.py", "line": 2, "old": "a - b", "new": "a + b"})
    assert (edit.outcome.reward, edit.credit) == (1.0, 1.0)
    assert verdict.result is not None
    assert verdict.result.exit_code == 0
    assert verdict.result.fields == {"tampered": []}
    assert sampled[0].verdict == verdict.call
    assert sampled[0].requested[-1] == edit.call


def test_other_calls_have_no_verdict(learned: AgentModel, renderer: Renderer) -> None:
    read, test = execute(sample(learned, renderer, [plan(0, READ), plan(1, TEST)]))
    assert [call.role for call in read] == ["setup", "call"]
    assert (read[-1].call.name, read[-1].credit) == ("file_read", 1.0)
    assert [call.role for call in test] == ["setup"] * 3 + ["call"]
    assert (test[-1].call.name, test[-1].credit) == ("pytest_run", 1.0)


def test_rows_hold_prompt_call_and_result_start_with_the_span_on_the_call(
    learned: AgentModel, renderer: Renderer
) -> None:
    sampled = sample(learned, renderer, [plan(0, EDIT), plan(1, TEST)])
    rows, vocab = rows_of(sampled), renderer.vocab
    for row, (call, number) in enumerate(zip(sampled, (0, 1), strict=True)):
        whole = renderer.render(KNOWN[number])
        length = int(rows["lengths"][row])
        start, end = call.span
        # the sampled call is the recorded one, so the row is a prefix of the rendered session, position by position
        assert rows["input_ids"][row, :length].tolist() == whole.input_ids[:length].tolist()
        assert rows["position_ids"][row, :length].tolist() == whole.position_ids[:length].tolist()
        assert rows["input_ids"][row, start] == vocab.tool_start
        assert rows["input_ids"][row, end - 1] == vocab.tool_end
        assert rows["input_ids"][row, end] == vocab.result
        assert length == end + 1
        assert rows["steps"][row][0]["result_at"] == end
    assert rows["outcome_mask"].tolist() == [0.0, 0.0]
    assert (rows["tool_target"] == -100).all()


def test_fresh_outcomes_and_advantages_reach_the_joined_rows_only_where_they_belong(
    learned: AgentModel, renderer: Renderer
) -> None:
    sampled = sample(learned, renderer, [plan(0, EDIT), plan(1, TEST)])
    groups, rows = execute(sampled), without_intents(rows_of(sampled))
    recorded = collate([sample_of(session, renderer.render(session)) for session in KNOWN])
    batch = join([recorded, rows])
    for row, group in enumerate(groups, 3):
        for call in group:
            call.row = row if call.role == "call" else None
    judged = [call for group in groups for call in group]
    judged[2].credit = -0.5  # as if the edit had broken the tests
    assign_advantages(judged, "policy", *credit_totals(judged, "policy"))
    write_targets(batch, judged)
    assert batch["policy_weight"][:3].abs().sum() == 0
    start, end = sampled[0].span
    assert set(batch["policy_weight"][3, start:end].tolist()) == {-1.5}
    assert batch["policy_weight"][3].abs().sum() == 1.5 * (end - start)
    at = {int(row): i for i, (row, _) in enumerate(batch["outcome_at"].tolist())}
    assert batch["outcome_mask"][at[3]] == 0  # an edit runs no code
    assert (batch["outcome_mask"][at[4]], batch["outcome_target"][at[4]]) == (1, 1)
    assert torch.equal(batch["outcome_target"][:-2], recorded["outcome_target"])
    assert len(batch["intent_at"]) == 3
    alone = select_rows(batch, [3])
    assert set(alone["policy_weight"][0, start:end].tolist()) == {-1.5}


def test_the_policy_gradient_touches_exactly_the_call(learned: AgentModel, renderer: Renderer) -> None:
    """The policy loss of a row is −A·Σ log p over the call's tokens, computed here by hand."""
    sampled = sample(learned, renderer, [plan(0, EDIT)])
    batch = without_intents(rows_of(sampled))
    start, end = sampled[0].span
    batch["policy_weight"][0, start:end] = 0.75
    learned.entropy_bonus, kept = 0.0, learned.entropy_bonus
    with torch.no_grad():
        outputs = learned(batch)
        loss = learned.component_sums(outputs, batch)["policy"]
        logprobs = learned.vocabulary_logits(outputs["hidden"])[0].log_softmax(-1)
    learned.entropy_bonus = kept
    ids = batch["input_ids"][0]
    by_hand = sum(-0.75 * logprobs[at - 1, ids[at]] for at in range(start, end))
    assert float(loss) == pytest.approx(float(by_hand), abs=1e-5)
    assert outputs["next_at"][:, 1].tolist() == list(range(start, end))


def test_a_call_that_does_not_parse_is_failed_without_running(renderer: Renderer) -> None:
    sampled = sample(make_model(renderer), renderer, [plan(0, EDIT), plan(1, EDIT)], temperature=1.0)
    assert all(isinstance(call.call, FormatError) for call in sampled)
    assert all(call.requested == () for call in sampled)
    for call, group in zip(sampled, execute(sampled), strict=True):
        (judged,) = group
        assert (judged.result, judged.outcome.reward, judged.credit) == (None, -0.5, -0.5)
        assert judged.call.name == "format_error"
        assert judged.call.args["reason"]
        assert judged.span == call.span
        assert call.span[0] < call.span[1] == len(call.draft)
    rows = rows_of(sampled)
    assert len(rows["tool_at"]) == len(rows["outcome_at"]) == 0


def test_predictions_of_sampled_calls(learned: AgentModel, renderer: Renderer) -> None:
    sampled = sample(learned, renderer, [plan(0, EDIT), plan(1, TEST)])
    predict(learned, rows_of(sampled), sampled)
    for call in sampled:
        assert call.prediction is not None
        assert call.prediction.reward is not None
        assert call.prediction.intents is not None
        assert call.prediction.tool_probs is not None
        assert sum(call.prediction.tool_probs.values()) == pytest.approx(1, abs=2e-3)
    assert learned.training


def test_plans_are_different_sessions_and_follow_the_seed() -> None:
    def chosen(seed: int, count: int) -> list[tuple[str, int]]:
        generator = torch.Generator().manual_seed(seed)
        return [(p.session.session_id, p.step) for p in plan_calls(KNOWN, count, generator)]

    assert chosen(1, 2) == chosen(1, 2)
    assert len({chosen(seed, 2)[0] for seed in range(20)}) > 5
    assert len({name for name, _ in chosen(1, 9)}) == 3  # more cannot be had
    foreign = KNOWN[0].model_copy(update={"workspace": None})
    assert plan_calls([foreign], 2, torch.Generator()) == []


def test_calls_sampled_within_the_grammar_parse(renderer: Renderer) -> None:
    """An untrained model writes noise by itself, and calls within the grammar."""
    model = make_model(renderer)
    plans = [plan(number, index) for number in range(3) for index in range(2)]
    noise = sample(model, renderer, plans, temperature=1.0)
    assert any(isinstance(call.call, FormatError) for call in noise)
    calls = sample(model, renderer, plans, temperature=1.0, grammar=True)
    assert [type(call.call) for call in calls] == [ToolCall] * len(calls)
