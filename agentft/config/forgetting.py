"""The ``forgetting`` section (floor 1): what keeps a new stage from losing what earlier ones taught.

Three means, all off by default: language modelling on earlier rows beside the stage's own loss, earlier samples trained
again as they were, and a penalty on moving weights that earlier data depends on. Formulas: docs/forgetting.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ReplayBufferConfig:
    """Samples of an earlier stage, trained again with their own targets, in the place of new ones."""

    shards: str | None = None  # folder of an earlier stage's shards; its train split is used
    share: float = 0.0  # share of each global batch that comes from them; must give whole rows a process


@dataclass(frozen=True, kw_only=True)
class EwcConfig:
    """Elastic weight consolidation: weights that earlier data depends on are held back."""

    weight: float = 0.0  # λ of λ/2·Σ F·(w − w*)²; 1 holds them as strongly as the earlier loss itself would
    fisher: str | None = None  # file that `agentft fisher` wrote for the weights of model.path


@dataclass(frozen=True, kw_only=True)
class ForgettingConfig:
    """Against forgetting what earlier stages taught; all off by default."""

    lm_share: float = 0.0  # share s of the language-modelling loss: total = (1−s)·stage + s·LM
    lm_shards: str | None = None  # folder of an earlier stage's shards; every token of its train split is a target
    lm_rows: int = 4  # rows of them beside each global batch, over all processes
    replay: ReplayBufferConfig = field(default_factory=ReplayBufferConfig)  # earlier samples in each batch
    ewc: EwcConfig = field(default_factory=EwcConfig)  # penalty on weights that earlier data depends on

    def replay_rows(self, batch_size: int) -> float:
        """Return how many rows of a global batch of ``batch_size`` are replayed; not whole where it cannot be so."""
        rows = self.replay.share * batch_size
        return round(rows) if math.isclose(rows, round(rows), abs_tol=1e-6) else rows


def problems(
    config: ForgettingConfig,
    *,
    stage: str,
    distilled: bool,
    batch_size: int,
    shards: str,
    path: str | None,
    adapters: bool,
    world_size: int,
) -> Iterator[dict[str, Any]]:
    """Yield the parts of a ``checks.Problem`` for every setting that is out of range or cannot take effect.

    Args:
        config: The section.
        stage: ``stage``.
        distilled: Whether ``loss.distill`` is ever more than 0.
        batch_size: ``data.batch_size``.
        shards: ``data.shards``.
        path: ``model.path``.
        adapters: Whether adapters are trained instead of the weights themselves.
        world_size: Processes that share the global batch.
    """
    shares = {"forgetting.lm_share": config.lm_share, "forgetting.replay.share": config.replay.share}
    for key, share in shares.items():
        if not 0 <= share < 1:
            yield {"keys": (key,), "what": f"{key} is out of range", "got": share, "expected": "0 to below 1"}
    if not 0 <= config.ewc.weight < math.inf:
        key = "forgetting.ewc.weight"
        yield {"keys": (key,), "what": f"{key} is out of range", "got": config.ewc.weight, "expected": "0 or more"}
    for key, amount, beside, source in (
        ("forgetting.lm_share", config.lm_share, "forgetting.lm_shards", config.lm_shards),
        ("forgetting.replay.share", config.replay.share, "forgetting.replay.shards", config.replay.shards),
        ("forgetting.ewc.weight", config.ewc.weight, "forgetting.ewc.fisher", config.ewc.fisher),
    ):
        if amount and source is None:
            yield {"keys": (beside, key), "what": f"{beside} is missing", "got": f"{key}={amount}"}
        elif source is not None and not amount:
            yield {"keys": (beside, key), "what": f"{beside} has no effect", "got": f"{key}=0"}
        elif source == shards:
            what = f"{beside} is what the run trains on anyway"
            yield {"keys": (beside,), "what": what, "got": source, "expected": "the shards of an earlier stage"}
    yield from _row_problems(config, batch_size, world_size)
    if distilled and stage != "agent":
        what = "loss.distill has no effect in this stage, whose rows have no steps"
        yield {"keys": ("loss.distill", "stage"), "what": what, "got": f"stage={stage}", "expected": "weight 0"}
    if config.ewc.weight and (path is None or adapters):
        yield {
            "keys": ("forgetting.ewc.weight", "model.path"),
            "what": "the penalty holds weights that are loaded and trained",
            "got": "random weights (model.preset)" if path is None else "adapters beside frozen weights (model.lora)",
            "expected": "model.path, and all weights trained",
        }


def _row_problems(config: ForgettingConfig, batch_size: int, world_size: int) -> Iterator[dict[str, Any]]:
    rows = config.replay_rows(batch_size)
    if 0 < config.replay.share < 1 and (isinstance(rows, float) or rows % world_size or not 0 < rows < batch_size):
        near = max(world_size, round(rows / world_size) * world_size)
        processes = f", {world_size} processes" if world_size > 1 else ""
        yield {
            "keys": ("forgetting.replay.share", "data.batch_size"),
            "what": "this share of a batch is no whole number of rows for each process",
            "got": f"{config.replay.share:g} of {batch_size} is {rows:g}{processes}",
            "hint": f"set forgetting.replay.share={near / batch_size:g} ({near} rows)" if near < batch_size else None,
        }
    if config.lm_share and (config.lm_rows < 1 or config.lm_rows % world_size):
        yield {
            "keys": ("forgetting.lm_rows",),
            "what": "these rows cannot be shared out",
            "got": config.lm_rows,
            "expected": f"a multiple of {world_size} (processes)" if world_size > 1 else "1 or more",
        }
