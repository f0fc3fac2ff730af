"""ETAI records pass through as they are (floor 3); the check happens where every record is checked."""

from __future__ import annotations

from collections import Counter
from typing import Any

from agentft.etai import RecordError

NAME = "etai"


def record(document: object, notes: Counter[str]) -> dict[str, Any]:
    """Return the record itself.

    Raises:
        RecordError: the document is no object.
    """
    if not isinstance(document, dict):
        raise RecordError("a record is one object", reason="not_object", got=document, expected="an object")
    return document
