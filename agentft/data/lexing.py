"""What is what in source code (floor 3): prose against code, words, names and comments, by Pygments' lexers.

``prose_spans(text, language)`` finds comments, docstrings and markup; ``units`` cuts a text into whole words and runs
of punctuation, names first; ``names`` and ``comments`` find what denoising changes. A piece out of the middle of a file
is lexed as well as it can be: nothing is ever refused, and offsets are characters of the text as given.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

PROSE_LANGUAGES = frozenset({"markdown", "restructuredtext", "text", "groff", "asciidoc", "org"})
"""Languages (first alias of the lexer) whose every token is prose."""

NAME, WORD, PUNCTUATION = 0, 1, 2
"""Ranks of a unit: names are masked before other words, and those before brackets and operators."""

Span = tuple[int, int]

_UNIT = re.compile(r"\w+|[^\w\s]+")
_DUNDER = re.compile(r"__\w+__")


@dataclass(frozen=True)
class Unit:
    """One word or run of punctuation: half-open characters of the text, and its rank."""

    start: int
    end: int
    rank: int


@functools.lru_cache(maxsize=4096)
def language_of_suffix(name: str) -> str | None:
    """Return the language of a file name, None where Pygments knows none."""
    from pygments.lexers import find_lexer_class_for_filename

    found = find_lexer_class_for_filename(name)
    return None if found is None else str(found.aliases[0] if found.aliases else found.name).lower()


def language_of(path: str) -> str | None:
    """Return the language that a path's name tells, None where it tells none."""
    name = PurePosixPath(path.replace("\\", "/")).name
    suffix = PurePosixPath(name).suffix
    return language_of_suffix(f"x{suffix}" if suffix else name)


@functools.lru_cache(maxsize=64)
def known_language(name: str) -> str | None:
    """Return the language as this module calls it (``C++`` → ``cpp``), None where Pygments does not know it."""
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    spellings = {"c++": "cpp", "c#": "csharp", "f#": "fsharp", "plain text": "text", "jupyter notebook": "python"}
    try:
        return str(get_lexer_by_name(spellings.get(name.lower(), name.lower())).aliases[0]).lower()
    except ClassNotFound:
        return None


def prose_spans(text: str, language: str | None) -> list[Span]:
    """Return where a document is prose: comments, docstrings, and all of a language of markup. In order, none touch."""
    if language in PROSE_LANGUAGES:
        return [(0, len(text))] if text else []
    merged: list[Span] = []
    for start, kind, value in _tokens(text, language):
        if not _is_comment(kind) and not _is_docstring(kind):
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], start + len(value))
        else:
            merged.append((start, start + len(value)))
    return merged


def units(text: str, language: str | None) -> list[Unit]:
    """Return the words and runs of punctuation of a text, in order; together they are all but its white space."""
    from pygments.token import Token

    found: list[Unit] = []
    for start, kind, value in _tokens(text, language):
        if kind in Token.Literal.Number and value.strip() == value and value:
            found.append(Unit(start, start + len(value), WORD))
            continue
        for match in _UNIT.finditer(value):
            word = match[0][0].isalnum() or match[0][0] == "_"
            rank = (NAME if kind in Token.Name else WORD) if word else PUNCTUATION
            found.append(Unit(start + match.start(), start + match.end(), rank))
    return found


def names(text: str, language: str | None) -> dict[str, list[int]]:
    """Return the names that a file may have given itself → the characters where each stands, all of its places.

    Left out: built-ins, imported modules, exceptions, decorators, names with double underscores, and whatever shares
    its spelling with one of these.
    """
    from pygments.token import Name

    places: dict[str, list[int]] = {}
    foreign: set[str] = set()
    for start, kind, value in _tokens(text, language):
        if kind not in Name:
            continue
        given = any(kind in group for group in (Name.Builtin, Name.Namespace, Name.Exception, Name.Decorator))
        if given or not value.isidentifier() or _DUNDER.fullmatch(value):
            foreign.update(_UNIT.findall(value))
        else:
            places.setdefault(value, []).append(start)
    return {name: starts for name, starts in places.items() if name not in foreign}


def comments(text: str, language: str | None) -> list[Span]:
    """Return the comments of a text, without docstrings and without a line break at the end of one."""
    found: list[Span] = []
    for start, kind, value in _tokens(text, language):
        if _is_comment(kind) and value.strip():
            found.append((start, start + len(value.rstrip("\r\n"))))
    return found


def _is_comment(kind: Any) -> bool:
    from pygments.token import Comment

    return kind in Comment and kind not in Comment.Preproc and kind not in Comment.PreprocFile


def _is_docstring(kind: Any) -> bool:
    from pygments.token import String

    return kind in String.Doc


def _tokens(text: str, language: str | None) -> Iterator[tuple[int, Any, str]]:
    """Yield (start, kind, text) of lexical tokens; without a known language all is one piece of text."""
    from pygments.token import Text

    if language is None or known_language(language) is None:
        yield 0, Text, text
        return
    at = 0
    for start, kind, value in _lexer(language).get_tokens_unprocessed(text):
        if start >= at and text.startswith(value, start):  # a few lexers repeat a piece of what they delegate
            yield start, kind, value
            at = start + len(value)


@functools.lru_cache(maxsize=64)
def _lexer(language: str) -> Any:
    from pygments.lexers import get_lexer_by_name

    return get_lexer_by_name(language)
