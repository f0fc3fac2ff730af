"""Sessions become MDS shards (floor 3): split, order, render, write, verify. Contract: docs/design.md, "Shards".

    report = write_shards(["sessions.jsonl"], "shards", text=TextConfig(), positions=FeedbackPositionsConfig())
    verify_shards("shards")

Two passes with bounded memory: sessions are first put into 128 groups by a stable hash of their id (on disk, beside the
output), then each group is sorted by id, rendered and written. The output folder appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentft import etai_io
from agentft.config.schema import FeedbackPositionsConfig, TextConfig
from agentft.data.conversations import read_records
from agentft.data.grouping import GROUPS, Buckets, fill, group_of, read_record, record_text
from agentft.data.meta import COMPLEXITY_LETTERS, INDEX_NAME, META_NAME, SPLITS, TOKENIZER_NAME, ShardMeta, SplitMeta
from agentft.data.progress import track
from agentft.data.storage import disk_errors
from agentft.errors import AgentFTError, ConfigError, DataError
from agentft.etai import SCHEMA_VERSION, Session, Split
from agentft.text.chat import ChatRenderer, Conversation, Record, record_texts
from agentft.text.chat_template import CHAT_TEMPLATE_VERSION, prepare, template_fingerprint
from agentft.text.render import TEMPLATE_VERSION, Renderer, session_texts
from agentft.text.rendered import Rendered
from agentft.text.vocab import (
    Vocab,
    add_special_tokens,
    load_tokenizer,
    save_tokenizer,
    tokenizer_fingerprint,
    train_tokenizer,
)
from agentft.tools import TOOL_INDEX
from agentft.tools.user import specs, user_specs

if TYPE_CHECKING:
    from streaming import MDSWriter
    from transformers import PreTrainedTokenizerBase

COLUMNS: dict[str, str] = {
    "session_id": "str",
    "group": "int",
    "input_ids": "ndarray:int32",
    "loss_mask": "ndarray:uint8",
    "position_ids": "ndarray:int32",
    "anchors": "json",
    "record": "str",
}
SIZE_LIMIT_BYTES = 32 << 20
COMPRESSION = "zstd:7"
HASHES = ("sha1", "xxh64")
REJECTED_NAME = "rejected.jsonl"


@dataclass(frozen=True, kw_only=True)
class ShardReport:
    """What was written: the folder, its meta.json, and the sessions that could not be used, with the reason."""

    folder: Path
    meta: ShardMeta
    rejected: tuple[tuple[str, str], ...]
    unreadable: int
    size_bytes: int


def write_shards(
    sessions: Sequence[str | Path],
    output: str | Path,
    *,
    text: TextConfig,
    positions: FeedbackPositionsConfig,
    tokenizer: str = "train",
    vocab_size: int = 4096,
    holdout: Sequence[str] = (),
    val_share: float = 0.0,
    progress: bool = False,
) -> ShardReport:
    """Render the sessions of these files and write ``output/{train,val,test}``, ``tokenizer/`` and ``meta.json``.

    Args:
        sessions: Files of ETAI records (.jsonl, .gz, .zst); with a chat template also of chats.
        output: Folder to write; earlier shards there are replaced at the end, anything else is refused.
        text: How a session becomes tokens.
        positions: Positions of result tokens.
        tokenizer: A folder or hub name, or ``train``: a small BPE learnt from the training split alone.
            A chat template of the model's own comes with its tokenizer.
        vocab_size: Size of a trained tokenizer.
        holdout: Repositories that go to the test split whole.
        val_share: With a holdout, the share of the other sessions that goes to val.
        progress: Show a progress bar on standard error.

    Raises:
        DataError: No usable session, an unknown holdout, a full disk, or an output folder that is no shard folder.
    """
    if not 0 <= val_share < 1:
        raise DataError("no share of the sessions", where="--val-share", got=val_share, expected="from 0 to below 1")
    with shard_folder(output) as partial:
        buckets = Buckets(partial / "buckets", record_text, read_record)
        read = etai_io.read if text.template == "etai" else read_records
        unreadable, rejected = fill(buckets, sessions, holdout, val_share, read)
        made_by = _tokenizer(tokenizer, vocab_size, buckets, text)
        save_tokenizer(made_by, partial / TOKENIZER_NAME)
        renderer = renderer_of(made_by, text, positions)
        splits, dropped = _write_splits(partial, buckets, renderer, rejected, progress)
        meta = _meta(text, positions, made_by, holdout, splits, dropped, len(rejected))
        shutil.rmtree(buckets.folder)
        size = write_side_files(partial, meta, rejected)
    target = Path(os.path.realpath(output))
    return ShardReport(folder=target, meta=meta, rejected=tuple(rejected), unreadable=unreadable, size_bytes=size)


def renderer_of(
    tokenizer: PreTrainedTokenizerBase, text: TextConfig, positions: FeedbackPositionsConfig
) -> Renderer | ChatRenderer:
    """Return what renders records with ``text.template`` and the tools of this process."""
    if text.template == "etai":
        return Renderer(Vocab.of(tokenizer), text, positions, specs())
    return ChatRenderer(tokenizer, text, positions, specs())


def template_version(text: TextConfig) -> int:
    """Return the version of the code that renders ``text.template``."""
    return TEMPLATE_VERSION if text.template == "etai" else CHAT_TEMPLATE_VERSION


@contextlib.contextmanager
def shard_folder(output: str | Path) -> Iterator[Path]:
    """Give a folder to write that takes the place of ``output`` when the block ends well, and else is removed.

    Raises:
        DataError: A full disk, or an output folder that holds something else than shards.
    """
    target = Path(os.path.realpath(output))
    _refuse_foreign(target)
    _remove_partials(target)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        with disk_errors(partial / META_NAME):
            partial.mkdir(parents=True)
            yield partial
            _publish(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_splits(
    partial: Path,
    buckets: Buckets[Record],
    renderer: Renderer | ChatRenderer,
    rejected: list[tuple[str, str]],
    progress: bool,
) -> tuple[dict[Split, SplitMeta], Counter[str]]:
    """Write every split that has sessions; append what cannot be rendered to ``rejected``."""
    splits: dict[Split, SplitMeta] = {}
    dropped: Counter[str] = Counter()
    with track("render and write", buckets.counts.total(), enabled=progress) as advance:
        for split in SPLITS:
            if split in buckets.splits():
                written = _write_split(partial / split, buckets, split, renderer, dropped, rejected, advance)
                if written is not None:
                    splits[split] = written
    if not splits:
        raise DataError("no session could be rendered", got=rejected[0][1] if rejected else None)
    return splits, dropped


def _meta(
    text: TextConfig,
    positions: FeedbackPositionsConfig,
    tokenizer: PreTrainedTokenizerBase,
    holdout: Sequence[str],
    splits: dict[Split, SplitMeta],
    dropped: Counter[str],
    rejected: int,
) -> ShardMeta:
    return ShardMeta(
        schema_version=SCHEMA_VERSION,
        template=text.template,
        template_version=template_version(text),
        chat_template_sha256=None if text.template == "etai" else template_fingerprint(tokenizer),
        text=asdict(text),
        positions=asdict(positions),
        tokenizer_sha256=tokenizer_fingerprint(tokenizer),
        vocab_size=len(tokenizer),
        tools=list(TOOL_INDEX),
        user_tools=user_specs(),
        groups=GROUPS,
        holdout=sorted(holdout),
        splits=splits,
        dropped_result_tokens=dropped["result_tokens"],
        dropped_steps=dropped["steps"],
        dropped_instruction_tokens=dropped["instruction_tokens"],
        rejected=rejected,
    )


def write_side_files(partial: Path, meta: ShardMeta, rejected: Sequence[tuple[str, str]]) -> int:
    """Write ``meta.json`` and, where something could not be used, ``rejected.jsonl``; return the folder's bytes."""
    if rejected:
        lines = (json.dumps({"session_id": name, "reason": reason}) + "\n" for name, reason in rejected)
        (partial / REJECTED_NAME).write_text("".join(lines))
    (partial / META_NAME).write_text(meta.model_dump_json(indent=2) + "\n")
    return sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())


def _tokenizer(name: str, vocab_size: int, buckets: Buckets[Record], text: TextConfig) -> PreTrainedTokenizerBase:
    if name == "train" and text.template == "chat":
        hint = "agentft shards write … --tokenizer MODEL, or set text.template to chatml or functioncall"
        raise ConfigError("a trained tokenizer has no chat template", where="--tokenizer", got=name, hint=hint)
    if name != "train":
        tokenizer = load_tokenizer(name)
    else:
        split: Split = next(split for split in SPLITS if split in buckets.splits())
        tokenizer = train_tokenizer(_texts(buckets.split(split), text), vocab_size)
    if text.template == "etai":
        add_special_tokens(tokenizer)
    else:
        prepare(tokenizer, text.template)
    return tokenizer


def _texts(records: Iterator[Record], text: TextConfig) -> Iterator[str]:
    if text.template != "etai":
        return record_texts(records)
    return session_texts((record for record in records if isinstance(record, Session)), text)


@dataclass
class _Counts:
    sessions: int = 0
    steps: list[int] = field(default_factory=list)  # of each session
    complexity: list[str] = field(default_factory=list)  # letter of each session
    trained: int = 0
    context: int = 0
    longest: int = 0
    repositories: Counter[str] = field(default_factory=Counter)

    def add(self, session: Record, rendered: Rendered) -> None:
        trained = int(rendered.loss_mask.sum())
        self.sessions += 1
        self.steps.append(len(rendered.steps))
        self.complexity.append(COMPLEXITY_LETTERS[session.complexity])
        self.trained += trained
        self.context += len(rendered.input_ids) - trained
        self.longest = max(self.longest, len(rendered.input_ids))
        self.repositories[session.repository or ""] += 1


def _write_split(
    folder: Path,
    buckets: Buckets[Record],
    split: Split,
    renderer: Renderer | ChatRenderer,
    dropped: Counter[str],
    rejected: list[tuple[str, str]],
    advance: Any,
) -> SplitMeta | None:
    """Render and write one split; None when nothing of it could be rendered."""
    counts = _Counts()
    with mds_writer(folder) as writer:
        for record in buckets.split(split):
            try:
                parts = list(_parts(renderer, record))
            except AgentFTError as error:
                rejected.append((record.session_id, str(error)))
                parts = []
            for part, rendered in parts:
                writer.write(sample_of(part, rendered))
                counts.add(part, rendered)
                dropped.update(asdict(rendered.dropped))
            advance()
    if not counts.sessions:
        shutil.rmtree(folder)
        return None
    index = (folder / INDEX_NAME).read_bytes()
    return SplitMeta(
        sessions=counts.sessions,
        steps=sum(counts.steps),
        trained_tokens=counts.trained,
        context_tokens=counts.context,
        longest_tokens=counts.longest,
        shards=len(json.loads(index)["shards"]),
        index_sha256=hashlib.sha256(index).hexdigest(),
        repositories=dict(sorted(counts.repositories.items())),
        session_steps=" ".join(map(str, counts.steps)),
        session_complexity="".join(counts.complexity),
    )


def _parts(renderer: Renderer | ChatRenderer, record: Record) -> Iterator[tuple[Record, Rendered]]:
    if isinstance(renderer, ChatRenderer):
        yield from renderer.parts(record)
    else:
        assert isinstance(record, Session), "etai_io reads nothing else"
        yield record, renderer.render(record)


@contextlib.contextmanager
def mds_writer(folder: Path) -> Iterator[MDSWriter]:
    """Give a writer of ``COLUMNS``; a block that fails leaves no index."""
    from streaming import MDSWriter

    writer = MDSWriter(
        columns=COLUMNS, out=str(folder), compression=COMPRESSION, hashes=list(HASHES), size_limit=SIZE_LIMIT_BYTES
    )
    try:
        yield writer
    except BaseException:
        writer.cancel_future_jobs()  # no index: what is there is not a split
        raise
    writer.finish()


def sample_of(session: Record, rendered: Rendered) -> dict[str, Any]:
    """Return the row of a record: the columns of ``COLUMNS``, with the exact types that MDS insists on.

    A conversation has no targets for the heads: its anchors are empty.

    Raises:
        DataError: The record renders to nothing (MDS cannot hold an empty array).
    """
    if not len(rendered.input_ids):
        raise DataError("the session renders to no tokens", where=session.session_id)
    steps = [asdict(step) for step in rendered.steps]
    for step in steps:
        step["outcome"] = None if math.isnan(step["outcome"]) else float(step["outcome"])
    known = None if isinstance(session, Conversation) else session
    viewport, target = (known.ide_context.viewport, known.cursor_target) if known else (None, None)
    anchors = {
        "intent_at": int(rendered.intent_at),
        "intents": known.intents if known else None,
        "cursor_at": int(rendered.cursor_at),
        "cursor_target": target.model_dump() if target else None,
        "viewport": viewport.model_dump() if viewport else None,
        "steps": steps,
    }
    return {
        "session_id": session.session_id.encode("utf-8", "backslashreplace").decode(),
        "group": int(group_of(session.session_id)),
        "input_ids": np.asarray(rendered.input_ids, dtype=np.int32),
        "loss_mask": np.asarray(rendered.loss_mask, dtype=np.uint8),
        "position_ids": np.asarray(rendered.position_ids, dtype=np.int32),
        "anchors": anchors,
        "record": record_text(session),
    }


def _refuse_foreign(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise DataError("the output is a file", where=str(target), expected="a folder to write")
    if target.is_dir() and any(target.iterdir()) and not (target / META_NAME).exists():
        raise DataError(
            "the output folder holds something else",
            where=str(target),
            expected="a new or empty folder, or earlier shards",
        )


def _remove_partials(target: Path) -> None:
    """Remove what killed writers of this folder left behind."""
    for path in target.parent.glob(f".{target.name}.partial-*"):
        pid = path.name.rpartition("-")[2]
        if not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _publish(partial: Path, target: Path) -> None:
    """Put the finished folder in place; earlier shards go only after it is there."""
    old = partial.with_name(f"{partial.name}.old")
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)
