"""What a model consists of, without its weights (floor 5): published configurations and exact parameter counts.

    shape = model_shape(config.model, vocab_size=None)

A folder needs only its ``config.json``. For the architectures of the shipped YAMLs the published figures stand below,
so that a plan can be made before anything is downloaded; nothing is fetched. Parameters are counted on torch's meta
device from two short models of the architecture (with one and with two layers of its last kind): layers of one kind
are alike, so the count is exact.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from agentft.config.schema import ModelConfig
from agentft.errors import ModelError
from agentft.models import kimi
from agentft.models.backbone import layers_of, preset_config

PUBLISHED: dict[str, dict[str, Any]] = {
    # The config.json of each repository on the Hugging Face hub, as published; only what sizes depend on.
    "glm-4-9b": {  # zai-org/glm-4-9b-hf
        "model_type": "glm", "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 13696, "vocab_size": 151552,
        "attention_bias": True,
    },
    "glm-4.5-air": {  # zai-org/GLM-4.5-Air
        "model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
        "vocab_size": 151552, "attention_bias": True,
    },
    "kimi-k2": {  # moonshotai/Kimi-K2-Instruct
        "model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
        "num_key_value_heads": 64, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "vocab_size": 163840, "n_group": 1, "topk_group": 1,
    },
    "moonlight": {  # moonshotai/Moonlight-16B-A3B-Instruct
        "model_type": "deepseek_v3", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "intermediate_size": 11264, "moe_intermediate_size": 1408,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "vocab_size": 163840, "n_group": 1, "topk_group": 1,
    },
    "qwen2.5-coder-7b": {  # Qwen/Qwen2.5-Coder-7B-Instruct
        "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "smollm2-135m": {  # HuggingFaceTB/SmolLM2-135M-Instruct
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a backbone.

    Attributes:
        source: Where its configuration was found.
        config: The whole configuration of transformers.
        dense_layers: Decoder layers without routed experts.
        parameters: All of them, tied tables once.
        embedding: Rows of one table times its width.
        tied: Whether input and output embeddings are one table.
        layer: Parameters of the largest decoder layer.
        largest: Parameters of the largest single tensor.
        linears: name → (inputs, outputs, how many of them in the model), of decoder layers, routed experts left out.
        norms: Normalisations over the full width in a decoder layer.
    """

    source: str
    config: PretrainedConfig
    dense_layers: int
    parameters: int
    embedding: int
    tied: bool
    layer: int
    largest: int
    linears: dict[str, tuple[int, int, int]]
    norms: int

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return int(self.config.num_hidden_layers)


def model_shape(model: ModelConfig, *, vocab_size: int | None) -> ModelShape:
    """Return the sizes of a run's backbone; ``vocab_size`` is that of the shards' tokenizer, if it is known.

    Raises:
        ModelError: Neither a folder with a config.json nor one of ``PUBLISHED``.
    """
    config, source = find_config(model, vocab_size)
    if vocab_size is not None:
        config.vocab_size = max(config.vocab_size, vocab_size)
    dense = min(int(getattr(config, "first_k_dense_replace", config.num_hidden_layers)), config.num_hidden_layers)
    if not getattr(config, "n_routed_experts", None):
        dense = config.num_hidden_layers
    short = max(1, min(dense + 1, config.num_hidden_layers) if dense < config.num_hidden_layers else 1)
    one, two = _on_meta(config, short), _on_meta(config, short + 1)
    per_layer = _count(two) - _count(one)
    more = config.num_hidden_layers - short
    embedding = config.vocab_size * config.hidden_size
    last = layers_of(one)[-1]
    linears: dict[str, tuple[int, int, int]] = {}
    for at, layer in enumerate(layers_of(one)):
        times = 1 + more if at == short - 1 else 1
        for name, module in layer.named_modules():
            if isinstance(module, torch.nn.Linear) and ".experts." not in f".{name}.":
                key = f"{name}/{module.in_features}/{module.out_features}"
                known = linears.get(key, (module.in_features, module.out_features, 0))
                linears[key] = (*known[:2], known[2] + times)
    return ModelShape(
        source=source,
        config=config,
        dense_layers=dense,
        parameters=_count(one) + more * per_layer,
        embedding=embedding,
        tied=one.get_output_embeddings().weight is one.get_input_embeddings().weight,
        layer=max(sum(p.numel() for p in layer.parameters()) for layer in layers_of(one)),
        largest=max(p.numel() for p in one.parameters()),
        linears=linears,
        norms=sum(
            "norm" in name and getattr(getattr(module, "weight", None), "shape", ()) == (config.hidden_size,)
            for name, module in last.named_modules()
        ),
    )


def find_config(model: ModelConfig, vocab_size: int | None) -> tuple[PretrainedConfig, str]:
    """Return a copy of the configuration of a run's backbone, and where it was found."""
    kimi.register()
    if model.preset is not None:
        return preset_config(model.preset, vocab_size or 4096), f"preset {model.preset}"
    path = Path(str(model.path)).expanduser()
    if (path / "config.json").exists():
        return copy.deepcopy(AutoConfig.from_pretrained(path, trust_remote_code=False)).get_text_config(), str(path)
    known = next((name for name in PUBLISHED if name in path.name.lower()), None)
    if known is None:
        raise ModelError(
            "a plan needs the model's config.json",
            where="model.path",
            got=f"{path}: no such file in it, and no published sizes under this name",
            expected=f"a folder with a config.json, or one of {', '.join(PUBLISHED)}",
        )
    facts = dict(PUBLISHED[known])
    return AutoConfig.for_model(facts.pop("model_type"), **facts), f"published configuration of {known}"


def _on_meta(config: PretrainedConfig, layers: int) -> PreTrainedModel:
    short = copy.deepcopy(config)
    short.num_hidden_layers = layers
    kinds = getattr(short, "layer_types", None)
    if kinds:
        short.layer_types = (list(kinds) * layers)[:layers]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(short)
    model.tie_weights()
    return model


def _count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
