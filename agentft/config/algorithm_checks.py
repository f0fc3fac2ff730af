"""Cross-checks of ``algorithms`` and ``data.curriculum`` (floor 1): ranges, and settings that cannot take effect."""

from __future__ import annotations

import math
from collections.abc import Iterator

from agentft.config.checks import Problem, out_of_range, parse_time
from agentft.config.schema import RunConfig


def check_algorithms(config: RunConfig) -> Iterator[Problem]:
    """Yield every problem of the two sections."""
    yield from _check_ranges(config)
    yield from _check_curriculum(config)
    yield from _check_warmup(config)
    yield from _check_what_is_needed(config)


def _check_ranges(config: RunConfig) -> Iterator[Problem]:
    a = config.algorithms
    at_least_one = {
        "algorithms.raspberry.window": a.raspberry.window,
        "algorithms.length_warmup.start": a.length_warmup.start,
        "algorithms.early_stop.patience": a.early_stop.patience,
        "algorithms.spikes.window": a.spikes.window,
        "algorithms.spikes.most_skips": a.spikes.most_skips,
        "algorithms.samples.count": a.samples.count,
        "algorithms.samples.max_tokens": a.samples.max_tokens,
    }
    not_negative = {
        "algorithms.raspberry.alpha": a.raspberry.alpha,
        "algorithms.early_stop.min_delta": a.early_stop.min_delta,
        "algorithms.monitors.speed": a.monitors.speed,
        "algorithms.monitors.activations": a.monitors.activations,
        "algorithms.samples.every": a.samples.every,
    }
    yield from out_of_range(at_least_one, lambda v: 1 <= v < math.inf, "1 or more")
    yield from out_of_range(not_negative, lambda v: 0 <= v < math.inf, "0 or more")
    yield from out_of_range({"algorithms.raspberry.p": a.raspberry.p}, lambda v: 0 <= v <= 1, "from 0 to 1")
    skipped = {"algorithms.stochastic_depth.p": a.stochastic_depth.p}
    yield from out_of_range(skipped, lambda v: 0 <= v < 1, "from 0 to below 1")
    yield from out_of_range({"algorithms.spikes.factor": a.spikes.factor}, lambda v: 0 < v < math.inf, "more than 0")


def _check_curriculum(config: RunConfig) -> Iterator[Problem]:
    curriculum, key = config.data.curriculum, "data.curriculum.widths"
    widths = curriculum.widths
    if not widths or any(not 0 <= width <= 1 for width in widths) or sorted(widths) != list(widths):
        what = "the widths of the curriculum are no rising shares"
        yield Problem(keys=(key,), what=what, got=widths, expected="one or more numbers from 0 to 1 that do not fall")
    elif curriculum.by == "steps" and widths[0] == 1:
        yield Problem(
            keys=(key, "data.curriculum.by"),
            what="the curriculum has no effect",
            got=f"widths={widths}: every epoch begins with all sessions",
            hint="begin with less, such as [0.2, 0.5, 1.0], or set data.curriculum.by=none",
        )


def _check_warmup(config: RunConfig) -> Iterator[Problem]:
    warmup, longest = config.algorithms.length_warmup, config.text.max_tokens
    parsed = parse_time(warmup.until)
    if parsed is None or parsed[1] == "dur" or parsed[0] == 0:
        key = "algorithms.length_warmup.until"
        yield Problem(keys=(key,), what=f"{key} is not a time", got=warmup.until, expected="such as 5ep or 200ba")
    if warmup.enabled and warmup.start >= longest:
        yield Problem(
            keys=("algorithms.length_warmup.start", "text.max_tokens"),
            what="the length warm-up has no effect",
            got=f"start={warmup.start}, text.max_tokens={longest}: no row is longer",
            hint=f"set algorithms.length_warmup.start below {longest}, or enabled=false",
        )
    if warmup.enabled and warmup.end < max(warmup.start, longest):
        yield Problem(
            keys=("algorithms.length_warmup.end", "text.max_tokens"),
            what="the length warm-up ends with a jump",
            got=f"start={warmup.start}, end={warmup.end}, text.max_tokens={longest}",
            expected=f"end at {max(warmup.start, longest)} or beyond",
        )


def _check_what_is_needed(config: RunConfig) -> Iterator[Problem]:
    a, f = config.algorithms, config.feedback
    off = f.backend == "off"
    if a.raspberry.enabled and (off or (f.recorded.share == 0 and f.policy.every == 0)):
        yield Problem(
            keys=("algorithms.raspberry.enabled", "feedback.backend" if off else "feedback.recorded.share"),
            what="algorithms.raspberry has no effect: no call is executed whose failure it could learn of",
            got=f"feedback.backend={f.backend}, recorded.share={f.recorded.share}, policy.every={f.policy.every}",
            hint="switch feedback on, or set algorithms.raspberry.enabled=false",
        )
    if a.diversity and (off or f.probe.every == 0):
        yield Problem(
            keys=("algorithms.diversity", "feedback.backend" if off else "feedback.probe.every"),
            what="algorithms.diversity has no effect: no call is sampled on held-out sessions",
            got=f"feedback.backend={f.backend}, probe.every={f.probe.every}",
            hint="set feedback.probe.every, or algorithms.diversity=false",
        )
    interval = parse_time(config.train.eval_interval)
    if a.early_stop.metric is not None and interval is not None and interval[0] == 0:
        yield Problem(
            keys=("algorithms.early_stop.metric", "train.eval_interval"),
            what="algorithms.early_stop has no effect: nothing is evaluated while training",
            got=f"train.eval_interval={config.train.eval_interval}",
            hint="set train.eval_interval, such as 1ep, or algorithms.early_stop.metric=null",
        )
    needs_agent = {
        "algorithms.raspberry.enabled": a.raspberry.enabled,
        "algorithms.diversity": a.diversity,
        "algorithms.samples.every": a.samples.every > 0,
    }
    steps = {"data.curriculum.by": config.data.curriculum.by == "steps"}
    for key, on in (needs_agent if config.stage == "sft" else needs_agent | steps).items():
        if on and config.stage != "agent":
            yield Problem(keys=(key, "stage"), what=f"{key} has no effect", got=f"stage={config.stage}")
