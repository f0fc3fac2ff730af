"""Run by Composer's launcher, one process a rank: trains on this rank's sessions and writes the losses it saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from composer.utils import dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support_agent import InProcessExecutor, make_renderer, sessions
from support_training import train_agent

from agentft.config.schema import FeedbackConfig, PolicyConfig, ProbeConfig, RecordedConfig
from agentft.sandbox.base import Executor
from agentft.sandbox.replay import ReplayExecutor

RECORDED = FeedbackConfig(recorded=RecordedConfig(prefetch_batches=1), probe=ProbeConfig(every=0))
SAMPLED = FeedbackConfig(policy=PolicyConfig(every=1, calls=4), probe=ProbeConfig(every=2, calls=2))


def train(folder: Path, executor: Executor, config: FeedbackConfig) -> dict[str, object]:
    """Train three batches of four sessions, shared out over the ranks; return what this rank saw."""
    known, ranks, rank = sessions(8), dist.get_world_size(), dist.get_global_rank()
    seen, feedback, _ = train_agent(
        folder,
        executor,
        config,
        renderer=make_renderer(known),
        known=known[rank::ranks],
        batches=3,
        batch_size=4 // ranks,
    )
    return {"totals": seen.totals, "losses": seen.losses, "summary": feedback.summary()}


def main(folder: Path) -> None:
    dist.initialize_dist("cpu")
    rank = dist.get_global_rank()
    seen = {
        "recorded": train(folder / "recorded", InProcessExecutor(), RECORDED),
        "sampled": train(folder / "sampled", InProcessExecutor(), SAMPLED),
    }
    dist.barrier()
    seen["replayed"] = train(folder / "replayed", ReplayExecutor(folder / "sampled", rank=rank), SAMPLED)
    (folder / f"seen{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
