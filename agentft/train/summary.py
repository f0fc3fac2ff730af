"""``summary.json`` of a finished run (floor 5): losses, executions, probe, tokens, seconds and versions."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from composer.utils import dist

from agentft import __version__
from agentft.algorithms.padding import PaddingShare
from agentft.feedback.trace import read_traces
from agentft.files import write_json
from agentft.train.build import BuiltRun

PACKAGES = ("mosaicml", "mosaicml-streaming", "torch", "transformers", "numpy", "docker")


def write_summary(
    folder: Path, run: BuiltRun, seconds: Mapping[str, float], calibration: Mapping[str, Any] | None
) -> None:
    """Write the training's part of ``summary.json``. A collective call; the first rank writes.

    ``calibration``: what ``evals.calibrate`` fitted, None where nothing was.
    """
    parts = dist.all_gather_object(run.feedback.summary() if run.feedback else {})
    if dist.get_global_rank() != 0:
        return
    trained = run.record.trained_tokens
    padding = next((part for part in run.trainer.state.callbacks if isinstance(part, PaddingShare)), None)
    timestamp = run.trainer.state.timestamp
    summary = {
        "batches": timestamp.batch.value,
        "loss": run.record.loss_summary(),
        "eval_loss": run.record.eval_losses,
        "calibration": calibration,
        "tokens": {"trained": trained, "context": timestamp.token.value - trained},
        "padding": padding.summary() if padding else None,
        **feedback_summary(folder, parts),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "versions": versions(),
    }
    write_json(folder / "summary.json", summary)


def feedback_summary(folder: Path, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return sandbox, traces and probe. ``executions`` really ran; ``cache_hits`` were answered beside them; ms.

    ``tampered`` counts verdicts over sessions that tampered with their tests; ``cache`` says how many hits were run
    again (``verified``), how many of them differed (``mismatches``), and which tools are therefore ``disabled``.
    """
    parts = [part for part in parts if part]
    lines = list(read_traces(folder)) if parts else []
    ran = [line for line in lines if line.status is not None and not line.cached]
    ended_ms = [line.duration_s * 1000 for line in ran if line.status != "infra"]
    return {
        "sandbox": {
            "executions": len(ran),
            "by_status": dict(sorted(Counter(str(line.status) for line in ran).items())),
            "median_ms": round(median(ended_ms), 3) if ended_ms else None,
            "cache_hits": sum(line.cached for line in lines),
            "tampered": sum(bool(line.fields.get("tampered")) for line in lines),
            "cache": cache_summary([part["executor"].get("cache", {}) for part in parts]),
        },
        "traces": {"path": str(folder / "traces"), "lines": len(lines)},
        "probe": {name: sum(part["probe"][name] for part in parts) for name in ("calls", "parse_ok", "exit0")},
    }


def cache_summary(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the ranks' caches say, together (all zero where nothing is cached, as in a replay)."""
    counts = {name: sum(part.get(name, 0) for part in parts) for name in ("from_disk", "verified", "mismatches")}
    return {**counts, "disabled": sorted({tool for part in parts for tool in part.get("disabled", ())})}


def versions() -> dict[str, str]:
    """Return the versions that decide about results."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"agentft": __version__, "python": platform.python_version(), **found}
