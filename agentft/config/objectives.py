"""Section ``objectives`` (floor 1): what continued pretraining predicts. It belongs to ``stage: pretrain`` alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ObjectivesConfig:
    """Which objective a row of the corpus is trained with; drawn anew for each row and epoch."""

    causal: float = 0.8  # share of the rows that are trained as they are: every next token
    fim: float = 0.2  # share with a part taken out of the middle and asked for at the end
    masked: float = 0.0  # share with whole words masked and asked for after the row
    denoise: float = 0.0  # share that is corrupted, with the original asked for after it
    spm_share: float = 0.5  # of the fim rows: suffix first (SPM); the others have the prefix first (PSM)
    mask_least: float = 0.15  # of the masked rows: least share of the words that is masked
    mask_most: float = 0.25  # most share; each row draws its own in between
    corruptions: list[Literal["rename", "permute", "comments"]] = field(  # what denoise does: one of them for each row
        default_factory=lambda: ["rename", "permute", "comments"]
    )
    code_weight: float = 1.2  # weight of a token of code in the loss; prose (comments, docstrings, markup) has 1


WEIGHTS = ("causal", "fim", "masked", "denoise")
"""Names of the objectives; each is a field of ``ObjectivesConfig``."""

_NEEDS = {"spm_share": "fim", "mask_least": "masked", "mask_most": "masked", "corruptions": "denoise"}


def problems(
    config: ObjectivesConfig | None, *, stage: str, backend: str, calibration_split: str | None, input_noise: float
) -> Iterator[dict[str, Any]]:
    """Yield the parts of a ``checks.Problem`` for every setting that is out of range or cannot take effect.

    Args:
        config: The section, None where it is null.
        stage: ``stage``.
        backend: ``feedback.backend``.
        calibration_split: ``data.calibration_split``.
        input_noise: ``data.input_noise``.
    """
    if stage != "pretrain":
        if config is not None:
            what = "objectives have no effect in this stage"
            hint = "set stage=pretrain, or objectives to null"
            yield {"keys": ("objectives", "stage"), "what": what, "got": f"stage={stage}", "hint": hint}
        return
    if backend != "off":
        what, hint = "a corpus has no calls to execute", "set feedback.backend=off"
        yield {"keys": ("feedback.backend", "stage"), "what": what, "got": f"stage=pretrain, {backend}", "hint": hint}
    if calibration_split is not None:
        what, hint = "a corpus has no outcomes to calibrate on", "set data.calibration_split to null"
        yield {"keys": ("data.calibration_split", "stage"), "what": what, "got": calibration_split, "hint": hint}
    if input_noise:
        what, hint = "the objectives of a corpus have their own noise", "set data.input_noise=0"
        yield {"keys": ("data.input_noise", "stage"), "what": what, "got": input_noise, "hint": hint}
    yield from _value_problems(config or ObjectivesConfig())


def _value_problems(config: ObjectivesConfig) -> Iterator[dict[str, Any]]:
    weights = {name: getattr(config, name) for name in WEIGHTS}
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            key = f"objectives.{name}"
            yield {"keys": (key,), "what": f"{key} is out of range", "got": weight, "expected": "0 or more"}
    if not sum(weights.values()) > 0:
        yield {"keys": ("objectives",), "what": "no objective has a weight", "got": weights}
    if not 0 <= config.spm_share <= 1:
        key = "objectives.spm_share"
        yield {"keys": (key,), "what": f"{key} is out of range", "got": config.spm_share, "expected": "0 to 1"}
    if not 0 < config.mask_least <= config.mask_most < 1:
        got = f"mask_least={config.mask_least}, mask_most={config.mask_most}"
        expected = "0 < mask_least <= mask_most < 1"
        what = "the shares of masked words are no range"
        keys = ("objectives.mask_least", "objectives.mask_most")
        yield {"keys": keys, "what": what, "got": got, "expected": expected}
    if not 0 < config.code_weight < math.inf:
        key = "objectives.code_weight"
        yield {"keys": (key,), "what": f"{key} is out of range", "got": config.code_weight, "expected": "above 0"}
    if config.denoise and not config.corruptions:
        keys = ("objectives.corruptions", "objectives.denoise")
        yield {"keys": keys, "what": "denoise has no corruption to undo", "expected": "rename, permute, comments"}
    for name, objective in _NEEDS.items():
        if not weights[objective] and getattr(config, name) != getattr(ObjectivesConfig(), name):
            keys = (f"objectives.{name}", f"objectives.{objective}")
            got = f"objectives.{objective}=0"
            yield {"keys": keys, "what": f"objectives.{name} has no effect", "got": got}
