"""Defect operators (floor 3): each looks at one node of a function and proposes small textual changes.

An operator is a generator of ``(start, end, text)``: replace ``source.text[start:end]`` by ``text``. What comes out
may still be harmless or may not compile; ``defects`` filters by syntax, and real tests decide the rest.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agentft.data.synthesis.source import Function, Source, code_statements, first_line_of

Change = tuple[int, int, str]


@dataclass(frozen=True)
class Site:
    """One node, where it stands, and what surrounds it."""

    source: Source
    function: Function
    node: ast.AST
    parent: ast.AST


_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Eq: (r"==", ("!=",)),
    ast.NotEq: (r"!=", ("==",)),
    ast.Lt: (r"<", (">", ">=")),
    ast.LtE: (r"<=", (">=", ">")),
    ast.Gt: (r">", ("<", "<=")),
    ast.GtE: (r">=", ("<=", "<")),
    ast.Is: (r"is(?!\s+not)", ("is not",)),
    ast.IsNot: (r"is\s+not", ("is",)),
    ast.In: (r"in", ("not in",)),
    ast.NotIn: (r"not\s+in", ("in",)),
}
_BOUNDARIES: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: (r"<", "<="),
    ast.LtE: (r"<=", "<"),
    ast.Gt: (r">", ">="),
    ast.GtE: (r">=", ">"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: (r"\+", ("-",)),
    ast.Sub: (r"-", ("+",)),
    ast.Mult: (r"\*", ("+", "//")),
    ast.Div: (r"/", ("*", "//")),
    ast.FloorDiv: (r"//", ("%", "*")),
    ast.Mod: (r"%", ("//",)),
    ast.Pow: (r"\*\*", ("*",)),
    ast.BitAnd: (r"&", ("|",)),
    ast.BitOr: (r"\|", ("&",)),
    ast.BitXor: (r"\^", ("|",)),
    ast.LShift: (r"<<", (">>",)),
    ast.RShift: (r">>", ("<<",)),
}
_RELATED = (
    *(("append", "extend"), ("lower", "upper"), ("startswith", "endswith"), ("lstrip", "rstrip"), ("find", "rfind")),
    *(("index", "count"), ("keys", "values"), ("items", "keys"), ("pop", "get"), ("add", "discard")),
    *(("split", "rsplit"), ("setdefault", "get"), ("update", "copy"), ("insert", "append"), ("min", "max")),
    *(("difference", "intersection"), ("popleft", "pop"), ("appendleft", "append"), ("partition", "rpartition")),
)
_ATTRIBUTES = {**{right: left for left, right in _RELATED}, **dict(_RELATED)}
_EXCEPTIONS = {
    "KeyError": "IndexError",
    "IndexError": "KeyError",
    "TypeError": "ValueError",
    "ValueError": "TypeError",
    "AttributeError": "KeyError",
    "StopIteration": "ValueError",
    "ZeroDivisionError": "ValueError",
    "OverflowError": "TypeError",
}


def comparison_swap(site: Site) -> Iterator[Change]:
    """``==`` for ``!=``, ``<`` for ``>``, ``in`` for ``not in``."""
    if isinstance(site.node, ast.Compare) and len(site.node.ops) == 1:
        pattern, others = _COMPARISONS[type(site.node.ops[0])]
        yield from _between(site, site.node.left, site.node.comparators[0], pattern, others)


def boundary_shift(site: Site) -> Iterator[Change]:
    """``<`` for ``<=``; ``range(n)`` for ``range(n - 1)``."""
    node = site.node
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for index, operator in enumerate(node.ops):
            if type(operator) in _BOUNDARIES:
                pattern, other = _BOUNDARIES[type(operator)]
                yield from _between(site, operands[index], operands[index + 1], pattern, (other,))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range" and node.args:
        stop = node.args[min(1, len(node.args) - 1)]
        if isinstance(stop, ast.Name | ast.Call | ast.Attribute):
            end = site.source.span(stop)[1]
            yield end, end, " - 1"
            yield end, end, " + 1"


def arithmetic_swap(site: Site) -> Iterator[Change]:
    """``+`` for ``-``, ``*`` for ``//``, also in ``+=``."""
    node = site.node
    if isinstance(node, ast.BinOp) and not _is_text(node.left) and not _is_text(node.right):
        pattern, others = _ARITHMETIC.get(type(node.op), ("", ()))
        yield from _between(site, node.left, node.right, pattern, others)
    elif isinstance(node, ast.AugAssign) and not _is_text(node.value):
        pattern, others = _ARITHMETIC.get(type(node.op), ("", ()))
        yield from _between(site, node.target, node.value, f"{pattern}=", tuple(f"{other}=" for other in others))


def constant_change(site: Site) -> Iterator[Change]:
    """A number off by one, or another short text."""
    node = site.node
    if not isinstance(node, ast.Constant) or isinstance(site.parent, ast.Slice | ast.arguments | ast.JoinedStr):
        return
    start, end = site.source.span(node)
    if type(node.value) is int and abs(node.value) < 1000:
        yield start, end, str(node.value + 1)
        if node.value > 0:
            yield start, end, str(node.value - 1)
    elif isinstance(node.value, str) and re.fullmatch(r"""'[^'\\]{,3}'|"[^"\\]{,3}\"""", site.source.text[start:end]):
        quote = site.source.text[start]
        yield start, end, f"{quote}{'_' if node.value in ('', ' ') else ''}{quote}"


def boolean_flip(site: Site) -> Iterator[Change]:
    """``True`` for ``False``."""
    node = site.node
    if isinstance(node, ast.Constant) and isinstance(node.value, bool) and not isinstance(site.parent, ast.arguments):
        yield *site.source.span(node), str(not node.value)


def condition_negated(site: Site) -> Iterator[Change]:
    """``if x`` for ``if not x`` and the reverse."""
    node = site.node
    if not isinstance(node, ast.If | ast.IfExp | ast.Assert | ast.comprehension):
        return
    for test in node.ifs[:1] if isinstance(node, ast.comprehension) else [node.test]:
        start = site.source.span(test)[0]
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield start, site.source.span(test.operand)[0], ""
        elif isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            yield start, start, "not "


def and_or_swap(site: Site) -> Iterator[Change]:
    """``and`` for ``or``."""
    if isinstance(site.node, ast.BoolOp):
        word, other = ("and", "or") if isinstance(site.node.op, ast.And) else ("or", "and")
        for left, right in zip(site.node.values, site.node.values[1:], strict=False):
            yield from _between(site, left, right, rf"\b{word}\b", (other,))


def wrong_variable(site: Site) -> Iterator[Change]:
    """Another name of the same function."""
    node = site.node
    if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
        return
    if isinstance(site.parent, ast.Call) and site.parent.func is node:
        return
    known = _local_names(site.function)
    if node.id in known:
        others = [name for name in known if name != node.id and name not in ("self", "cls")]
        ahead = sorted(others, key=lambda name: (abs(known[name] - node.lineno), name))
        for name in ahead[:2]:
            yield *site.source.span(node), name


def wrong_attribute(site: Site) -> Iterator[Change]:
    """A related method, or another attribute of the same object."""
    node = site.node
    if not isinstance(node, ast.Attribute):
        return
    end = site.source.span(node)[1]
    start = end - len(node.attr)
    if node.attr in _ATTRIBUTES:
        yield start, end, _ATTRIBUTES[node.attr]
    elif isinstance(node.value, ast.Name) and node.value.id == "self":
        called = isinstance(site.parent, ast.Call) and site.parent.func is node
        for other in _own_attributes(site, called):
            if other != node.attr:
                yield start, end, other


def removed_guard(site: Site) -> Iterator[Change]:
    """An ``if`` that only returns, raises, continues or breaks is gone."""
    node = site.node
    leaves = ast.Return | ast.Raise | ast.Continue | ast.Break
    if isinstance(node, ast.If) and not node.orelse and len(node.body) == 1 and isinstance(node.body[0], leaves):
        yield from _without_lines(site)


def removed_statement(site: Site) -> Iterator[Change]:
    """An assignment or a call is gone."""
    node = site.node
    if isinstance(node, ast.Assign | ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield from _without_lines(site)


def swapped_arguments(site: Site) -> Iterator[Change]:
    """``f(b, a)`` for ``f(a, b)``."""
    if isinstance(site.node, ast.Call):
        for left, right in zip(site.node.args, site.node.args[1:], strict=False):
            if isinstance(left, ast.Starred) or isinstance(right, ast.Starred):
                continue
            first, second = site.source.span(left), site.source.span(right)
            text = site.source.text
            middle = text[first[1] : second[0]]
            if middle.strip() == ",":
                yield first[0], second[1], text[slice(*second)] + middle + text[slice(*first)]


def dropped_return(site: Site) -> Iterator[Change]:
    """The value is computed, but not returned or yielded."""
    node = site.node
    if isinstance(node, ast.Return) and isinstance(
        node.value, ast.Call | ast.BinOp | ast.Name | ast.Compare | ast.IfExp
    ):
        yield site.source.span(node)[0], site.source.span(node.value)[0], ""
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield) and node.value.value is not None:
        yield site.source.span(node.value)[0], site.source.span(node.value.value)[0], ""


def wrong_default(site: Site) -> Iterator[Change]:
    """Another default value of an argument."""
    if not isinstance(site.node, ast.Constant) or not isinstance(site.parent, ast.arguments):
        return
    span, value = site.source.span(site.node), site.node.value
    if isinstance(value, bool):
        yield *span, str(not value)
    elif isinstance(value, int):
        yield *span, str(value + 1)
    elif value is None:
        yield *span, "0"
        yield *span, "False"
    elif isinstance(value, str):
        yield *span, "'_'" if value != "_" else "''"


def slice_bound(site: Site) -> Iterator[Change]:
    """A bound of a slice or a constant index moved, or left out."""
    node = site.node
    if isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper):
            if bound is not None:
                start, end = site.source.span(bound)
                if isinstance(bound, ast.Constant) and type(bound.value) is int:
                    yield start, end, str(bound.value + 1)
                elif isinstance(bound, ast.Name | ast.BinOp):
                    yield end, end, " + 1"
                yield start, end, ""


def wrong_exception(site: Site) -> Iterator[Change]:
    """Another exception is raised or caught."""
    node = site.node
    inside = isinstance(site.parent, ast.ExceptHandler | ast.Raise | ast.Tuple) or (
        isinstance(site.parent, ast.Call) and site.parent.func is node
    )
    if isinstance(node, ast.Name) and node.id in _EXCEPTIONS and inside:
        yield *site.source.span(node), _EXCEPTIONS[node.id]


def swapped_branches(site: Site) -> Iterator[Change]:
    """``b if c else a`` for ``a if c else b``; the other statement of a two-way ``if``."""
    node, text = site.node, site.source.text
    if isinstance(node, ast.IfExp):
        pair: tuple[ast.AST, ast.AST] = (node.body, node.orelse)
    elif isinstance(node, ast.If) and len(node.body) == len(node.orelse) == 1:
        if isinstance(node.orelse[0], ast.If) or _lines(node.body[0]) + _lines(node.orelse[0]) > 2:
            return
        pair = (node.body[0], node.orelse[0])
    else:
        return
    first, second = sorted(map(site.source.span, pair))
    yield first[0], second[1], text[slice(*second)] + text[first[1] : second[0]] + text[slice(*first)]


def function_removed(site: Site) -> Iterator[Change]:
    """The body of a short function is gone."""
    node = site.node
    if node is not site.function.node or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    code = code_statements(node)
    if not code or code[0].lineno == node.lineno:
        return
    first, last = first_line_of(code[0]), code[-1].end_lineno or code[-1].lineno
    if last - first < 12 and not isinstance(code[0], ast.Raise | ast.Pass):
        start = site.source.line_start(first)
        start += len(site.source.lines[first - 1]) - len(site.source.lines[first - 1].lstrip())
        yield start, site.source.span(code[-1])[1], "raise NotImplementedError"


OPERATORS: dict[str, Callable[[Site], Iterator[Change]]] = {
    operator.__name__: operator
    for operator in (
        comparison_swap,
        boundary_shift,
        arithmetic_swap,
        constant_change,
        boolean_flip,
        condition_negated,
        and_or_swap,
        wrong_variable,
        wrong_attribute,
        removed_guard,
        removed_statement,
        swapped_arguments,
        dropped_return,
        wrong_default,
        slice_bound,
        wrong_exception,
        swapped_branches,
        function_removed,
    )
}
"""Every kind of defect, by name."""


def _between(site: Site, left: ast.AST, right: ast.AST, pattern: str, others: tuple[str, ...]) -> Iterator[Change]:
    start, end = site.source.span(left)[1], site.source.span(right)[0]
    gap = site.source.text[start:end]
    match = re.search(pattern, gap) if pattern and "#" not in gap else None
    for other in others if match else ():
        assert match is not None
        yield start + match.start(), start + match.end(), other


def _without_lines(site: Site) -> Iterator[Change]:
    """Remove the whole lines of a statement that is not alone in its block."""
    node = site.node
    assert isinstance(node, ast.stmt)
    blocks = [getattr(site.parent, name, []) for name in ("body", "orelse", "finalbody")]
    siblings = next((block for block in blocks if isinstance(block, list) and node in block), [])
    if len(siblings) < 2 or _lines(node) > 5:
        return
    first, last = node.lineno, node.end_lineno or node.lineno
    before = site.source.lines[first - 1][: site.source.position(site.source.span(node)[0])[1]]
    after = site.source.lines[last - 1][site.source.position(site.source.span(node)[1])[1] :]
    if not before.strip() and (not after.strip() or after.strip().startswith("#")):
        yield site.source.line_start(first), site.source.line_start(last + 1), ""


def _lines(node: ast.AST) -> int:
    return (node.end_lineno or 0) - node.lineno + 1  # type: ignore[attr-defined]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


@functools.lru_cache(maxsize=64)
def _local_names(function: Function) -> dict[str, int]:
    """Return the function's own names and the line on which each first appears."""
    names: dict[str, int] = {}
    for node in ast.walk(function.node):
        if isinstance(node, ast.arg):
            names.setdefault(node.arg, node.lineno)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id, node.lineno)
    return names


def _own_attributes(site: Site, called: bool) -> list[str]:
    """Return up to two attributes of ``self`` that the function uses in the same way (called or not)."""
    calls = {node.func for node in ast.walk(site.function.node) if isinstance(node, ast.Call)}
    names = {
        node.attr
        for node in ast.walk(site.function.node)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and (node in calls) == called
    }
    return sorted(names)[:2]
