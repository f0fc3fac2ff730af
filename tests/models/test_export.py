"""Saving and exporting: equal logits after a round trip, and after an export where agentft cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from agent_samples import VOCAB, WITHOUT_AGENTFT, make_agent, make_samples

from agentft.data.batch import collate
from agentft.errors import ModelError
from agentft.models.backbone import hidden_states
from agentft.models.export import export, load_model, save_model
from agentft.text.vocab import save_tokenizer, train_tokenizer

READER = (
    WITHOUT_AGENTFT
    + """import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, ids, out = sys.argv[1], torch.tensor(json.loads(sys.argv[2])), sys.argv[3]
plain = AutoModelForCausalLM.from_pretrained(folder).eval()
assert AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|tool_start|>") > 0
sys.path.insert(0, folder)
import load_heads
backbone, heads, about = load_heads.load_agent(folder)
with torch.no_grad():
    logits = plain(input_ids=ids[None]).logits
    said = load_heads.read_heads(backbone, heads, about, ids)
    place = load_heads.positions(ids, about)
json.dump({"class": type(plain).__name__, "said": said, "positions": place.tolist()}, open(out + ".json", "w"))
save_file({"logits": logits}, out)
"""
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["def f(x):\n    return x\n"] * 3, VOCAB), folder)
    return folder


@pytest.mark.parametrize("preset", ["tiny-glm", "tiny-kimi"])
def test_a_saved_agent_comes_back_bit_for_bit(preset: str, tmp_path: Path, tokenizer: Path) -> None:
    agent = make_agent(preset).eval()
    save_model(agent, tmp_path / "model", tokenizer=tokenizer)
    back = load_model(tmp_path / "model")
    assert (back.config, back.tools, back.entropy_bonus) == (agent.config, agent.tools, agent.entropy_bonus)
    batch = collate(make_samples(3))
    with torch.no_grad():
        before, after = agent(batch), back(batch)
    for name in before:
        assert torch.equal(before[name], after[name]), name
    assert not list((tmp_path / "model").glob("*.bin")) + list((tmp_path / "model").glob("*.pt"))


@pytest.mark.parametrize(
    ("preset", "architecture"), [("tiny-glm", "GlmForCausalLM"), ("tiny-kimi", "DeepseekV3ForCausalLM")]
)
def test_an_export_loads_without_agentft(preset: str, architecture: str, tmp_path: Path, tokenizer: Path) -> None:
    from safetensors.torch import load_file

    agent = make_agent(preset).eval()
    save_model(agent, tmp_path / "run" / "model", tokenizer=tokenizer)
    written = export(tmp_path / "run", tmp_path / "out")
    assert written["architecture"] == architecture
    about = json.loads((tmp_path / "out" / "heads.json").read_text())
    marks = about["tokens"]
    ids = [200, 201, marks["<|trace_start|>"], 210, marks["<|tool_start|>"], 211, marks["<|args|>"], 212]
    ids += [marks["<|result|>"], 220, 221, marks["<|result_end|>"], 213, marks["<|output|>"], 214]
    places = [*range(8), *range(10000, 10004), 8, 9, 10]
    done = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path / "out"), json.dumps(ids), str(tmp_path / "logits")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read = json.loads((tmp_path / "logits.json").read_text())
    assert read["class"] == architecture
    assert read["positions"] == places
    tokens = torch.tensor(ids)[None]
    with torch.no_grad():
        plain = agent.backbone(input_ids=tokens).logits
        hidden = hidden_states(agent.backbone, tokens, torch.tensor(places)[None])[0]
        outcome = agent.heads.reward(hidden[8:9]).sigmoid()
        tool = agent.heads.tool(hidden[4:5]).softmax(-1)[0]
        intent = agent.heads.intent(hidden[2:3]).sigmoid()[0]
    assert torch.equal(load_file(tmp_path / "logits")["logits"], plain)
    said = read["said"]
    torch.testing.assert_close(torch.tensor(said["outcome"]), outcome)
    torch.testing.assert_close(torch.tensor(list(said["tool"][0].values())), tool)
    torch.testing.assert_close(torch.tensor(list(said["intent"][0].values())), intent)
    assert list(said["tool"][0]) == list(agent.tools)


def test_what_is_missing_or_in_the_way_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no saved agent"):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="no saved agent"):
        export(tmp_path / "no-run", tmp_path / "out")
    save_model(make_agent(), tmp_path / "run" / "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("mine")
    with pytest.raises(ModelError, match="not empty"):
        export(tmp_path / "run", tmp_path / "full")


def test_the_verb_prints_what_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from agentft.cli import main

    save_model(make_agent(), tmp_path / "run" / "model")
    assert main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["architecture"] == "GlmForCausalLM"
