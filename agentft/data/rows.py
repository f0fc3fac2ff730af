"""A row of a corpus (floor 3): a stretch of a document with where it comes from and where it is prose.

``Row`` is what objectives work on, read from a sample of corpus shards; ``record_of`` is what ``write_corpus`` puts
into the column ``record``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentft.data.lexing import Span
from agentft.data.marks import Marks
from agentft.errors import DataError
from agentft.text.vocab import Vocab


@dataclass(frozen=True, kw_only=True)
class Row:
    """``prose``: half-open characters of ``text`` in comments, docstrings or markup; ``ends``: so does the document."""

    text: str
    language: str | None
    prose: Sequence[Span]
    ends: bool

    @classmethod
    def of(cls, sample: Mapping[str, Any], vocab: Vocab, marks: Marks) -> Row:
        """Return the row of a sample of corpus shards.

        Raises:
            DataError: The sample is no row of a corpus.
        """
        record = sample["record"]
        record = json.loads(record) if isinstance(record, str) else record
        if "prose" not in record:
            raise DataError(
                "the sample is no row of a corpus",
                where=str(sample["session_id"]),
                expected="shards of `agentft shards write-corpus`",
            )
        ids = np.asarray(sample["input_ids"])[len(marks.opening) :].tolist()
        ends = bool(ids) and ids[-1] == marks.end
        text = vocab.decode(ids[:-1] if ends else ids)
        prose = [(int(start), int(end)) for start, end in record["prose"]]
        return cls(text=text, language=record["language"], prose=prose, ends=ends)

    def weights(self, start: int, spans: Sequence[Span], code_weight: float) -> list[float]:
        """Return the weight of each token: 1 where most of it is prose, ``code_weight`` elsewhere.

        Args:
            start: Where in the row the tokens' text begins.
            spans: Half-open characters of each token, counted from there.
            code_weight: Weight of a token of code.
        """
        before = np.zeros(len(self.text) + 1, np.int64)
        for first, last in self.prose:
            before[first + 1 : last + 1] = 1
        before = np.cumsum(before)
        at = np.asarray(spans, np.int64).reshape(-1, 2) + start
        share = before[at[:, 1]] - before[at[:, 0]]
        is_prose = 2 * share > at[:, 1] - at[:, 0]
        return [float(weight) for weight in np.where(is_prose, 1.0, code_weight)]


def record_of(
    row_id: str, *, repository: str, path: str, language: str | None, number: int, prose: Sequence[Span]
) -> str:
    """Return the column ``record`` of a row, as ASCII JSON; ``number`` counts the rows of a document from 0."""
    record = {
        "session_id": row_id,
        "repository": repository,
        "path": path,
        "language": language,
        "row": number,
        "prose": [list(span) for span in prose],
    }
    return json.dumps(record, ensure_ascii=True)
