"""``agentft fisher RUN --shards FOLDER -o FILE`` (floor 4): how much earlier data depends on each weight of a run.

The file is what ``forgetting.ewc.fisher`` of the next stage names; its ``model.path`` is then this run's ``model``
folder or its export. One forward and backward pass a sample; docs/forgetting.md has the formula and the costs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentft.data.meta import TOKENIZER_NAME, load_meta
from agentft.data.read import read_samples
from agentft.errors import EXIT_OK, DataError, ModelError
from agentft.etai import Split
from agentft.models.export import load_model
from agentft.models.fisher import Fisher, FisherRow, Kind, diagonal_fisher, save_fisher, weights_digest
from agentft.text.vocab import load_tokenizer, tokenizer_fingerprint


def measure(
    run: Path, shards: Path, *, split: Split = "train", kind: Kind = "true", limit: int | None = None, seed: int = 17
) -> Fisher:
    """Return the diagonal Fisher information of a run's backbone on the targets of a split's rows.

    Args:
        run: A run folder, or the folder of a saved agent.
        shards: Of earlier data; in the order of the shards, which is that of a hash.
        split: Which split.
        kind: ``true`` or ``empirical`` (``agentft.models.fisher``).
        limit: Samples to measure on, at most.
        seed: Of the draws of ``true``.

    Raises:
        ModelError: The run has no saved model, or one with adapters.
        DataError: Another tokenizer made the shards.
    """
    folder = run if (run / "agent.json").is_file() else run / "model"
    _check_tokenizer(folder, shards)
    digest = weights_digest(folder)
    backbone = load_model(folder).backbone
    if not all(parameter.requires_grad for parameter in backbone.parameters()):
        raise ModelError("the weights of this run are frozen beside adapters", where=str(run), hint="merge them first")
    samples = itertools.islice(read_samples(shards, split), limit)
    diagonal, count, tokens = diagonal_fisher(backbone, map(row_of, samples), kind=kind, seed=seed)
    return Fisher(
        diagonal=diagonal, kind=kind, samples=count, tokens=tokens, weights=digest, data=f"{shards.name}/{split}"
    )


def row_of(sample: dict[str, Any]) -> FisherRow:
    """Return a shard row as a sample to measure on."""
    return FisherRow(
        input_ids=torch.from_numpy(np.asarray(sample["input_ids"], np.int64)),
        position_ids=torch.from_numpy(np.asarray(sample["position_ids"], np.int64)),
        targets=torch.from_numpy(np.asarray(sample["loss_mask"]).astype(bool)),
    )


def command(arguments: argparse.Namespace) -> int:
    """Run ``agentft fisher``."""
    started = time.monotonic()
    fisher = measure(
        Path(arguments.run),
        Path(arguments.shards),
        split=arguments.split,
        kind=arguments.targets,
        limit=arguments.samples,
        seed=arguments.seed,
    )
    save_fisher(fisher, Path(arguments.output))
    about = {
        "output": arguments.output,
        "kind": fisher.kind,
        "samples": fisher.samples,
        "tokens": fisher.tokens,
        "weights": sum(tensor.numel() for tensor in fisher.diagonal.values()),
        "size_bytes": Path(arguments.output).stat().st_size,
        "seconds": round(time.monotonic() - started, 1),
        "largest": list(_largest(fisher)),
    }
    if arguments.json:
        print(json.dumps(about))
        return EXIT_OK
    print(f"{fisher.kind} Fisher information of {about['weights']} weights, measured in {about['seconds']} s on")
    print(f"{fisher.samples} samples ({fisher.tokens} targets) of {fisher.data}; most of it lies in")
    for name, share in _largest(fisher):
        print(f"  {share:6.1%}  {name}")
    print(f"next: forgetting.ewc.fisher={arguments.output} forgetting.ewc.weight=1 with model.path of this run's model")
    return EXIT_OK


def _largest(fisher: Fisher, count: int = 5) -> Iterator[tuple[str, float]]:
    sums = {name: float(tensor.sum(dtype=torch.float64)) for name, tensor in fisher.diagonal.items()}
    whole = sum(sums.values()) or 1.0
    for name in sorted(sums, key=lambda name: -sums[name])[:count]:
        yield name, sums[name] / whole


def _check_tokenizer(model: Path, shards: Path) -> None:
    meta = load_meta(shards)
    known = model if (model / "tokenizer.json").is_file() else shards / TOKENIZER_NAME
    found = tokenizer_fingerprint(load_tokenizer(known))
    if found != meta.tokenizer_sha256:
        raise DataError(
            "these shards were written with another tokenizer than the model's",
            where=str(shards),
            got=meta.tokenizer_sha256[:12],
            expected=found[:12],
            hint=f"write them again: agentft shards write SESSIONS.jsonl -o FOLDER --tokenizer {model}",
        )
