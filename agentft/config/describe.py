"""What each setting means (floor 1): the line of doc beside each field of the configuration, by dotted key.

Used by error messages and by the test that keeps the shipped YAMLs complete.
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import sys
import tokenize
import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Literal

from agentft.config import schema


@functools.cache
def field_docs() -> dict[str, str]:
    """Return dotted key → line of doc, for every section and every leaf, in the order of the schema."""
    comments = _comments_by_field()
    return {key: comments[owner.__name__, name] for key, owner, name, _ in walk(schema.RunConfig)}


def walk(cls: type, prefix: str = "") -> Iterator[tuple[str, type, str, Any]]:
    """Yield (dotted key, owning dataclass, field name, type) of every section and leaf, sections first."""
    hints = typing.get_type_hints(cls)
    for item in fields(cls):
        key, kind = f"{prefix}{item.name}", hints[item.name]
        yield key, cls, item.name, kind
        if section := section_of(kind):
            yield from walk(section, f"{key}.")


def section_of(kind: Any) -> type | None:
    """Return the dataclass of a section, also of one that may be null; None for a value."""
    parts = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return next((part for part in parts if is_dataclass(part) and isinstance(part, type)), None)


@functools.cache
def types_by_key() -> dict[str, Any]:
    """Return dotted key → annotated type, sections included."""
    return {key: kind for key, _, _, kind in walk(schema.RunConfig)}


def spell_type(kind: Any) -> str:
    """Return a type as a user would say it: ``a whole number``, ``one of a, b``, ``a section``."""
    plain = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    if kind in plain:
        return plain[kind]
    if is_dataclass(kind):
        return f"a section with {', '.join(item.name for item in fields(kind))}"
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(spell_type(part) for part in parts if part is not types.NoneType) + ", or null"
    if origin is tuple:
        return f"a list of {len(parts)}, each {spell_type(parts[0])}"
    if origin is list:
        return f"a list, each {spell_type(parts[0])}"
    return str(kind)


def _comments_by_field() -> dict[tuple[str, str], str]:
    """Read the comment on the line where each field of each dataclass starts or ends, in every module of sections."""
    modules = sorted({owner.__module__ for _, owner, _, _ in walk(schema.RunConfig)})
    return {key: text for module in modules for key, text in _comments_in(inspect.getsource(sys.modules[module]))}


def _comments_in(source: str) -> Iterator[tuple[tuple[str, str], str]]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comment_at = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                comment = comment_at.get(item.lineno) or comment_at.get(item.end_lineno or item.lineno)
                yield (node.name, item.target.id), comment or ""
