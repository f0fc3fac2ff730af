"""A progress bar on standard error with rate and time left (floor 3); silent where standard error is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def track(label: str, total: int, *, enabled: bool = True) -> Iterator[Callable[[], None]]:
    """Give a function that counts one item of ``total`` as done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (enabled and console.is_terminal)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)
