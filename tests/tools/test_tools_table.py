"""``agentft tools``: one table, and docs/tools.md is made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentft.cli import main
from agentft.tools import BUILTIN_TOOLS
from agentft.tools.table import markdown


def test_the_document_is_the_table() -> None:
    path = Path(__file__).resolve().parents[2] / "docs" / "tools.md"
    assert path.read_text() == markdown(BUILTIN_TOOLS), "agentft tools --markdown > docs/tools.md"


def test_the_verb_shows_every_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tools"]) == 0
    shown = capsys.readouterr().out
    assert all(spec.usage() in shown for spec in BUILTIN_TOOLS)
    assert main(["tools", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [spec.name for spec in BUILTIN_TOOLS]
    assert len(rows) == 18
    assert rows[0]["parameters"]["required"] == ["path"]
