"""The ``algorithms`` section and ``data.curriculum`` (floor 1): what may bend training, watch it or end it.

Everything is off by default, and off leaves every loss as it was, bit for bit. docs/algorithms.md says what each does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """The order of the sessions within an epoch."""

    by: Literal["none", "steps"] = "none"  # none: shuffled; steps: sessions with few tool steps come first
    widths: list[float] = field(  # one an epoch, the last stays: share of the sessions, easiest first, to begin with
        default_factory=lambda: [0.2, 0.5, 1.0]
    )


@dataclass(frozen=True, kw_only=True)
class RaspberryConfig:
    """Suppression of tools that have failed of late."""

    enabled: bool = False  # off: the tool head is trained as it is
    window: int = 10  # newest executions of a tool that its failure rate is taken over
    p: float = 0.1  # share of the calls whose tool decision is suppressed, drawn anew in each batch
    alpha: float = 0.5  # how far the logit of a tool that always fails is pushed down, in nats


@dataclass(frozen=True, kw_only=True)
class LengthWarmupConfig:
    """Rows are cut short at first."""

    enabled: bool = False  # off: rows are trained whole
    start: int = 512  # longest row in the first batch, in tokens
    end: int = 8192  # longest row right before `until`; from then on nothing is cut
    until: str = "5ep"  # end of the warm-up, such as 5ep or 200ba


@dataclass(frozen=True, kw_only=True)
class StochasticDepthConfig:
    """Whole decoder layers are skipped at random while training."""

    enabled: bool = False  # off: every layer runs
    p: float = 0.1  # probability that the last layer is skipped in a batch; falls linearly to p / layers at the first


@dataclass(frozen=True, kw_only=True)
class EarlyStopConfig:
    """End the run when an evaluation loss no longer falls."""

    metric: Literal["code", "intent", "tool", "cursor", "reward"] | None = None  # evaluation loss to watch; null: none
    patience: int = 3  # evaluations in a row without a new best value before the run ends
    min_delta: float = 0.0  # a new best value must be lower by more than this


@dataclass(frozen=True, kw_only=True)
class SpikesConfig:
    """Batches whose loss is not finite, or far above those before."""

    on_nan: Literal["ignore", "skip", "stop"] = "ignore"  # loss or gradient not finite: skip the step, or stop the run
    on_spike: Literal["ignore", "log", "skip", "stop"] = "ignore"  # loss far above the median of the window
    window: int = 50  # batches that a loss is compared with; nothing is a spike before half of them are there
    factor: float = 8.0  # how far above the median, in robust standard deviations (1.4826 times the median deviation)
    most_skips: int = 5  # batches in a row that may be skipped; one more stops the run


@dataclass(frozen=True, kw_only=True)
class MonitorsConfig:
    """Figures about the machine and the model."""

    learning_rate: bool = False  # lr-DecoupledAdamW/group<n>, in the order of the optimiser's groups
    speed: int = 0  # batches that throughput is averaged over (tokens trained, context, sessions); 0 is off
    memory: bool = False  # memory/…: of the GPU, or the process on a CPU
    activations: int = 0  # batches between looks at the decoder layers' outputs; 0 is off


@dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    """What the model would write, in runs/<name>/samples.txt and samples.jsonl."""

    every: int = 0  # batches between samples; 0 is off
    count: int = 2  # held-out sessions to continue, always the same
    max_tokens: int = 128  # longest turn


@dataclass(frozen=True, kw_only=True)
class AlgorithmsConfig:
    """Algorithms and monitors, each off by default."""

    raspberry: RaspberryConfig = field(default_factory=RaspberryConfig)  # suppression of tools that fail
    length_warmup: LengthWarmupConfig = field(default_factory=LengthWarmupConfig)  # short rows first
    stochastic_depth: StochasticDepthConfig = field(default_factory=StochasticDepthConfig)  # skipped layers
    diversity: bool = False  # share of unique syntax nodes in the code that the probe's calls carry
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)  # end when evaluation no longer improves
    spikes: SpikesConfig = field(default_factory=SpikesConfig)  # losses that are not finite, or jump
    monitors: MonitorsConfig = field(default_factory=MonitorsConfig)  # learning rate, speed, memory, activations
    samples: SamplesConfig = field(default_factory=SamplesConfig)  # readable generations
