"""Defects on real and on generated code: mutants parse, differ, are small, and are undone exactly."""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agentft
from agentft.data.synthesis.defects import MAX_EDIT_CHARS, Defect, alternatives, cap_of, find_defects, is_sound
from agentft.data.synthesis.operators import OPERATORS
from agentft.data.synthesis.source import Source, apply_edit, edit_between, edit_from_to

EXAMPLE = '''
def f(items, low=0, strict=True, *, step=None):
    """Text with 1 < 2 and True that no operator may touch."""
    if not items:
        return []
    try:
        first = items[low:]
    except KeyError as error:
        raise ValueError("ünï") from error
    total = len(first) * 2 + low
    size = total - 1
    if strict and total <= size or size == 3:
        first.append(size)
        total += 1
    label = "a" if strict else "b"
    flag = False
    for at in range(size):
        print(label, at)
    return max(total, size)
'''
EXPECTED = {
    "comparison_swap": ("size == 3", "size != 3"),
    "boundary_shift": ("total <= size", "total < size"),
    "arithmetic_swap": ("total - 1", "total + 1"),
    "constant_change": ("size == 3", "size == 4"),
    "boolean_flip": ("flag = False", "flag = True"),
    "condition_negated": ("if not items", "if items"),
    "and_or_swap": ("strict and total", "strict or total"),
    "wrong_variable": ("print(label, at)", "print(label, flag)"),
    "wrong_attribute": ("first.append", "first.extend"),
    "removed_guard": ("    if not items:\n        return []\n", ""),
    "removed_statement": ("    size = total - 1\n", ""),
    "swapped_arguments": ("max(total, size)", "max(size, total)"),
    "dropped_return": ("return max", "max"),
    "wrong_default": ("strict=True", "strict=False"),
    "slice_bound": ("items[low:]", "items[:]"),
    "wrong_exception": ("except KeyError", "except IndexError"),
    "swapped_branches": ('"a" if strict else "b"', '"b" if strict else "a"'),
}


def sources() -> list[Source]:
    """A few real files of this project."""
    root = Path(agentft.__file__).parent
    paths = [root / "etai.py", root / "sandbox" / "execute.py", root / "tools" / "parse.py", root / "losses.py"]
    return [Source(path.name, path.read_text()) for path in paths]


@pytest.mark.parametrize("kind", sorted(EXPECTED))
def test_each_operator_makes_its_change(kind: str) -> None:
    found = [defect for defect in find_defects(Source("f.py", EXAMPLE)) if defect.kind == kind]
    before, after = EXPECTED[kind]
    texts = [defect.broken.text for defect in found]
    assert EXAMPLE.replace(before, after, 1) in texts
    assert all(is_sound(defect) for defect in found if defect.broken.text == EXAMPLE.replace(before, after, 1))


def test_a_removed_body_is_a_missing_feature() -> None:
    source = Source("g.py", 'def g(a):\n    """Twice."""\n    b = a * 2\n    return b\n')
    defect = next(d for d in find_defects(source) if d.kind == "function_removed")
    assert defect.broken.text == 'def g(a):\n    """Twice."""\n    raise NotImplementedError\n'
    assert defect.repair.old == "raise NotImplementedError"
    assert defect.repair.new == "b = a * 2\n    return b"


def test_there_are_enough_kinds_and_all_occur_in_real_code() -> None:
    assert len(OPERATORS) >= 10
    kinds = Counter(defect.kind for source in sources() for defect in find_defects(source))
    assert len(set(OPERATORS) - set(kinds)) <= 2, set(OPERATORS) - set(kinds)


def check(defect: Defect) -> None:
    """What every sound defect promises."""
    original, broken, edit = defect.original.text, defect.broken.text, defect.repair
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(original))
    assert apply_edit(defect.broken, edit) == original
    assert edit.old != edit.new
    assert len(edit.old) + len(edit.new) <= MAX_EDIT_CHARS
    lines = broken.split("\n")
    assert edit.old.split("\n")[0] in lines[edit.line - 1]
    function = defect.function
    changed = defect.original.position(defect.start)[0]
    assert function.first_line <= changed <= function.end_line
    untouched = original[: defect.start], original[defect.end :]
    assert broken.startswith(untouched[0])
    assert broken.endswith(untouched[1])


def test_defects_of_real_code_parse_differ_and_are_undone_by_a_small_edit() -> None:
    checked = 0
    for source in sources():
        for defect in find_defects(source)[::23]:
            if is_sound(defect):
                check(defect)
                checked += 1
    assert checked > 60


names = st.sampled_from(["a", "b", "value", "größe", "items"])
operators = st.sampled_from(["<", "<=", ">", "==", "!=", "in", "is not"])


@st.composite
def functions(draw: st.DrawFn) -> str:
    """Small functions with awkward spacing, comments, several statements on a line and non-ASCII names."""
    left, right, other = draw(names), draw(names), draw(names)
    space = draw(st.sampled_from(["", " ", "  "]))
    compare = draw(operators)
    gap = f" {compare} " if compare.isalpha() or " " in compare else f"{space}{compare}{space}"
    comment = draw(st.sampled_from(["", "  # ümlaut < 1", "  # 'quoted"]))
    number = draw(st.integers(-3, 20))
    body = f"""
    def f({left}, _{right}=None, *_x):
        {right} = {other} = {left}{comment}
        if {left}{gap}{right} and {other}:{comment}
            return {left}
        {other} = {right}[{number}:{space}]{comment}

        {right} += {number}
        return g({left},{space}{number}, {other})
    """
    return textwrap.dedent(body)


@settings(max_examples=60, deadline=None)
@given(functions())
def test_defects_of_any_function_keep_their_promises(text: str) -> None:
    for defect in find_defects(Source("x.py", text)):
        if is_sound(defect):
            check(defect)


@settings(max_examples=150, deadline=None)
@given(st.text("ab(= \n", min_size=1, max_size=40), st.integers(0, 40), st.integers(0, 6), st.text("ab= ", max_size=6))
def test_edit_between_gives_what_it_says_or_nothing(text: str, start: int, size: int, new: str) -> None:
    start = min(start, len(text))
    end = min(start + size, len(text))
    wanted = text[:start] + new + text[end:]
    if "\n" in text[start:end] or wanted == text:
        return
    edit = edit_between(Source("x.py", text), start, end, new)
    assert apply_edit(Source("x.py", text), edit) in (wanted, None)
    assert len(edit.old) <= max((len(line) for line in text.split("\n")), default=0)


def test_a_small_change_gives_a_small_edit() -> None:
    source = Source("x.py", "def f(a, b):\n    return a < b and b < a\n")
    at = source.text.index("<")
    edit = edit_between(source, at, at + 1, "<=")
    assert (edit.line, edit.old, edit.new) == (2, "< b", "<= b")
    whole = edit_from_to(source, source.text.replace("b < a", "b > a"))
    assert apply_edit(source, whole) == source.text.replace("b < a", "b > a")
    assert len(whole.old) < 12


def test_lines_that_are_gone_come_back_where_they_were() -> None:
    text = "def f(a):\n    b = 1\n\n    c = 2\n    return b + c\n"
    for gone in ("    b = 1\n", "    c = 2\n"):
        source = Source("x.py", text)
        defect = next(d for d in find_defects(source) if d.text == "" and text[d.start : d.end] == gone)
        assert defect.inserts_lines
        assert apply_edit(defect.broken, defect.repair) == text


def test_wrong_repairs_at_the_same_place_are_neither_right_nor_nothing() -> None:
    source = Source("f.py", EXAMPLE)
    every = [defect for defect in find_defects(source) if is_sound(defect)]
    seen = 0
    for defect in every:
        for edit in alternatives(defect, every):
            result = apply_edit(defect.broken, edit)
            assert result not in (None, EXAMPLE, defect.broken.text)
            seen += 1
    assert seen > 3


def test_a_tenth_is_the_most_of_a_kind() -> None:
    assert [cap_of(count) for count in (1, 9, 10, 19, 20, 200)] == [1, 1, 1, 1, 2, 20]


def test_identities_are_distinct_and_stable() -> None:
    first, second = (find_defects(Source("f.py", EXAMPLE)) for _ in range(2))
    assert [d.identity for d in first] == [d.identity for d in second]
    assert len({d.identity for d in first}) == len(first)
    assert all(re.fullmatch("[0-9a-f]{12}", d.identity) for d in first)


def test_the_interpreters_own_stumble_is_no_verdict_on_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 may fail to build a tree while another one is built; the same text parses the next time."""
    from agentft.data.synthesis import source

    real, failures = ast.parse, iter([True, True])

    def stumbling(text: str) -> ast.Module:
        if next(failures, False):
            raise SystemError("AST constructor recursion depth mismatch (before=45, after=58)")
        return real(text)

    monkeypatch.setattr(source.ast, "parse", stumbling)
    assert isinstance(source.parse("a = 1"), ast.Module)
    with pytest.raises(SyntaxError):
        source.parse("a = ")
