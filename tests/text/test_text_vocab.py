"""The tokenizer: single ids for special tokens, content that cannot forge them, stable fingerprints."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import SOURCE, small_vocab, texts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentft.errors import ConfigError, ModelError
from agentft.text.vocab import (
    RESERVED_TOKENS,
    SPECIAL_TOKENS,
    Vocab,
    add_special_tokens,
    load_tokenizer,
    save_tokenizer,
    tokenizer_fingerprint,
    train_tokenizer,
)


def foreign(byte_level: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer as another model would bring it: its own end token, none of ours."""
    backend = Tokenizer(models.BPE(unk_token=None if byte_level else "<unk>"))
    backend.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False) if byte_level else pre_tokenizers.Metaspace()
    )
    backend.decoder = decoders.ByteLevel() if byte_level else decoders.Metaspace()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    names = ["<|end|>"] if byte_level else ["<unk>", "<|end|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([SOURCE] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


@given(st.one_of(texts(), st.text(st.characters(), max_size=60)))
@settings(max_examples=150, deadline=None)
def test_content_comes_back_exactly_and_never_as_special_ids(text: str) -> None:
    vocab = small_vocab()
    ids = vocab.encode(text)
    assert not set(ids) & set(vocab.special)
    assert vocab.decode(ids) == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_special_tokens_have_single_ids_within_the_size() -> None:
    tokenizer = train_tokenizer([SOURCE] * 3, 480)
    vocab = Vocab.of(tokenizer)
    assert len(RESERVED_TOKENS) == 128
    assert len(set(vocab.special)) == len(SPECIAL_TOKENS)
    assert len(tokenizer) <= 480
    for token in SPECIAL_TOKENS:
        assert tokenizer.encode(token, add_special_tokens=False) == [tokenizer.convert_tokens_to_ids(token)]
        assert len(vocab.encode(token)) > 1
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|eot|>")
    assert vocab.decode([vocab.step, *vocab.encode("a b"), vocab.eot]) == "<|step|>a b<|eot|>"


def test_training_is_deterministic_and_compresses_code() -> None:
    first, second = train_tokenizer([SOURCE] * 9, 600), train_tokenizer([SOURCE] * 9, 600)
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(second)
    assert tokenizer_fingerprint(first) != tokenizer_fingerprint(train_tokenizer([SOURCE] * 9, 420))
    pieces = [first.decode([i]) for i in Vocab.of(first).encode(SOURCE)]
    assert "\n        " in pieces
    assert [piece.strip() for piece in pieces if piece.strip().isdigit()][:2] == ["1", "0"]
    assert len(pieces) < len(SOURCE) / 2


def test_save_and_load_keep_ids_and_fingerprint(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([SOURCE] * 3, 480)
    save_tokenizer(tokenizer, tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(tokenizer)
    assert Vocab.of(loaded).special == Vocab.of(tokenizer).special
    assert (loaded.pad_token, loaded.eos_token) == ("<|pad|>", "<|eot|>")
    with pytest.raises(ModelError, match="cannot load a tokenizer"):
        load_tokenizer(tmp_path / "nothing")


def test_an_existing_tokenizer_is_extended_once(tmp_path: Path) -> None:
    tokenizer = foreign()
    before = len(tokenizer)
    assert add_special_tokens(tokenizer) == len(SPECIAL_TOKENS)
    assert add_special_tokens(tokenizer) == 0
    assert len(tokenizer) == before + len(SPECIAL_TOKENS)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|pad|>")
    vocab = Vocab.of(tokenizer)
    assert min(vocab.special) >= before
    assert vocab.decode(vocab.encode("<|end|> <|step|>")) == "<|end|> <|step|>"
    assert tokenizer.convert_tokens_to_ids("<|end|>") not in vocab.encode("<|end|>")
    save_tokenizer(tokenizer, tmp_path)
    assert tokenizer_fingerprint(load_tokenizer(tmp_path)) == tokenizer_fingerprint(tokenizer)


def test_a_pickled_vocabulary_still_guards_special_tokens() -> None:
    vocab = pickle.loads(pickle.dumps(small_vocab()))
    assert vocab.encode("x<|tool_end|>y") == small_vocab().encode("x<|tool_end|>y")
    assert vocab.special == small_vocab().special


def test_what_cannot_work_is_said() -> None:
    with pytest.raises(ConfigError, match="lacks 148 special tokens"):
        Vocab.of(foreign())
    with pytest.raises(ConfigError, match="too small"):
        train_tokenizer(["x"], 300)
    lossy = foreign(byte_level=False)
    add_special_tokens(lossy)
    with pytest.raises(ConfigError, match="byte for byte"):
        Vocab.of(lossy)
