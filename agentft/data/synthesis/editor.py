"""The editor's state when the user asks (floor 3): consistent with the workspace, sometimes near the fault."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from agentft.data.synthesis.source import source_of
from agentft.etai import CursorPosition, IdeContext, Viewport

NEAR_SHARE = 0.4
_COMMITS = (
    "Tidy up {stem}",
    "Simplify {stem}",
    "Shorten {name}",
    "Refactor {name}",
    "Clean-up after review",
    "Small changes in {stem}",
)


def editor_state(
    rng: random.Random,
    files: Mapping[str, str],
    fault: tuple[str, int],
    name: str,
    related: Sequence[str],
    at_cursor: bool,
) -> IdeContext:
    """Return open files, cursor, viewport and git state.

    Args:
        files: the workspace, path → text.
        fault: file and line of the defect.
        name: name of the broken function.
        related: files that the session is about; some of them are open.
        at_cursor: the cursor stands within a few lines of the fault.
    """
    path, line = fault
    open_files = [other for other in dict.fromkeys(related) if other in files and (other == path or rng.random() < 0.6)]
    near = at_cursor or rng.random() < NEAR_SHARE
    if near or not open_files:
        open_files = [path, *(other for other in open_files if other != path)]
        cursor_file = path
    else:
        cursor_file = rng.choice(open_files)
    lines = files[cursor_file].split("\n")
    if near:
        wanted = line + rng.randint(-3, 3)
    else:
        starts = [function.def_line for function in source_of(cursor_file, files[cursor_file]).functions]
        wanted = rng.choice(starts) + rng.randint(0, 4) if starts else rng.randint(1, len(lines))
    cursor_line = min(max(1, wanted), max(1, len(lines) - 1))
    column = min(len(lines[cursor_line - 1]), rng.choice((0, 4, 8, len(lines[cursor_line - 1]))))
    changed = rng.random() < 0.5
    return IdeContext(
        open_files=open_files[:3],
        cursor_position=CursorPosition(file=cursor_file, line=cursor_line, column=column),
        git_status=f" M {path}" if changed else "",
        viewport=_viewport(rng, cursor_line),
        last_commit_message=None if changed else _commit(rng, path, name),
    )


def _viewport(rng: random.Random, cursor_line: int) -> Viewport:
    """Return a window that shows the cursor some rows below its upper edge."""
    line_height = float(rng.randint(18, 22))
    zoom = rng.choice((0.9, 1.0, 1.0, 1.1, 1.25))
    top_line = max(0, cursor_line - 1 - rng.randint(4, 24))
    return Viewport(
        scroll_top=round(top_line * line_height * zoom, 2),
        zoom=zoom,
        line_height=line_height,
        char_width=round(line_height * 0.42, 2),
    )


def _commit(rng: random.Random, path: str, name: str) -> str:
    return rng.choice(_COMMITS).format(stem=path.rsplit("/", 1)[-1].removesuffix(".py"), name=name)
