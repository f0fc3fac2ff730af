"""Checks of chat templates and of ``stage: sft`` (floor 1): settings that contradict each other or have no effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from agentft.config.schema import LossConfig, RunConfig, ScheduleConfig

HEAD_LOSSES = ("intent", "tool", "cursor", "reward", "policy")
HEAD_RATES = ("intent_lr", "tool_lr", "reward_lr", "cursor_lr")


def problems(config: RunConfig, defaults: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield the parts of a ``checks.Problem`` for what chat templates and supervised fine-tuning cannot honour.

    Args:
        config: The whole run.
        defaults: A run with nothing set, to tell what was.
    """
    yield from _template_problems(config)
    if config.stage == "sft":
        yield from _stage_problems(config, defaults)


def _template_problems(config: RunConfig) -> Iterator[dict[str, Any]]:
    text, template = config.text, config.text.template
    if template == "etai":
        if text.list_tools:
            what, hint = "text.list_tools has no effect", "the native template has no list of tools; set it to false"
            yield {"keys": ("text.list_tools", "text.template"), "what": what, "got": "template=etai", "hint": hint}
        return
    if text.handles:
        what, hint = "a chat template has no handles", "set text.handles=false"
        got = f"handles=true, template={template}"
        yield {"keys": ("text.handles", "text.template"), "what": what, "got": got, "hint": hint}
    if config.feedback.backend != "off":
        what = "execution feedback reads and writes the native template"
        got, hint = f"backend={config.feedback.backend}, template={template}", "set feedback.backend=off"
        yield {"keys": ("feedback.backend", "text.template"), "what": what, "got": got, "hint": hint}
    native = {
        "data.input_noise": config.data.input_noise,
        "algorithms.samples.every": config.algorithms.samples.every,
    }
    for key, value in native.items():
        if value:
            what, hint = f"{key} works on the native template", f"set {key}=0"
            yield {"keys": (key, "text.template"), "what": what, "got": f"template={template}", "hint": hint}


def _stage_problems(config: RunConfig, defaults: RunConfig) -> Iterator[dict[str, Any]]:
    got = "stage=sft trains the language model alone"
    if config.feedback.backend != "off" and config.text.template == "etai":
        what, hint = "stage sft has no feedback", "set feedback.backend=off, or stage=agent"
        yield {"keys": ("feedback.backend", "stage"), "what": what, "got": config.feedback.backend, "hint": hint}
    if config.data.calibration_split is not None:
        what, hint = "stage sft trains no outcome head to calibrate", "set data.calibration_split to null"
        split = config.data.calibration_split
        yield {"keys": ("data.calibration_split", "stage"), "what": what, "got": split, "hint": hint}
    for section, names in (("loss", HEAD_LOSSES), ("optimizer", HEAD_RATES)):
        mine, unset = getattr(config, section), getattr(defaults, section)
        for name in names:
            if getattr(mine, name) != getattr(unset, name):
                key = f"{section}.{name}"
                hint = "leave it out, or set stage=agent"
                yield {"keys": (key, "stage"), "what": f"{key} has no effect", "got": got, "hint": hint}


def stage_loss(config: RunConfig) -> LossConfig:
    """Return the loss weights of the run's stage: supervised fine-tuning trains no head and follows no execution."""
    if config.stage != "sft":
        return config.loss
    return replace(config.loss, **{name: ScheduleConfig(start=0.0) for name in HEAD_LOSSES})
