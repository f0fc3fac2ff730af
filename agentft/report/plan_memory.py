"""Memory of a training step on one rank (floor 5): closed formulas from a model's sizes and a run's settings.

    memory = step_memory(shape, setup)
    memory.phases()["backward"]      # bytes

What autograd keeps for a decoder layer is counted from the forward code of transformers' models, one term an operation
(docs/plan.md lists them). The general method is that of Korthikanti et al. 2022 ("Reducing Activation Recomputation in
Large Transformer Models", arXiv:2205.05198), whose figure of 34·s·b·h bytes is for another layer and for dropout.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentft.etai import INTENTS
from agentft.models.adapters import target_pattern
from agentft.models.causal_blocks import BLOCK, LONGEST
from agentft.models.heads import AgentHeads
from agentft.report.plan_models import ModelShape
from agentft.tools import TOOL_INDEX

FP32, BF16 = 4, 2


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What of a run decides its memory.

    Attributes:
        tokens: Tokens of one forward pass on one rank.
        longest: Tokens of its longest row.
        trained: Trained tokens among them.
        passes: Forward passes a step (gradient accumulation).
        ranks: Processes that share a batch.
        sharded: FSDP: weights, gradients and optimiser state are shared out.
        reshard: FSDP: gathered weights are freed after a layer.
        amp: bfloat16 autocast.
        recompute: Activation checkpointing.
        packed: Rows without padding, attention by segment (no mask); on a CPU by blocks (``causal_blocks``).
        eager: Attention that keeps its scores.
        chunk: Trained positions whose logits exist at a time; 0 is all.
        lora_rank: 0 trains all weights.
        lora_targets: Names of the layers with an adapter; (): those of the architecture.
        frozen_bytes: Of a frozen weight (LoRA): 4, 2, or about 0.52 with nf4.
        on_gpu: Whether another device than the host holds it.
    """

    tokens: int
    longest: int
    trained: int
    passes: int = 1
    ranks: int = 1
    sharded: bool = False
    reshard: bool = True
    amp: bool = False
    recompute: bool = False
    packed: bool = True
    eager: bool = False
    chunk: int = 256
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    frozen_bytes: float = FP32
    on_gpu: bool = False


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes on one rank, each part by itself."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    buckets: float
    activations: float
    one_layer: float
    logits: float
    head_gradient: float
    optimizer_temporary: float
    casts: float
    trained_parameters: int
    passes: int

    def phases(self) -> dict[str, float]:
        """Return the bytes at the peak of each phase of a step that is not the first one."""
        fixed = self.weights + self.optimizer
        carried = self.gradients if self.passes > 1 else 0.0
        forward = fixed + carried + self.buckets + self.activations + self.gathered + self.casts
        at_head = forward + self.logits + self.head_gradient
        at_end = fixed + self.gradients + self.buckets + self.one_layer + self.gathered + self.casts
        if self.passes > 1:
            at_end += self.one_layer
        return {
            "load": self.weights,
            "forward": at_head,
            "backward": max(forward + self.head_gradient + self.one_layer, at_end),
            "optimiser": fixed + self.gradients + self.buckets + self.optimizer_temporary,
            "save": fixed,
        }


def step_memory(shape: ModelShape, setup: Setup) -> StepMemory:
    """Return what one rank holds."""
    heads = head_parameters(shape.config.hidden_size)
    frozen = shape.parameters if setup.lora_rank else 0
    trained = heads + (
        lora_parameters(shape, setup.lora_rank, setup.lora_targets) if setup.lora_rank else shape.parameters
    )
    share = setup.ranks if setup.sharded else 1
    per_token, layer = activation_bytes(shape, setup)
    width = shape.config.vocab_size
    rows = min(setup.chunk, setup.trained) if setup.chunk else setup.trained
    logit_bytes = (FP32 + (BF16 if setup.amp else 0)) if setup.chunk else 3 * FP32 + (2 * BF16 if setup.amp else 0)
    head_trained = not setup.lora_rank
    root = shape.embedding * (1 if shape.tied else 2)
    gathered = 0.0
    if setup.sharded:
        held = shape.parameters if not setup.reshard else root + 2 * shape.layer
        gathered = held * (setup.frozen_bytes if setup.lora_rank else FP32)
    return StepMemory(
        weights=(trained * FP32 + frozen * setup.frozen_bytes) / share,
        gradients=trained * FP32 / share,
        optimizer=2 * trained * FP32 / share,
        gathered=gathered,
        buckets=trained * FP32 if setup.ranks > 1 and not setup.sharded else 0.0,
        activations=per_token * setup.tokens + _mask(setup),
        one_layer=layer * setup.tokens * (1.0 if setup.recompute else 0.25),
        logits=rows * width * logit_bytes,
        head_gradient=shape.embedding * FP32 if head_trained else 0.0,
        optimizer_temporary=2 * FP32 * (shape.largest if head_trained else shape.config.hidden_size) / share,
        casts=_casts(shape, setup, root),
        trained_parameters=trained,
        passes=setup.passes,
    )


def head_parameters(width: int) -> int:
    """Return the parameters of the four heads over hidden states of this width, with the tools of this process."""
    with torch.device("meta"):
        heads = AgentHeads(width, len(INTENTS), len(TOOL_INDEX))
    return sum(parameter.numel() for parameter in heads.parameters())


def _casts(shape: ModelShape, setup: Setup, root: int) -> float:
    """Return the bytes of weights in bfloat16 that autocast makes of float32 ones and backward still needs."""
    if not setup.amp or setup.frozen_bytes != FP32:
        return 0.0
    return BF16 * (root + 2 * shape.layer if setup.sharded else shape.parameters)


def lora_parameters(shape: ModelShape, rank: int, targets: Sequence[str] = ()) -> int:
    """Return the parameters of adapters of this rank on the layers that ``model.lora.targets`` names.

    Raises:
        ModelError: A name in ``targets`` fits no layer.
    """
    return sum(rank * (inputs + outputs) * times for inputs, outputs, times in _adapted(shape, targets))


def _adapted(shape: ModelShape, targets: Sequence[str]) -> list[tuple[int, int, int]]:
    names = {key: key.split("/")[0] for key in shape.linears}
    fits = re.compile(target_pattern(list(names.values()), targets))
    return [size for key, size in shape.linears.items() if fits.fullmatch(names[key])]


def activation_bytes(shape: ModelShape, setup: Setup) -> tuple[float, float]:
    """Return (bytes a token of all that is kept for backward, bytes a token of one decoder layer).

    Everything outside the layers is in the first: rotary tables, final normalisation, gathered rows.
    """
    config = shape.config
    dense = _layer_bytes(shape, setup, routed=False)
    routed = _layer_bytes(shape, setup, routed=True) if shape.dense_layers < shape.layers else dense
    hidden = config.hidden_size * FP32
    outside = 4 * hidden + 2 * hidden * setup.trained / max(setup.tokens, 1)
    layers = dense * shape.dense_layers + routed * (shape.layers - shape.dense_layers)
    if setup.recompute:
        layers = hidden * shape.layers + max(dense, routed)
    return layers + outside, max(dense, routed)


def _layer_bytes(shape: ModelShape, setup: Setup, *, routed: bool) -> float:
    """Return the bytes a token that one decoder layer keeps for backward."""
    config, low = shape.config, BF16 if setup.amp else FP32
    # A norm keeps its input and its normalised input in float32; the layers behind it keep its output.
    norm = 2 * FP32 + low
    kept = shape.norms * config.hidden_size * norm
    kept += _attention(shape, setup) * low
    if setup.lora_rank:
        kept += setup.lora_rank * len(_adapted(shape, setup.lora_targets)) * low
    if not routed:
        return kept + 4 * config.intermediate_size * low
    experts, inner = config.num_experts_per_tok, config.moe_intermediate_size
    kept += experts * (4 * inner + 2 * config.hidden_size) * low  # gathered input, four inside, output before weighing
    kept += 4 * inner * int(getattr(config, "n_shared_experts", 0) or 0) * low
    return kept + 3 * config.n_routed_experts * FP32  # the router's scores


def _attention(shape: ModelShape, setup: Setup) -> float:
    """Return the numbers a token that attention keeps: queries, keys, values for every head, output (twice), sums."""
    config = shape.config
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        inner = 3 * (config.q_lora_rank or 0) + 3 * config.kv_lora_rank + config.qk_rope_head_dim
        kept = heads * (2 * key + 3 * value) + inner
    else:
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        kept = heads * 5 * size
    return kept + heads * _scores(setup)


def _scores(setup: Setup) -> float:
    """Return the numbers a token and head that attention keeps of its scores."""
    if setup.eager:
        return 2 * setup.longest
    if setup.packed and not setup.on_gpu and setup.longest <= LONGEST:
        return (setup.longest + BLOCK) / 2  # probabilities, up to the end of a token's own block
    return 2


def _mask(setup: Setup) -> float:
    """Return the bytes of the causal mask of padded rows."""
    return 0.0 if setup.packed and not setup.eager else setup.longest**2 * FP32
