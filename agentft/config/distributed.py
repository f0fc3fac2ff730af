"""``train.distributed`` (floor 1): how several processes share a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """How weights, gradients and optimiser state are shared out (strategy: fsdp)."""

    reshard_after_forward: bool = True  # free a layer's gathered weights until backward; false is faster, needs memory
    gradients: Literal["sharded", "whole"] = "sharded"  # between microbatches; whole reduces once a batch, needs memory


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Several processes, one batch."""

    strategy: Literal["ddp", "fsdp"] = "ddp"  # ddp: every process holds the whole model; fsdp: each its share of it
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)  # how it is shared out


def problems(config: DistributedConfig, alone: Mapping[str, object]) -> Iterator[dict[str, Any]]:
    """Yield what is wrong, as the parts of a ``checks.Problem``.

    Args:
        config: The section.
        alone: Keys of what needs the whole model in one process → their values; what is falsy is off.
    """
    section = "train.distributed"
    if config.strategy == "ddp":
        for name in ("reshard_after_forward", "gradients"):
            if getattr(config.fsdp, name) != getattr(FsdpConfig(), name):
                yield {
                    "keys": (f"{section}.fsdp.{name}", f"{section}.strategy"),
                    "what": f"{section}.fsdp.{name} has no effect",
                    "got": f"{section}.strategy=ddp",
                    "hint": f"set {section}.strategy=fsdp, or leave the key out",
                }
        return
    for key, value in alone.items():
        if value:
            yield {
                "keys": (key, f"{section}.strategy"),
                "what": f"{key} needs the whole model in each process, which fsdp does not keep",
                "got": f"{key}={value}, {section}.strategy=fsdp",
                "hint": f"switch it off, or set {section}.strategy=ddp",
            }
