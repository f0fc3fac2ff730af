"""Files that appear whole or not at all (floor 0)."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a name beside ``path`` to write to; it takes the place of ``path`` when the block ends well, else it goes.

    No other process or thread writes under that name. What a killed process leaves is called ``.*.partial``.

    Raises:
        OSError: the folder cannot be made, or the file cannot take its place; ``path`` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON; an older file stays until the new one is whole. Raises ``OSError``."""
    with whole_file(path) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n")
