"""Run by Composer's launcher, one process a rank: trains with everything that changes a loss; writes what it saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from composer.utils import dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support_algorithms import train

from agentft.algorithms.layer_skip import LayerSkip
from agentft.algorithms.length_warmup import LengthWarmup
from agentft.algorithms.monitors import LayerOutputs, TokenSpeed
from agentft.algorithms.raspberry import RASPBerry
from agentft.algorithms.spikes import LossSpikes
from agentft.config.algorithms import LengthWarmupConfig, RaspberryConfig, SpikesConfig, StochasticDepthConfig
from agentft.tools import TOOL_INDEX


def make(feedback: Any) -> Any:
    warmup = LengthWarmupConfig(enabled=True, start=200, end=600, until="3ba")
    raspberry = RaspberryConfig(enabled=True, window=4, p=0.5, alpha=2.0)
    algorithms = [
        LengthWarmup(warmup),
        RASPBerry(raspberry, feedback, tools=list(TOOL_INDEX), failed=-0.5, seed=17),
        LayerSkip(StochasticDepthConfig(enabled=True, p=0.6), seed=17),
    ]
    return algorithms, [LossSpikes(SpikesConfig(on_nan="stop", on_spike="log")), TokenSpeed(2), LayerOutputs(1)]


def run(folder: Path) -> dict[str, Any]:
    """Train six batches; return the curve and what the algorithms logged."""
    result = train(folder, make, batches=6, microbatch=4 // dist.get_world_size())
    names = ("length_warmup/", "raspberry/failure_rate", "stochastic_depth/")
    return {"curve": result.curve, "logged": {k: v for k, v in result.logged.items() if k.startswith(names)}}


def main(folder: Path) -> None:
    dist.initialize_dist("cpu")
    rank = dist.get_global_rank()
    (folder / f"seen{rank}.json").write_text(json.dumps(run(folder / "run")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
