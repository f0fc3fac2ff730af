"""Small source texts and a vocabulary for the tests of corpus and objectives."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis import strategies as st

from agentft.data.corpus import Document
from agentft.data.corpus_shards import CorpusRow, rows_of, sample_of_row
from agentft.data.marks import Marks
from agentft.text.vocab import Vocab, train_tokenizer

MODULE = '''"""Sums of several kinds."""

import math


# the weights are fixed
WEIGHTS = {"low": 1, "high": 3}


def total(values, kind="low"):
    """Return the weighted sum of values."""
    weight = WEIGHTS[kind]  # look it up once
    result = 0
    for value in values:
        result += value * weight
    return result


def longest(values):
    size = max(len(str(value)) for value in values)
    return math.floor(size / 2)


class Counter:
    def __init__(self, start):
        self.count = start

    def step(self, by=1):
        self.count = self.count + by
        return self.count
'''

SCRIPT = """// adds two numbers
function add(left, right) {
  const sum = left + right; // the sum
  return sum;
}

export default add;
"""

PROSE = "# Title\n\nSome words about sums, and how they are added.\n\nMore words: a list of them.\n"


@functools.cache
def tokenizer() -> Any:
    return train_tokenizer([MODULE, SCRIPT, PROSE] * 3, 500)


@functools.cache
def vocab() -> Vocab:
    return Vocab.of(tokenizer())


@functools.cache
def marks() -> Marks:
    return Marks.of(tokenizer(), vocab())


def document(text: str, language: str | None = "python", name: str = "repo:mod.py") -> Document:
    return Document(
        session_id=name, repository="repo", split_key="repo", path="mod.py", language=language, content=text
    )


def rows(text: str, language: str | None = "python", max_tokens: int = 512) -> list[CorpusRow]:
    return rows_of(document(text, language), vocab(), marks(), max_tokens)


def samples(text: str, language: str | None = "python", max_tokens: int = 512) -> list[dict[str, Any]]:
    return [sample_of_row(row) for row in rows(text, language, max_tokens)]


def sources() -> st.SearchStrategy[tuple[str, str | None]]:
    """Texts with their language: whole modules, pieces of them, and what nobody would write."""
    lines = st.lists(st.sampled_from([*MODULE.splitlines(), *SCRIPT.splitlines(), "é😀\t\r", "", "'''"]), max_size=30)
    languages = st.sampled_from(["python", "javascript", "markdown", "text", None])
    hostile = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60)
    text = st.one_of(
        st.sampled_from([MODULE, SCRIPT, PROSE]),
        lines.map("\n".join),
        st.tuples(lines.map("\n".join), hostile).map("".join),
    )
    return st.tuples(text.filter(bool), languages)
