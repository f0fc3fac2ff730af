"""Adapters: where they go in each architecture, what is trained and what stays, save, load, merge, checkpoints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from agent_samples import FAST, VOCAB, make_samples
from test_backbone import architectures
from tiny_checkpoints import KNOWN, agent_of, checkpoint, disturb

from agentft.config.schema import LoraConfig
from agentft.data.batch import collate
from agentft.errors import ConfigError, ModelError
from agentft.models import adapters
from agentft.models.agent_model import AgentModel, parameter_groups
from agentft.models.backbone import checkpoint_activations, hidden_states
from agentft.models.export import load_model, save_model
from agentft.models.generate import Prompt, sample_turns

LORA = LoraConfig(rank=4, alpha=8.0)
PLAIN = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 2)
FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"), 2)
LATENT = dict.fromkeys(("kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 2)
EXPECTED: dict[str, dict[str, int]] = {  # two layers; in the mixtures one is dense and one has a shared expert
    "llama": PLAIN,
    "mistral": PLAIN,
    "qwen2": PLAIN,
    "gemma3_text": dict.fromkeys(PLAIN, 3),
    "glm": FUSED,
    "glm4": FUSED,
    "glm4_moe": PLAIN,
    "deepseek_v3": LATENT | {"q_proj": 2},  # q_lora_rank null, as in Moonlight
    "kimi_k2": LATENT | {"q_a_proj": 2, "q_b_proj": 2},
}


def logits_of(agent: AgentModel, ids: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    with torch.no_grad():
        return agent.vocabulary_logits(hidden_states(agent.backbone, ids, positions))


def some_ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 21), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", list(architectures()))
def test_adapters_go_where_they_belong_and_change_nothing_at_first(name: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, name)
    agent, plain = agent_of(folder, lora=LORA).eval(), agent_of(folder).eval()
    layers = adapters.adapted_layers(agent.backbone)
    assert Counter(layer.rpartition(".")[2] for layer in layers) == EXPECTED[name]
    assert not any(".experts." in layer for layer in layers), "no routed expert"
    shared = sum("shared_experts" in layer for layer in layers)
    assert shared == (3 if name in ("glm4_moe", "deepseek_v3", "kimi_k2") else 0)
    torch.testing.assert_close(logits_of(agent, some_ids()), logits_of(plain, some_ids()), atol=1e-6, rtol=1e-5)
    before = logits_of(agent, some_ids())
    disturb(agent.backbone.parameters())
    trained = logits_of(agent, some_ids())
    assert (trained - before).abs().max() > 0.01
    adapters.merge(agent.backbone)
    assert type(agent.backbone.get_output_embeddings()) is torch.nn.Linear
    assert not adapters.is_adapted(agent.backbone)
    assert set(agent.state_dict()) == set(plain.state_dict()), "a plain model again"
    torch.testing.assert_close(logits_of(agent, some_ids()), trained, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])  # own and tied (scaled) embeddings
def test_a_step_trains_adapters_new_rows_and_heads_and_nothing_else(name: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, name)
    agent = agent_of(folder, lora=LORA)
    before = {key: tensor.clone() for key, tensor in agent.state_dict().items()}
    groups = parameter_groups(agent, FAST)
    trained = [parameter for group in groups for parameter in group["params"]]
    assert {id(p) for p in trained} == {id(p) for p in agent.parameters() if p.requires_grad}
    assert len(trained) == len({id(p) for p in trained})
    assert all(parameter.ndim == 2 for parameter in groups[0]["params"]), "adapters and rows are decayed"
    optimiser = torch.optim.AdamW(groups)
    batch = collate(make_samples(6))
    losses = []
    for _ in range(3):
        loss = agent.loss(agent(batch), batch)["total"]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[0]
    after = agent.state_dict()
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    own = {key for key in before if key.startswith("heads.") or "lora_" in key or key.endswith("rows")}
    assert moved == own
    rows = [key for key in own if key.endswith("rows")]
    assert len(rows) == (1 if name == "gemma3_text" else 2), "tied ends share their rows"
    adapters.merge(agent.backbone)
    plain = agent_of(folder)
    for end in ("get_input_embeddings", "get_output_embeddings"):
        new, old = getattr(agent.backbone, end)().weight, getattr(plain.backbone, end)().weight
        assert torch.equal(new[:KNOWN], old[:KNOWN])
        assert not torch.equal(new[KNOWN:], old[KNOWN:])
    tied = agent.backbone.get_input_embeddings().weight is agent.backbone.get_output_embeddings().weight
    assert tied == (name == "gemma3_text")


def test_rows_give_what_peft_gives_with_its_trainable_tokens(tmp_path: Path) -> None:
    """The same function as peft's trainable tokens, at the cost of the rows."""
    import peft

    agent = agent_of(checkpoint(tmp_path, "llama"), lora=LORA).eval()
    other = agent_of(tmp_path / "llama").eval()
    new = list(range(KNOWN, VOCAB))
    config = peft.TrainableTokensConfig(target_modules=["embed_tokens", "lm_head"], token_indices=new)
    peft.inject_adapter_in_model(config, other.backbone)
    rows = [agent.backbone.get_input_embeddings().rows, agent.backbone.get_output_embeddings().rows]
    theirs = [p for key, p in other.backbone.named_parameters() if "trainable_tokens_delta" in key]
    disturb(rows)
    with torch.no_grad():
        for mine, one in zip(rows, theirs, strict=True):
            one.copy_(mine)
    ids = some_ids()
    torch.testing.assert_close(logits_of(agent, ids), logits_of(other, ids), atol=1e-6, rtol=1e-5)
    batch = collate(make_samples(4))
    for model in (agent, other):
        model.loss(model(batch), batch)["code"].backward()
    for mine, one in zip(rows, theirs, strict=True):
        torch.testing.assert_close(mine.grad, one.grad, atol=1e-6, rtol=1e-4)


def test_what_was_trained_is_saved_and_loads_back_beside_its_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "kimi_k2")
    agent = agent_of(folder, lora=LORA).eval()
    disturb(agent.parameters())
    save_model(agent, tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "adapters.safetensors",
        "agent.json",
        "heads.safetensors",
    ]
    back = load_model(tmp_path / "model")
    batch = collate(make_samples(3))
    with torch.no_grad():
        before, after = agent(batch), back(batch)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert back.config == agent.config
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 64', '"hidden_size":  64'))
    with pytest.raises(ModelError, match="has changed"):
        load_model(tmp_path / "model")
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=r"not there[\s\S]*base\.path"):
        load_model(tmp_path / "model")


def test_rows_that_are_not_trained_come_back_too(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "llama", vocab_size=VOCAB + 40)  # a padded table: the new ids lie inside
    from agentft.config.schema import ModelConfig
    from agentft.models.agent_model import build_agent_model

    config = ModelConfig(path=str(folder), lora=LoraConfig(rank=2, train_embeddings=False))
    agent = build_agent_model(config, vocab_size=VOCAB, tools=["a"], seed=1, new_token_ids=range(KNOWN, VOCAB)).eval()
    assert not any(key.endswith("rows") for key, p in agent.named_parameters() if p.requires_grad)
    disturb(agent.parameters())
    save_model(agent, tmp_path / "model")
    assert torch.equal(logits_of(load_model(tmp_path / "model"), some_ids()), logits_of(agent, some_ids()))


@pytest.mark.parametrize("name", ["glm", "kimi_k2"])
@pytest.mark.parametrize("lora", [LoraConfig(rank=4, dropout=0.2), None], ids=["lora", "full"])
def test_checkpointed_activations_give_equal_gradients(name: str, lora: LoraConfig | None, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, name)
    batch = collate(make_samples(4))
    found = []
    for on in (False, True):
        agent = agent_of(folder, lora=lora).train()
        disturb(agent.parameters())
        if on:
            checkpoint_activations(agent.backbone)
        torch.manual_seed(4)
        agent.loss(agent(batch), batch)["total"].backward()
        found.append({key: p.grad for key, p in agent.named_parameters() if p.requires_grad})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_frozen_weights_in_bfloat16_leave_what_is_trained_in_float32(tmp_path: Path) -> None:
    agent = agent_of(checkpoint(tmp_path, "glm4_moe"), lora=LoraConfig(rank=4, frozen="bf16"))
    kinds = {p.requires_grad: {q.dtype for q in agent.parameters() if q.requires_grad == p.requires_grad} for p in
             agent.parameters()}  # fmt: skip
    assert kinds == {True: {torch.float32}, False: {torch.bfloat16}}
    batch = collate(make_samples(4))
    agent.loss(agent(batch), batch)["total"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in agent.parameters() if p.requires_grad)
    ids = some_ids()[0].numpy()
    prompt = Prompt(input_ids=ids, position_ids=torch.arange(21).numpy(), next_position=21)
    (turn,) = sample_turns(agent.eval().backbone, [prompt], stop_ids=[], max_new_tokens=3, temperature=0.0)
    assert len(turn.ids) == 3
    disturb(agent.parameters())
    save_model(agent, tmp_path / "model")
    back = load_model(tmp_path / "model")
    assert torch.equal(logits_of(agent, some_ids()), logits_of(back, some_ids()))


def test_a_state_holds_what_is_trained_and_fills_another_agent(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "deepseek_v3")
    one, two = (agent_of(folder, lora=LORA, seed=seed).eval() for seed in (1, 2))
    for agent in (one, two):
        adapters.keep_trained_only(agent)
    disturb(one.parameters())
    state = one.state_dict()
    assert set(state) == {key for key, p in one.named_parameters() if p.requires_grad}
    two.load_state_dict(state)
    assert torch.equal(logits_of(one, some_ids()), logits_of(two, some_ids()))
    del state["heads.tool.mlp.0.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*heads\.tool\.mlp\.0\.weight"):
        two.load_state_dict(state)


def test_names_of_layers_are_held_to_the_model(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "glm4_moe")
    agent = agent_of(folder, lora=LoraConfig(rank=2, targets=["q_proj", "shared_experts.down_proj"]))
    names = [layer.split(".", 3)[3] for layer in adapters.adapted_layers(agent.backbone)]
    assert Counter(names) == {"self_attn.q_proj": 2, "mlp.shared_experts.down_proj": 1}
    with pytest.raises(ModelError, match=r"model\.lora\.targets") as error:
        agent_of(folder, lora=LoraConfig(targets=["q_proj", "query"]))
    assert "query" in str(error.value)
    assert "gate_proj" in str(error.value)


def test_quantised_weights_need_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=r"model\.quantize"):
        agent_of(checkpoint(tmp_path, "llama"), lora=LORA, quantize="nf4")
