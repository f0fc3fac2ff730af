"""One rank of a small data job, for tests that need several processes: prints what it reads, one JSON line a batch.

    RANK=0 WORLD_SIZE=2 … python support_ranks.py SHARDS [--remote URI] [--batches N] [--state JSON] [--look N]

``--corpus`` takes shards of a corpus, and prints with each id what its row was made into by four objectives.
``--state`` is where an earlier job stopped; the last line printed is the state after ``--batches``. With ``--hang`` it
then says "ready" and waits to be killed.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from composer.utils import dist, get_device

from agentft.config.objectives import ObjectivesConfig
from agentft.config.schema import DataConfig
from agentft.data.loader import build_loader, open_shards
from agentft.data.marks import Marks
from agentft.data.objectives import Objectives
from agentft.text.vocab import Vocab, load_tokenizer


def four_objectives(shards: str) -> Objectives:
    """Return objectives of equal weight for the corpus in ``shards``."""
    tokenizer = load_tokenizer(f"{shards}/tokenizer")
    vocab = Vocab.of(tokenizer)
    config = ObjectivesConfig(causal=1, fim=1, masked=1, denoise=1)
    return Objectives(config, vocab, Marks.of(tokenizer, vocab), max_tokens=256, seed=17)


def rows(batch: dict[str, Any]) -> list[str]:
    """Return ``id: tokens`` of each row of a batch."""
    lengths = batch["lengths"].tolist()
    tokens = [batch["input_ids"][row, :length].tolist() for row, length in enumerate(lengths)]
    return [f"{name}: {ids}" for name, ids in zip(batch["session_id"], tokens, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shards")
    parser.add_argument("--remote")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--state")
    parser.add_argument("--look", type=int, default=0)
    parser.add_argument("--hang", action="store_true")
    parser.add_argument("--corpus", action="store_true")
    arguments = parser.parse_args()
    dist.initialize_dist(get_device("cpu"), timeout=60)
    data = DataConfig(shards=arguments.shards, remote=arguments.remote, batch_size=8)
    meta = open_shards(data)
    transform = four_objectives(arguments.shards) if arguments.corpus else None
    loader = build_loader(data, "train", meta, shuffle=True, seed=17, transform=transform).dataloader
    if arguments.state:
        loader.dataset.load_state_dict(json.loads(arguments.state))
    drawn = 0
    while drawn < arguments.batches:
        for batch in loader:
            ahead = [[s["session_id"] for s in u.samples] for u in loader.upcoming(arguments.look)]
            ids = rows(batch) if arguments.corpus else batch["session_id"]
            print(json.dumps({"ids": ids, "ahead": ahead}), flush=True)
            drawn += 1
            if drawn == arguments.batches:
                break
    in_epoch = drawn % len(loader) + (json.loads(arguments.state)["sample_in_epoch"] // 8 if arguments.state else 0)
    print(json.dumps(loader.dataset.state_dict(in_epoch * 8, True)), flush=True)
    if arguments.hang:
        print("ready", flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main()
