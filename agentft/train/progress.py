"""What a person sees while a run trains (floor 5): a progress bar with losses, rate and time left, and ``train.log``.

On a terminal one live line; elsewhere a plain line every ten seconds. ``train.log`` gets a plain line for every batch.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, TextIO

from composer.core import State, TimeUnit
from composer.loggers import Logger, LoggerDestination
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

PLAIN_EVERY_S = 10.0
SMOOTHING = 0.3
"""Weight of the newest batch in the shown losses."""


class ProgressReport(LoggerDestination):
    """Shows progress on the console and writes it to a file; one per run, on the first rank.

    Args:
        console: Where to show it, or None for no console.
        file: ``train.log``, or None.
    """

    def __init__(self, console: Console | None, file: Path | None) -> None:
        self._console, self._path = console, file
        self._file: TextIO | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._shown: dict[str, float] = {}
        self._held_out: dict[str, float] = {}
        self._started = self._last_line = 0.0
        self._tokens_at_start = self._batches_at_start = self._total = 0

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep the losses that were logged, smoothed."""
        for name, value in metrics.items():
            if name.startswith("loss/") and name.endswith("/raw") and metrics[f"{name[:-4]}/count"]:
                key = name.split("/")[1]
                self._shown[key] = self._shown.get(key, value) * (1 - SMOOTHING) + value * SMOOTHING
            elif name.startswith("metrics/eval/"):
                self._held_out[name.removeprefix("metrics/eval/")] = float(value)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Open the file and the bar."""
        self._started = self._last_line = time.monotonic()
        self._tokens_at_start = state.timestamp.token.value
        self._batches_at_start = state.timestamp.batch.value
        self._total = _batches(state)
        if self._path is not None:
            self._file = self._path.open("a", buffering=1)
        if self._console is not None and self._console.is_terminal:
            columns = (TextColumn("train"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
            self._task = self._progress.add_task("", total=self._total)
            self._progress.start()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Show this batch; losses that other callbacks log at the same event appear with the next one."""
        line = self._line(state)
        if self._file is not None:
            self._file.write(line + "\n")
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=state.timestamp.batch.value, description=self._losses())
        elif self._console is not None and self._due(state):
            self._console.print(line, highlight=False, soft_wrap=True)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Show the losses on the held-out split; where there are several evaluations, those of the one that ended."""
        kind = str(state.dataloader_label).removeprefix("eval")  # "" or "/fim"
        shown = {name: value for name, value in self._held_out.items() if f"/{name}".rpartition("/")[0] == kind}
        found = "  ".join(f"{name} {value:.3f}" for name, value in shown.items() if value == value)
        self._say(f"held out after batch {state.timestamp.batch.value}: {found}")

    def fit_end(self, state: State, logger: Logger) -> None:
        """Leave the last batch as a plain line in the place of the bar."""
        if self._progress is not None and self._console is not None:
            self._stop()
            self._console.print(self._line(state), highlight=False)

    def close(self, state: State, logger: Logger) -> None:
        """Close bar and file. Idempotent."""
        self._stop()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _due(self, state: State) -> bool:
        now, last = time.monotonic(), state.timestamp.batch.value >= self._total
        if not last and now - self._last_line < PLAIN_EVERY_S:
            return False
        self._last_line = now
        return True

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _say(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, highlight=False, soft_wrap=True)
        if self._file is not None:
            self._file.write(text + "\n")

    def _losses(self) -> str:
        return "  ".join(f"{name} {value:.3f}" for name, value in self._shown.items())

    def _line(self, state: State) -> str:
        done, seconds = state.timestamp.batch.value, time.monotonic() - self._started
        tokens = state.timestamp.token.value - self._tokens_at_start
        here = done - self._batches_at_start
        left_s = seconds / max(here, 1) * max(self._total - done, 0)
        rate = f"{here / seconds:.2f} batches/s, {tokens / seconds:,.0f} tokens/s, {_clock(left_s)} left"
        return f"batch {done}/{self._total}  {self._losses()}  ({rate})"


def _batches(state: State) -> int:
    """Return how many batches the run has."""
    end = state.max_duration
    assert end is not None
    return int(end.value * (state.dataloader_len or 1)) if end.unit == TimeUnit.EPOCH else int(end.value)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
