"""Rows of earlier stages: the same whatever the ranks, none left out, exact weights; what does not fit is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support_agent import POSITIONS, TEXT, sessions
from support_two_tasks import Listed, task, tiny_agent

from agentft.config.schema import DataConfig
from agentft.data.batch import collate, join, split
from agentft.data.corpus_shards import write_corpus
from agentft.data.meta import load_meta
from agentft.data.replay_buffer import (
    EarlierSource,
    check_replay,
    lm_sample,
    open_earlier,
    replayed,
    row_numbers,
    with_lm,
)
from agentft.data.shards import write_shards
from agentft.errors import DataError
from agentft.losses import target_counts
from agentft.tools import TOOL_INDEX

ROWS = Listed({"number": number} for number in range(11))


@given(total=st.integers(1, 40), count=st.integers(1, 12), seed=st.integers(0, 5), first=st.integers(0, 30))
def test_every_pass_takes_every_row_once(total: int, count: int, seed: int, first: int) -> None:
    passes = [number for batch in range(first + total) for number in row_numbers(total, count, batch, seed)]
    for start in range(0, len(passes) - total + 1, total):
        assert sorted(passes[start : start + total]) == list(range(total))


@given(batch=st.integers(0, 50), share=st.integers(1, 4))
def test_ranks_share_out_the_rows_that_one_process_would_take(batch: int, share: int) -> None:
    source = EarlierSource(rows=ROWS, count=4 * share, seed=3)
    alone = source.take(batch, 0, 1)
    for ranks in (2, 4):
        assert [row for rank in range(ranks) for row in source.take(batch, rank, ranks)] == alone


def test_passes_differ_in_their_order_and_seeds_too() -> None:
    orders = {tuple(row_numbers(11, 11, batch, seed)) for batch in range(3) for seed in range(3)}
    assert len(orders) == 9


def test_a_replayed_row_keeps_its_targets_and_is_no_session_of_the_stage() -> None:
    rows = task(0, 1)[:3]
    batch = join([collate(task(1, 1)[:2]), replayed(rows)])
    assert batch["session_id"] == ["1-0", "1-1", *(f"replay/{row['session_id']}" for row in rows)]
    assert torch.equal(batch["labels"][2:], collate(rows)["labels"])


def test_language_modelling_weighs_every_token_of_its_rows_but_the_first() -> None:
    stage = collate(task(1, 1)[:2])
    long = {"session_id": "a", "input_ids": np.arange(9), "position_ids": np.arange(9)}
    short = {"session_id": "b", "input_ids": np.arange(2), "position_ids": np.arange(2)}
    batch = with_lm(stage, collate([lm_sample(long, 6), lm_sample(short, 6)]))
    assert batch["lm_weight"].tolist() == [[0] * 6, [0] * 6, [0, 1, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0]]
    assert target_counts(batch) == target_counts(stage) | {"lm": 6.0}


def test_the_mixed_loss_is_exact_and_does_not_depend_on_the_cut() -> None:
    """total = 0.9 · stage + 0.1 · the mean over all next tokens of the rows."""
    model = tiny_agent(2)
    model.loss_weights = {"code": 0.9, "lm": 0.1}
    stage, rows = collate(task(1, 1)[:5]), collate([lm_sample(row, 8) for row in task(0, 1)[:3]])
    batch = with_lm(stage, rows)
    parts = model.loss(model(batch), batch)
    logits = model.backbone(input_ids=rows["input_ids"], position_ids=rows["position_ids"]).logits[:, :-1]
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows["input_ids"][:, 1:].flatten())
    alone = model.loss(model(stage), stage)
    torch.testing.assert_close(parts["lm"], plain)
    torch.testing.assert_close(parts["total"], 0.9 * alone["code"] + 0.1 * plain)
    for size in (1, 3, 5):
        cut = split(batch, size)
        found = sum(model.loss(model(part), part)["total"] * len(part["lengths"]) / 8 for part in cut)
        torch.testing.assert_close(found, parts["total"])


def test_rows_without_a_target_add_exactly_zero() -> None:
    model = tiny_agent(2)
    model.loss_weights = {"code": 0.9, "lm": 0.1}
    batch = collate(task(1, 1)[:2]) | {"lm_weight": torch.zeros(2, 3)}
    parts = model.loss(model(batch), batch)
    assert float(parts["lm"]) == 0.0
    parts["total"].backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.backbone.parameters())


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    (folder / "sessions.jsonl").write_text("\n".join(s.model_dump_json() for s in sessions(8)) + "\n")
    write_shards([folder / "sessions.jsonl"], folder / "shards", text=TEXT, positions=POSITIONS, vocab_size=520)
    return folder / "shards"


def opened(folder: Path, **changes: Any) -> Any:
    sha256 = json.loads((folder / "meta.json").read_text())["tokenizer_sha256"]
    wanted = {"tokenizer_sha256": sha256, "positions": POSITIONS} | changes
    return open_earlier(str(folder), DataConfig(shards="elsewhere", batch_size=4), **wanted)


def test_shards_of_an_earlier_stage_are_read_by_number(earlier: Path) -> None:
    rows, meta = opened(earlier)
    assert rows.num_samples == meta.sessions("train") > 0
    check_replay(str(earlier), meta, text=TEXT, tools=list(TOOL_INDEX))
    taken = EarlierSource(rows=rows, count=2, seed=1).take(3, 0, 1)
    assert len(collate(taken)["lengths"]) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer_sha256": "0" * 64}, "another tokenizer"),
        ({"positions": replace(POSITIONS, start=20000)}, "other positions"),
        ({"positions": replace(POSITIONS, enabled=False)}, "plain positions"),
    ],
)
def test_shards_that_do_not_fit_are_refused(earlier: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(earlier, **changes)


def test_a_corpus_of_pretraining_may_be_an_earlier_stage(earlier: Path, tmp_path: Path) -> None:
    lines = "".join(f"def f{n}(x):\n    return x + {n}\n\n\n" for n in range(40))
    (tmp_path / "corpus").mkdir()
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / "corpus" / name).write_text(lines)
    options = {"max_tokens": 128, "tokenizer": str(earlier / "tokenizer")}
    write_corpus([tmp_path / "corpus"], tmp_path / "shards", **options)  # type: ignore[arg-type]
    rows, meta = opened(tmp_path / "shards")
    check_replay("x", meta, text=TEXT, tools=list(TOOL_INDEX))
    batch = with_lm(collate(task(1, 1)[:1]), collate([lm_sample(rows[0], 64)]))
    assert target_counts(batch)["lm"] == len(rows[0]["input_ids"][:64]) - 1


def test_samples_that_are_too_long_or_have_other_tools_are_not_replayed(earlier: Path) -> None:
    meta = load_meta(earlier)
    with pytest.raises(DataError, match="longer"):
        check_replay("x", meta, text=replace(TEXT, max_tokens=8), tools=list(TOOL_INDEX))
    with pytest.raises(DataError, match="other tools"):
        check_replay("x", meta, text=TEXT, tools=["file_read"])
