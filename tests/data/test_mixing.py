"""The mix of the YAML is in every global batch: counted over epochs, ranks, workers and resumes; or refused."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streaming.base.world import World
from support_sessions import make_sessions

from agentft import etai_io
from agentft.config.algorithms import CurriculumConfig
from agentft.config.load import InvalidConfigError, load
from agentft.config.mixing import MixConfig, MixPartsConfig, quotas
from agentft.config.schema import DataConfig, FeedbackPositionsConfig, TextConfig
from agentft.data.loader import SessionLoader, build_loader, open_shards
from agentft.data.mixing import Mix, turn
from agentft.data.shards import write_shards
from agentft.errors import DataError
from agentft.etai import Session

YAML = Path(__file__).resolve().parents[2] / "yamls" / "agent" / "tiny-glm.yaml"
SINGLE, MULTI, UNSAID = 30, 8, 2
MIX = MixConfig(parts=MixPartsConfig(single_function=3, multi_file=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 40 sessions: 30 in one function, 8 over several files, 2 that do not say."""
    kinds = ["single_function"] * SINGLE + ["multi_file"] * MULTI + [None] * UNSAID
    sessions = [
        session.model_copy(update={"complexity": kind, "repository": "one"})
        for session, kind in zip(make_sessions(len(kinds)), kinds, strict=True)
    ]
    place = tmp_path_factory.mktemp("mix")
    etai_io.write(place / "sessions.jsonl", sessions)
    report = write_shards(
        [place / "sessions.jsonl"],
        place / "shards",
        text=TextConfig(max_tokens=512),
        positions=FeedbackPositionsConfig(),
        vocab_size=600,
    )
    return report.folder


def _loader(folder: Path, **data: Any) -> SessionLoader:
    config = DataConfig(shards=str(folder), **{"batch_size": 8, "mix": MIX, **data})
    spec = build_loader(config, "train", open_shards(config), shuffle=True, seed=17)
    assert isinstance(spec.dataloader, SessionLoader)
    assert spec.num_samples == len(spec.dataloader) * config.batch_size
    return spec.dataloader


def _kinds(batch: dict[str, Any]) -> Counter[str | None]:
    return Counter(Session.model_validate_json(record).complexity for record in batch["record"])


def _draw(loader: SessionLoader, count: int) -> Iterator[dict[str, Any]]:
    while True:
        for batch in loader:
            yield batch
            count -= 1
            if not count:
                return


def test_every_batch_holds_the_mix_and_each_session_has_its_turn(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="agentft.data.mixing"):
        loader = _loader(folder)
    assert "2 of 40 sessions belong to no part of the mix" in caplog.text
    assert len(loader) == MULTI // 2, "an epoch ends with the part that is used up first"
    seen: Counter[str] = Counter()
    for _ in range(5):
        epoch: list[str] = []
        for batch in loader:
            assert _kinds(batch) == {"single_function": 6, "multi_file": 2}
            epoch += batch["session_id"]
        assert len(set(epoch)) == len(epoch) == 32, "nothing twice in an epoch"
        seen.update(epoch)
    assert len(seen) == SINGLE + MULTI
    assert set(seen.values()) == {4, 5}, "of 30 sessions, 24 an epoch: each four of five times; the scarce part always"


def test_the_order_depends_on_seed_and_epoch_only_and_upcoming_knows_it(folder: Path) -> None:
    plain = [batch["session_id"] for batch in _draw(_loader(folder), 12)]
    assert len({tuple(names) for names in plain}) == 12
    loader = _loader(folder)
    ahead = [[sample["session_id"] for sample in coming.samples] for coming in loader.upcoming(12)]
    assert ahead == plain
    for seen, batch in enumerate(_draw(loader, 9), 1):
        assert batch["session_id"] == plain[seen - 1]
        (coming,) = loader.upcoming(1)
        assert [sample["session_id"] for sample in coming.samples] == plain[seen]
    assert [batch["session_id"] for batch in _draw(_loader(folder, num_workers=2), 8)] == plain[:8]


def test_resume_in_mid_epoch_goes_on_exactly(folder: Path) -> None:
    plain = [batch["session_id"] for batch in _draw(_loader(folder), 10)]
    for stop in (1, 3, 6):
        loader = _loader(folder)
        for _ in _draw(loader, stop):
            state = loader.dataset.state_dict(0, True)
        drawn = stop % len(loader)
        state = loader.dataset.state_dict(drawn * 8, True)
        resumed = _loader(folder)
        resumed.dataset.load_state_dict(state)
        assert [batch["session_id"] for batch in _draw(resumed, 10 - stop)] == plain[stop:]


@pytest.mark.parametrize(("nodes", "ranks", "workers"), [(1, 1, 1), (1, 2, 1), (1, 4, 2), (2, 4, 1)])
@pytest.mark.parametrize("start", [0, 8, 24])
def test_any_number_of_ranks_gets_the_same_global_batches(
    folder: Path, nodes: int, ranks: int, workers: int, start: int
) -> None:
    dataset = _loader(folder).dataset
    assert dataset.mix is not None
    for epoch in range(3):
        order = dataset.mix.order(epoch, 17)[start:].reshape(-1, 8)
        dataset.batch_size = 8 // (nodes * ranks)
        work = dataset._work(World(nodes, ranks, workers, 0), epoch, start)
        rounds = work.transpose(3, 2, 0, 1, 4).reshape(-1, 8)
        assert [sorted(batch) for batch in rounds[: len(order)]] == [sorted(batch) for batch in order]
        assert (rounds[len(order) :] == -1).all()


def test_a_curriculum_orders_each_part_and_keeps_the_mix(folder: Path) -> None:
    loader = _loader(folder, curriculum=CurriculumConfig(by="steps", widths=[0.2, 1.0]))
    steps = []
    for batch in loader:
        assert _kinds(batch) == {"single_function": 6, "multi_file": 2}
        steps.append(np.mean([len(row) for row in batch["steps"]]))
    assert np.mean(steps[: len(steps) // 2]) < np.mean(steps[len(steps) // 2 :])
    for batch in loader:  # the second epoch is open to all
        assert _kinds(batch) == {"single_function": 6, "multi_file": 2}


def test_every_batch_holds_whole_traces(folder: Path) -> None:
    from agentft.data.meta import TOKENIZER_NAME
    from agentft.text.vocab import Vocab, load_tokenizer

    vocab = Vocab.of(load_tokenizer(folder / TOKENIZER_NAME))
    for batch in _loader(folder):
        for row, length in enumerate(batch["lengths"].tolist()):
            ids = batch["input_ids"][row, :length].tolist()
            assert [ids.count(mark) for mark in (vocab.trace_start, vocab.trace_end, vocab.eot)] == [1, 1, 1]
            assert ids.index(vocab.trace_start) < ids.index(vocab.trace_end) < length - 1
            assert ids[-1] == vocab.eot
            assert ids.count(vocab.tool_start) == ids.count(vocab.result) == len(batch["steps"][row]) >= 3


def test_a_part_that_is_too_small_is_refused_with_numbers(folder: Path) -> None:
    parts = MixPartsConfig(single_function=1, multi_file=1)
    with pytest.raises(DataError, match="too few sessions for this mix") as caught:
        _loader(folder, batch_size=24, mix=MixConfig(parts=parts))
    assert "8 multi_file" in str(caught.value)
    assert "at least 12 multi_file" in str(caught.value)
    alone = _loader(folder, batch_size=30, mix=MixConfig(parts=MixPartsConfig(single_function=1, multi_file=0)))
    assert len(alone) == 1


def test_shards_that_do_not_say_are_refused(folder: Path) -> None:
    config = DataConfig(shards=str(folder), batch_size=8, mix=MIX)
    meta = open_shards(config)
    old = meta.model_copy(
        update={"splits": {"train": meta.splits["train"].model_copy(update={"session_complexity": ""})}}
    )
    with pytest.raises(DataError, match="do not say how complex"):
        build_loader(config, "train", old, shuffle=True, seed=1)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.batch_size=6", "data.mix.by=complexity"], "a multiple of 4"),
        (["data.batch_size=8", "data.mix={parts: {single_function: 0, multi_file: 0}}"], "one of them is above 0"),
        (["data.batch_size=8", "data.mix={parts: {single_function: -1, multi_file: 5}}"], "0 or more"),
        (["data.mix={by: language}"], "complexity"),
        (["data.mix.by=complexity", "forgetting.replay.share=0.25", "forgetting.replay.shards=x"], "replayed rows"),
    ],
)
def test_a_mix_that_cannot_be_delivered_is_an_error_before_anything_starts(overrides: list[str], said: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        load(YAML, overrides)
    assert said in str(caught.value)


def test_a_mix_is_read_from_yaml() -> None:
    mix = load(YAML, ["data.mix={by: complexity, parts: {single_function: 3, multi_file: 1}}"]).data.mix
    assert mix == MIX
    assert quotas(MIX.parts, 8) == {"single_function": 6, "multi_file": 2}
    assert quotas(MIX.parts, 6) is None


COUNTS = st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 3))


@settings(deadline=None, max_examples=60)
@given(COUNTS, st.integers(0, 40), st.integers(0, 40), st.integers(0, 5), st.integers(0, 99))
def test_counts_of_any_mix(
    counts: tuple[int, int, int], more_first: int, more_second: int, epoch: int, seed: int
) -> None:
    first, second, times = counts
    shares = {name: share * times for name, share in (("a", first), ("b", second)) if share}
    size = {"a": shares["a"] + more_first, "b": shares.get("b", 0) + more_second}
    members = {"a": np.arange(size["a"]), "b": 1000 + np.arange(size["b"])}
    mix = Mix({name: members[name] for name in shares}, shares)
    batches = mix.order(epoch, seed).reshape(-1, sum(shares.values()))
    assert len(batches) == min(size[name] // share for name, share in shares.items()) > 0
    assert len(np.unique(batches)) == batches.size, "nothing twice"
    for batch in batches:
        assert ((batch < 1000).sum(), (batch >= 1000).sum()) == (shares["a"], shares.get("b", 0))
    assert (mix.order(epoch, seed) == batches.reshape(-1)).all()


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 9))
def test_turns_differ_by_one_at_most(count: int, more: int, seed: int) -> None:
    members = np.arange(count + more)
    seen: Counter[int] = Counter(dict.fromkeys(members.tolist(), 0))
    for epoch in range(7):
        taken = turn(members, count, epoch, seed=(seed, 0))
        assert len(set(taken.tolist())) == count
        seen.update(taken.tolist())
    assert max(seen.values()) - min(seen.values()) <= 1
