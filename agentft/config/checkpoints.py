"""``train.checkpoints`` (floor 1): when a run is saved, what is kept, and where it goes before anything is removed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Time = tuple[float, str] | None
"""(value, unit) as ``checks.parse_time`` gives it."""

Measured = Literal["code", "intent", "tool", "cursor", "reward"]
"""Losses that an evaluation measures."""


@dataclass(frozen=True, kw_only=True)
class CheckpointsConfig:
    """Checkpoints: one file each, safetensors with JSON in its header, never a pickle."""

    interval: str = "1dur"  # time between checkpoints; 1dur is once, at the end
    keep_last: int = 2  # newest checkpoints kept on disk
    keep_best: int = 0  # checkpoints kept beside them for the lowest best_metric; 0 keeps none
    best_metric: Measured = "code"  # loss on eval_split that decides which are best
    autoresume: bool = False  # go on from the newest checkpoint of the run of this name instead of refusing it
    upload: str | None = None  # s3://bucket/prefix or a folder; checkpoints are removed here only once they are there
    strip_optimizer: bool = False  # all but the newest checkpoint lose the optimiser's state, two thirds of their size


def problems(
    config: CheckpointsConfig, *, interval: Time, evaluated: Time, overwrite: bool
) -> Iterator[dict[str, Any]]:
    """Yield what is wrong, as the parts of a ``checks.Problem``.

    ``interval`` and ``evaluated`` are the parsed times between checkpoints and between evaluations.
    """
    section = "train.checkpoints"
    if interval is not None and interval[0] == 0:
        yield {
            "keys": (f"{section}.interval",),
            "what": "a checkpoint cannot be saved every 0 batches",
            "got": config.interval,
            "hint": "1dur saves once, at the end",
        }
    if config.keep_last < 1 or config.keep_best < 0:
        key = "keep_last" if config.keep_last < 1 else "keep_best"
        yield {
            "keys": (f"{section}.{key}",),
            "what": f"{section}.{key} is out of range",
            "got": getattr(config, key),
            "expected": "1 or more" if key == "keep_last" else "0 or more",
        }
    if config.autoresume and overwrite:
        yield {
            "keys": (f"{section}.autoresume", "overwrite"),
            "what": "a run cannot both go on and be removed first",
            "got": "autoresume=true, overwrite=true",
            "hint": "set one of them to false",
        }
    if config.keep_best <= 0:
        return
    if evaluated is None or interval is None or interval[0] == 0:
        return
    together = evaluated[0] > 0 and evaluated[1] == interval[1] and interval[0] % evaluated[0] == 0
    if not together:
        yield {
            "keys": (f"{section}.keep_best", f"{section}.interval", "train.eval_interval"),
            "what": "the best checkpoints cannot be told: no evaluation falls together with each checkpoint",
            "got": f"interval={config.interval}, evaluated every {evaluated[0]:g}{evaluated[1]}",
            "expected": f"{section}.interval a multiple of train.eval_interval, in the same unit",
            "hint": f"set train.eval_interval={config.interval}",
        }
