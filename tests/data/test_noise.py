"""Noise on input tokens: where it falls, how much, and that nothing but seed, epoch and sample decides it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentft.config.schema import DataConfig
from agentft.data.loader import SessionLoader, build_loader, open_shards
from agentft.data.meta import TOKENIZER_NAME
from agentft.data.noise import InputNoise
from agentft.data.shards import ShardReport
from agentft.losses import NO_TARGET, tokens_at
from agentft.text.vocab import Vocab, load_tokenizer


@pytest.fixture(scope="module")
def vocab(written: ShardReport) -> Vocab:
    return Vocab.of(load_tokenizer(written.folder / TOKENIZER_NAME))


def _loader(written: ShardReport, vocab: Vocab, share: float, seed: int = 17, batch_size: int = 8) -> SessionLoader:
    config = DataConfig(shards=str(written.folder), batch_size=batch_size)
    noise = InputNoise(vocab, share, seed) if share else None
    spec = build_loader(config, "train", open_shards(config), shuffle=True, seed=17, edit=noise)
    assert isinstance(spec.dataloader, SessionLoader)
    return spec.dataloader


def _rows(loader: SessionLoader, epochs: int = 1) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Return {session id: its tokens} of each epoch."""
    seen = []
    for _ in range(epochs):
        rows: dict[str, np.ndarray[Any, Any]] = {}
        for batch in loader:
            for row, name in enumerate(batch["session_id"]):
                rows[name] = batch["input_ids"][row, : batch["lengths"][row]].numpy().copy()
        seen.append(rows)
    return seen


def test_inputs_are_noisy_and_nothing_else(written: ShardReport, vocab: Vocab) -> None:
    clean, noisy = _loader(written, vocab, 0), _loader(written, vocab, 0.3)
    noise, hit, eligible, imitated = InputNoise(vocab, 0.3, 17), 0, 0, 0
    for plain, edited in zip(clean, noisy, strict=True):
        may = noise.eligible(plain)
        changed = plain["input_ids"] != edited["input_ids"]
        assert not (changed & ~may).any()
        for key in ("labels", "position_ids", "intent_at", "outcome_target"):
            assert torch.equal(plain[key], edited[key])
        hit, eligible = hit + int(changed.sum()), eligible + int(may.sum())
        imitated += int((changed & (plain["labels"] != NO_TARGET)).sum())
        for row, steps in enumerate(plain["steps"]):
            for step in steps:
                span = slice(step["call_start"], step["call_end"])
                if (plain["labels"][row, span] == NO_TARGET).all():
                    assert not may[row, span].any(), "calls that are not imitated stay as they were"
        at = (plain["labels"] != NO_TARGET).nonzero(as_tuple=True)
        assert torch.equal(tokens_at(edited, at), plain["input_ids"][at]), "what stood there is not lost"
    assert eligible > 1000
    assert imitated > 100
    assert 0.27 < hit / eligible < 0.33


def test_noise_depends_on_seed_epoch_and_sample_alone(written: ShardReport, vocab: Vocab) -> None:
    first, second = _rows(_loader(written, vocab, 0.3), 2)
    again = _rows(_loader(written, vocab, 0.3, batch_size=4), 2)
    for rows, other in zip((first, second), again, strict=True):
        both = rows.keys() & other.keys()
        assert len(both) > 30
        assert all(np.array_equal(rows[name], other[name]) for name in both), "however the batches are cut"
    both = first.keys() & second.keys()
    assert not any(np.array_equal(first[name], second[name]) for name in both), "new in every epoch"
    (other_seed,) = _rows(_loader(written, vocab, 0.3, seed=18))
    assert not any(np.array_equal(first[name], other_seed[name]) for name in first.keys() & other_seed.keys())


def test_a_resumed_epoch_has_the_same_noise(written: ShardReport, vocab: Vocab) -> None:
    plain = [batch["input_ids"] for batch in _loader(written, vocab, 0.3)]
    loader = _loader(written, vocab, 0.3)
    for seen, _ in enumerate(loader, 1):
        if seen == 2:
            break
    state = loader.dataset.state_dict(2 * 8, True)
    resumed = _loader(written, vocab, 0.3)
    resumed.dataset.load_state_dict(state)
    assert all(torch.equal(a, b["input_ids"]) for a, b in zip(plain[2:], resumed, strict=True))


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_only_plain_tokens_come_and_go(data: st.DataObject, vocab: Vocab) -> None:
    marks = [vocab.context, vocab.instruction, vocab.trace_start, vocab.result, vocab.result_end, *vocab.lines[:2]]
    token = st.sampled_from(marks) | st.integers(0, vocab.size - 1)
    rows = data.draw(st.lists(st.lists(token, min_size=1, max_size=40), min_size=1, max_size=4))
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    imitated = torch.tensor(data.draw(st.lists(st.booleans(), min_size=ids.numel(), max_size=ids.numel())))
    labels = torch.where(imitated.view(ids.shape), ids, NO_TARGET)
    batch = {"input_ids": ids.clone(), "labels": labels, "lengths": lengths}
    noise = InputNoise(vocab, data.draw(st.sampled_from([0.1, 1.0])), seed=3)
    noise(batch, epoch=1, numbers=np.arange(len(rows)))
    changed = batch["input_ids"] != ids
    special = torch.tensor([int(token) in vocab.special for token in ids.flatten()]).view(ids.shape)
    assert not (changed & special).any()
    assert not any(int(token) in vocab.special for token in batch["input_ids"][changed])
    assert not (changed & (torch.arange(ids.shape[1]) >= lengths[:, None])).any(), "padding stays"
    for row, length in enumerate(lengths.tolist()):
        shown = True
        for at in range(length):
            here = int(ids[row, at])
            if here == vocab.trace_start:
                shown = False
            assert not changed[row, at] or shown or vocab.result in ids[row, :at] or labels[row, at] != NO_TARGET
