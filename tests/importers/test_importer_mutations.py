"""Whatever is done to a document, an importer gives a valid session or a ``RecordError``, never another exception."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
from foreign import ALL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentft.data.importers.detect import IMPORTERS, detect, split
from agentft.etai import RecordError, Session, to_session

WEIRD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.just(10**400),
    st.floats(),
    st.sampled_from(
        ["", "\x00\ud800", "text", "[1]", "{}", '{"a": NaN}', "user", "assistant", "tool", "functions.f:0"]
    ),
    st.sampled_from(
        [[], {}, [None], [{}], [[]], {"a": None}, {"role": []}, {"type": {}}, {"content": 1}, [{"type": "text"}]]
    ),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside ``value``."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    return found + [place for key, item in inner for place in places(item, (*path, key))]


@st.composite
def mutated(draw: st.DrawFn, name: str) -> Any:
    """Delete, replace or double up to four values anywhere in the document."""
    document = copy.deepcopy(ALL[name])
    for _ in range(draw(st.integers(1, 4))):
        choices = places(document)
        if not choices:
            break
        *parents, last = draw(st.sampled_from(choices))
        holder = document
        for key in parents:
            holder = holder[key]
        match draw(st.sampled_from(["delete", "replace", "replace", "double"])):
            case "delete":
                del holder[last]
            case "replace":
                holder[last] = copy.deepcopy(draw(WEIRD))
            case "double" if isinstance(holder, list):
                holder.insert(last, copy.deepcopy(holder[last]))
    return document


def try_all(document: Any, formats: list[str | None]) -> None:
    for _, part in split(document, "x"):
        for name in formats:
            try:
                session = to_session(IMPORTERS[name or detect(part)](part, Counter()))
            except RecordError:
                continue
            assert isinstance(session, Session)
            session.model_dump_json()
            codes = [step.execution_result.exit_code for step in session.execution_trace if step.execution_result]
            assert session.source == "mine" or -1 not in codes


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_mutated_documents_never_crash(name: str, data: st.DataObject) -> None:
    try_all(data.draw(mutated(name)), [None, name])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_documents_read_as_another_format_never_crash(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(ALL)))
    try_all(data.draw(mutated(name)), [*IMPORTERS])


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        WEIRD,
        lambda x: (
            st.lists(x, max_size=3)
            | st.dictionaries(
                st.sampled_from(["messages", "history", "trajectory", "attempts", "role", "content", "chat", "info"]),
                x,
                max_size=4,
            )
        ),
        max_leaves=8,
    )
)
def test_any_json_value_never_crashes(value: Any) -> None:
    try_all(value, [None, *IMPORTERS])
