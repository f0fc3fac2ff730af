"""Weights over time (floor 2): ``ScheduleConfig`` and a moment → one number. Pure functions.

``check_schedule`` finds every missing or contradicting field; ``value`` assumes a schedule that passed it.
Time is counted in batches; ``5ep`` means five times the batches of an epoch, and a fraction of an epoch counts as such.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise

from agentft.config.schema import ScheduleConfig
from agentft.errors import ConfigError

_TIME = re.compile(r"(\d+(?:\.\d+)?)(ep|ba)")
_USES: dict[str, tuple[str, ...]] = {
    "constant": (),
    "step": ("points",),
    "linear": ("end", "until", "slope", "floor"),
    "cosine": ("end", "until"),
    "piecewise": ("points",),
}


@dataclass(frozen=True, kw_only=True)
class TrainTime:
    """A moment of training: batches done since the start, and how many batches an epoch has."""

    batch: int
    batches_per_epoch: int

    @property
    def epoch(self) -> float:
        """Epochs done, with the fraction."""
        return self.batch / max(self.batches_per_epoch, 1)


def value(schedule: ScheduleConfig, time: TrainTime) -> float:
    """Return the weight at ``time``; never negative.

    Raises:
        ConfigError: A time string cannot be read (``check_schedule`` reports it earlier and with its path).
    """
    start, now = float(schedule.start), float(time.batch)
    if schedule.kind == "step":
        return [start, *(v for at, v in _points(schedule, time) if now >= at)][-1]
    if schedule.kind == "piecewise":
        return _interpolate([(0.0, start), *_points(schedule, time)], now)
    if schedule.kind == "cosine":
        return float(schedule.end) + (start - float(schedule.end)) * 0.5 * (  # type: ignore[arg-type]
            1 + math.cos(math.pi * _progress(schedule, time))
        )
    if schedule.kind == "linear":
        return _linear(schedule, time)
    return start


def parse_time(text: str, batches_per_epoch: int) -> float:
    """Return ``5ep`` or ``200ba`` in batches.

    Raises:
        ConfigError: ``text`` is neither.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise ConfigError("not a time", got=text, expected="a number of epochs or batches such as 5ep or 200ba")
    return float(match[1]) * (max(batches_per_epoch, 1) if match[2] == "ep" else 1)


def check_schedule(schedule: ScheduleConfig, path: str) -> list[ConfigError]:
    """Return every error of a schedule; ``path`` is its config key, such as ``loss.code``."""
    kind = schedule.kind
    errors = [
        ConfigError(f"`{kind}` does not use `{name}`", where=f"{path}.{name}", got=given, hint=f"remove `{name}`")
        for name in ("end", "until", "slope", "floor", "points")
        if name not in _USES[kind] and (given := getattr(schedule, name)) not in (None, [])
    ]
    for name in ("start", "end", "floor"):
        errors += _check_weight(getattr(schedule, name), f"{path}.{name}", required=name == "start")
    if schedule.until is not None and "until" in _USES[kind]:
        errors += _check_time(schedule.until, f"{path}.until")
    if kind == "cosine":
        errors += _check_both(schedule, path)
    if kind == "linear":
        errors += _check_linear(schedule, path)
    if kind in ("step", "piecewise"):
        errors += _check_points(schedule.points, f"{path}.points")
    return errors


def _linear(schedule: ScheduleConfig, time: TrainTime) -> float:
    start = float(schedule.start)
    if schedule.slope is None:
        return start + (float(schedule.end) - start) * _progress(schedule, time)  # type: ignore[arg-type]
    elapsed = time.epoch if schedule.per == "ep" else float(time.batch)
    return max(start + schedule.slope * elapsed, schedule.floor or 0.0)


def _progress(schedule: ScheduleConfig, time: TrainTime) -> float:
    return min(time.batch / parse_time(str(schedule.until), time.batches_per_epoch), 1.0)


def _points(schedule: ScheduleConfig, time: TrainTime) -> list[tuple[float, float]]:
    pairs = (entry.split("=") for entry in schedule.points)
    return [(parse_time(at.strip(), time.batches_per_epoch), float(weight)) for at, weight in pairs]


def _interpolate(points: list[tuple[float, float]], now: float) -> float:
    for (t0, v0), (t1, v1) in pairwise(points):
        if now < t1:
            return v0 + (v1 - v0) * (now - t0) / (t1 - t0)
    return points[-1][1]


def _check_weight(number: object, where: str, *, required: bool) -> list[ConfigError]:
    if number is None and not required:
        return []
    if not isinstance(number, int | float) or not math.isfinite(number) or number < 0:
        return [ConfigError("not a weight", where=where, got=number, expected="a finite number, 0 or more")]
    return []


def _check_time(text: str, where: str) -> list[ConfigError]:
    match = _TIME.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        return [ConfigError("not a time", where=where, got=text, expected="a time after 0 such as 5ep or 200ba")]
    return []


def _check_both(schedule: ScheduleConfig, path: str) -> list[ConfigError]:
    return [
        ConfigError(f"`{schedule.kind}` needs `{name}`", where=f"{path}.{name}", expected=expected)
        for name, expected in (("end", "the value to reach"), ("until", "the time at which it is reached, such as 5ep"))
        if getattr(schedule, name) is None
    ]


def _check_linear(schedule: ScheduleConfig, path: str) -> list[ConfigError]:
    if schedule.slope is None:
        errors = _check_both(schedule, path)
        if schedule.floor is not None:
            errors.append(
                ConfigError("`floor` needs `slope`", where=f"{path}.floor", got=schedule.floor, hint="use `end` alone")
            )
        return errors
    if not math.isfinite(schedule.slope):
        return [ConfigError("not a slope", where=f"{path}.slope", got=schedule.slope, expected="a finite number")]
    return [
        ConfigError("either `slope` or `end` with `until`", where=f"{path}.{name}", got=given, hint=f"remove `{name}`")
        for name in ("end", "until")
        if (given := getattr(schedule, name)) is not None
    ]


def _check_points(points: list[str], where: str) -> list[ConfigError]:
    if not points:
        return [ConfigError("no points", where=where, expected='a list such as ["5ep=0.15", "9ep=0.1"]')]
    errors: list[ConfigError] = []
    times: list[tuple[str, float]] = []
    for row, entry in enumerate(points):
        at, _, weight = str(entry).partition("=")
        match = _TIME.fullmatch(at.strip())
        if match is None or float(match[1]) <= 0 or not _is_weight(weight):
            errors.append(
                ConfigError("not a point", where=f"{where}[{row}]", got=entry, expected="TIME=WEIGHT such as 5ep=0.15")
            )
        else:
            times.append((match[2], float(match[1])))
    if len({unit for unit, _ in times}) > 1:
        errors.append(ConfigError("points mix epochs and batches", where=where, got=points, expected="one unit"))
    elif any(later[1] <= earlier[1] for earlier, later in pairwise(times)):
        errors.append(ConfigError("points are not in time order", where=where, got=points, expected="rising times"))
    return errors


def _is_weight(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and float(text) >= 0
    except ValueError:
        return False
