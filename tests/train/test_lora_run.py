"""A run with adapters, from a checkpoint in a folder: sampled calls, resume, evaluation, export; over two processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support_agent import TEXT, sessions
from support_runs import RunServer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GlmConfig, GlmForCausalLM, PreTrainedTokenizerFast

from agentft.feedback.trace import read_traces
from agentft.text.render import session_texts
from agentft.text.vocab import SPECIAL_TOKENS, load_tokenizer
from agentft.train.run import main

MINIMAL = """
run_name: lora
text: {max_tokens: 1024}
model: {lora: {rank: 4, dropout: 0.1}}
data: {batch_size: 8, microbatch_size: 4}
optimizer: {backbone_lr: 1.0e-3, decay: step, decay_per_epoch: 0.5, warmup: 1ba}
feedback: {probe: {every: 2, calls: 2}, policy: {every: 2, calls: 2}}
train: {duration: 4ba, device: cpu, threads: 1, activation_checkpointing: true, eval_interval: 0ba,
  checkpoints: {interval: 2ba}}
loggers: {tensorboard: false}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pretrained model's files (random weights, a tokenizer without our tokens), shards and a YAML."""
    from agentft.config.schema import FeedbackPositionsConfig, TextConfig
    from agentft.data.shards import write_shards

    folder = tmp_path_factory.mktemp("lora")
    known = sessions(24)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        session_texts(known, TEXT), trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.save_pretrained(folder / "base")
    torch.manual_seed(1)
    config = GlmConfig(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, pad_token_id=None, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    GlmForCausalLM(config).save_pretrained(folder / "base")
    lines = [
        session.model_copy(update={"repository": "held-out" if row >= 18 else "calc"}).model_dump_json()
        for row, session in enumerate(known)
    ]
    (folder / "sessions.jsonl").write_text("\n".join(lines) + "\n")
    write_shards(
        [folder / "sessions.jsonl"],
        folder / "shards",
        text=TextConfig(max_tokens=1024),
        positions=FeedbackPositionsConfig(),
        tokenizer=str(folder / "base"),
        holdout=["held-out"],
    )
    (folder / "run.yaml").write_text(MINIMAL)
    return folder


def words(base: Path, runs: Path, *more: str) -> list[str]:
    places = [f"runs_dir={runs}", f"data.shards={base / 'shards'}", f"model.path={base / 'base'}"]
    return [str(base / "run.yaml"), *places, *more]


def lines_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "losses.jsonl").read_text().splitlines()]


def test_a_run_with_adapters_samples_resumes_evaluates_and_exports(
    base: Path, tmp_path: Path, bubblewrap: None
) -> None:
    from agentft.models.export import export, load_model
    from agentft.train.evaluate import evaluate_run

    local = "feedback.backend=local"
    assert main(words(base, tmp_path, local)) == 0
    run = tmp_path / "lora"
    assert {line.source for line in read_traces(run)} == {"recorded", "policy", "probe"}
    lines = lines_of(run)
    assert len(lines) == 4
    assert lines[-1]["loss/code/raw"] < lines[0]["loss/code/raw"]
    assert sorted(p.name for p in (run / "model").glob("*.safetensors")) == [
        "adapters.safetensors",
        "heads.safetensors",
    ]

    copy = tmp_path / "again" / "lora"
    shutil.copytree(run, copy)
    (copy / "summary.json").unlink()
    listed = json.loads((copy / "checkpoints" / "checkpoints.json").read_text())
    listed["checkpoints"] = [entry for entry in listed["checkpoints"] if entry["batch"] == 2]
    (copy / "checkpoints" / "checkpoints.json").write_text(json.dumps(listed))
    assert main(words(base, tmp_path / "again", local, "train.checkpoints.autoresume=true")) == 0
    assert (copy / "losses.jsonl").read_bytes() == (run / "losses.jsonl").read_bytes()
    trained = (run / "model" / "adapters.safetensors").read_bytes()
    assert (copy / "model" / "adapters.safetensors").read_bytes() == trained

    assert evaluate_run(run, "test")["held_out"]["code_loss"] > 0
    export(run, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert plain.config.vocab_size == len(load_tokenizer(base / "base")) + len(SPECIAL_TOKENS)
    ids = torch.randint(0, plain.config.vocab_size, (1, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = load_model(run / "model").backbone(input_ids=ids).logits
        torch.testing.assert_close(plain(input_ids=ids).logits, expected, atol=5e-5, rtol=1e-4)


def test_checkpoints_hold_what_is_trained(base: Path, tmp_path: Path) -> None:
    from agentft.train.checkpoint_file import read_checkpoint

    assert main(words(base, tmp_path, "feedback.backend=off", "train.duration=2ba")) == 0
    state = read_checkpoint(tmp_path / "lora" / "checkpoints" / "ba2.safetensors")["state"]["model"]
    kinds = {"heads." in name or "lora_" in name or name.endswith("rows") for name in state}
    assert kinds == {True}
    assert sum("lora_A" in name for name in state) == 12


@pytest.mark.slow
def test_two_processes_see_the_losses_of_one_whether_they_share_the_weights_or_not(base: Path, tmp_path: Path) -> None:
    more = ["feedback.backend=off", "feedback.policy.every=0", "feedback.probe.every=0", "train.duration=2ba"]
    more += ["model.lora.dropout=0", "loggers.console=false"]
    kinds = {"one": 1, "ddp": 2, "fsdp": 2}
    with RunServer(tmp_path) as server:
        for name, processes in kinds.items():
            strategy = f"train.distributed.strategy={'fsdp' if name == 'fsdp' else 'ddp'}"
            server.run(words(base, tmp_path / name, *more, strategy), processes=processes)
    lines = {name: lines_of(tmp_path / name / "lora") for name in kinds}
    saved = {name: load_file(tmp_path / name / "lora" / "model" / "adapters.safetensors") for name in kinds}
    for name in ("ddp", "fsdp"):
        for one, two in zip(lines["one"], lines[name], strict=True):
            assert two == pytest.approx(one, rel=1e-4, abs=1e-5), name
        assert saved[name].keys() == saved["one"].keys()
        for key, tensor in saved["one"].items():
            torch.testing.assert_close(saved[name][key], tensor, atol=1e-4, rtol=1e-2)
