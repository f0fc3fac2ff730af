"""Objectives of continued pretraining as changes of a row at load time (floor 3): causal, fim, masked, denoise.

    objectives = Objectives(config.objectives, vocab, Marks.of(tokenizer), max_tokens=8192, seed=17)
    sample = objectives(sample, epoch)           # what the row is trained as in this epoch
    objectives.restore(sample["input_ids"])      # the document's ids again, whatever the objective did

What comes out is a function of (seed, epoch, id of the row) alone: neither ranks, loader processes nor a resume change
it. A row is cut at *characters* and its parts are encoded one by one: a cursor stands anywhere, also inside of what the
tokenizer would make one token, and a model that was cut between tokens only has never seen such a prefix (Bavarian et
al. 2022, "Efficient Training of Language Models to Fill in the Middle", arXiv:2207.14255, section 4.3). The corpus
holds rows whose ids are what their text encodes to, so joining the parts and encoding them gives the row's ids back.

    causal    opening document [end]                                    all of the document and its end are trained
    fim  PSM  opening <prefix> p <suffix> s <middle> m end              p, s, m and the end
         SPM  opening <prefix> <suffix> s <middle> p m end              s, p, m and the end
    masked    opening document with <mask> for words <sep> w1 <mask> w2 <mask> … wn end      all behind <sep>
    denoise   opening damaged document <sep> document end                                    all behind <sep>

In fim all three parts are trained, as in the paper: that is what keeps the left-to-right ability whole. A decoder sees
only what is to its left, so a masked word is asked for *behind* the row, where both sides of it have been read; the
<mask> between two answers is trained, because it is the decision that a word ends. (Raffel et al. 2020, "T5", use
numbered sentinels; order does here.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentft.config.objectives import WEIGHTS, ObjectivesConfig
from agentft.data.corruptions import CORRUPTIONS
from agentft.data.lexing import Unit, units
from agentft.data.marks import Marks
from agentft.data.rows import Row
from agentft.text.vocab import Vocab

if TYPE_CHECKING:
    from collections.abc import Callable

Sample = dict[str, Any]

ATTEMPTS = 6
"""Draws of a cut or of a window before a row that will not fit is trained as it is."""

FEWEST_UNITS = 4
"""Words and runs of punctuation that a row must have for one of them to be at most a quarter."""


@dataclass(frozen=True)
class Piece:
    """A part of what is trained: one special id (``mark``), or text; trained text says where in the row it starts."""

    text: str = ""
    trained: bool = False
    start: int = 0
    mark: int = -1


class Objectives:
    """Draws an objective for each row and epoch and applies it.

    Args:
        config: Weights and settings.
        vocab: Of the tokenizer that wrote the corpus.
        marks: Special ids, see ``Marks.of``.
        max_tokens: No sample is longer.
        seed: Of every draw.
    """

    def __init__(self, config: ObjectivesConfig, vocab: Vocab, marks: Marks, *, max_tokens: int, seed: int) -> None:
        self.config, self.vocab, self.marks, self.max_tokens, self.seed = config, vocab, marks, max_tokens, seed
        weights = np.array([getattr(config, name) for name in WEIGHTS], np.float64)
        self._shares: npt.NDArray[np.float64] = weights / weights.sum()

    def __call__(self, sample: Mapping[str, Any], epoch: int, only: str | None = None) -> Sample:
        """Return the sample as it is trained in ``epoch``; ``only`` names the objective instead of a draw.

        Changed: ``input_ids``, ``loss_mask``, ``position_ids``; new: ``token_weight`` [T] float32 and ``objective``,
        the name of what was done (causal where a row has nothing to cut, mask or damage, or no room for it).
        """
        row = Row.of(sample, self.vocab, self.marks)
        rng = generator(self.seed, epoch, str(sample["session_id"]))
        name = str(rng.choice(WEIGHTS, p=self._shares)) if only is None else only
        change = {"fim": self._fim, "masked": self._masked, "denoise": self._denoise}
        changed = change[name](row, rng) if name in change else None
        if changed is None:
            name, changed = "causal", self._causal(row)
        return {**sample, **changed, "objective": name}

    def restore(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of the document (of the window of it that was used), without opening and end."""
        marks, vocab = self.marks, self.vocab
        plain = [int(i) for i in ids][len(marks.opening) :]
        if plain and plain[-1] == marks.end:
            plain.pop()
        if plain and plain[0] == marks.prefix:
            prefix, rest = _split(plain[1:], marks.suffix)
            suffix, middle = _split(rest, marks.middle)
            return list(vocab.encode("".join(map(vocab.decode, (prefix, middle, suffix)))))
        if marks.sep not in plain:
            return plain
        shown, asked = _split(plain, marks.sep)
        if marks.mask not in shown:
            return asked
        gaps, words = _split_all(shown, marks.mask), _split_all(asked, marks.mask)
        parts = [part for pair in zip(gaps, [*words, []], strict=True) for part in pair]
        return list(vocab.encode("".join(map(vocab.decode, parts))))

    def _causal(self, row: Row) -> Sample:
        pieces = [Piece(row.text, trained=True)]
        return self._assemble(row, [*pieces, Piece(mark=self.marks.end, trained=True)] if row.ends else pieces)

    def _fim(self, row: Row, rng: np.random.Generator) -> Sample | None:
        marks, text = self.marks, row.text
        prefix_mark, suffix_mark, middle_mark = (Piece(mark=m) for m in (marks.prefix, marks.suffix, marks.middle))
        end = Piece(mark=marks.end, trained=True)
        suffix_first = rng.random() < self.config.spm_share
        for _ in range(ATTEMPTS if len(text) else 0):
            left, right = sorted(rng.choice(len(text) + 1, size=2, replace=False).tolist())
            prefix = Piece(text[:left], trained=True)
            middle = Piece(text[left:right], trained=True, start=left)
            suffix = Piece(text[right:], trained=True, start=right)
            if suffix_first:
                pieces = [prefix_mark, suffix_mark, suffix, middle_mark, prefix, middle, end]
            else:
                pieces = [prefix_mark, prefix, suffix_mark, suffix, middle_mark, middle, end]
            sample = self._assemble(row, pieces)
            if len(sample["input_ids"]) <= self.max_tokens:
                return sample
        return None

    def _masked(self, row: Row, rng: np.random.Generator) -> Sample | None:
        def pieces(start: int, text: str) -> list[Piece] | None:
            chosen = self._choose(units(text, row.language), rng)
            return self._asked(start, text, chosen) if chosen else None

        return self._windowed(row, rng, pieces)

    def _choose(self, found: list[Unit], rng: np.random.Generator) -> list[Unit]:
        """Return what is masked, in order: a share between the configured ones, names before words before brackets."""
        if len(found) < FEWEST_UNITS:
            return []
        share = rng.uniform(self.config.mask_least, self.config.mask_most)
        most = int(self.config.mask_most * len(found))
        least = min(int(np.ceil(self.config.mask_least * len(found))), most)
        count = min(max(round(share * len(found)), least), most)
        luck = rng.random(len(found))
        order = sorted(range(len(found)), key=lambda i: (found[i].rank, luck[i]))
        return [found[i] for i in sorted(order[:count])]

    def _asked(self, start: int, text: str, chosen: list[Unit]) -> list[Piece]:
        """Return the text with <mask> for what was chosen, then the answers. A word takes one space with it."""
        shown: list[Piece] = []
        answers: list[Piece] = []
        at = 0
        for unit in chosen:
            space = unit.start - 1 > at and text[unit.start - 1] == " " and not text[unit.start - 2].isspace()
            first = unit.start - 1 if space else unit.start
            shown += [Piece(text[at:first]), Piece(mark=self.marks.mask)]
            answers += [
                Piece(text[first : unit.end], trained=True, start=start + first),
                Piece(mark=self.marks.mask, trained=True),
            ]
            at = unit.end
        answers[-1] = Piece(mark=self.marks.end, trained=True)
        return [*shown, Piece(text[at:]), Piece(mark=self.marks.sep), *answers]

    def _denoise(self, row: Row, rng: np.random.Generator) -> Sample | None:
        def pieces(start: int, text: str) -> list[Piece] | None:
            for name in rng.permutation(self.config.corruptions):
                damaged = CORRUPTIONS[str(name)](text, row.language, rng)
                if damaged is not None:
                    original = Piece(text, trained=True, start=start)
                    end = Piece(mark=self.marks.end, trained=True)
                    return [Piece(damaged), Piece(mark=self.marks.sep), original, end]
            return None

        return self._windowed(row, rng, pieces)

    def _windowed(
        self, row: Row, rng: np.random.Generator, pieces: Callable[[int, str], list[Piece] | None]
    ) -> Sample | None:
        """Return the sample of the whole row or, where that is too long, of a random window of whole lines."""
        start, text = 0, row.text
        for _ in range(ATTEMPTS):
            parts = pieces(start, text)
            if parts is None:
                return None
            sample = self._assemble(row, parts)
            length = len(sample["input_ids"])
            if length <= self.max_tokens:
                return sample
            start, text = window(row.text, int(len(text) * self.max_tokens / length * 0.95), rng)
        return None

    def _assemble(self, row: Row, pieces: Sequence[Piece]) -> Sample:
        ids: list[int] = list(self.marks.opening)
        trained = [False] * len(ids)
        weight = [1.0] * len(ids)
        for piece in pieces:
            part = [piece.mark] if piece.mark >= 0 else self.vocab.encode(piece.text)
            ids += part
            trained += [piece.trained] * len(part)
            if piece.mark < 0 and piece.trained and self.config.code_weight != 1 and part:
                weight += row.weights(piece.start, self.vocab.spans(piece.text), self.config.code_weight)
            else:
                weight += [1.0] * len(part)
        return {
            "input_ids": np.array(ids, np.int32),
            "loss_mask": np.array(trained, np.uint8),
            "position_ids": np.arange(len(ids), dtype=np.int32),
            "token_weight": np.array(weight, np.float32),
        }


def generator(seed: int, epoch: int, sample_id: str) -> np.random.Generator:
    """Return the source of randomness of one sample in one epoch: equal arguments, equal draws, on any machine."""
    text = f"{seed}/{epoch}/{sample_id}".encode("utf-8", "surrogatepass")
    return np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(text).digest()[:16], "big")))


def window(text: str, size: int, rng: np.random.Generator) -> tuple[int, str]:
    """Return (start, text) of a random stretch of about ``size`` characters: whole lines where some fit."""
    size = max(size, 1)
    starts = [0, *(i + 1 for i, character in enumerate(text) if character == "\n")]
    possible = [start for start in starts if start + size <= len(text)] or [0]
    start = int(rng.choice(possible))
    end = text.rfind("\n", start, start + size) + 1
    return start, text[start : end if end > start else start + size]


def _split(ids: list[int], mark: int) -> tuple[list[int], list[int]]:
    at = ids.index(mark)
    return ids[:at], ids[at + 1 :]


def _split_all(ids: list[int], mark: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == mark:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts
