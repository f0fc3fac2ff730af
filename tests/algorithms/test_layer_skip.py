"""Skipped layers: the expectation stays, names stay, the same layers everywhere, and nothing outside training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_algorithms import train
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GlmConfig, GlmForCausalLM

from agentft.algorithms.layer_skip import LayerSkip, decoder_layers, draw, skip_probabilities
from agentft.config.algorithms import StochasticDepthConfig
from agentft.config.schema import ModelConfig
from agentft.errors import ModelError
from agentft.models.backbone import build_backbone, decoder_of, hidden_states

HALF = StochasticDepthConfig(enabled=True, p=0.5)


def test_probabilities_are_linear_over_depth() -> None:
    assert skip_probabilities(4, 0.1) == pytest.approx([0.025, 0.05, 0.075, 0.1])


def test_draws_follow_the_probabilities_and_the_name() -> None:
    draws = torch.tensor([draw([0.1, 0.5], f"17/layers/{batch}") for batch in range(4000)]).float().mean(0)
    assert draws.tolist() == pytest.approx([0.1, 0.5], abs=0.03)
    assert draw([0.5] * 64, "a") == draw([0.5] * 64, "a") != draw([0.5] * 64, "b")


def forward(backbone: Any) -> torch.Tensor:
    ids = torch.arange(24).reshape(2, 12)
    return hidden_states(backbone, ids, torch.arange(12).expand(2, 12))


@pytest.mark.parametrize("preset", ["tiny-glm", "tiny-kimi"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_skipped_layers_of_both_architectures(preset: str, checkpointing: bool) -> None:
    backbone = build_backbone(ModelConfig(preset=preset), 64, 3)  # type: ignore[arg-type]
    if checkpointing:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    names, plain = list(backbone.state_dict()), forward(backbone.eval())
    skip = LayerSkip(HALF, seed=1)
    skip.attach(backbone)
    assert list(backbone.state_dict()) == names
    skip._skipped = [number != 1 for number in range(len(decoder_layers(backbone)))]
    assert torch.equal(forward(backbone.eval()), plain), "evaluation and sampling use every layer"
    backbone.train()
    found = forward(backbone)
    layer, keep = decoder_layers(backbone)[1], 1 - skip._probabilities[1]
    embedded = backbone.get_input_embeddings()(torch.arange(24).reshape(2, 12))
    decoder = backbone.base_model
    alone = embedded + (_plain_layer(backbone, layer, embedded) - embedded) / keep
    torch.testing.assert_close(found, decoder.norm(alone))
    found.square().sum().backward()
    skipped = [p for number, one in enumerate(decoder_layers(backbone)) if number != 1 for p in one.parameters()]
    assert all(p.grad is not None and not p.grad.any() for p in skipped)
    assert any(p.grad is not None and p.grad.any() for p in layer.parameters())


def _layer_inputs(backbone: Any, hidden: torch.Tensor) -> dict[str, Any]:
    positions = torch.arange(12).expand(len(hidden), 12)
    mask = torch.full((12, 12), torch.finfo(torch.float32).min).triu(1)[None, None]
    angles = backbone.base_model.rotary_emb(hidden, positions)
    return {"attention_mask": mask, "position_ids": positions, "position_embeddings": angles}


def _plain_layer(backbone: Any, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return type(layer).forward(layer, hidden, **_layer_inputs(backbone, hidden))


def test_the_mean_of_many_draws_is_the_plain_layer() -> None:
    config = GlmConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, attention_dropout=0.0, pad_token_id=None,
    )  # fmt: skip
    backbone = GlmForCausalLM(config)
    inputs = torch.randn(1, 12, 32)
    layer = decoder_layers(backbone)[0]
    plain = _plain_layer(backbone, layer.eval(), inputs)
    skip = LayerSkip(HALF, seed=1)
    skip.attach(backbone)
    layer.train()
    outputs = []
    for skipped in (True, False):
        skip._skipped = [skipped]
        outputs.append(layer(inputs, **_layer_inputs(backbone, inputs)))
    torch.testing.assert_close(0.5 * outputs[0] + 0.5 * outputs[1], plain)


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="told apart"):
        decoder_layers(nn.Linear(2, 2))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "glm4", "glm4_moe", "gemma3_text"])
def test_layers_of_other_architectures_whatever_they_return(kind: str) -> None:
    """Gemma's layers give a tuple, GLM-4-0414's are said to and do not."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 16}
    more = {"num_hidden_layers": 3, "num_key_value_heads": 1, "pad_token_id": None}
    if kind == "glm4_moe":
        more |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
    backbone = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **more))
    plain = forward(backbone.eval())
    skip = LayerSkip(HALF, seed=1)
    skip.attach(backbone)
    assert torch.equal(forward(backbone.eval()), plain)
    backbone.train()
    skip._skipped = [True, False, True]
    found = forward(backbone)
    assert found.shape == plain.shape
    assert not torch.allclose(found, plain)
    found.square().sum().backward()
    assert all(p.grad is not None for layer in decoder_layers(backbone)[::2] for p in layer.parameters())
    skip._skipped = [True, True, True]
    embedded = backbone.get_input_embeddings()(torch.arange(24).reshape(2, 12))
    torch.testing.assert_close(forward(backbone), decoder_of(backbone).norm(embedded))


def test_training_is_repeatable_resumes_and_does_not_depend_on_microbatches(tmp_path: Path) -> None:
    def make(_: Any) -> Any:
        return [LayerSkip(HALF, seed=17)], []

    whole = train(tmp_path / "whole", make, batches=4, save_every=2)
    parts = train(tmp_path / "parts", make, batches=4, microbatch=1)
    resumed = train(tmp_path / "resumed", make, batches=4, load=tmp_path / "whole" / "checkpoints" / "ba2.pt")
    assert sum(whole.logged["stochastic_depth/skipped"]) > 0
    assert resumed.curve == whole.curve[2:]
    for got, expected in zip(parts.curve, whole.curve, strict=True):
        assert got == pytest.approx(expected, abs=1e-5)
    assert [n for n in whole.weights if "skip" in n] == []
