"""Ways to damage source code that can be undone by who has learnt to read it (floor 3): rename, permute, comments.

Each takes a text, its language and a source of randomness, and returns the damaged text, or None where the text has
nothing of that kind to damage.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from agentft.data.lexing import comments, names

Corruption = Callable[[str, str | None, np.random.Generator], str | None]

_BETWEEN_BLOCKS = re.compile(r"(\r?\n(?:[ \t]*\r?\n)+)(?=\S)")
"""Blank lines before a line that is not indented."""


def rename(text: str, language: str | None, rng: np.random.Generator) -> str | None:
    """Give some of the text's own names (at least one) meaningless new ones, each the same at all of its places."""
    found = names(text, language)
    if not found:
        return None
    chosen = rng.permutation(sorted(found))[: int(rng.integers(1, len(found) + 1))]
    return replace_names(
        text, {str(name): new for name, new in zip(chosen, _fresh(text, len(chosen)), strict=True)}, found
    )


def replace_names(text: str, new_names: dict[str, str], places: dict[str, list[int]]) -> str:
    """Return the text with every name of ``new_names`` replaced at all of its ``places`` (first characters)."""
    cuts = sorted((start, name) for name in new_names for start in places[name])
    parts, at = [], 0
    for start, name in cuts:
        parts += [text[at:start], new_names[name]]
        at = start + len(name)
    return "".join([*parts, text[at:]])


def permute(text: str, language: str | None, rng: np.random.Generator) -> str | None:
    """Change the order of the blocks that blank lines separate at the outermost level; the blank lines stay."""
    parts = _BETWEEN_BLOCKS.split(text)
    blocks, gaps = parts[::2], parts[1::2]
    if len(set(blocks)) < 2:
        return None
    order = rng.permutation(len(blocks))
    while all(blocks[old] == blocks[new] for new, old in enumerate(order)):
        order = rng.permutation(len(blocks))
    shuffled = [blocks[old] for old in order]
    return "".join(part for pair in zip(shuffled, [*gaps, ""], strict=True) for part in pair)


def uncomment(text: str, language: str | None, rng: np.random.Generator) -> str | None:
    """Take all comments out, with the space before them and with lines that held nothing else."""
    parts, at = [], 0
    for start, end in comments(text, language):
        while start > at and text[start - 1] in " \t":
            start -= 1
        alone = (start == 0 or text[start - 1] == "\n") and (end == len(text) or text[end] in "\r\n")
        if alone and end < len(text):
            end = text.index("\n", end) + 1 if "\n" in text[end:] else len(text)
        parts.append(text[at:start])
        at = end
    return "".join([*parts, text[at:]]) if parts else None


CORRUPTIONS: dict[str, Corruption] = {"rename": rename, "permute": permute, "comments": uncomment}


def _fresh(text: str, count: int) -> list[str]:
    """Return ``count`` names that do not occur in the text."""
    taken = set(re.findall(r"\w+", text))
    free: list[str] = []
    number = 0
    while len(free) < count:
        if f"v{number}" not in taken:
            free.append(f"v{number}")
        number += 1
    return free
