"""Stage sft from a file of chats to a model: what it learns, that it resumes exactly, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support_chats import write_chats
from support_runs import RunServer, make_shards, wait_for
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentft.config.load import InvalidConfigError, load
from agentft.data.shards import write_shards
from agentft.train.check import load_run_config
from agentft.train.run import main

REPO = Path(__file__).resolve().parents[2]
YAML = REPO / "yamls" / "sft" / "tiny-sft.yaml"
SMALL = ["loggers.tensorboard=false", "loggers.console=false", "data.batch_size=8", "data.microbatch_size=2"]
SMALL += ["train.threads=1", "train.precision=fp32", "train.eval_interval=0ba"]
QUESTION = [{"role": "user", "content": "What is 4 + 4? Think. Think. Think. Think. "}]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, config = tmp_path_factory.mktemp("chats"), load(YAML)
    chats, positions = write_chats(folder / "chats.jsonl", 40), config.model.feedback_positions
    write_shards([chats], folder / "shards", text=config.text, positions=positions, vocab_size=450)
    return folder / "shards"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunServer]:
    with RunServer(tmp_path_factory.mktemp("server")) as running:
        yield running


def _words(name: str, runs: Path, shards: Path, *more: str) -> list[str]:
    return [str(YAML), f"run_name={name}", f"runs_dir={runs}", f"data.shards={shards}", *SMALL, *more]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_loss_falls_and_the_model_answers_in_its_template(tmp_path: Path, shards: Path) -> None:
    more = ["train.duration=12ep", "train.eval_interval=6ep", "optimizer.backbone_lr=3e-3"]
    assert main(_words("learns", tmp_path, shards, *more)) == 0
    losses = _lines(tmp_path / "learns" / "losses.jsonl")
    assert losses[-1]["loss/code/raw"] < losses[0]["loss/code/raw"] / 4
    assert {line[f"loss/{name}/raw"] for line in losses for name in ("intent", "tool", "cursor", "reward")} == {0.0}
    folder = tmp_path / "learns" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    answer = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=end, pad_token_id=0)
    said = tokenizer.decode(answer[0, prompt.shape[1] :])
    assert said.startswith("It is ")
    assert said.endswith(".<|im_end|>")


def test_heads_stay_as_they_were(tmp_path: Path, shards: Path) -> None:
    heads = []
    for batches in (1, 3):
        assert main(_words(f"heads{batches}", tmp_path, shards, f"train.duration={batches}ba")) == 0
        (file,) = (tmp_path / f"heads{batches}" / "model").glob("heads*.safetensors")
        heads.append(load_file(file))
    assert all(torch.equal(heads[0][name], tensor) for name, tensor in heads[1].items())


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_uninterrupted_run(tmp_path: Path, shards: Path, server: RunServer) -> None:
    saved = ["train.duration=9ba", "train.checkpoints.interval=2ba", "train.checkpoints.autoresume=true"]
    server.run(_words("whole", tmp_path, shards, *saved))
    words, losses = _words("killed", tmp_path, shards, *saved), tmp_path / "killed" / "losses.jsonl"
    for batch in (3, 7):
        run = server.start(words)
        seen = wait_for(lambda batch=batch: losses.is_file() and len(losses.read_bytes().splitlines()) >= batch)
        run.kill()
        run.wait()
        assert seen, run.output()
    server.run(words)
    assert losses.read_bytes() == (tmp_path / "whole" / "losses.jsonl").read_bytes()
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items())


@pytest.mark.slow
def test_two_processes_see_the_losses_of_one(tmp_path: Path, shards: Path, server: RunServer) -> None:
    server.run(_words("one", tmp_path, shards, "train.duration=3ba"))
    server.run(_words("two", tmp_path, shards, "train.duration=3ba"), processes=2)
    one, two = (_lines(tmp_path / name / "losses.jsonl") for name in ("one", "two"))
    assert len(one) == len(two) == 3
    for line, other in zip(one, two, strict=True):
        assert line == pytest.approx(other, rel=1e-5, abs=1e-5)


def test_sessions_in_a_chat_template_train_the_heads_of_an_agent(tmp_path: Path) -> None:
    """Stage agent without feedback: the four heads read at their places in the chat template."""
    more = ["stage=agent", "text.max_tokens=1024", "train.duration=2ba", "data.eval_split=train"]
    make_shards(tmp_path, count=24, held_out=0, config=load_run_config(YAML, more))
    assert main(_words("agent", tmp_path, tmp_path / "shards", *more)) == 0
    losses = _lines(tmp_path / "agent" / "losses.jsonl")
    for name in ("code", "intent", "tool", "reward"):
        assert all(line[f"loss/{name}/raw"] > 0 for line in losses), name


def test_shards_of_another_template_are_refused(
    tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_words("other", tmp_path, shards, "text.template=functioncall", "train.duration=1ba")) == 1
    said = capsys.readouterr().err
    assert "text.template = 'chatml' in the shards" in said
    assert "text.template = 'functioncall' in the run" in said


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["text.handles=true"], "a chat template has no handles"),
        (["feedback.backend=local"], "execution feedback reads and writes the native template"),
        (["text.template=etai", "text.list_tools=true"], r"text\.list_tools has no effect"),
        (["text.template=etai", "feedback.backend=local"], "stage sft has no feedback"),
        (["data.calibration_split=val"], "no outcome head to calibrate"),
        (["loss.intent={kind: constant, start: 0.5}"], r"loss\.intent has no effect"),
        (["optimizer.tool_lr=1e-3"], r"optimizer\.tool_lr has no effect"),
        (["data.input_noise=0.1"], r"data\.input_noise works on the native template"),
        (["algorithms.samples.every=10"], r"algorithms\.samples\.every works on the native template"),
    ],
)
def test_settings_that_cannot_take_effect_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        load(YAML, overrides)
