"""How varied the code is that the model writes (floor 4): the share of unique syntax nodes in the probe's calls.

A model that collapses writes the same edit everywhere; its losses do not show it. Every time probe calls come back, the
Python in their arguments is parsed: what ``file_write`` writes, what ``file_edit`` puts in, and code handed to an
interpreter. Each node of a syntax tree counts with all that is below it and without its place in the file:

    unique share = distinct subtrees / subtrees, over all snippets of the round together.

1 means that no expression occurs twice; the share falls with the amount of code, so compare rounds of one run. An edit
is often a fragment: it is dedented, and tried as the body of a function too. What does not parse is only counted. The
calls are those of this rank's part of the probe, as in the other ``probe/`` figures.
"""

from __future__ import annotations

import ast
import textwrap
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from composer import Callback, Logger, State

from agentft.feedback.callback import ExecutionFeedback
from agentft.tools import ToolCall

CODE_ARGUMENTS = ("content", "new", "code")
"""Arguments that hold code, in any tool."""
NOT_PYTHON = (".js", ".ts", ".json", ".md", ".toml", ".cfg", ".yaml", ".yml", ".txt", ".html", ".css", ".sh")
"""Endings of paths whose content is not read as Python."""


@dataclass(frozen=True, kw_only=True)
class Diversity:
    """Snippets that parsed and those that did not, all subtrees and the distinct ones."""

    parsed: int
    unparsed: int
    nodes: int
    unique: int

    @property
    def unique_share(self) -> float | None:
        """Distinct subtrees by subtrees; None without any."""
        return self.unique / self.nodes if self.nodes else None


def snippets(call: ToolCall) -> list[str]:
    """Return the code that a call carries, without what is empty or belongs to a file of another kind."""
    if str(call.args.get("path", "")).endswith(NOT_PYTHON):
        return []
    found = [call.args.get(name) for name in CODE_ARGUMENTS]
    return [text for text in found if isinstance(text, str) and text.strip()]


def parse_python(text: str) -> ast.AST | None:
    """Return the syntax tree of a module or of a fragment; None where it is neither."""
    dedented = textwrap.dedent(text)
    for source in (dedented, f"def fragment():\n{textwrap.indent(dedented, '    ')}"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what the snippet does wrong is not this program's business
                return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None


def measure(texts: Iterable[str]) -> Diversity:
    """Return the figures over some snippets."""
    known: dict[tuple[object, ...], int] = {}
    parsed = unparsed = nodes = 0
    for text in texts:
        tree = parse_python(text)
        if tree is None:
            unparsed += 1
            continue
        parsed += 1
        for child in ast.iter_child_nodes(tree):
            nodes += _number(child, known)[1]
    return Diversity(parsed=parsed, unparsed=unparsed, nodes=nodes, unique=len(known))


def _number(node: ast.AST, known: dict[tuple[object, ...], int]) -> tuple[int, int]:
    """Return the number of this subtree among the distinct ones, and how many nodes it has."""
    parts: list[object] = [type(node).__name__]
    size = 1
    for name, value in ast.iter_fields(node):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                number, below = _number(item, known)
                size += below
                parts.append((name, number))
            else:
                parts.append((name, type(item).__name__, repr(item)))
    return known.setdefault(tuple(parts), len(known)), size


class DiversityMonitor(Callback):
    """Logs ``diversity/unique_share``, ``/nodes``, ``/snippets`` and ``/unparsed`` when probe calls come back.

    It stands behind the feedback callback in the list, because it reads what that has collected after the batch.
    """

    def __init__(self, feedback: ExecutionFeedback) -> None:
        self._feedback = feedback
        self._measured = 0

    def batch_end(self, state: State, logger: Logger) -> None:
        """Measure the probe calls that this batch's end brought."""
        self._measured = 0
        self._log(logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Measure those that came after the last batch."""
        self._log(logger)

    def _log(self, logger: Logger) -> None:
        calls = [judged.call for judged in self._feedback.probed[self._measured :]]
        self._measured += len(calls)
        if not calls:
            return
        found = measure(text for call in calls for text in snippets(call))
        metrics = {"nodes": found.nodes, "snippets": found.parsed, "unparsed": found.unparsed}
        logger.log_metrics({f"diversity/{name}": float(value) for name, value in metrics.items()})
        if found.unique_share is not None:
            logger.log_metrics({"diversity/unique_share": found.unique_share})
