"""A corpus becomes MDS shards (floor 3): ``agentft shards write-corpus``. Columns are those of sessions.

    report = write_corpus(["repos/"], "data/corpus/shards", max_tokens=8192, tokenizer="models/qwen")

A row is ``opening text [end]`` (``data.marks``): every id but the opening's is trained, anchors are empty, ``record``
says where the row is from and where it is prose. Rows keep ``ROOM`` tokens free for the marks of objectives, so that a
row of full length can still be turned into fill-in-the-middle. Bounded memory: documents and rows wait on disk, in 128
groups by a stable hash. The output folder appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentft.data.corpus import Document, ReadReport, cut, dump_document, load_document, read_documents
from agentft.data.grouping import GROUPS, Buckets, group_of, val_or_train
from agentft.data.lexing import prose_spans
from agentft.data.marks import Marks
from agentft.data.meta import INDEX_NAME, SPLITS, TOKENIZER_NAME, ShardMeta, SplitMeta
from agentft.data.progress import track
from agentft.data.rows import record_of
from agentft.data.shards import mds_writer, shard_folder, write_side_files
from agentft.errors import AgentFTError, ConfigError, DataError
from agentft.etai import SCHEMA_VERSION, Split, split_of
from agentft.text.render import TEMPLATE_VERSION
from agentft.text.vocab import (
    Vocab,
    add_special_tokens,
    load_tokenizer,
    save_tokenizer,
    tokenizer_fingerprint,
    train_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROOM = 16
"""Tokens that a row leaves free: three marks, an end, and what a cut inside of a token adds."""

LEAST_TOKENS = 64
"""Smallest ``max_tokens`` of a corpus."""


@dataclass(frozen=True, kw_only=True)
class CorpusReport:
    """What was written. ``split_by`` is repository, file or holdout; ``skipped``: files that are no source, by kind."""

    folder: Path
    meta: ShardMeta
    documents: int
    split_by: str
    skipped: dict[str, int]
    rejected: tuple[tuple[str, str], ...]
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class CorpusRow:
    """A row that waits to be written."""

    session_id: str
    repository: str
    ids: list[int]
    untrained: int
    record: str


def write_corpus(
    paths: Sequence[str | Path],
    output: str | Path,
    *,
    max_tokens: int,
    tokenizer: str = "train",
    vocab_size: int = 4096,
    holdout: Sequence[str] = (),
    val_share: float = 0.0,
    progress: bool = False,
) -> CorpusReport:
    """Cut documents into rows and write ``output/{train,val,test}``, ``tokenizer/`` and ``meta.json``.

    Without a holdout the split is 8:1:1 by a stable hash of the repository; where that leaves a split empty (few
    repositories), of the document.

    Args:
        paths: Folders, source files, and .jsonl(.gz, .zst) with ``content`` and optional ``language``, ``path``,
            ``repository``.
        output: Folder to write; earlier shards there are replaced at the end, anything else is refused.
        max_tokens: Longest sample that a run may make of a row (``text.max_tokens``).
        tokenizer: A folder or hub name, or ``train``: a small BPE learnt from the training split alone.
        vocab_size: Size of a trained tokenizer.
        holdout: Repositories that go to the test split whole.
        val_share: With a holdout, the share of the other documents that goes to val.
        progress: Show a progress bar on standard error.

    Raises:
        ConfigError: ``max_tokens`` or the tokenizer cannot be used.
        DataError: No usable document, an unknown holdout, a full disk, or an output folder that is no shard folder.
    """
    if max_tokens < LEAST_TOKENS:
        raise ConfigError("rows too short", where="text.max_tokens", got=max_tokens, expected=f"{LEAST_TOKENS} or more")
    if not 0 <= val_share < 1:
        raise DataError("no share of the documents", where="--val-share", got=val_share, expected="from 0 to below 1")
    with shard_folder(output) as partial:
        documents = Buckets(partial / "documents", dump_document, load_document)
        found = ReadReport()
        with documents.filling() as put:
            for document in read_documents(paths, found):
                put("train", document)  # its own split is decided when all are known
        if not found.documents:
            got = found.rejected[0][1] if found.rejected else f"{found.skipped.total()} files that are no source"
            raise DataError("no documents", where=", ".join(map(str, paths)), got=got)
        split, split_by = _splitter(documents, found, holdout, val_share)
        made_by = _tokenizer(tokenizer, vocab_size, documents, split)
        save_tokenizer(made_by, partial / TOKENIZER_NAME)
        rows = _cut_all(partial / "rows", documents, split, made_by, max_tokens, found, progress)
        splits = _write_splits(partial, rows, progress)
        meta = _meta(made_by, max_tokens, holdout, splits, len(found.rejected))
        shutil.rmtree(documents.folder)
        shutil.rmtree(rows.folder)
        size = write_side_files(partial, meta, found.rejected)
    return CorpusReport(
        folder=Path(os.path.realpath(output)),
        meta=meta,
        documents=found.documents,
        split_by=split_by,
        skipped=dict(found.skipped.most_common()),
        rejected=tuple(found.rejected),
        size_bytes=size,
    )


def _splitter(
    documents: Buckets[Document], found: ReadReport, holdout: Sequence[str], val_share: float
) -> tuple[Callable[[Document], Split], str]:
    unknown = sorted(set(holdout) - set(found.repositories))
    if unknown:
        known = ", ".join(sorted(found.repositories)[:40])
        raise DataError("no document of this repository", where="--holdout", got=", ".join(unknown), expected=known)
    if holdout:

        def held_out(document: Document) -> Split:
            return "test" if document.repository in holdout else val_or_train(document.session_id, val_share)

        return held_out, "holdout"
    if found.splits == set(SPLITS):
        return lambda document: split_of(document.split_key), "repository"
    return lambda document: split_of(document.session_id), "file"


def _tokenizer(
    name: str, vocab_size: int, documents: Buckets[Document], split: Callable[[Document], Split]
) -> PreTrainedTokenizerBase:
    if name != "train":
        tokenizer = load_tokenizer(name)
        add_special_tokens(tokenizer)
        return tokenizer
    return train_tokenizer(_training_texts(documents, split), vocab_size)


def _training_texts(documents: Buckets[Document], split: Callable[[Document], Split]) -> Iterator[str]:
    for document in documents.split("train"):
        if split(document) == "train":
            yield document.content


def _cut_all(
    folder: Path,
    documents: Buckets[Document],
    split: Callable[[Document], Split],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    found: ReadReport,
    progress: bool,
) -> Buckets[CorpusRow]:
    """Put the rows of every document into their buckets; what cannot be a row goes to ``found.rejected``."""
    vocab = Vocab.of(tokenizer)
    marks = Marks.of(tokenizer, vocab)
    rows = Buckets(folder, _dump_row, _load_row)
    with track("cut", found.documents, enabled=progress) as advance, rows.filling() as put:
        for document in documents.split("train"):
            try:
                cut_up = rows_of(document, vocab, marks, max_tokens)
            except AgentFTError as error:
                found.rejected.append((document.session_id, error.what))
            else:
                for row in cut_up:
                    put(split(document), row)
            advance()
    return rows


def rows_of(document: Document, vocab: Vocab, marks: Marks, max_tokens: int) -> list[CorpusRow]:
    """Return the rows of a document: at most ``max_tokens − ROOM`` ids, in the last one the document's end beside.

    Raises:
        DataError: The text spells a mark, or the tokenizer does not give it back.
    """
    text = vocab.decode(vocab.encode(document.content))  # as the tokenizer normalises it
    prose = prose_spans(text, document.language)
    spans = cut(text, vocab, max_tokens - ROOM - len(marks.opening))
    rows = []
    for number, (start, end) in enumerate(spans):
        ids = list(vocab.encode(text[start:end]))
        if marks.forbidden.intersection(ids):
            mark = vocab.decode([next(i for i in ids if i in marks.forbidden)])
            raise DataError(f"spells {mark!r}, which the tokenizer reads as a mark")
        if list(vocab.encode(vocab.decode(ids))) != ids:
            raise DataError("the tokenizer does not give this text back")
        name = f"{document.session_id}#{number:04d}"
        inside = [(max(a, start) - start, min(b, end) - start) for a, b in prose if a < end and b > start]
        record = record_of(
            name,
            repository=document.repository,
            path=document.path,
            language=document.language,
            number=number,
            prose=inside,
        )
        ids = [*marks.opening, *ids, *([marks.end] if end == len(text) else [])]
        rows.append(
            CorpusRow(
                session_id=name,
                repository=document.repository,
                ids=ids,
                untrained=len(marks.opening),
                record=record,
            )
        )
    return rows


def sample_of_row(row: CorpusRow) -> dict[str, Any]:
    """Return the sample of a row: the columns of ``data.shards.COLUMNS``."""
    trained = np.ones(len(row.ids), np.uint8)
    trained[: row.untrained] = 0
    anchors: dict[str, Any] = {"intent_at": -1, "intents": None, "cursor_at": -1, "cursor_target": None}
    return {
        "session_id": row.session_id.encode("utf-8", "backslashreplace").decode(),
        "group": group_of(row.session_id),
        "input_ids": np.array(row.ids, np.int32),
        "loss_mask": trained,
        "position_ids": np.arange(len(row.ids), dtype=np.int32),
        "anchors": {**anchors, "viewport": None, "steps": []},
        "record": row.record,
    }


def _write_splits(partial: Path, rows: Buckets[CorpusRow], progress: bool) -> dict[Split, SplitMeta]:
    splits: dict[Split, SplitMeta] = {}
    with track("write", rows.counts.total(), enabled=progress) as advance:
        for split in SPLITS:
            if split in rows.splits():
                splits[split] = _write_split(partial / split, rows, split, advance)
    if not splits:
        raise DataError("no document could be used", hint="rejected documents are listed with their reason by --json")
    return splits


def _write_split(folder: Path, rows: Buckets[CorpusRow], split: Split, advance: Callable[[], Any]) -> SplitMeta:
    repositories: Counter[str] = Counter()
    tokens = untrained = longest = 0
    with mds_writer(folder) as writer:
        for row in rows.split(split):
            writer.write(sample_of_row(row))
            repositories[row.repository] += 1
            tokens, untrained = tokens + len(row.ids), untrained + row.untrained
            longest = max(longest, len(row.ids))
            advance()
    index = (folder / INDEX_NAME).read_bytes()
    return SplitMeta(
        sessions=repositories.total(),
        steps=0,
        trained_tokens=tokens - untrained,
        context_tokens=untrained,
        longest_tokens=longest,
        shards=len(json.loads(index)["shards"]),
        index_sha256=hashlib.sha256(index).hexdigest(),
        repositories=dict(sorted(repositories.items())),
    )


def _meta(
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    holdout: Sequence[str],
    splits: dict[Split, SplitMeta],
    rejected: int,
) -> ShardMeta:
    return ShardMeta(
        kind="corpus",
        schema_version=SCHEMA_VERSION,
        template="none",
        template_version=TEMPLATE_VERSION,
        text={"max_tokens": max_tokens},
        positions={},
        tokenizer_sha256=tokenizer_fingerprint(tokenizer),
        vocab_size=len(tokenizer),
        tools=[],
        groups=GROUPS,
        holdout=sorted(holdout),
        splits=splits,
        dropped_result_tokens=0,
        dropped_steps=0,
        dropped_instruction_tokens=0,
        rejected=rejected,
    )


def _dump_row(row: CorpusRow) -> str:
    return json.dumps(asdict(row), ensure_ascii=True)


def _load_row(line: str) -> CorpusRow:
    return CorpusRow(**json.loads(line))
