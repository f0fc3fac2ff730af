"""What a run writes down while it trains (floor 5): every loss in full precision, and first and last for the summary.

``losses.jsonl``: one line a batch, ``{"batch": 0, "loss/code/raw": …}``; floats are written so that they read back bit
for bit, which is what replay and equal seeds are checked with. ``metrics.jsonl``: everything that is logged.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from composer.core import State
from composer.loggers import Logger, LoggerDestination

from agentft.losses import COMPONENTS, EXTRA_COMPONENTS

LAST_SHARE, LAST_MOST = 0.1, 10
"""``last`` in the summary is the mean over the last tenth of the batches with a target, at most ten of them."""


class RunRecord(LoggerDestination):
    """Writes ``losses.jsonl`` and, if wanted, ``metrics.jsonl`` into a run folder (on the first rank only).

    Args:
        folder: The run folder, or None to keep figures in memory only (ranks above 0).
        metrics: Whether to write ``metrics.jsonl``.
    """

    def __init__(self, folder: Path | None, *, metrics: bool) -> None:
        self._folder, self._metrics = folder, metrics
        self._files: dict[str, TextIO] = {}
        self._raw: dict[str, list[float]] = {name: [] for name in (*COMPONENTS, *EXTRA_COMPONENTS)}
        self._weight: dict[str, list[float]] = {name: [] for name in (*COMPONENTS, *EXTRA_COMPONENTS)}
        self.trained_tokens = 0
        self.eval_losses: dict[str, float] = {}
        self._eval_batch = 0

    def measured(self) -> tuple[int, dict[str, float]]:
        """Return the number of batches done at the newest evaluation, and its losses."""
        return self._eval_batch, self.eval_losses

    def state_dict(self) -> dict[str, Any]:
        """Return what the summary needs of the batches so far; what is on disk stays there."""
        kept = {"raw": self._raw, "weight": self._weight}
        return {
            **{part: {name: np.asarray(row) for name, row in rows.items()} for part, rows in kept.items()},
            "trained_tokens": self.trained_tokens,
            "eval_losses": dict(self.eval_losses),
            "eval_batch": self._eval_batch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self._raw |= {name: row.tolist() for name, row in state["raw"].items()}
        self._weight |= {name: row.tolist() for name, row in state["weight"].items()}
        self.trained_tokens, self._eval_batch = state["trained_tokens"], state["eval_batch"]
        self.eval_losses = dict(state["eval_losses"])

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep and write what was logged; ``step`` is the number of batches done."""
        plain = {name: _plain(value) for name, value in metrics.items()}
        if self._metrics:
            self._write("metrics.jsonl", {"step": step, **plain})
        losses = {name: value for name, value in plain.items() if name.startswith("loss/") and name.endswith("/raw")}
        if losses:
            self._write("losses.jsonl", {"batch": (step or 1) - 1, **losses})  # counted from 0, as in the traces
            self._keep(plain)
        for name, value in plain.items():
            if name.startswith("metrics/eval/") and value is not None:
                self.eval_losses[name.removeprefix("metrics/eval/")] = value
                self._eval_batch = step or 0

    def fit_end(self, state: State, logger: Logger) -> None:
        """Make sure that everything is on disk."""
        for file in self._files.values():
            file.flush()

    def close(self, state: State, logger: Logger) -> None:
        """Close the files. Idempotent."""
        for file in self._files.values():
            file.close()
        self._files = {}
        self._folder = None

    def loss_summary(self) -> dict[str, dict[str, float | None]]:
        """Return component → {first, last, weight_first, weight_last}; None where it never had a target.

        ``first`` is the first batch with a target, ``last`` the mean over the last tenth of them (see ``LAST_SHARE``).
        """
        found: dict[str, dict[str, float | None]] = {}
        for name in (*COMPONENTS, *(extra for extra in EXTRA_COMPONENTS if self._weight[extra])):
            raw, weight = self._raw[name], self._weight[name]
            tail = raw[-max(1, min(LAST_MOST, int(len(raw) * LAST_SHARE))) :]
            found[name] = {
                "first": raw[0] if raw else None,
                "last": sum(tail) / len(tail) if tail else None,
                "weight_first": weight[0] if weight else None,
                "weight_last": weight[-1] if weight else None,
            }
        return found

    def _keep(self, plain: dict[str, Any]) -> None:
        for name in (*COMPONENTS, *(extra for extra in EXTRA_COMPONENTS if f"loss/{extra}/weight" in plain)):
            self._weight[name].append(plain[f"loss/{name}/weight"])
            if plain[f"loss/{name}/count"]:
                self._raw[name].append(plain[f"loss/{name}/raw"])
        self.trained_tokens += round(plain["loss/code/count"])

    def _write(self, name: str, line: dict[str, Any]) -> None:
        if self._folder is None:
            return
        if name not in self._files:
            self._files[name] = (self._folder / name).open("a", buffering=1)
        self._files[name].write(json.dumps(line) + "\n")


def _plain(value: Any) -> float | None:
    """Return a number that JSON has; what is not finite becomes null."""
    number = float(value.item() if hasattr(value, "item") else value)
    return number if math.isfinite(number) else None
