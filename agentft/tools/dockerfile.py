"""Checks a Dockerfile without an engine (floor 0): the mistakes that make a build fail before it runs anything.

    problems, facts = check_dockerfile(text, exists=lambda path: (root / path).exists())

Found: no FROM, an unknown instruction or one without arguments, FROM of a stage that is not there, COPY and ADD of
paths that are not in the build context or lie outside of it. What RUN does is not known.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

INSTRUCTIONS = frozenset(
    [
        *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "MAINTAINER"),
        *("ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
    ]
)
_HEREDOC = re.compile(r"<<-?\s*([\"']?)(\w+)\1")


@dataclass
class DockerfileCheck:
    """What was found. ``problems`` are (line from 1, text) in the order of the file."""

    problems: list[tuple[int, str]] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    instructions: int = 0


def check_dockerfile(text: str, exists: Callable[[str], bool]) -> DockerfileCheck:
    """Check ``text``; ``exists`` says whether a path, relative to the build context, is there (it may hold ``*``)."""
    found = DockerfileCheck()
    for number, line in _logical_lines(text):
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        found.instructions += 1
        if name.upper() not in INSTRUCTIONS:
            close = difflib.get_close_matches(name.upper(), sorted(INSTRUCTIONS), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            found.problems.append((number, f"unknown instruction {name}{hint}"))
        elif not rest:
            found.problems.append((number, f"{name.upper()} needs an argument"))
        elif name.upper() == "FROM":
            _from(found, number, rest)
        elif not found.stages and name.upper() != "ARG":
            found.problems.append((number, f"{name.upper()} stands before the first FROM"))
            found.stages.append("")  # said once
        elif name.upper() in ("COPY", "ADD"):
            _copy(found, number, name.upper(), rest, exists)
    if not found.instructions or (not found.stages and not found.problems):
        found.problems.append((1, "there is no FROM: an image needs a base, such as FROM python:3.11-slim"))
    return found


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Return (number of the first line, instruction) with continued lines joined; comments and bodies left out."""
    lines: list[tuple[int, str]] = []
    start, until = 0, ""
    parts: list[str] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if until:
            until = "" if line == until else until
            continue
        if not line or line.startswith("#"):
            continue
        start = start if parts else number
        parts.append(line.removesuffix("\\").strip())
        if line.endswith("\\"):
            continue
        joined, parts = " ".join(parts), []
        lines.append((start, joined))
        heredoc = _HEREDOC.search(joined)
        until = heredoc[2] if heredoc and joined.split()[0].upper() in ("RUN", "COPY", "ADD") else ""
    if parts:
        lines.append((start, " ".join(parts)))
    return lines


def _from(found: DockerfileCheck, number: int, rest: str) -> None:
    words = [word for word in rest.split() if not word.startswith("--")]
    if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
        found.problems.append((number, "FROM takes an image, or an image AS a name"))
    found.stages.append(words[2] if len(words) == 3 else "")


def _copy(found: DockerfileCheck, number: int, name: str, rest: str, exists: Callable[[str], bool]) -> None:
    try:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    except ValueError as error:
        found.problems.append((number, f"{name}: {error}"))
        return
    flags = [word for word in words if word.startswith("--")]
    paths = [word for word in words if not word.startswith("--")]
    if len(paths) < 2:
        found.problems.append((number, f"{name} takes at least one source and a destination"))
        return
    source = next((flag.partition("=")[2] for flag in flags if flag.startswith("--from=")), None)
    if source is not None:
        if source.isdigit() and int(source) >= len(found.stages) - 1:
            found.problems.append((number, f"{name} --from={source}: there is no such stage before this one"))
        return
    for path in paths[:-1]:
        if path.startswith("<<") or "$" in path or (name == "ADD" and "://" in path):
            continue
        inner = path.lstrip("/").removeprefix("./")
        if ".." in inner.split("/"):
            found.problems.append((number, f"{name} {path}: lies outside of the build context"))
        elif not exists(inner or "."):
            found.problems.append((number, f"{name} {path}: no such file in the build context"))
