"""Platt scaling: what it finds, what it leaves, and that a calibrated head says what was fitted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_agent import make_model, make_renderer, sessions

from agentft.data.shards import sample_of
from agentft.evals.calibrate import FEWEST_RUNS, calibrate_outcome, fit_platt
from agentft.evals.heads import predict


def _drawn(scale: float, shift: float, count: int = 20_000) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(count, dtype=torch.float64, generator=generator)
    passed = torch.rand(count, dtype=torch.float64, generator=generator) < torch.sigmoid(scale * logits + shift)
    return logits, passed.double()


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (0.4, -1.0), (2.0, 0.5)])
def test_the_sigmoid_that_drew_the_outcomes_is_found(scale: float, shift: float) -> None:
    found = fit_platt(*_drawn(scale, shift))
    assert found == pytest.approx((scale, shift), abs=0.08)


def test_few_runs_move_little_and_many_move_all_the_way() -> None:
    logits, passed = _drawn(0.4, -1.0)
    shifts = [fit_platt(logits[:count], passed[:count])[1] for count in (4, 40, 400, 20_000)]
    assert abs(shifts[0]) < 0.5
    assert shifts[-1] == pytest.approx(-1.0, abs=0.05)
    assert abs(shifts[2] + 1) < abs(shifts[0] + 1)


def test_separated_outcomes_give_a_finite_answer() -> None:
    logits = torch.tensor([-3.0, -2.0, 2.0, 3.0], dtype=torch.float64)
    scale, shift = fit_platt(logits, (logits > 0).double())
    assert 0 < scale < 10
    assert abs(shift) < 1e-6


def test_logits_that_point_the_wrong_way_are_replaced_by_the_rate() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, -1.0, -2.0] * 8, dtype=torch.float64)
    scale, shift = fit_platt(logits, torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0] * 8, dtype=torch.float64))
    assert scale == 0.0
    assert -1 < shift < 0


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.floats(-15, 15), st.booleans()), min_size=4, max_size=60).filter(
        lambda rows: 0 < sum(passed for _, passed in rows) < len(rows)
    )
)
def test_the_likelihood_never_gets_worse_and_the_order_stays(rows: list[tuple[float, bool]]) -> None:
    logits = torch.tensor([logit for logit, _ in rows], dtype=torch.float64)
    passed = torch.tensor([float(p) for _, p in rows], dtype=torch.float64)
    scale, shift = fit_platt(logits, passed)
    ones, zeros = float(passed.sum()), len(rows) - float(passed.sum())
    targets = torch.where(passed > 0, (ones + 1) / (ones + 2), 1 / (zeros + 2))

    def loss(a: float, b: float) -> float:
        return float(torch.nn.functional.binary_cross_entropy_with_logits(a * logits + b, targets))

    assert math.isfinite(scale)
    assert math.isfinite(shift)
    assert scale >= 0
    assert loss(scale, shift) <= loss(1.0, 0.0) + 1e-9


def test_a_calibrated_head_says_what_was_fitted_and_keeps_its_order() -> None:
    known = sessions(14)
    renderer = make_renderer(known)
    model = make_model(renderer)
    samples = [sample_of(session, renderer.render(session)) for session in known]
    before = predict(model, samples)
    found = calibrate_outcome(model, samples, known)
    after = predict(model, samples)
    assert found is not None
    assert found.runs >= FEWEST_RUNS
    assert found.brier_after < found.brier_before
    for key, probability in before.outcomes.items():
        logit = math.log(probability / (1 - probability))
        wanted = 1 / (1 + math.exp(-(found.scale * logit + found.shift)))
        assert after.outcomes[key] == pytest.approx(wanted, abs=1e-5)
    assert after.tools == before.tools
    assert after.code_loss == before.code_loss


def test_too_few_runs_change_nothing() -> None:
    known = sessions(5)
    renderer = make_renderer(known)
    model = make_model(renderer)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert calibrate_outcome(model, [sample_of(s, renderer.render(s)) for s in known], known) is None
    assert calibrate_outcome(model, [], []) is None
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
