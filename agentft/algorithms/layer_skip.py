"""Stochastic depth by layer (floor 4): in each training batch some decoder layers are skipped.

Layer l of L (counted from 1) is skipped with probability p_l = p·l/L (linear, as in Huang et al. 2016,
arXiv:1603.09382). A layer adds F(x) to its input; one that is kept gives x + F(x)/(1 − p_l), so that the expectation is
the plain layer and nothing has to be scaled afterwards: evaluation, sampling and export use the model as it is. (Huang
et al. scale at test time instead; dividing while training is what dropout and timm's ``DropPath`` do.)

The same layers are skipped on every rank and in every microbatch of a batch, by a draw of (seed, batch): the gradient
is then that of one network over the whole global batch, however it is cut, and data parallelism meets the same
parameters everywhere. Draws by microbatch would vary more but make the loss depend on the cut. Resume needs no state.

A skipped layer computes nothing. Its parameters get a zero gradient rather than none, as unused experts do, because
data parallelism waits for every gradient; momentum and weight decay therefore go on for it.

Names of the state dict stay: the layer's ``forward`` is replaced on the instance, and only in training mode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from composer import Algorithm, Event, Logger, State
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentft.config.algorithms import StochasticDepthConfig
from agentft.errors import ModelError
from agentft.models.agent_model import agent_of
from agentft.models.backbone import hidden_states, layers_of, touch
from agentft.models.generate import evaluating


def decoder_layers(backbone: nn.Module) -> list[nn.Module]:
    """Return the decoder layers in order.

    Raises:
        ModelError: There are none that can be told from the rest of the model.
    """
    layers = layers_of(backbone)
    if not layers:
        raise ModelError(
            "the backbone has no decoder layers that can be told apart",
            where="algorithms",
            got=type(backbone).__name__,
            expected="layers of transformers' class GradientCheckpointingLayer",
        )
    return layers


def _gives_tuples(backbone: PreTrainedModel, layers: list[nn.Module]) -> list[bool]:
    """Return for each layer whether its output is a tuple: seen in a forward pass of one token, because the layers'
    annotations are often wrong about it."""
    seen: dict[nn.Module, bool] = {}

    def note(layer: nn.Module, inputs: Any, output: Any) -> None:
        seen[layer] = isinstance(output, tuple)

    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        with evaluating(backbone), torch.no_grad():
            one = torch.zeros(1, 1, dtype=torch.int64, device=backbone.device)
            hidden_states(backbone, one, one)
    finally:
        for hook in hooks:
            hook.remove()
    return [seen[layer] for layer in layers]


def skip_probabilities(layers: int, p: float) -> list[float]:
    """Return p·l/L for l = 1 … L."""
    return [p * (number + 1) / layers for number in range(layers)]


def draw(probabilities: list[float], name: str) -> list[bool]:
    """Return for each layer whether it is skipped: a function of ``name``."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    chances = torch.rand(len(probabilities), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (chances < torch.tensor(probabilities, dtype=torch.float64)).tolist()


class LayerSkip(Algorithm):
    """Stochastic depth of a backbone. ``attach`` it before the model is shared out over processes (FSDP)."""

    def __init__(self, config: StochasticDepthConfig, *, seed: int) -> None:
        self.config, self.seed = config, seed
        self._probabilities: list[float] = []
        self._skipped: list[bool] = []

    def match(self, event: Event, state: State) -> bool:
        """Attach when the trainer is made, unless that is done; draw at the start of each batch."""
        return event in (Event.INIT, Event.BATCH_START)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Attach, or draw."""
        if event == Event.INIT:
            if not self._probabilities:
                self.attach(agent_of(state).backbone)
            return
        self._skipped = draw(self._probabilities, f"{self.seed}/layers/{state.timestamp.batch.value}")
        logger.log_metrics({"stochastic_depth/skipped": float(sum(self._skipped))})

    def attach(self, backbone: PreTrainedModel) -> None:
        """Replace the forward of every decoder layer; nothing is skipped before the first draw."""
        layers = decoder_layers(backbone)
        tuples = _gives_tuples(backbone, layers)
        self._probabilities = skip_probabilities(len(layers), self.config.p)
        self._skipped = [False] * len(layers)
        for number, layer in enumerate(layers):
            layer.forward = self._skippable(number, layer, layer.forward, tuples[number])

    def _skippable(
        self, number: int, layer: nn.Module, forward: Callable[..., Any], gives_tuple: bool
    ) -> Callable[..., Any]:
        keep = 1 - self._probabilities[number]

        def skippable(*args: Any, **kwargs: Any) -> Any:
            if not layer.training:
                return forward(*args, **kwargs)
            hidden: Tensor = args[0] if args else kwargs["hidden_states"]
            if self._skipped[number]:
                output = touch(hidden, [p for p in layer.parameters() if p.requires_grad])
                return (output,) if gives_tuple else output
            output = forward(*args, **kwargs)
            if gives_tuple:
                return (hidden + (output[0] - hidden) / keep, *output[1:])
            return hidden + (output - hidden) / keep

        return skippable
