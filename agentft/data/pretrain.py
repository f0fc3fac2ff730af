"""What stage pretrain reads (floor 3): rows of a corpus, changed by the configured objectives.

    objectives = build_objectives(config, tokenizer, meta)
    train = build_loader(config.data, "train", meta, shuffle=True, seed=17, transform=objectives)
    fim = held_out_as(objectives, "fim", held_out)            # the same rows as fill-in-the-middle

Held-out rows are changed as in epoch 0 at every evaluation, so that its losses can be compared.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from composer.core import DataSpec

from agentft.config.objectives import WEIGHTS, ObjectivesConfig
from agentft.config.schema import RunConfig
from agentft.data.batch import collate, num_samples, num_tokens
from agentft.data.loader import SessionLoader
from agentft.data.marks import Marks
from agentft.data.meta import ShardMeta
from agentft.data.objectives import Objectives
from agentft.errors import ConfigError, DataError
from agentft.text.vocab import Vocab, tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_objectives(config: RunConfig, tokenizer: PreTrainedTokenizerBase, meta: ShardMeta) -> Objectives:
    """Return the objectives of a run, after checking that its shards are a corpus that it can use.

    Raises:
        DataError: The shards hold sessions, or another tokenizer wrote them.
        ConfigError: ``text.max_tokens`` is shorter than the rows may be.
    """
    where = config.data.shards
    if meta.kind != "corpus":
        hint = "write a corpus: agentft shards write-corpus PATH -o FOLDER"
        raise DataError("stage pretrain reads a corpus, not sessions", where=where, got=meta.kind, hint=hint)
    if meta.tokenizer_sha256 != tokenizer_fingerprint(tokenizer):
        raise DataError("the tokenizer is not the one that wrote these shards", where=where)
    if config.text.max_tokens < meta.text["max_tokens"]:
        raise ConfigError(
            "the rows of the corpus may be longer than a sample",
            where="text.max_tokens",
            got=config.text.max_tokens,
            expected=f"{meta.text['max_tokens']} or more, as the corpus was written with",
            hint="raise text.max_tokens, or write the corpus again with --config",
        )
    vocab = Vocab.of(tokenizer)
    return Objectives(
        config.objectives or ObjectivesConfig(),
        vocab,
        Marks.of(tokenizer, vocab),
        max_tokens=config.text.max_tokens,
        seed=config.seed,
    )


def weighted(config: ObjectivesConfig | None) -> tuple[str, ...]:
    """Return the names of the objectives that have a weight."""
    return tuple(name for name in WEIGHTS if getattr(config or ObjectivesConfig(), name) > 0)


def held_out_as(objectives: Objectives, name: str, held_out: DataSpec) -> DataSpec:
    """Return the rows of ``held_out`` (an evaluation's loader) as one objective has them."""
    loader = held_out.dataloader
    assert isinstance(loader, SessionLoader)
    again = SessionLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        collate_fn=partial(_collate_as, objectives, name),
        drop_last=False,
    )
    return DataSpec(
        again,
        num_samples=held_out.num_samples,
        split_batch=held_out.split_batch,
        get_num_samples_in_batch=num_samples,
        get_num_tokens_in_batch=num_tokens,
    )


def _collate_as(objectives: Objectives, name: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    return collate([objectives(sample, 0, only=name) for sample in samples])
