"""Samples, bootstrap intervals, gates, and the report of a benchmark.

    samples = Samples()
    samples.add("agentft/python", seconds)
    ratio = samples.ratio("agentft/python", "floor/python")     # of medians, with a 95 % interval
    gates = [Gate("warm call / floor", ratio.value, 1.25, "lower")]
    sys.exit(report(gates, samples, context, path))

Every figure is computed from the raw samples, and the raw samples are in the JSON file.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

BOOTSTRAPS, SEED = 1000, 7
RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def show(self, digits: int = 2, scale: float = 1.0) -> str:
        """Return ``value [low, high]``."""
        return f"{self.value * scale:.{digits}f} [{self.low * scale:.{digits}f}, {self.high * scale:.{digits}f}]"


class Samples:
    """Raw samples by name, in the order in which they were taken."""

    def __init__(self) -> None:
        self.raw: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        """Keep one sample."""
        self.raw.setdefault(name, []).append(value)

    def __contains__(self, name: str) -> bool:
        return bool(self.raw.get(name))

    def quantile(self, name: str, share: float = 0.5) -> Estimate:
        """Return a quantile of the samples (the median unless said otherwise)."""
        return _estimate(np.quantile(self._array(name), share), np.quantile(self._resampled(name), share, axis=1))

    def ratio(self, name: str, to: str) -> Estimate:
        """Return median(name) / median(to)."""
        value = np.median(self._array(name)) / np.median(self._array(to))
        return _estimate(
            value, np.median(self._resampled(name), axis=1) / np.median(self._resampled(to, SEED + 1), axis=1)
        )

    def _array(self, name: str) -> npt.NDArray[np.float64]:
        return np.asarray(self.raw[name], dtype=np.float64)

    def _resampled(self, name: str, seed: int = SEED) -> npt.NDArray[np.float64]:
        values = self._array(name)
        return values[np.random.default_rng(seed).integers(0, len(values), (BOOTSTRAPS, len(values)))]


def _estimate(value: np.float64, resampled: npt.NDArray[np.float64]) -> Estimate:
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Estimate(float(value), float(low), float(high))


@dataclass(frozen=True)
class Gate:
    """A figure that a benchmark promises. ``value`` None: it could not be measured, which is a failure."""

    name: str
    value: float | None
    target: float
    better: Literal["lower", "higher"]

    @property
    def ok(self) -> bool:
        """Whether the promise holds."""
        if self.value is None:
            return False
        return self.value <= self.target if self.better == "lower" else self.value >= self.target

    def show(self) -> str:
        """Return the value for a table."""
        if self.value is None:
            return "not measured"
        return f"{self.value:,.0f}" if self.value >= 1000 else f"{self.value:.3g}"

    def to_json(self) -> dict[str, Any]:
        """Return {name, value, target, better, ok}."""
        return {"name": self.name, "value": self.value, "target": self.target, "better": self.better, "ok": self.ok}


def wide_console() -> Console:
    """Return a console that does not fold tables where the output is a file."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def machine() -> dict[str, Any]:
    """Return what the figures depend on: cores, load, kernel, Python."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "nice": os.nice(0),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def report(gates: Sequence[Gate], samples: Samples, context: dict[str, Any], path: Path) -> int:
    """Print the gates, write {gates, context, samples} to ``path``; return the exit code."""
    table = Table("gate", "measured", "target", "", title="Gates", title_justify="left")
    for gate in gates:
        sign = "≤" if gate.better == "lower" else "≥"
        table.add_row(
            gate.name, gate.show(), f"{sign} {gate.target:g}", "[green]pass[/]" if gate.ok else "[red]FAIL[/]"
        )
    console = wide_console()
    console.print(table)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"gates": [gate.to_json() for gate in gates], "context": context, "samples": samples.raw}
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"written: {path}")
    return 0 if all(gate.ok for gate in gates) else 1
