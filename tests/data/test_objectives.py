"""Every objective gives its document back, trains exactly what it asks for, and draws the same whoever draws."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_corpus import MODULE, PROSE, SCRIPT, marks, samples, sources, vocab

from agentft.config.objectives import WEIGHTS, ObjectivesConfig
from agentft.data.batch import collate
from agentft.data.corruptions import permute, rename, uncomment
from agentft.data.lexing import PUNCTUATION, names, prose_spans, units
from agentft.data.objectives import Objectives, generator
from agentft.errors import DataError

ALL = ObjectivesConfig(causal=1, fim=1, masked=1, denoise=1)
FEW = settings(max_examples=60, deadline=None)


def objectives(config: ObjectivesConfig = ALL, *, max_tokens: int = 512, seed: int = 3) -> Objectives:
    return Objectives(config, vocab(), marks(), max_tokens=max_tokens, seed=seed)


def content(sample: dict[str, Any]) -> list[int]:
    ids = sample["input_ids"].tolist()[len(marks().opening) :]
    return ids[:-1] if ids[-1] == marks().end else ids


def trained(sample: dict[str, Any]) -> list[int]:
    return sample["input_ids"][sample["loss_mask"] == 1].tolist()


@given(sources(), st.sampled_from(WEIGHTS), st.integers(0, 5))
@FEW
def test_every_objective_gives_the_document_back_and_fits(
    source: tuple[str, str | None], name: str, epoch: int
) -> None:
    for sample in samples(*source, max_tokens=160):
        changed = objectives(max_tokens=160)(sample, epoch, only=name)
        assert len(changed["input_ids"]) <= 160
        assert len(changed["loss_mask"]) == len(changed["position_ids"]) == len(changed["token_weight"])
        restored = objectives(max_tokens=160).restore(changed["input_ids"])
        if changed["objective"] in ("causal", "fim"):
            assert restored == content(sample)
        else:  # of a long row a window of it
            window, whole = vocab().decode(restored), vocab().decode(content(sample))
            assert window in whole
            assert window == whole or len(whole) > 60
        assert collate([changed])["labels"].shape == (1, len(changed["input_ids"]))


def test_a_row_that_leaves_room_is_asked_for_whole() -> None:
    (sample,) = samples(MODULE, max_tokens=1024)
    for name in WEIGHTS:
        changed = objectives(max_tokens=1024)(sample, 0, only=name)
        assert changed["objective"] == name
        assert objectives().restore(changed["input_ids"]) == content(sample)


@given(sources(), st.integers(0, 20))
@FEW
def test_fim_has_one_of_two_orders_and_trains_all_but_the_marks(source: tuple[str, str | None], epoch: int) -> None:
    for sample in samples(*source):
        changed = objectives()(sample, epoch, only="fim")
        if changed["objective"] != "fim":
            assert len(vocab().decode(content(sample))) < 1 or len(changed["input_ids"]) > 500
            continue
        ids, mask, m = changed["input_ids"].tolist(), changed["loss_mask"].astype(bool), marks()
        assert ids[0] == m.prefix
        assert ids.index(m.suffix) < ids.index(m.middle)
        assert [ids.count(mark) for mark in (m.prefix, m.suffix, m.middle)] == [1, 1, 1]
        assert ids[-1] == m.end
        assert [i for i, on in zip(ids, mask, strict=True) if not on] == [m.prefix, m.suffix, m.middle]


def test_both_orders_are_drawn_in_their_share_and_cuts_lie_inside_of_tokens_too() -> None:
    (sample,) = samples(MODULE)
    drawn = [objectives()(sample, epoch, only="fim")["input_ids"].tolist() for epoch in range(200)]
    first = [ids[1] == marks().suffix for ids in drawn]
    assert 70 < sum(first) < 130
    psm = ObjectivesConfig(spm_share=0.0)
    assert not any(objectives(psm)(sample, e, only="fim")["input_ids"][1] == marks().suffix for e in range(20))
    whole = content(sample)
    assert sum(len(ids) - 4 > len(whole) for ids in drawn) > 20, "a cut inside of a token makes more of it"


@given(sources(), st.integers(0, 20))
@FEW
def test_masked_asks_for_whole_words_in_a_share_within_bounds(source: tuple[str, str | None], epoch: int) -> None:
    text, language = source
    for sample in samples(text, language, max_tokens=400):
        row = vocab().decode(content(sample))
        changed = objectives(max_tokens=1200)(sample, epoch, only="masked")
        found = units(row, language)
        if changed["objective"] != "masked":
            assert len(found) < 4
            continue
        ids = changed["input_ids"].tolist()
        at, m = ids.index(marks().sep), marks()
        asked = ids[at + 1 :].count(m.mask) + 1
        assert ids[:at].count(m.mask) == asked
        assert asked <= 0.25 * len(found)
        assert asked >= math.floor(0.15 * len(found))
        mask = changed["loss_mask"].astype(bool)
        assert not mask[: at + 1].any()
        assert mask[at + 1 :].all()
        answers = [vocab().decode(part) for part in _parts(ids[at + 1 : -1], m.mask)]
        known = {row[unit.start : unit.end] for unit in found}
        assert {answer.removeprefix(" ") for answer in answers} <= known


def _parts(ids: list[int], mark: int) -> list[list[int]]:
    cuts = [-1, *(i for i, token in enumerate(ids) if token == mark), len(ids)]
    return [ids[a + 1 : b] for a, b in itertools.pairwise(cuts)]


def test_masking_takes_names_before_brackets_and_never_a_part_of_a_word() -> None:
    (sample,) = samples(MODULE, max_tokens=1024)
    text = vocab().decode(content(sample))
    words = set(re.findall(r"\w+", text))
    ranks: set[int] = set()
    for epoch in range(20):
        ids = objectives(max_tokens=2048)(sample, epoch, only="masked")["input_ids"].tolist()
        asked = [vocab().decode(part).strip() for part in _parts(ids[ids.index(marks().sep) + 1 : -1], marks().mask)]
        assert set(asked) <= words, "in code that is a third names, brackets are never reached"
        ranks |= {unit.rank for unit in units(text, "python") if text[unit.start : unit.end] in asked}
    assert PUNCTUATION not in ranks
    symbols = samples("(((( ))))\n[[ ]] {{ }} :: ;; ,, ==\n+ - * / a\n", max_tokens=200)
    asked = objectives(max_tokens=400)(symbols[0], 0, only="masked")
    assert asked["objective"] == "masked", "where there are no names, brackets are asked for"


def test_the_share_of_masked_words_is_drawn_anew() -> None:
    (sample,) = samples(MODULE, max_tokens=1024)
    counts = {
        objectives(max_tokens=2048)(sample, epoch, only="masked")["input_ids"].tolist().count(marks().mask)
        for epoch in range(12)
    }
    assert len(counts) > 3


@given(sources(), st.integers(0, 20))
@FEW
def test_denoise_trains_the_original_and_nothing_else(source: tuple[str, str | None], epoch: int) -> None:
    for sample in samples(*source, max_tokens=400):
        changed = objectives(max_tokens=1200)(sample, epoch, only="denoise")
        if changed["objective"] == "denoise":
            assert trained(changed) == [*content(sample), marks().end]


@given(st.integers(0, 1000))
@FEW
def test_renaming_is_consistent_and_can_be_undone(seed: int) -> None:
    renamed = rename(MODULE, "python", generator(seed, 0, "x"))
    assert renamed is not None
    mapping = {}
    old_words, new_words = (re.findall(r"\w+|\W", text) for text in (MODULE, renamed))
    assert len(old_words) == len(new_words)
    for old, new in zip(old_words, new_words, strict=True):
        if old != new:
            assert mapping.setdefault(old, new) == new, "one name, one new name"
    assert len(set(mapping.values())) == len(mapping) >= 1
    assert set(mapping) <= set(names(MODULE, "python"))
    assert not set(mapping.values()) & set(old_words)
    compile(renamed, "renamed.py", "exec")
    back = {new: old for old, new in mapping.items()}
    assert "".join(back.get(word, word) for word in new_words) == MODULE
    assert not {"max", "len", "str", "math", "__init__"} & set(mapping)


def test_blocks_change_places_and_stay_whole() -> None:
    shuffled = permute(MODULE, "python", generator(1, 0, "x"))
    assert shuffled is not None
    assert shuffled != MODULE
    blocks = [re.split(r"\n\n+(?=\S)", text.strip("\n")) for text in (MODULE, shuffled)]
    assert sorted(blocks[0]) == sorted(blocks[1])
    assert permute("one = 1\n", "python", generator(1, 0, "x")) is None
    assert permute("a\n\na", "python", generator(1, 0, "x")) is None


@pytest.mark.parametrize(("text", "language"), [(MODULE, "python"), (SCRIPT, "javascript")])
def test_comments_go_and_nothing_else(text: str, language: str) -> None:
    bare = uncomment(text, language, generator(1, 0, "x"))
    assert bare is not None
    assert "look it up" not in bare
    assert "// " not in bare
    assert "the weights are fixed" not in bare
    assert [line for line in bare.splitlines() if line.strip()] == [
        kept for line in text.splitlines() if line.strip() and (kept := re.sub(r"[ \t]*(#|//) .*", "", line))
    ]
    assert uncomment("x = 1\n", "python", generator(1, 0, "x")) is None


def test_code_weighs_more_than_prose() -> None:
    (sample,) = samples(MODULE)
    changed = objectives()(sample, 0, only="causal")
    weights = dict.fromkeys((1.0, 1.2), "")
    for token, weight in zip(changed["input_ids"][:-1], changed["token_weight"][:-1], strict=True):
        weights[round(float(weight), 3)] += vocab().decode([int(token)])
    assert "Return the weighted sum of values" in weights[1.0]
    assert "look it up once" in weights[1.0]
    assert "result +=" in weights[1.2]
    assert "Return the weighted" not in weights[1.2]
    (markdown,) = samples(PROSE, "markdown")
    assert set(objectives()(markdown, 0, only="causal")["token_weight"].tolist()) == {1.0}
    even = ObjectivesConfig(code_weight=1.0)
    assert set(objectives(even)(sample, 0, only="fim")["token_weight"].tolist()) == {1.0}
    assert prose_spans(PROSE, "markdown") == [(0, len(PROSE))]


def test_weights_follow_their_tokens_through_a_cut() -> None:
    """Of the tokens that a cut leaves whole, each weighs what it weighs in the row as it is."""
    (sample,) = samples("# a long comment about nothing\nresult = compute(first, second)\n")
    plain = objectives()(sample, 0, only="causal")
    total = float(plain["token_weight"].sum())
    for epoch in range(30):
        changed = objectives()(sample, epoch, only="fim")
        prose = changed["token_weight"][(changed["loss_mask"] == 1) & (changed["token_weight"] == 1.0)]
        assert len(prose) >= (plain["token_weight"] == 1.0).sum() - 3
        assert float(changed["token_weight"].sum()) == pytest.approx(total + 4, abs=6)


@given(st.integers(0, 50), st.integers(0, 1000))
@FEW
def test_a_draw_depends_on_seed_epoch_and_id_alone(epoch: int, seed: int) -> None:
    (sample,) = samples(MODULE)
    one, two = objectives(seed=seed), objectives(seed=seed)
    for other in range(3):
        two(sample, epoch + other)  # what was drawn before changes nothing
    first, second = one(sample, epoch), two(sample, epoch)
    assert first["objective"] == second["objective"]
    for key in ("input_ids", "loss_mask", "position_ids", "token_weight"):
        assert np.array_equal(first[key], second[key])


def test_epochs_seeds_and_rows_differ() -> None:
    (sample,) = samples(MODULE)
    ids = [objectives()(sample, epoch, only="fim")["input_ids"].tolist() for epoch in range(4)]
    assert len({tuple(i) for i in ids}) == 4
    assert objectives(seed=4)(sample, 0, only="fim")["input_ids"].tolist() != ids[0]
    assert objectives()({**sample, "session_id": "other"}, 0, only="fim")["input_ids"].tolist() != ids[0]


def test_the_mix_is_delivered() -> None:
    (sample,) = samples(MODULE, max_tokens=1024)
    mixed = objectives(ObjectivesConfig(causal=0.5, fim=0.2, masked=0.2, denoise=0.1), max_tokens=1024)
    drawn = [mixed({**sample, "session_id": f"row {i}"}, 0)["objective"] for i in range(600)]
    shares = {name: drawn.count(name) / len(drawn) for name in WEIGHTS}
    assert shares == pytest.approx({"causal": 0.5, "fim": 0.2, "masked": 0.2, "denoise": 0.1}, abs=0.07)
    plain = objectives(ObjectivesConfig(causal=1.0, fim=0.0))
    assert {plain({**sample, "session_id": str(i)}, 0)["objective"] for i in range(20)} == {"causal"}


def test_causal_rows_are_the_stored_rows() -> None:
    for sample in samples(MODULE, max_tokens=100):
        changed = objectives()(sample, 7, only="causal")
        for key in ("input_ids", "loss_mask", "position_ids"):
            assert np.array_equal(changed[key], sample[key])


def test_a_session_is_no_row() -> None:
    (sample,) = samples(SCRIPT, "javascript")
    with pytest.raises(DataError, match="no row of a corpus"):
        objectives()({**sample, "record": '{"session_id": "s"}'}, 0)
