"""Ten kinds of broken records: each gives one clear message that names file, line, field, what was got and expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentft.errors import DataError
from agentft.etai import RecordError
from agentft.etai_io import read

GOOD: dict[str, Any] = {
    "session_id": "good",
    "user_instruction": "Make the tests pass.",
    "execution_trace": [
        {"step": 1, "tool_called": "pytest_run", "tool_args": {}, "execution_result": {"exit_code": 1, "stdout": "F"}},
        {"step": 2, "tool_called": "file_read", "tool_args": {"path": "a.py"}, "execution_result": None},
    ],
}


def changed(**changes: Any) -> str:
    """Return the good record as JSON with top-level changes; a value of None removes the key."""
    record = {**json.loads(json.dumps(GOOD)), "session_id": "bad", **changes}
    return json.dumps({key: value for key, value in record.items() if value is not None})


def with_result(**result: Any) -> str:
    return changed(execution_trace=[{"step": 1, "tool_called": "t", "execution_result": result}])


BROKEN = {
    "cut line": (
        '{"session_id": "bad", "user_instr',
        "not_json",
        "",
        "not JSON: Unterminated string",
        ['got: {"session_id"', "expected: one JSON value"],
    ),
    "not an object": ("[1, 2]", "not_object", "", "one JSON object a line", ["got: [1, 2]", "expected: an object"]),
    "missing field": (
        changed(user_instruction=None),
        "missing_field",
        "user_instruction",
        "required field is missing",
        ["got: an object with execution_trace, session_id", "expected: `user_instruction`"],
    ),
    "unknown field": (
        changed(execution_trace=[{"step": 1, "tool_called": "t", "tool_arg": {}}]),
        "unknown_field",
        "execution_trace[0].tool_arg",
        "unknown field",
        ["got: {}", "do: did you mean `tool_args`?"],
    ),
    "wrong type": (
        with_result(exit_code="0"),
        "wrong_value",
        "execution_trace[0].execution_result.exit_code",
        "wrong value",
        ["got: 0", "expected: a valid integer"],
    ),
    "out of range": (
        changed(ide_context={"cursor_position": {"file": "a.py", "line": 0}}),
        "wrong_value",
        "ide_context.cursor_position.line",
        "wrong value",
        ["got: 0", "expected: greater than or equal to 1"],
    ),
    "schema version": (
        changed(schema_version="9.9"),
        "schema_version",
        "schema_version",
        "unknown schema version",
        ["got: 9.9", "expected: '1.0'", "do: read this file with the agentft release that wrote it"],
    ),
    "duplicate id": (
        changed(session_id="good"),
        "duplicate_id",
        "session_id",
        "the id was used before",
        ["got: good", "the first record with this one is line 1"],
    ),
    "steps out of order": (
        changed(execution_trace=[{"step": 2, "tool_called": "t"}, {"step": 1, "tool_called": "t"}]),
        "step_order",
        "execution_trace[0].step",
        "steps are out of order, or one is missing",
        ["got: 2", "expected: 1 (steps are numbered 1, 2, 3"],
    ),
    "unknown intent": (
        changed(intents=["make_coffee"]),
        "wrong_value",
        "intents",
        "wrong value",
        ["expected: unknown ['make_coffee']; known are fix_test_failure"],
    ),
    "unknown workspace": (
        changed(workspace={"kind": "zip", "files": {}}),
        "wrong_value",
        "workspace",
        "wrong value",
        ["'zip'", "'files', 'git', 'image'"],
    ),
    "not a number": (
        with_result(exit_code=0).replace('"exit_code": 0', '"duration_s": NaN'),
        "not_json",
        "",
        "NaN is not JSON",
        ["expected: one JSON value"],
    ),
    "number too large": (
        with_result(exit_code=0).replace('"exit_code": 0', '"duration_s": 1e999'),
        "not_finite",
        "",
        "a number is not finite",
        ["got: inf", "expected: a JSON number"],
    ),
    "nested too deeply": (
        changed(execution_trace=[{"step": 1, "tool_called": "t", "tool_args": {"a": 0}}]).replace(
            '"a": 0', '"a": ' + "[" * 200 + "]" * 200
        ),
        "too_deep",
        "",
        "nested too deeply",
        ["expected: at most 100 levels"],
    ),
}


@pytest.mark.parametrize(("line", "reason", "field", "what", "parts"), BROKEN.values(), ids=BROKEN.keys())
def test_one_clear_message(tmp_path: Path, line: str, reason: str, field: str, what: str, parts: list[str]) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n" + changed(session_id="after") + "\n")
    reader = read(path)
    assert [session.session_id for session in reader] == ["good", "after"]
    assert dict(reader.report.by_reason) == {reason: 1}
    [rejected] = [json.loads(text) for text in (tmp_path / "sessions.rejected.jsonl").read_text().splitlines()]
    assert (rejected["line"], rejected["reason"], rejected["field"] or "") == (2, reason, field)
    assert rejected["record"].strip() == line
    message: str = rejected["message"]
    assert message.startswith(f"{path}:2: {field}: " if field else f"{path}:2: ")
    assert what in message.splitlines()[0]
    for part in parts:
        assert part in message
    assert len(message.splitlines()) <= 4

    with pytest.raises(RecordError) as caught:
        list(read(path, strict=True))
    assert isinstance(caught.value, DataError)
    assert str(caught.value) == message
