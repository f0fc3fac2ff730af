"""What a run's checkpoints will need of the disk (floor 5), refused before the run starts if it is not there. Light.

``estimate`` reads the headers of a checkpoint folder's safetensors (preflight, in milliseconds); ``require_room`` is
asked again with exact figures once the model is built.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

from agentft.config.checks import parse_time
from agentft.config.schema import RunConfig
from agentft.errors import EXIT_ENVIRONMENT, AgentFTError

SLACK_GIB = 2.0
"""Room for records, traces, logs and kept results, in GiB."""
FLOAT32_BYTES = 4


def estimate(config: RunConfig) -> tuple[int, int]:
    """Return (bytes of the saved weights, bytes of the trained ones) as far as files say, else (0, 0).

    Weights are trained and saved in float32. Adapters are small beside their backbone, which is not saved: (0, 0).
    """
    if config.model.path is None or config.model.lora is not None:
        return 0, 0
    files = sorted(Path(config.model.path).expanduser().glob("*.safetensors"))
    size = sum(FLOAT32_BYTES * math.prod(shape) for file in files for shape in _shapes(file))
    return size, size


def require_room(config: RunConfig, folder: Path, weights_bytes: int, trained_bytes: int) -> None:
    """Refuse a run whose checkpoints will not fit.

    Args:
        config: The run.
        folder: The run folder; checkpoints that are there already are replaced and count as room.
        weights_bytes: What the weights of a checkpoint take.
        trained_bytes: What the trained ones of them take; the optimiser keeps two numbers for each.

    Raises:
        AgentFTError: Says what is needed, what is there and what to change (exit code 3).
    """
    kept = config.train.checkpoints
    whole, bare = weights_bytes + 2 * trained_bytes, weights_bytes
    files = min(_saved(config), kept.keep_last + kept.keep_best + 1)  # one is written before one is removed
    whole_files = min(files, 2) if kept.strip_optimizer else files
    need = whole_files * whole + (files - whole_files) * bare + weights_bytes + int(SLACK_GIB * 2**30)
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    have = shutil.disk_usage(existing).free
    have += sum(path.stat().st_size for path in (folder / "checkpoints").glob("*.safetensors"))
    if have >= need:
        return
    error = AgentFTError(
        "too little disk space for the checkpoints of this run",
        where=str(existing),
        got=f"{_gib(have)} free",
        expected=f"{_gib(need)}: {files} checkpoints of up to {_gib(whole)}, the model ({_gib(weights_bytes)}) "
        f"and {SLACK_GIB:.0f} GiB of slack",
        hint="put runs_dir on a larger disk, lower train.checkpoints.keep_last or keep_best, save less often, "
        "or set train.checkpoints.strip_optimizer=true",
    )
    error.exit_code = EXIT_ENVIRONMENT
    raise error


def _saved(config: RunConfig) -> float:
    """Return how many checkpoints the run will write; infinite where the units cannot be compared."""
    duration, interval = parse_time(config.train.duration), parse_time(config.train.checkpoints.interval)
    if duration is None or interval is None or interval[0] <= 0:
        return math.inf
    if interval[1] == "dur":
        return math.ceil(1 / interval[0])
    return math.ceil(duration[0] / interval[0]) if interval[1] == duration[1] else math.inf


def _shapes(file: Path) -> list[list[int]]:
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return [entry["shape"] for name, entry in header.items() if name != "__metadata__"]


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
