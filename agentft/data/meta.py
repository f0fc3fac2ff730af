"""What a folder of shards is made of (floor 3): ``meta.json``, and the check that a run fits it.

``load_meta(folder or s3://…)`` reads it; ``check_fingerprint`` refuses shards that another tokenizer, template or
text configuration made, stating both sides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from agentft.config.schema import FeedbackPositionsConfig, TextConfig
from agentft.data.storage import open_store
from agentft.errors import DataError
from agentft.etai import Split

META_NAME, INDEX_NAME, TOKENIZER_NAME = "meta.json", "index.json", "tokenizer"
SPLITS: tuple[Split, ...] = ("train", "val", "test")
COMPLEXITY_LETTERS: dict[str | None, str] = {"single_function": "s", "multi_file": "m", None: "-"}
"""``complexity`` of a record → its letter in ``SplitMeta.session_complexity``."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SplitMeta(_Strict):
    """One split: how much is in it. ``trained_tokens`` are targets, ``context_tokens`` the rest.

    ``session_steps``: number of steps of each session, in the order of the shards, with spaces between (for
    ``data.curriculum``; empty in shards that were written before it was kept). ``session_complexity``: likewise, one of
    ``COMPLEXITY_LETTERS`` a session (for ``data.mix``).
    """

    sessions: int
    steps: int
    trained_tokens: int
    context_tokens: int
    longest_tokens: int
    shards: int
    index_sha256: str
    repositories: dict[str, int]
    session_steps: str = ""
    session_complexity: str = ""


class ShardMeta(_Strict):
    """The content of ``meta.json``: how sessions became tokens, and how many of them there are."""

    format: Literal["agentft-shards/1"] = "agentft-shards/1"
    kind: Literal["sessions", "corpus"] = "sessions"
    schema_version: str
    template: str
    template_version: int
    chat_template_sha256: str | None = None
    text: dict[str, Any]
    positions: dict[str, Any]
    tokenizer_sha256: str
    vocab_size: int
    tools: list[str]
    user_tools: dict[str, str] = {}
    groups: int
    holdout: list[str]
    splits: dict[Split, SplitMeta]
    dropped_result_tokens: int
    dropped_steps: int
    dropped_instruction_tokens: int
    rejected: int

    def sessions(self, split: Split) -> int:
        """Return the number of sessions in ``split`` (0 when the split is absent)."""
        return self.splits[split].sessions if split in self.splits else 0


def load_meta(source: str | Path) -> ShardMeta:
    """Read ``meta.json`` of a local folder or of an object store.

    Raises:
        DataError: It is missing, is no JSON, or has wrong fields.
        StorageError: The store refuses or cannot be reached.
    """
    raw = open_store(str(source)).read(META_NAME)
    if raw is None:
        raise DataError(
            "no shards here",
            where=f"{str(source).rstrip('/')}/{META_NAME}",
            expected="a folder or prefix that `agentft shards write` or `upload` has finished",
        )
    return parse_meta(raw, where=f"{str(source).rstrip('/')}/{META_NAME}")


def parse_meta(raw: bytes, *, where: str) -> ShardMeta:
    """Parse the bytes of a ``meta.json``; errors name ``where`` and the first wrong field."""
    try:
        return ShardMeta.model_validate(json.loads(raw))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise DataError(
            f"meta.json does not fit: {field}: {first['msg']}", where=where, hint="write the shards again"
        ) from error
    except ValueError as error:
        raise DataError("meta.json is damaged", where=where, got=str(error), hint="write the shards again") from error


def check_fingerprint(
    meta: ShardMeta,
    *,
    tokenizer_sha256: str,
    template_version: int,
    text: TextConfig,
    positions: FeedbackPositionsConfig,
    tools: Sequence[str],
    user_tools: Mapping[str, str] | None = None,
    chat_template_sha256: str | None = None,
    where: str = META_NAME,
) -> None:
    """Refuse shards that were made differently from what the run would make now.

    Raises:
        DataError: Lists every difference with both sides.
    """
    if meta.kind != "sessions":
        hint = "write sessions with `agentft shards write`, or set stage=pretrain"
        raise DataError("these shards hold no sessions", where=where, got=meta.kind, hint=hint)
    run = {
        "template": text.template,
        "template_version": template_version,
        "tokenizer_sha256": tokenizer_sha256,
        "tools": list(tools),
        "user_tools": dict(user_tools or {}),
        "chat_template_sha256": chat_template_sha256,
    }
    run |= {f"text.{key}": value for key, value in asdict(text).items()}
    run |= {f"model.feedback_positions.{key}": value for key, value in asdict(positions).items()}
    shards = {
        "template": meta.template,
        "template_version": meta.template_version,
        "tokenizer_sha256": meta.tokenizer_sha256,
        "tools": meta.tools,
        "user_tools": meta.user_tools,
        "chat_template_sha256": meta.chat_template_sha256,
    }
    shards |= {f"text.{key}": value for key, value in (asdict(TextConfig()) | meta.text).items()}
    shards |= {f"model.feedback_positions.{key}": value for key, value in meta.positions.items()}
    ignored = {"model.feedback_positions.rotary_base"}  # changes the model, not the tokens
    if not (positions.enabled or meta.positions["enabled"]):
        ignored.add("model.feedback_positions.start")
    differing = sorted(
        key for key in run.keys() | shards.keys() if run.get(key) != shards.get(key) and key not in ignored
    )
    if differing:
        raise DataError(
            "these shards were made by another tokenizer, template or text configuration",
            where=where,
            got="; ".join(f"{key} = {shards.get(key)!r} in the shards" for key in differing),
            expected="; ".join(f"{key} = {run.get(key)!r} in the run" for key in differing),
            hint="write the shards again with this run's configuration, or change the configuration back",
        )
