"""One training run of Hugging Face Trainer or of TRL's SFTTrainer, in a process of its own; prints its figures as JSON.

    python bench/kit/peer_trainer.py '{"kind": "trainer", "rows": "rows.npz", "model": "model", …}'

It imports nothing of agentft: TRL runs in an environment of its own. ``rows.npz`` holds ``ids``, ``trained`` (0 or 1)
and ``lengths`` of all sessions, end to end; ``model`` is a folder that transformers loads. Kinds: ``trainer`` pads each
batch to its longest session, ``grouped`` is the same with ``group_by_length``, ``sft`` packs (``bfd``, padding-free).
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

IGNORE = -100


def _memory() -> Any:
    """Return ``kit.memory``, which this file stands beside."""
    spec = importlib.util.spec_from_file_location("memory", Path(__file__).with_name("memory.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Clock(TrainerCallback):
    """Notes the time after every step of the optimiser."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.marks.append(time.perf_counter())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.marks.append(time.perf_counter())


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    memory, clock, seen = _memory(), Clock(), []
    dataset = _rows(asked["rows"])
    model = AutoModelForCausalLM.from_pretrained(asked["model"], attn_implementation="sdpa", dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        trainer = (_sft if asked["kind"] == "sft" else _plain)(asked, model, dataset, clock, folder)
        collate = trainer.data_collator

        def counted(examples: list[dict[str, Any]]) -> Any:
            seen.append(sum(len(example["input_ids"]) for example in examples))
            return collate(examples)

        trainer.data_collator = counted
        memory.reset_peak()
        before = memory.resident_mib()
        trainer.train()
        peak = memory.peak_mib()
    per_step = asked.get("accumulate", 1)
    tokens = [sum(seen[i * per_step : (i + 1) * per_step]) for i in range(len(clock.marks) - 1)]
    seconds = [after - start for start, after in zip(clock.marks, clock.marks[1:], strict=False)]
    print(json.dumps({"tokens": tokens, "step_s": seconds, "peak_mib": peak, "start_mib": before}))


def _rows(path: str) -> Dataset:
    data = np.load(path)
    ends = np.cumsum(data["lengths"])
    starts = ends - data["lengths"]
    ids = [data["ids"][a:b].tolist() for a, b in zip(starts, ends, strict=True)]
    marks = [data["trained"][a:b] for a, b in zip(starts, ends, strict=True)]
    labels = [np.where(mark, row, IGNORE).tolist() for mark, row in zip(marks, ids, strict=True)]
    return Dataset.from_dict({"input_ids": ids, "labels": labels, "length": [len(row) for row in ids]})


def _settings(asked: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return what both trainers are told: the same optimiser, no evaluation, nothing saved, a CPU where asked."""
    return {
        "output_dir": folder,
        "max_steps": asked["steps"],
        "learning_rate": asked["lr"],
        "lr_scheduler_type": "cosine",
        "optim": "adamw_torch",
        "max_grad_norm": 1.0,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 17,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    }


def _plain(asked: dict[str, Any], model: Any, dataset: Dataset, clock: Clock, folder: str) -> Trainer:
    def pad(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(example["input_ids"]) for example in examples)

        def rows(key: str, filler: int) -> torch.Tensor:
            return torch.tensor([example[key] + [filler] * (longest - len(example[key])) for example in examples])

        mask = [[1] * len(e["input_ids"]) + [0] * (longest - len(e["input_ids"])) for e in examples]
        return {
            "input_ids": rows("input_ids", 0),
            "labels": rows("labels", IGNORE),
            "attention_mask": torch.tensor(mask),
        }

    settings = TrainingArguments(
        **_settings(asked, folder),
        per_device_train_batch_size=asked["batch"],
        group_by_length=asked["kind"] == "grouped",
    )
    return Trainer(model=model, args=settings, train_dataset=dataset, data_collator=pad, callbacks=[clock])


def _sft(asked: dict[str, Any], model: Any, dataset: Dataset, clock: Clock, folder: str) -> Trainer:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    # The rows are ids already; SFTTrainer wants a tokenizer all the same, for its padding and end tokens.
    words = WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>")
    settings = SFTConfig(
        **_settings(asked, folder),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=asked["accumulate"],
        packing=True,
        packing_strategy="bfd",
        max_length=asked["max_tokens"],
        bf16=False,
    )
    return SFTTrainer(
        model=model,
        args=settings,
        train_dataset=dataset.remove_columns(["length"]),
        processing_class=tokenizer,
        callbacks=[clock],
    )


if __name__ == "__main__":
    main()
