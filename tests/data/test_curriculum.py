"""The curriculum: short sessions first, every session once, and the same order for every reader of it."""

from __future__ import annotations

import json
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streaming.base.world import World

from agentft.config.algorithms import CurriculumConfig
from agentft.config.schema import DataConfig
from agentft.data.curriculum import open_count, share_out, widening_order
from agentft.data.loader import SessionLoader, build_loader, open_shards
from agentft.data.meta import META_NAME
from agentft.data.shards import ShardReport
from agentft.errors import DataError

STEPS = CurriculumConfig(by="steps", widths=[0.1, 0.5, 1.0])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.floats(0, 1), st.integers(0, 5))
def test_every_session_comes_once_and_none_before_it_is_open(steps: list[int], width: float, seed: int) -> None:
    ids = np.arange(len(steps))
    by_id = np.array(steps)
    order = widening_order(ids, by_id, width, np.random.default_rng(seed))
    assert sorted(order.tolist()) == ids.tolist()
    easiest = np.sort(by_id)
    for position, number in enumerate(order.tolist()):
        assert by_id[number] <= easiest[open_count(position, len(steps), width) - 1]
    if width == 0:
        assert by_id[order].tolist() == easiest.tolist()


@given(st.integers(1, 300), st.floats(0, 1))
def test_what_is_open_only_grows_and_ends_with_everything(total: int, width: float) -> None:
    counts = [open_count(position, total, width) for position in range(total)]
    assert counts[0] == min(total, max(1, int(np.ceil(width * total))))
    assert counts[-1] == total
    assert all(before <= after for before, after in pairwise(counts))


@given(st.integers(1, 7), st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]), st.integers(1, 3), st.integers(1, 3))
def test_global_batches_do_not_depend_on_who_reads_them(
    batches: int, shape: tuple[int, int], workers: int, size: int
) -> None:
    nodes, ranks = shape
    whole = size * nodes * ranks
    order = np.arange(batches * whole)
    work = share_out(order, World(nodes, ranks, workers, 0), size)
    rounds = work.shape[3]
    drawn = [work[:, :, number % workers, number // workers].flatten() for number in range(rounds * workers)]
    assert np.concatenate(drawn)[: len(order)].tolist() == order.tolist()
    assert all((rest == -1).all() for rest in drawn[batches:])


def _ids(loader: SessionLoader) -> list[list[str]]:
    return [list(batch["session_id"]) for batch in loader]


def _loader(folder: Path, curriculum: CurriculumConfig, **more: int) -> SessionLoader:
    data = DataConfig(shards=str(folder), batch_size=4, curriculum=curriculum, **more)
    loader = build_loader(data, "train", open_shards(data), shuffle=True, seed=17).dataloader
    assert isinstance(loader, SessionLoader)
    return loader


@pytest.fixture(scope="module")
def epochs(written: ShardReport) -> list[list[list[str]]]:
    """Three epochs of a loader with the curriculum, and the look ahead checked on the way."""
    loader, found = _loader(written.folder, STEPS), []
    ahead: list[str] = []
    for _ in range(3):
        found.append([])
        for batch in loader:
            assert ahead in ([], batch["session_id"])
            ahead = [sample["session_id"] for sample in loader.upcoming(1)[0].samples]
            found[-1].append(list(batch["session_id"]))
    return found


def test_epochs_begin_short_and_hold_every_session(written: ShardReport, epochs: list[list[list[str]]]) -> None:
    """The sessions of the fixture have three steps or four, about half of each."""
    plain = _loader(written.folder, CurriculumConfig())
    loader = _loader(written.folder, STEPS)
    rows = [loader.dataset[number] for number in range(loader.dataset.num_samples)]
    steps = {row["session_id"]: len(row["anchors"]["steps"]) for row in rows}
    means = [[float(np.mean([steps[name] for name in batch])) for batch in epoch] for epoch in epochs]
    assert set(steps.values()) == {3, 4}
    assert np.mean(means[0][:3]) < 3.2 < 3.7 < np.mean(means[0][-3:])
    assert np.mean(means[0][:3]) <= np.mean(means[1][:3]) + 1e-9
    for number, epoch in enumerate(epochs):
        shuffled = _ids(plain)
        assert sorted(chain(*epoch)) == sorted(chain(*shuffled))
        assert (epoch == shuffled) == (number == 2), "from width 1 on the order is Streaming's own"


@pytest.mark.parametrize("stop", [1, 5, 10])
def test_a_resumed_reader_goes_on_exactly(written: ShardReport, epochs: list[list[list[str]]], stop: int) -> None:
    loader = _loader(written.folder, STEPS)
    loader.dataset.load_state_dict(loader.dataset.state_dict(0, True) | {"epoch": 1, "sample_in_epoch": stop * 4})
    assert [s["session_id"] for s in loader.upcoming(1)[0].samples] == epochs[1][stop]
    assert _ids(loader) == epochs[1][stop:]
    assert _ids(loader) == epochs[2]


def test_loader_processes_keep_the_order(written: ShardReport, epochs: list[list[list[str]]]) -> None:
    loader = _loader(written.folder, STEPS, num_workers=2)
    assert _ids(loader) == epochs[0]
    assert _ids(loader) == epochs[1]


def test_shards_without_step_counts_are_refused(shards: Path) -> None:
    meta = json.loads((shards / META_NAME).read_text())
    for split in meta["splits"].values():
        del split["session_steps"]
    (shards / META_NAME).write_text(json.dumps(meta))
    with pytest.raises(DataError, match="do not say how many steps"):
        _loader(shards, STEPS)
    _loader(shards, CurriculumConfig())
