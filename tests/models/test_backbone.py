"""Backbones: every architecture by path, vocabulary growth, masks, unused experts, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_samples import VOCAB, make_agent
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    DeepseekV3Config,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

from agentft.config.schema import FeedbackPositionsConfig, ModelConfig
from agentft.errors import ModelError
from agentft.models import kimi
from agentft.models.backbone import build_backbone, causal_mask, hidden_states

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MLA: dict[str, Any] = SMALL | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
MOE = SMALL | {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}


def architectures() -> dict[str, PretrainedConfig]:
    kimi.register()
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0}
    return {
        "glm": GlmConfig(**SMALL, head_dim=16),
        "glm4": Glm4Config(**SMALL, head_dim=16),
        "glm4_moe": Glm4MoeConfig(**MOE, head_dim=16, n_shared_experts=1, n_group=1, topk_group=1),
        "deepseek_v3": DeepseekV3Config(**MLA, q_lora_rank=None),
        "kimi_k2": kimi.KimiK2Config(**MLA, q_lora_rank=24, rope_scaling=yarn),
        "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
        "llama": LlamaConfig(**SMALL),
        "gemma3_text": Gemma3TextConfig(
            **SMALL | {"num_hidden_layers": 3},
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "mistral": MistralConfig(**SMALL, sliding_window=8),
    }


def saved(folder: Path, config: PretrainedConfig) -> Path:
    torch.manual_seed(3)
    Auto.from_config(config).save_pretrained(folder)
    return folder


def by_path(folder: Path, *, feedback: bool = False, attention: str = "sdpa") -> ModelConfig:
    positions = FeedbackPositionsConfig(enabled=feedback)
    return ModelConfig(path=str(folder), feedback_positions=positions, attention=attention)  # type: ignore[arg-type]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", list(architectures()))
def test_every_architecture_loads_by_path_and_gives_its_own_logits(name: str, attention: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / name, architectures()[name])
    ids = torch.randint(0, 96, (2, 21), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(21).expand(2, -1)
    plain = Auto.from_pretrained(folder, attn_implementation=attention).eval()
    expected = plain(input_ids=ids).logits
    for feedback in (False, True):
        backbone = build_backbone(by_path(folder, feedback=feedback, attention=attention), 96, seed=0).eval()
        assert backbone.config.model_type == name
        logits = backbone.lm_head(hidden_states(backbone, ids, positions))
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)


def test_kimi_checkpoints_that_name_remote_code_run_native_code(tmp_path: Path) -> None:
    folder = saved(tmp_path, architectures()["kimi_k2"])
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("configuration_deepseek.py", "modeling_deepseek.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    backbone = build_backbone(by_path(folder), 96, seed=0)
    assert type(backbone) is kimi.KimiK2ForCausalLM
    assert not (tmp_path / "ran").exists()


def test_unknown_architectures_with_remote_code_are_refused(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": auto_map}))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match="cannot be loaded"):
        build_backbone(by_path(tmp_path), 96, seed=0)
    assert not (tmp_path / "ran").exists()


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    folder = saved(tmp_path, architectures()["llama"])
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"model\.path") as error:
        build_backbone(by_path(folder), 96, seed=0)
    assert "safetensors" in str(error.value)


def test_what_cannot_be_trained_is_refused_clearly(tmp_path: Path) -> None:
    text = {**SMALL, "head_dim": 16, "vocab_size": 262208}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    both = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28})
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    cases = [
        (ModelConfig(path="./nowhere"), "no such folder"),
        (ModelConfig(path=str(tmp_path)), "cannot be loaded"),
        (ModelConfig(), "either a preset or a path"),
        (ModelConfig(preset="tiny-glm", path="x"), "either a preset or a path"),
        (by_path(saved(tmp_path / "both", both)), "reads more than text"),
        (by_path(saved(tmp_path / "mixed", Qwen3Config(**SMALL, head_dim=16, **windows))), "attention of this kind"),
    ]
    T5Config(d_model=32, num_layers=1, vocab_size=96).save_pretrained(tmp_path / "t5")
    cases.append((by_path(tmp_path / "t5"), "cannot be loaded"))
    for config, message in cases:
        with pytest.raises(ModelError, match=message):
            build_backbone(config, 96, seed=0)


def test_a_backbone_without_rotary_positions_cannot_have_feedback_positions(tmp_path: Path) -> None:
    from transformers import GPT2Config

    folder = saved(tmp_path, GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2, n_positions=64))
    with pytest.raises(ModelError, match="rotary"):
        build_backbone(by_path(folder, feedback=True), 96, seed=0)
    assert build_backbone(by_path(folder), 96, seed=0).config.model_type == "gpt2"


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # own and tied output embeddings
def test_new_tokens_start_as_the_mean_of_the_old(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, architectures()[name])
    old = build_backbone(by_path(folder), 96, seed=0)
    grown = build_backbone(by_path(folder), 103, seed=0)
    for before, after in (
        (old.get_input_embeddings().weight, grown.get_input_embeddings().weight),
        (old.get_output_embeddings().weight, grown.get_output_embeddings().weight),
    ):
        assert after.shape[0] == 103
        assert torch.equal(after[:96], before)
        torch.testing.assert_close(after[96:], before.mean(0).expand(7, -1))
    assert (grown.get_input_embeddings().weight is grown.get_output_embeddings().weight) == (name == "qwen2")


def test_a_padded_vocabulary_keeps_its_size_and_new_ids_inside_it_get_the_mean(tmp_path: Path) -> None:
    folder = saved(tmp_path, architectures()["llama"])
    before = build_backbone(by_path(folder), 96, seed=0).get_input_embeddings().weight
    after = build_backbone(by_path(folder), 90, seed=0, new_token_ids=[88, 89]).get_input_embeddings().weight
    assert after.shape[0] == 96
    torch.testing.assert_close(after[88:90], before[:88].mean(0).expand(2, -1))
    assert torch.equal(after[:88], before[:88])


@pytest.mark.parametrize("preset", ["tiny-glm", "tiny-kimi"])
def test_presets_are_small_seeded_and_leave_the_random_state_alone(preset: str) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    one, two, other = (make_agent(preset, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["backbone.lm_head.weight"], other["backbone.lm_head.weight"])
    full = build_backbone(ModelConfig(preset=preset), 4096, seed=0)  # type: ignore[arg-type]
    assert 4e6 <= sum(p.numel() for p in full.parameters()) <= 8e6


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("preset", ["tiny-glm", "tiny-kimi"])
def test_padding_and_neighbours_change_nothing(preset: str, attention: str) -> None:
    backbone = make_agent(preset, attention=attention).backbone.eval()
    ids = torch.randint(0, VOCAB, (1, 20), generator=torch.Generator().manual_seed(0))
    jumps = torch.tensor([[*range(8), *range(10000, 10006), *range(8, 14)]])
    alone = hidden_states(backbone, ids, jumps)
    padded_ids = torch.cat((torch.cat((ids, torch.full((1, 9), 7)), dim=1), torch.randint(0, VOCAB, (1, 29))))
    padded_jumps = torch.cat((torch.cat((jumps, torch.zeros(1, 9, dtype=torch.int64)), dim=1), torch.arange(29)[None]))
    beside = hidden_states(backbone, padded_ids, padded_jumps)[:1, :20]
    torch.testing.assert_close(beside, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_sees_the_past_across_position_jumps_and_never_the_future(attention: str) -> None:
    backbone = make_agent(attention=attention).backbone.eval()
    ids = torch.randint(0, VOCAB, (1, 16), generator=torch.Generator().manual_seed(0))
    jumps = torch.tensor([[*range(6), *range(10000, 10004), *range(6, 12)]])
    before = hidden_states(backbone, ids, jumps)
    changed = ids.clone()
    changed[0, 2] = (ids[0, 2] + 1) % VOCAB
    after = hidden_states(backbone, changed, jumps)
    assert torch.equal(after[:, :2], before[:, :2])
    assert (after[0, 2:] - before[0, 2:]).abs().amax(-1).min() > 0, "every later token sees the change, past both jumps"


def test_the_mask_is_float_and_lower_triangular() -> None:
    mask = causal_mask(4, torch.float32, torch.device("cpu"))
    assert mask.dtype == torch.float32
    assert torch.equal(mask[0, 0] == 0, torch.ones(4, 4).tril().bool())


def test_experts_without_a_token_get_a_zero_gradient() -> None:
    backbone = make_agent("tiny-kimi").backbone
    experts = backbone.model.layers[1].mlp.experts
    hidden_states(backbone, torch.tensor([[5]]), torch.tensor([[0]])).sum().backward()
    grads = [expert.down_proj.weight.grad for expert in experts]
    assert all(grad is not None for grad in grads)
    idle = sum(bool((grad == 0).all()) for grad in grads if grad is not None)
    assert idle == len(experts) - 2, "one token reaches two experts"
    with torch.no_grad():
        assert not hidden_states(backbone, torch.tensor([[5]]), torch.tensor([[0]])).requires_grad
