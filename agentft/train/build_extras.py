"""The ``algorithms`` section as objects (floor 5): what ``build`` adds to the trainer beside losses and feedback.

    algorithms, callbacks = build_extras(
        config, folder, model=model, renderer=renderer, sessions=held_out, feedback=feedback
    )

With the section's defaults both lists are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from composer.callbacks import LRMonitor, MemoryMonitor, SpeedMonitor
from composer.core import Algorithm, Callback

from agentft.algorithms.diversity import DiversityMonitor
from agentft.algorithms.early_stop import EarlyStop
from agentft.algorithms.layer_skip import LayerSkip
from agentft.algorithms.length_warmup import LengthWarmup
from agentft.algorithms.monitors import LayerOutputs, ProcessMemory, TokenSpeed
from agentft.algorithms.raspberry import RASPBerry
from agentft.algorithms.samples import Samples
from agentft.algorithms.spikes import LossSpikes
from agentft.config.algorithms import MonitorsConfig
from agentft.config.schema import RunConfig
from agentft.etai import Session
from agentft.feedback.callback import ExecutionFeedback
from agentft.models.agent_model import AgentModel
from agentft.text.render import Renderer
from agentft.tools import TOOL_INDEX


def build_extras(
    config: RunConfig,
    folder: Path,
    *,
    model: AgentModel,
    renderer: Renderer | None,
    sessions: Callable[[], Sequence[Session]],
    feedback: ExecutionFeedback | None,
) -> tuple[list[Algorithm], list[Callback]]:
    """Return algorithms and callbacks, in the order in which they act.

    Args:
        config: The run's configuration, checked: what needs feedback is on only with feedback.
        folder: The run folder.
        model: The agent, whole: before it is shared out over processes.
        renderer: Renders prompts for samples; None in a stage that has no sessions.
        sessions: Gives the held-out sessions that samples continue.
        feedback: The callback that executes calls; the callbacks returned here stand behind it.
    """
    section = config.algorithms
    algorithms: list[Algorithm] = []
    if section.length_warmup.enabled:
        algorithms.append(LengthWarmup(section.length_warmup))  # first: the others see the rows that are trained
    if section.raspberry.enabled:
        assert feedback is not None, "a check of the configuration"
        algorithms.append(
            RASPBerry(
                section.raspberry,
                feedback,
                tools=list(TOOL_INDEX),
                failed=config.feedback.reward.failed,
                seed=config.seed,
            )
        )
    if section.stochastic_depth.enabled:
        layer_skip = LayerSkip(section.stochastic_depth, seed=config.seed)
        layer_skip.attach(model.backbone)
        algorithms.append(layer_skip)
    callbacks: list[Callback] = []
    if (section.spikes.on_nan, section.spikes.on_spike) != ("ignore", "ignore"):
        callbacks.append(LossSpikes(section.spikes))
    if section.early_stop.metric is not None:
        callbacks.append(EarlyStop(section.early_stop))
    if section.diversity:
        assert feedback is not None, "a check of the configuration"
        callbacks.append(DiversityMonitor(feedback))
    callbacks += build_monitors(section.monitors, on_gpu=config.train.device != "cpu" and torch.cuda.is_available())
    if section.samples.every:
        assert renderer is not None, "a check of the configuration"
        callbacks.append(Samples(section.samples, renderer, sessions(), folder))
    return algorithms, callbacks


def build_monitors(config: MonitorsConfig, *, on_gpu: bool) -> list[Callback]:
    """Return the monitors that are on; Composer's own where they take our batches."""
    found: list[Callback] = []
    if config.learning_rate:
        found.append(LRMonitor())
    if config.speed:
        found += [SpeedMonitor(window_size=config.speed), TokenSpeed(config.speed)]
    if config.memory:
        found.append(MemoryMonitor() if on_gpu else ProcessMemory())
    if config.activations:
        found.append(LayerOutputs(config.activations))
    return found
