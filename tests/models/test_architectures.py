"""Each architecture from its checkpoint to an export: new tokens, a training step, sampling, equal logits elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from agent_samples import FAST, VOCAB, WITHOUT_AGENTFT, make_samples
from test_backbone import architectures
from tiny_checkpoints import KNOWN, agent_of, checkpoint

from agentft.config.schema import LoraConfig
from agentft.data.batch import collate
from agentft.models.agent_model import AgentModel, parameter_groups
from agentft.models.export import export, save_model
from agentft.models.generate import Prompt, sample_turns

NAMES = [name for name in architectures() if name != "mistral"]
READER = (
    WITHOUT_AGENTFT
    + """import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
ids, found = torch.tensor(json.loads(sys.argv[1])), {}
for folder in sys.argv[3:]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found[folder] = model(input_ids=ids).logits.contiguous()
assert not {"agentft", "composer", "streaming"} & set(sys.modules)
save_file(found, sys.argv[2])
"""
)


def train(agent: AgentModel, steps: int = 2) -> list[float]:
    """Train on sessions with feedback positions and new tokens; return the loss before each step and at the end."""
    batch = collate(make_samples(4))
    assert int(batch["position_ids"].max()) >= 10000
    assert int(batch["input_ids"].max()) >= KNOWN
    optimiser = torch.optim.AdamW(parameter_groups(agent, FAST))
    losses = []
    for _ in range(steps):
        loss = agent.loss(agent.train()(batch), batch)["total"]
        optimiser.zero_grad()
        loss.backward()
        missing = [name for name, p in agent.named_parameters() if p.requires_grad and p.grad is None]
        assert missing == []
        optimiser.step()
        losses.append(float(loss.detach()))
    return [*losses, float(agent.loss(agent.eval()(batch), batch)["total"].detach())]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AgentModel]:
    """Two agents for each architecture, trained and exported: all weights, and adapters; by export folder."""
    root = tmp_path_factory.mktemp("architectures")
    agents: dict[str, AgentModel] = {}
    for name in NAMES:
        folder = checkpoint(root, name)
        for kind, lora in (("full", None), ("lora", LoraConfig(rank=4))):
            agent = agent_of(folder, lora=lora)
            losses = train(agent)
            assert losses[-1] < losses[0], name
            run, output = root / f"run-{name}-{kind}", root / f"{name}-{kind}"
            save_model(agent, run / "model")
            export(run, output)
            agents[str(output)] = agent
    return agents


def test_exports_load_where_agentft_is_absent_and_give_equal_logits(
    trained: dict[str, AgentModel], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    ids = torch.randint(0, VOCAB, (2, 19), generator=torch.Generator().manual_seed(5))
    done = subprocess.run(
        [sys.executable, "-c", READER, json.dumps(ids.tolist()), str(tmp_path / "logits"), *trained],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read = load_file(tmp_path / "logits")
    for folder, agent in trained.items():
        with torch.no_grad():
            expected = agent.backbone(input_ids=ids).logits
        if folder.endswith("full"):
            assert torch.equal(read[folder], expected), folder
        else:  # adapters were added to the weights
            torch.testing.assert_close(read[folder], expected, atol=5e-5, rtol=1e-4)
        about = json.loads((Path(folder) / "config.json").read_text())
        assert about["vocab_size"] == VOCAB
        assert about["model_type"] == Path(folder).name.rpartition("-")[0].replace("kimi_k2", "deepseek_v3")


@pytest.mark.parametrize("name", NAMES)
def test_sampling_with_a_cache_is_sampling_without(name: str, trained: dict[str, AgentModel]) -> None:
    """Behind a jump into the feedback range and back, beside a shorter row."""
    agent = next(agent for folder, agent in trained.items() if Path(folder).name == f"{name}-lora")
    places = torch.tensor([*range(9), *range(10000, 10006), *range(9, 15)])
    rows = [torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (21, 12)]
    prompts = [
        Prompt(
            input_ids=row.int().numpy(), position_ids=places[: len(row)].int().numpy(), next_position=15 - 6 * (i > 0)
        )
        for i, row in enumerate(rows)
    ]
    turns = [
        sample_turns(agent.backbone, prompts, stop_ids=[], max_new_tokens=6, temperature=0.0, use_cache=cached)
        for cached in (True, False)
    ]
    for with_cache, without in zip(*turns, strict=True):
        assert with_cache.ids == without.ids
        torch.testing.assert_close(torch.tensor(with_cache.logprobs), torch.tensor(without.logprobs), atol=1e-4, rtol=0)
