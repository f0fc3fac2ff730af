"""The published JSON Schema is the one that the types give, and it agrees with the reader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

import agentft
from agentft.etai import INTENTS, RecordError, Session, to_session
from agentft.etai_io import json_schema

PUBLISHED = Path(agentft.__file__).with_name("etai.schema.json")


def test_the_published_schema_is_current() -> None:
    printed = subprocess.run([sys.executable, "-m", "agentft.etai_io"], capture_output=True, text=True, check=True)
    assert PUBLISHED.read_text() == printed.stdout, "run: python -m agentft.etai_io > agentft/etai.schema.json"
    assert json.loads(printed.stdout) == json_schema()


GOOD = {
    "session_id": "s",
    "user_instruction": "Fix it.",
    "ide_context": {"open_files": ["a.py"], "cursor_position": {"file": "a.py", "line": 3}, "viewport": {"zoom": 1.5}},
    "execution_trace": [
        {
            "step": 1,
            "tool_called": "pytest_run",
            "tool_args": {"targets": "tests", "deep": [1, {"x": None}]},
            "execution_result": {"exit_code": None, "failed": ["t::a"], "error_location": {"file": "a.py", "line": 3}},
        }
    ],
    "intents": ["fix_test_failure"],
    "workspace": {"kind": "git", "url": "https://example.org/r", "commit": "HEAD"},
}
BAD = [
    {**GOOD, "session_id": ""},
    {**GOOD, "extra": 1},
    {**GOOD, "intents": ["nonsense"]},
    {**GOOD, "schema_version": "2.0"},
    {**GOOD, "workspace": {"kind": "zip"}},
    {**GOOD, "execution_trace": [{"step": 0, "tool_called": "t"}]},
    {**GOOD, "execution_trace": [{"step": 1, "tool_called": "t", "execution_result": {"exit_code": "0"}}]},
    {key: value for key, value in GOOD.items() if key != "user_instruction"},
]


def test_schema_and_reader_accept_the_same_records() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    validator.check_schema(json_schema())
    validator.validate(GOOD)
    session = to_session(GOOD)
    validator.validate(json.loads(session.model_dump_json()))
    result = session.execution_trace[0].execution_result
    assert result is not None
    assert result.model_dump()["failed"] == ["t::a"]
    for record in BAD:
        assert list(validator.iter_errors(record)), record
        with pytest.raises(RecordError):
            to_session(record)


def test_the_schema_names_every_intent_and_documents_itself() -> None:
    schema = json_schema()
    [intents] = [option for option in schema["properties"]["intents"]["anyOf"] if option.get("type") == "array"]
    assert intents["items"]["enum"] == list(INTENTS)
    assert schema["description"] == Session.__doc__ or schema["description"].startswith("One coding session")
    assert set(schema["required"]) == {"session_id", "user_instruction"}
