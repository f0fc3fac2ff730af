"""Property tests: any session is written and read back in its normal form, whatever its text holds."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from agentft.etai import INTENTS, RecordError, Session, parse_json, to_session
from agentft.etai_io import read, write

TEXT = st.one_of(
    st.text(st.characters(), max_size=30),  # surrogates and NUL included
    st.sampled_from(["", "\x00", "\ud800", "a\r\nb", "\ufffd", "\u2028", "☃\udc00\x00", "\\u0000", '"}\n{"']),
)
CLEAN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=30)


def json_values(text: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
    return st.recursive(leaves, lambda x: st.lists(x, max_size=3) | st.dictionaries(text, x, max_size=3), max_leaves=6)


def results(text: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.none() | st.fixed_dictionaries(
        {},
        optional={
            "exit_code": st.none() | st.integers(-300, 300),
            "stdout": text,
            "stderr": text,
            "duration_s": st.none() | st.floats(0, 1e6),
            "error_location": st.fixed_dictionaries({"file": text, "line": st.integers(1, 9999)}),
            "combined": st.booleans(),
            "total_bytes": st.none() | st.integers(0, 10**12),
            "failed": json_values(text),
        },
    )


@st.composite
def records(draw: st.DrawFn, text: st.SearchStrategy[str]) -> dict[str, Any]:
    # names and ids have a minimal length, which pydantic can only check on text without surrogates
    calls = draw(
        st.lists(st.tuples(CLEAN, st.dictionaries(text, json_values(text), max_size=3), results(text)), max_size=3)
    )
    trace = [
        {"step": i, "tool_called": "t" + name, "tool_args": args, "execution_result": result, "thought": name or None}
        for i, (name, args, result) in enumerate(calls, 1)
    ]
    cursor = {"file": draw(text), "line": draw(st.integers(1, 10**6)), "column": draw(st.integers(0, 500))}
    return {
        "session_id": "s" + draw(CLEAN),
        "user_instruction": draw(text),
        "ide_context": {"open_files": draw(st.lists(text, max_size=3)), "cursor_position": cursor},
        "execution_trace": trace,
        "final_output": draw(text),
        "intents": draw(st.none() | st.lists(st.sampled_from(INTENTS), max_size=3)),
        "workspace": draw(
            st.none()
            | st.fixed_dictionaries({"kind": st.just("files"), "files": st.dictionaries(text, text, max_size=2)})
        ),
    }


def through_a_file(session: Session, name: str) -> tuple[Session, Counter[str]]:
    with TemporaryDirectory() as folder:
        report = write(Path(folder) / name, [session])
        reader = read(Path(folder) / name, strict=True)
        [back] = reader
        assert reader.report.repaired.total() == 0, "what is written needs no repair"
        return back, +report.repaired


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(records(CLEAN), st.sampled_from(["s.jsonl", "s.jsonl.gz", "s.jsonl.zst"]))
def test_clean_sessions_come_back_unchanged(record: dict[str, Any], name: str) -> None:
    session = Session.model_validate(record)
    assert through_a_file(session, name) == (session, Counter())


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(records(TEXT))
def test_nasty_sessions_come_back_in_their_normal_form(record: dict[str, Any]) -> None:
    try:
        normal = to_session(record)
    except RecordError as error:
        reason = error.reason
        event(reason)
        if reason != "duplicate_key":
            raise
        return
    back, _ = through_a_file(Session.model_validate(record), "s.jsonl")
    assert back == normal
    back.model_dump_json()  # encodable as UTF-8


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_read_without_a_crash(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "s.jsonl"
        path.write_bytes(data)
        reader = read(path)
        assert list(reader) == []
        assert reader.report.rejected == sum(bool(line.strip()) for line in data.split(b"\n"))


@settings(max_examples=300, deadline=None)
@given(json_values(TEXT))
def test_any_json_value_is_a_record_or_a_record_error(value: Any) -> None:
    with contextlib.suppress(RecordError):
        assert isinstance(to_session(value), Session)


@pytest.mark.parametrize("depth", [150, 5_000, 200_000])
def test_deep_nesting_is_refused_before_the_stack_ends(depth: int) -> None:
    with pytest.raises(RecordError, match="nested too deeply"):
        to_session({"session_id": "s", "user_instruction": parse_json("[" * depth + "]" * depth)})
