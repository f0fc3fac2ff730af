"""Schedules: the project's defaults at known moments, bounds that hold for any schedule, and each kind of mistake."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentft.config.schema import LossConfig, ScheduleConfig
from agentft.errors import ConfigError
from agentft.schedules import TrainTime, check_schedule, parse_time, value

weights = st.floats(0, 10, allow_nan=False)
times = st.builds(TrainTime, batch=st.integers(0, 5000), batches_per_epoch=st.integers(1, 200))


def at_epoch(epoch: float, batches_per_epoch: int = 20) -> TrainTime:
    return TrainTime(batch=round(epoch * batches_per_epoch), batches_per_epoch=batches_per_epoch)


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        ("code", {0: 0.8, 5: 0.7, 20: 0.4, 100: 0.4}),
        ("intent", {0: 0.25, 4.95: 0.25, 5: 0.15, 50: 0.15}),
        ("tool", {0: 0.2, 50: 0.2}),
        ("cursor", {2.95: 0.15, 3: 0.10}),
        ("reward", {9.95: 0.20, 10: 0.25}),
    ],
)
def test_the_defaults_are_the_projects(component: str, expected: dict[float, float]) -> None:
    schedule = getattr(LossConfig(), component)
    for epoch, weight in expected.items():
        assert value(schedule, at_epoch(epoch)) == pytest.approx(weight), f"{component} at epoch {epoch}"


def test_the_default_schedules_are_valid() -> None:
    for name in ("code", "intent", "tool", "cursor", "reward", "policy"):
        assert check_schedule(getattr(LossConfig(), name), f"loss.{name}") == []


@given(start=weights, end=weights, until=st.integers(1, 300), kind=st.sampled_from(["linear", "cosine"]), time=times)
def test_ramps_stay_between_their_ends_and_arrive(
    start: float, end: float, until: int, kind: str, time: TrainTime
) -> None:
    schedule = ScheduleConfig(kind=kind, start=start, end=end, until=f"{until}ba")
    assert check_schedule(schedule, "loss.code") == []
    got = value(schedule, time)
    assert min(start, end) - 1e-9 <= got <= max(start, end) + 1e-9
    assert value(schedule, TrainTime(batch=0, batches_per_epoch=7)) == pytest.approx(start)
    assert value(schedule, TrainTime(batch=until, batches_per_epoch=7)) == pytest.approx(end)


@given(start=weights, slope=st.floats(-5, 5), floor=st.none() | weights, time=times)
def test_a_slope_never_goes_below_its_floor_or_zero(
    start: float, slope: float, floor: float | None, time: TrainTime
) -> None:
    schedule = ScheduleConfig(kind="linear", start=start, slope=slope, floor=floor)
    assert value(schedule, time) >= (floor or 0.0)


@given(
    start=weights,
    steps=st.lists(st.tuples(st.integers(1, 400), weights), min_size=1, max_size=5, unique_by=lambda p: p[0]),
    time=times,
)
def test_points_are_met_exactly(start: float, steps: list[tuple[int, float]], time: TrainTime) -> None:
    steps = sorted(steps)
    points = [f"{at}ba={weight!r}" for at, weight in steps]
    stairs = ScheduleConfig(kind="step", start=start, points=points)
    lines = ScheduleConfig(kind="piecewise", start=start, points=points)
    assert check_schedule(stairs, "x") == check_schedule(lines, "x") == []
    for at, weight in steps:
        here = TrainTime(batch=at, batches_per_epoch=3)
        assert value(stairs, here) == weight
        assert value(lines, here) == pytest.approx(weight)
    everything = [start, *(weight for _, weight in steps)]
    assert value(stairs, time) in everything
    assert min(everything) - 1e-9 <= value(lines, time) <= max(everything) + 1e-9


def test_epochs_and_batches_name_the_same_moment() -> None:
    by_epoch = ScheduleConfig(kind="cosine", start=1.0, end=0.0, until="4ep")
    by_batch = ScheduleConfig(kind="cosine", start=1.0, end=0.0, until="80ba")
    for batch in range(0, 100, 7):
        time = TrainTime(batch=batch, batches_per_epoch=20)
        assert value(by_epoch, time) == value(by_batch, time)
    assert value(by_epoch, at_epoch(2)) == pytest.approx(0.5)
    assert parse_time("1.5ep", 20) == 30


@pytest.mark.parametrize(
    ("schedule", "where"),
    [
        (ScheduleConfig(start=-0.1), "loss.code.start"),
        (ScheduleConfig(start=math.inf), "loss.code.start"),
        (ScheduleConfig(start=0.1, end=0.2), "loss.code.end"),
        (ScheduleConfig(start=0.1, floor=0.0), "loss.code.floor"),
        (ScheduleConfig(kind="step", start=0.1), "loss.code.points"),
        (ScheduleConfig(kind="step", start=0.1, points=["soon=1"]), "loss.code.points[0]"),
        (ScheduleConfig(kind="step", start=0.1, points=["5ep=much"]), "loss.code.points[0]"),
        (ScheduleConfig(kind="step", start=0.1, points=["5ep=1", "3ep=2"]), "loss.code.points"),
        (ScheduleConfig(kind="piecewise", start=0.1, points=["5ep=1", "90ba=2"]), "loss.code.points"),
        (ScheduleConfig(kind="linear", start=0.1, end=0.2), "loss.code.until"),
        (ScheduleConfig(kind="linear", start=0.1, until="3ep"), "loss.code.end"),
        (ScheduleConfig(kind="linear", start=0.1, end=0.2, until="0ep"), "loss.code.until"),
        (ScheduleConfig(kind="linear", start=0.1, end=0.2, until="3ep", floor=0.1), "loss.code.floor"),
        (ScheduleConfig(kind="linear", start=0.1, slope=-0.1, end=0.2), "loss.code.end"),
        (ScheduleConfig(kind="linear", start=0.1, slope=math.nan), "loss.code.slope"),
        (ScheduleConfig(kind="cosine", start=0.1, end=0.2, until="later"), "loss.code.until"),
        (ScheduleConfig(kind="cosine", start=0.1, end=0.0, until="9ep", slope=1.0), "loss.code.slope"),
    ],
)
def test_each_mistake_is_named_at_its_place(schedule: ScheduleConfig, where: str) -> None:
    errors = check_schedule(schedule, "loss.code")
    assert [error.where for error in errors] == [where], [str(error) for error in errors]


def test_a_time_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ConfigError, match="not a time"):
        parse_time("5 epochs", 10)
