"""Special tokens and the tokenizer (floor 2): one id per mark of structure, content that can never forge one.

``train_tokenizer`` learns a small byte-level BPE from the data; ``add_special_tokens`` extends the tokenizer of an
existing model. ``Vocab.of(tokenizer)`` is what renderer and parser work with:

    tokenizer = train_tokenizer(session_texts(sessions), 4096)
    save_tokenizer(tokenizer, "shards/tokenizer")
    vocab = Vocab.of(load_tokenizer("shards/tokenizer"))
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentft.errors import ConfigError, ModelError, boundary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

FILE_HANDLES = 16
LINE_HANDLES = 96
FREE_RESERVED = 16

STRUCTURE_TOKENS: tuple[str, ...] = (
    "<|pad|>",
    "<|eot|>",
    "<|context|>",
    "<|file|>",
    "<|cursor|>",
    "<|instruction|>",
    "<|trace_start|>",
    "<|trace_end|>",
    "<|step|>",
    "<|tool_start|>",
    "<|args|>",
    "<|arg|>",
    "<|val|>",
    "<|json|>",
    "<|tool_end|>",
    "<|result|>",
    "<|result_end|>",
    "<|output|>",
    "<|file_tree|>",
    "<|diff_hunk|>",
)
"""Marks of structure; each is one field of ``Vocab`` (``<|tool_start|>`` → ``tool_start``)."""

RESERVED_TOKENS: tuple[str, ...] = (
    *(f"<F{i}>" for i in range(FILE_HANDLES)),
    *(f"<L{i:02d}>" for i in range(LINE_HANDLES)),
    *(f"<|reserved_{i}|>" for i in range(FILE_HANDLES + LINE_HANDLES, FILE_HANDLES + LINE_HANDLES + FREE_RESERVED)),
)
"""The block of 128 reserved ids: file handles, line handles, free ones."""

SPECIAL_TOKENS: tuple[str, ...] = STRUCTURE_TOKENS + RESERVED_TOKENS

# A line break keeps its indentation (one token for "\n        "), words keep their underscores and one leading space,
# every digit stands alone.
_PRE_TOKEN = r"(?:\r?\n)+[ \t]*|\A[ \t]+| ?[\p{L}_][\p{L}\p{M}_]*| ?\p{N}| ?[^\s\p{L}\p{N}_]+|[^\S\r\n]+(?!\S)|\s"
_CACHE_ENTRIES = 65536
_CACHED_CHARACTERS = 400


class Codec(Protocol):
    """Turns content into ids and back; never sees or gives a special id."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of ``text`` as plain content."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of content ids."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocab:
    """Ids of every special token, and a codec for everything else.

    ``files``, ``lines`` and ``free`` are the reserved block; ``special`` holds every special id.
    """

    pad: int
    eot: int
    context: int
    file: int
    cursor: int
    instruction: int
    trace_start: int
    trace_end: int
    step: int
    tool_start: int
    args: int
    arg: int
    val: int
    json: int
    tool_end: int
    result: int
    result_end: int
    output: int
    file_tree: int
    diff_hunk: int
    files: tuple[int, ...]
    lines: tuple[int, ...]
    free: tuple[int, ...]
    size: int
    codec: Codec
    special: dict[int, str] = field(init=False)

    def __post_init__(self) -> None:
        named = {getattr(self, token[2:-2]): token for token in STRUCTURE_TOKENS}
        reserved = dict(zip(self.files + self.lines + self.free, RESERVED_TOKENS, strict=True))
        object.__setattr__(self, "special", named | reserved)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Vocab:
        """Return the vocabulary of a fast tokenizer that has our special tokens.

        Raises:
            ConfigError: the tokenizer is slow, lacks a special token, or does not give text back byte for byte.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                "tokenizer has no fast form",
                got=type(tokenizer).__name__,
                expected="a tokenizer with tokenizer.json",
            )
        known = tokenizer.get_vocab()
        missing = [token for token in SPECIAL_TOKENS if token not in known]
        if missing:
            raise ConfigError(
                f"tokenizer lacks {len(missing)} special tokens",
                got=missing[:5],
                hint="call agentft.text.vocab.add_special_tokens on it and save it again",
            )
        return cls.from_ids({token: known[token] for token in SPECIAL_TOKENS}, len(tokenizer), _FastCodec(tokenizer))

    @classmethod
    def from_ids(cls, ids: dict[str, int], size: int, codec: Codec) -> Vocab:
        """Return a vocabulary with these ids of ``SPECIAL_TOKENS``."""
        reserved = [ids[token] for token in RESERVED_TOKENS]
        names: dict[str, Any] = {token[2:-2]: ids[token] for token in STRUCTURE_TOKENS}
        return cls(
            **names,
            files=tuple(reserved[:FILE_HANDLES]),
            lines=tuple(reserved[FILE_HANDLES : FILE_HANDLES + LINE_HANDLES]),
            free=tuple(reserved[FILE_HANDLES + LINE_HANDLES :]),
            size=size,
            codec=codec,
        )

    @property
    def end_of_turn(self) -> tuple[int, int]:
        """The ids at which the agent hands over: after a call, and at the very end."""
        return self.tool_end, self.eot

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of content; a special token spelled out in it stays text. Lone surrogates become U+FFFD."""
        return self.codec.encode(text) if text else ()

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the half-open character span of each id of ``encode(text)``; a character's ids may share its span."""
        assert isinstance(self.codec, _FastCodec)
        return self.codec.spans(text) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of content ids; special ids are written as their names."""
        pieces: list[str] = []
        start = 0
        for at, token in enumerate(ids):
            if token in self.special:
                pieces += [self.codec.decode(ids[start:at]), self.special[token]]
                start = at + 1
        return "".join([*pieces, self.codec.decode(ids[start:])])


class _FastCodec:
    """A private copy of the tokenizer's backend that treats special tokens in text as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from tokenizers import Tokenizer

        self._json = tokenizer.backend_tokenizer.to_str()
        self._backend = Tokenizer.from_str(self._json)
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self._cached = lru_cache(maxsize=_CACHE_ENTRIES)(self._encode)
        probe = '  if a[0] == "x":\n\t    b\r\n\n é = "<|step|>" '
        if self.decode(self.encode(probe)) != probe:
            raise ConfigError(
                "tokenizer does not give text back byte for byte",
                got=self.decode(self.encode(probe)),
                expected=probe,
                hint="use a tokenizer with byte-level BPE",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _codec_from_json, (self._json,)

    def encode(self, text: str) -> tuple[int, ...]:
        return self._cached(text) if len(text) <= _CACHED_CHARACTERS else self._encode(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        try:
            return tuple(self._backend.encode(text, add_special_tokens=False).ids)
        except TypeError:  # a lone surrogate has no bytes
            clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return tuple(self._backend.encode(clean, add_special_tokens=False).ids)

    def spans(self, text: str) -> list[tuple[int, int]]:
        return list(self._backend.encode(text, add_special_tokens=False).offsets)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=False)) if len(ids) else ""


def _codec_from_json(text: str) -> _FastCodec:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return _FastCodec(PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text)))


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE of at most ``vocab_size`` ids, special tokens included. Same texts, same tokenizer.

    Raises:
        ConfigError: ``vocab_size`` has no room for 256 bytes and the special tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    least = 256 + len(SPECIAL_TOKENS)
    if vocab_size < least:
        raise ConfigError("vocabulary is too small", where="vocab_size", got=vocab_size, expected=f"at least {least}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRE_TOKEN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    clean = (text.encode("utf-8", "replace").decode("utf-8") for text in texts)
    backend.train_from_iterator(clean, trainer)
    return _wrap(backend)


def _wrap(backend: Any) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|eot|>",
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in ("<|pad|>", "<|eot|>")],
        clean_up_tokenization_spaces=False,
    )


def add_special_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Add the special tokens that ``tokenizer`` lacks; return how many. A pad token is set only if it has none."""
    kept = list(tokenizer.additional_special_tokens)
    wanted = kept + [token for token in SPECIAL_TOKENS if token not in kept]
    added = tokenizer.add_special_tokens({"additional_special_tokens": wanted})
    if tokenizer.pad_token is None:
        tokenizer.pad_token = "<|pad|>"
    return added


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a sha256 that is equal exactly when two tokenizers give the same ids (it survives save and load)."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    added = sorted((t["id"], t["content"], t["special"]) for t in state["added_tokens"])
    parts = [state["normalizer"], state["pre_tokenizer"], state["model"], added]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write the tokenizer into ``folder`` in Hugging Face form."""
    tokenizer.save_pretrained(str(folder))


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerFast:
    """Return the fast tokenizer in a folder (or of a hub name); special tokens are not added.

    Raises:
        ModelError: nothing there that can be loaded.
    """
    from transformers import AutoTokenizer

    hint = "give a folder with tokenizer.json, such as SHARDS/tokenizer"
    with boundary(f"cannot load a tokenizer from {source}", error=ModelError, hint=hint):
        where = str(Path(source).expanduser()) if str(source).startswith("~") else str(source)
        return AutoTokenizer.from_pretrained(where, use_fast=True, trust_remote_code=False)
