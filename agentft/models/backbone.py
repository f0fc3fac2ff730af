"""The backbone (floor 3): a Hugging Face causal LM, random from a preset or loaded from a folder or hub name.

Only native code of transformers and only safetensors are ever loaded: no remote code, no pickle. Presets are tiny
models of the GLM and Kimi K2 architectures that train on a CPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GlmConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentft.config.schema import ModelConfig
from agentft.errors import ModelError
from agentft.models import adapters, attention, kimi, rotary

PRESETS = ("tiny-glm", "tiny-kimi")
SLIDING = ("gemma3_text", "qwen2")
"""Architectures whose layers take a mask each, so that some of them may look back over a window only."""
ALIGNMENT = 64
"""Bytes; matrix kernels round differently for operands in memory that does not begin at a multiple of this."""


def build_backbone(
    config: ModelConfig, vocab_size: int, seed: int, *, new_token_ids: Sequence[int] = ()
) -> PreTrainedModel:
    """Return the backbone in float32 (frozen weights as configured) with at least ``vocab_size`` embedding rows.

    Args:
        config: Preset or path, attention implementation, adapters, feedback positions.
        vocab_size: Number of ids of the tokenizer. A larger (padded) vocabulary of a checkpoint stays as it is.
        seed: Seed of a preset's random weights and of adapters; the global random state is left alone.
        new_token_ids: Ids that the checkpoint has never seen; their rows become the mean of the rows it knows.

    Raises:
        ModelError: The checkpoint is missing, or its architecture cannot be trained here.
        ConfigError: Quantised weights are asked for where they cannot be had.
    """
    kimi.register()
    if (config.preset is None) == (config.path is None):
        raise ModelError("a model is either a preset or a path", where="model", expected="exactly one of preset, path")
    new_rows: list[int] = []
    if config.preset is not None:
        backbone = _random(preset_config(config.preset, vocab_size), seed, attention.to_load(config.attention))
    else:
        backbone = _load(config)
        new_rows = _fit_vocabulary(backbone, vocab_size, new_token_ids)
    _check(backbone)
    feedback = config.feedback_positions
    if feedback.enabled and not rotary.install(backbone, feedback.start, feedback.rotary_base):
        raise ModelError(
            "feedback positions need a backbone with rotary positions",
            where="model.feedback_positions",
            got=backbone.config.model_type,
            hint="set model.feedback_positions.enabled=false",
        )
    attention.install(backbone, config.attention)
    keep_unused_experts_in_graph(backbone)
    if config.lora is not None:
        adapters.attach(backbone, config.lora, new_rows, seed)
    return backbone


def preset_config(preset: str, vocab_size: int) -> PretrainedConfig:
    """Return the configuration of a preset.

    Raises:
        ModelError: There is no such preset.
    """
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "max_position_embeddings": 16384,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if preset == "tiny-glm":
        return GlmConfig(
            **common,
            num_hidden_layers=3,
            intermediate_size=768,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            attention_dropout=0.0,
            attention_bias=True,
        )
    if preset == "tiny-kimi":
        return kimi.KimiK2Config(
            **common,
            num_hidden_layers=4,
            intermediate_size=768,
            moe_intermediate_size=192,
            num_attention_heads=4,
            num_key_value_heads=4,
            n_shared_experts=1,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=128,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=32,
            v_head_dim=64,
        )
    raise ModelError("no such preset", where="model.preset", got=preset, expected=" or ".join(PRESETS))


def hidden_states(
    backbone: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, lengths: Tensor | None = None
) -> Tensor:
    """Return the last hidden states [B, T, H] of right-padded rows [B, T].

    The mask is always explicit: without one, transformers takes any jump of ``position_ids`` for a document boundary.
    With ``lengths`` [B], the real tokens a row, padding is not computed (its hidden states are 0): the rows go through
    the decoder end to end in one, attention stays within each (``agentft.models.attention``).
    """
    if lengths is not None:
        return _unpadded_hidden_states(backbone, input_ids, position_ids, lengths.tolist())
    mask = causal_mask(input_ids.shape[1], backbone.dtype, input_ids.device)
    return decoder_of(backbone)(
        input_ids=input_ids, attention_mask=layer_masks(backbone, mask), position_ids=position_ids, use_cache=False
    ).last_hidden_state


def _unpadded_hidden_states(
    backbone: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, lengths: list[int]
) -> Tensor:
    rows, longest = input_ids.shape
    places = torch.cat([torch.arange(length) + row * longest for row, length in enumerate(lengths)])
    places = places.to(input_ids.device, non_blocking=True)  # [N], of the real tokens
    inputs = attention.segments(backbone, lengths, input_ids.device)
    if inputs["attention_mask"].is_floating_point():
        inputs["attention_mask"] = layer_masks(backbone, inputs["attention_mask"])
    hidden = decoder_of(backbone)(
        input_ids=input_ids.reshape(-1).index_select(0, places)[None],
        position_ids=position_ids.reshape(-1).index_select(0, places)[None],
        use_cache=False,
        **inputs,
    ).last_hidden_state[0]
    return hidden.new_zeros(rows * longest, hidden.shape[-1]).index_copy(0, places, hidden).view(rows, longest, -1)


def decoder_of(backbone: PreTrainedModel) -> nn.Module:
    """Return what makes hidden states of ids (Gemma 3 does not name it as its base)."""
    base = backbone.base_model
    return backbone.get_decoder() if base is backbone else base


def vocabulary_logits(backbone: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return next-token logits [..., V] of final hidden states [..., H]."""
    return soft_capped(backbone.get_output_embeddings()(hidden), logit_cap(backbone))


def logit_cap(backbone: PreTrainedModel) -> float | None:
    """Return what bounds the logits of a backbone (Gemma), None where nothing does."""
    return getattr(backbone.config.get_text_config(), "final_logit_softcapping", None)


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap·tanh(logits / cap); without a cap the logits."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def layers_of(backbone: nn.Module) -> list[nn.Module]:
    """Return the decoder layers in order; none where they cannot be told from the rest of the model."""
    return [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]


def layer_masks(backbone: PreTrainedModel, mask: Tensor) -> Tensor | dict[str, Tensor]:
    """Return what the decoder takes for an additive mask [B, 1, Q, K] of full attention, K being the last column read.

    In a sliding window a token sees the newest ``sliding_window`` columns, itself included, whatever their positions.
    A backbone that has one in some layers only (Gemma 3) gets a mask for each kind of layer.
    """
    if "sliding_attention" not in _layer_kinds(backbone):
        return mask
    queries, columns = mask.shape[-2:]
    column = torch.arange(columns, device=mask.device)
    outside = column <= column[columns - queries :, None] - backbone.config.sliding_window
    window = mask.masked_fill(outside, torch.finfo(mask.dtype).min)
    if not getattr(backbone.config, "layer_types", None):
        return window
    return {"full_attention": mask, "sliding_attention": window}


def checkpoint_activations(backbone: PreTrainedModel) -> None:
    """Keep only the inputs of each decoder layer; backward computes the rest again (exact, non-reentrant).

    Raises:
        ModelError: The architecture cannot.
    """
    if not backbone.supports_gradient_checkpointing:
        kind = backbone.config.model_type
        raise ModelError("activations cannot be checkpointed", where="train.activation_checkpointing", got=kind)
    backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def causal_mask(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the additive causal mask [1, 1, T, T] in float: 0 where seen, the lowest number of ``dtype`` elsewhere.

    Rows are padded on the right, so a real token never sees padding and one mask serves every row. Float, because eager
    attention silently misreads a bool mask.
    """
    lowest = torch.finfo(dtype).min
    return torch.full((length, length), lowest, dtype=dtype, device=device).triu(1)[None, None]


def _random(config: PretrainedConfig, seed: int, attention: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def _load(config: ModelConfig) -> PreTrainedModel:
    path, where = str(config.path), "model.path"
    if path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
        raise ModelError("no such folder", where=where, got=path, expected="a Hugging Face model folder or a hub name")
    source = str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else path
    options: dict[str, Any] = {"trust_remote_code": False}
    if config.quantize != "none":  # on the GPU of this process, because the quantiser runs there
        options["quantization_config"] = adapters.quantization(config.quantize)
        options["device_map"] = {"": torch.cuda.current_device()}
    try:
        about = AutoConfig.from_pretrained(source, trust_remote_code=False)
        backbone = AutoModelForCausalLM.from_pretrained(
            source,
            config=about,
            use_safetensors=True,
            dtype=torch.bfloat16 if config.lora is not None and config.lora.frozen == "bf16" else torch.float32,
            attn_implementation=attention.to_load(config.attention),
            **options,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as cause:
        raise ModelError(
            "the backbone cannot be loaded",
            where=where,
            got=f"{path}: {cause}",
            expected="config.json and *.safetensors of a causal LM that transformers knows without remote code",
        ) from cause
    with torch.no_grad():
        for parameter in backbone.parameters():
            if parameter.data_ptr() % ALIGNMENT:  # still a view into the file
                parameter.data = parameter.data.clone()
    return backbone


def _check(backbone: PreTrainedModel) -> None:
    kind = backbone.config.model_type
    if backbone.config.get_text_config() is not backbone.config:
        raise ModelError(
            "the model reads more than text",
            where="model.path",
            got=kind,
            expected="a causal LM of text, such as gemma3_text",
            hint="save its language model as a model of its own",
        )
    layers = _layer_kinds(backbone)
    unknown = layers - {"full_attention", "sliding_attention"}
    mixed = "sliding_attention" in layers and getattr(backbone.config, "layer_types", None) is not None
    if unknown or (mixed and kind not in SLIDING):
        raise ModelError("attention of this kind is not supported", where="model.path", got=f"{kind}: {sorted(layers)}")
    if backbone.get_output_embeddings() is None:
        raise ModelError("the model has no output embeddings", got=kind, expected="a causal LM")
    missing = {"attention_mask", "position_ids"} - set(inspect.signature(decoder_of(backbone).forward).parameters)
    if missing:
        raise ModelError("the model's forward lacks arguments", got=f"{kind}: {sorted(missing)}")


def _layer_kinds(backbone: PreTrainedModel) -> set[str]:
    """Return the kinds of attention of the layers; where they are not named, all are of one kind."""
    config = backbone.config
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return set(getattr(config, "layer_types", None) or ["sliding_attention" if windowed else "full_attention"])


def _fit_vocabulary(backbone: PreTrainedModel, vocab_size: int, new_token_ids: Sequence[int]) -> list[int]:
    """Make room for ``vocab_size`` ids; return the rows that the checkpoint has never seen, now the mean of its own."""
    known = len(_tables(backbone)[0])
    new = sorted({row for row in new_token_ids if row < known} | set(range(known, vocab_size)))
    if vocab_size > known:
        backbone.resize_token_embeddings(vocab_size, mean_resizing=False)
    if not new:
        return []
    trained = min(new)  # rows behind the old tokenizer pad the table and were never trained
    with torch.no_grad():
        for table in _tables(backbone):
            table[new] = table[:trained].float().mean(0).to(table.dtype)
    return new


def _tables(backbone: PreTrainedModel) -> list[nn.Parameter]:
    """Return the input and the output embeddings [V, H]: one table when they are tied."""
    tables = [backbone.get_input_embeddings().weight, backbone.get_output_embeddings().weight]
    return [table for table in {id(table): table for table in tables}.values() if isinstance(table, nn.Parameter)]


class _Touch(torch.autograd.Function):
    """Identity whose backward gives each listed parameter a zero gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros_like(parameter) for parameter in ctx.parameters)


def touch(hidden: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return ``hidden``; backward gives each parameter a zero gradient, for which data parallelism waits."""
    return _Touch.apply(hidden, *parameters)


def keep_unused_experts_in_graph(backbone: nn.Module) -> int:
    """Give experts that saw no token a zero gradient instead of none; return the number of expert layers.

    Data parallelism waits for the gradient of every parameter. Searching the graph for unused ones at every step
    (``find_unused_parameters``) also forces a synchronisation per microbatch; a zero costs nothing by comparison and
    makes one process behave as several do.
    """
    layers = [module for module in backbone.modules() if isinstance(getattr(module, "experts", None), nn.ModuleList)]
    for layer in layers:
        _touch_unused(layer)
    return len(layers)


def _touch_unused(layer: nn.Module) -> None:
    experts = list(layer.get_submodule("experts").children())
    used: set[nn.Module] = set()

    def forget(module: nn.Module, inputs: Any) -> None:
        used.clear()

    def note(expert: nn.Module, inputs: Any, output: Any) -> None:
        used.add(expert)

    def touch(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        idle = [p for expert in experts if expert not in used for p in expert.parameters() if p.requires_grad]
        if not idle:
            return output
        if isinstance(output, tuple):
            return (_Touch.apply(output[0], *idle), *output[1:])
        return _Touch.apply(output, *idle)

    layer.register_forward_pre_hook(forget)
    layer.register_forward_hook(touch)
    for expert in experts:
        expert.register_forward_hook(note)
