"""Cross-checks of a whole ``RunConfig`` (floor 1): ranges, times, and settings that contradict each other.

Pure functions; ``agentft.config.load`` turns each ``Problem`` into an error that names the line of the YAML.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from agentft.config import checkpoints, distributed, forgetting, mixing, objectives
from agentft.config.chat import problems as chat_problems
from agentft.config.hosts import ADDRESSES, RAY_AUTO, host_problem
from agentft.config.schema import RunConfig

_TIME = re.compile(r"(?P<value>\d+(?:\.\d+)?)(?P<unit>ep|ba|dur)")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is wrong with the values of ``keys`` (dotted); the first key decides which line is named."""

    keys: tuple[str, ...]
    what: str
    got: object = None
    expected: str | None = None
    hint: str | None = None


def parse_time(text: str) -> tuple[float, str] | None:
    """Return (value, unit) of ``24ep``, ``300ba`` or ``0.5dur``; None if it is none of these."""
    match = _TIME.fullmatch(text)
    if match is None or (match["unit"] != "dur" and "." in match["value"]):
        return None
    return float(match["value"]), match["unit"]


def out_of_range(values: Mapping[str, float], holds: Callable[[float], bool], expected: str) -> Iterator[Problem]:
    """Yield a problem for each key whose value does not hold."""
    for key, value in values.items():
        if not holds(value):
            yield Problem(keys=(key,), what=f"{key} is out of range", got=value, expected=expected)


def check(config: RunConfig, *, world_size: int = 1) -> Iterator[Problem]:
    """Yield every problem of ``config`` that does not need other parts of the package."""
    yield from _check_ranges(config)
    yield from _check_times(config)
    yield from _check_model(config)
    yield from _check_adapters(config)
    yield from _check_data(config, world_size)
    yield from _check_feedback(config)
    yield from _check_hosts(config)
    yield from _check_chat(config)
    yield from _check_operations(config)
    yield from _check_forgetting(config, world_size)
    yield from _check_objectives(config)
    yield from _check_batches(config)


def _check_ranges(config: RunConfig) -> Iterator[Problem]:
    o, f, s, t, d = config.optimizer, config.feedback, config.sandbox, config.text, config.data
    at_least_one = {
        "text.max_tokens": t.max_tokens,
        "text.result_tokens": t.result_tokens,
        "model.feedback_positions.start": config.model.feedback_positions.start,
        "data.batch_size": d.batch_size,
        "data.microbatch_size": d.microbatch_size,
        "data.num_canonical_nodes": d.num_canonical_nodes,
        "feedback.policy.calls": f.policy.calls,
        "feedback.probe.calls": f.probe.calls,
        "feedback.distillation.max_calls": f.distillation.max_calls,
        "sandbox.workers": s.workers,
        "sandbox.memory_mib": s.memory_mib,
        "sandbox.pids": s.pids,
    }
    not_negative = {
        "seed": config.seed,
        "data.num_workers": d.num_workers,
        "optimizer.backbone_lr": o.backbone_lr,
        "optimizer.intent_lr": o.intent_lr,
        "optimizer.tool_lr": o.tool_lr,
        "optimizer.reward_lr": o.reward_lr,
        "optimizer.cursor_lr": o.cursor_lr,
        "optimizer.weight_decay": o.weight_decay,
        "optimizer.clip_norm": o.clip_norm,
        "feedback.recorded.prefetch_batches": f.recorded.prefetch_batches,
        "feedback.policy.every": f.policy.every,
        "feedback.probe.every": f.probe.every,
        "sandbox.cache.mib": s.cache.mib,
        "train.threads": config.train.threads,
        "train.vocab_chunk_tokens": config.train.vocab_chunk_tokens,
    }
    above_zero = {
        "model.feedback_positions.rotary_base": config.model.feedback_positions.rotary_base,
        "optimizer.decay_per_epoch": o.decay_per_epoch,
        "feedback.policy.temperature": f.policy.temperature,
        "feedback.probe.temperature": f.probe.temperature,
        "feedback.distillation.temperature": f.distillation.temperature,
        "feedback.wait_s": f.wait_s,
        "sandbox.timeout_s": s.timeout_s,
        "sandbox.cpus": s.cpus,
    }
    share = {
        "optimizer.final_lr": o.final_lr,
        "optimizer.decay_per_epoch": o.decay_per_epoch,
        "feedback.recorded.share": f.recorded.share,
        "feedback.max_infra_share": f.max_infra_share,
        "data.input_noise": d.input_noise,
        "sandbox.cache.verify_share": s.cache.verify_share,
    }
    yield from out_of_range(at_least_one, lambda v: v >= 1, "1 or more")
    yield from out_of_range(not_negative, lambda v: 0 <= v < math.inf, "0 or more")
    yield from out_of_range(above_zero, lambda v: 0 < v < math.inf, "more than 0")
    yield from out_of_range(share, lambda v: 0 <= v <= 1, "between 0 and 1")
    if not all(0 <= beta < 1 for beta in o.betas):
        yield Problem(keys=("optimizer.betas",), what="optimizer.betas is out of range", got=o.betas, expected="[0, 1)")


def _check_times(config: RunConfig) -> Iterator[Problem]:
    times = {
        "train.duration": (config.train.duration, ("ep", "ba")),
        "train.eval_interval": (config.train.eval_interval, ("ep", "ba", "dur")),
        "train.checkpoints.interval": (config.train.checkpoints.interval, ("ep", "ba", "dur")),
        "optimizer.warmup": (config.optimizer.warmup, ("ep", "ba", "dur")),
    }
    for key, (text, units) in times.items():
        parsed = parse_time(text)
        if parsed is None or parsed[1] not in units:
            example = ", ".join({"ep": "24ep", "ba": "300ba", "dur": "0.1dur"}[unit] for unit in units)
            yield Problem(keys=(key,), what=f"{key} is not a time", got=text, expected=f"such as {example}")
    duration, warmup = parse_time(config.train.duration), parse_time(config.optimizer.warmup)
    if duration and duration[0] == 0:
        yield Problem(keys=("train.duration",), what="the run has no length", got=config.train.duration)
    if duration and warmup and duration[1] == warmup[1] and warmup[0] > duration[0]:
        yield Problem(
            keys=("optimizer.warmup", "train.duration"),
            what="the warm-up is longer than the run",
            got=f"{config.optimizer.warmup} of {config.train.duration}",
            hint="shorten optimizer.warmup or lengthen train.duration",
        )


def _check_model(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    if (model.preset is None) == (model.path is None):
        yield Problem(
            keys=("model.preset", "model.path"),
            what="the backbone comes from a preset or from a path, exactly one of them",
            got=f"preset={model.preset}, path={model.path}",
            hint="set one and leave the other null",
        )
    if model.feedback_positions.enabled and model.feedback_positions.start < config.text.max_tokens:
        yield Problem(
            keys=("model.feedback_positions.start", "text.max_tokens"),
            what="the range of feedback positions starts inside the conversation",
            got=f"start={model.feedback_positions.start}, text.max_tokens={config.text.max_tokens}",
            expected="start at text.max_tokens or beyond",
        )
    if config.stage != "pretrain" and config.text.result_tokens >= config.text.max_tokens:
        yield Problem(
            keys=("text.result_tokens", "text.max_tokens"),
            what="one result may fill the whole sequence",
            got=f"result_tokens={config.text.result_tokens}, max_tokens={config.text.max_tokens}",
            expected="text.result_tokens below text.max_tokens",
        )


def _check_adapters(config: RunConfig) -> Iterator[Problem]:
    lora, quantize = config.model.lora, config.model.quantize
    if lora is not None:
        if lora.rank < 1:
            yield Problem(
                keys=("model.lora.rank",), what="model.lora.rank is out of range", got=lora.rank, expected="1 or more"
            )
        if not 0 < lora.alpha < math.inf:
            yield Problem(
                keys=("model.lora.alpha",),
                what="model.lora.alpha is out of range",
                got=lora.alpha,
                expected="more than 0",
            )
        if not 0 <= lora.dropout < 1:
            yield Problem(
                keys=("model.lora.dropout",),
                what="model.lora.dropout is out of range",
                got=lora.dropout,
                expected="[0, 1)",
            )
        if config.model.preset is not None:
            yield Problem(
                keys=("model.lora", "model.preset"),
                what="adapters need weights that were trained before",
                got=f"preset={config.model.preset}, whose frozen weights would be random",
                hint="set model.path to a checkpoint and model.preset to null, or model.lora to null",
            )
    elif quantize != "none":
        yield Problem(
            keys=("model.quantize", "model.lora"),
            what="quantised weights cannot be trained themselves",
            got=f"model.quantize={quantize}, model.lora=null",
            hint="add a section model.lora, or set model.quantize=none",
        )
    shared = config.train.distributed.strategy == "fsdp"
    if shared and (quantize != "none" or (lora is not None and lora.frozen != "fp32")):
        yield Problem(
            keys=("model.quantize" if quantize != "none" else "model.lora.frozen", "train.distributed.strategy"),
            what="fsdp shares out weights of one precision only",
            got=f"model.quantize={quantize}, model.lora.frozen={lora.frozen if lora else None}",
            expected="model.quantize=none and model.lora.frozen=fp32; each process holds a share of it",
        )
    if quantize != "none" and config.train.device == "cpu":
        yield Problem(
            keys=("model.quantize", "train.device"),
            what="quantised weights need a GPU",
            got=f"model.quantize={quantize}, train.device=cpu",
            hint="set train.device=gpu, or model.quantize=none",
        )


def _check_data(config: RunConfig, world_size: int) -> Iterator[Problem]:
    data = config.data
    if data.remote is not None and "://" not in data.remote:
        yield Problem(
            keys=("data.remote",),
            what="data.remote is not an address of an object store",
            got=data.remote,
            expected="s3://bucket/prefix",
            hint="for a local folder set data.shards and leave data.remote null",
        )
    if data.batch_size >= 1 and data.batch_size % world_size:
        yield Problem(
            keys=("data.batch_size",),
            what=f"the global batch cannot be shared by {world_size} processes",
            got=data.batch_size,
            expected=f"a multiple of {world_size}",
        )
    elif data.packing != "pack" and data.microbatch_size > data.batch_size // world_size >= 1:
        yield Problem(
            keys=("data.microbatch_size", "data.batch_size"),
            what="a microbatch is larger than a process's share of the batch",
            got=f"microbatch_size={data.microbatch_size}, batch_size={data.batch_size}, processes={world_size}",
            expected=f"data.microbatch_size at most {data.batch_size // world_size}",
        )


def _check_batches(config: RunConfig) -> Iterator[Problem]:
    for parts in mixing.problems(config):
        yield Problem(**parts)


def _check_chat(config: RunConfig) -> Iterator[Problem]:
    for parts in chat_problems(config, RunConfig()):
        yield Problem(**parts)


def _check_feedback(config: RunConfig) -> Iterator[Problem]:
    feedback = config.feedback
    if feedback.backend == "replay" and not feedback.replay_from:
        yield Problem(
            keys=("feedback.replay_from", "feedback.backend"),
            what="replay needs the run whose executions are repeated",
            hint="set feedback.replay_from=runs/<name>",
        )
    if feedback.backend != "replay" and feedback.replay_from:
        yield Problem(
            keys=("feedback.replay_from", "feedback.backend"),
            what="feedback.replay_from has no effect",
            got=f"feedback.backend={feedback.backend}",
            hint="set feedback.backend=replay or leave feedback.replay_from null",
        )
    if feedback.reward.passed <= feedback.reward.failed:
        yield Problem(
            keys=("feedback.reward.passed", "feedback.reward.failed"),
            what="a call that passes must be worth more than one that fails",
            got=f"passed={feedback.reward.passed}, failed={feedback.reward.failed}",
        )
    if config.sandbox.cache.folder and not config.sandbox.cache.mib:
        yield Problem(
            keys=("sandbox.cache.folder", "sandbox.cache.mib"),
            what="sandbox.cache.folder has no effect",
            got="sandbox.cache.mib=0, which keeps results in memory only",
            hint="give sandbox.cache.mib a size, or leave sandbox.cache.folder null",
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.run_name):
        yield Problem(
            keys=("run_name",),
            what="run_name is not the name of a folder",
            got=config.run_name,
            expected="letters, digits, dot, dash and underscore",
        )


def _check_objectives(config: RunConfig) -> Iterator[Problem]:
    for parts in objectives.problems(
        config.objectives,
        stage=config.stage,
        backend=config.feedback.backend,
        calibration_split=config.data.calibration_split,
        input_noise=config.data.input_noise,
    ):
        yield Problem(**parts)


def _check_operations(config: RunConfig) -> Iterator[Problem]:
    train = config.train
    for parts in checkpoints.problems(
        train.checkpoints,
        interval=parse_time(train.checkpoints.interval),
        evaluated=parse_time(train.eval_interval),
        overwrite=config.overwrite,
    ):
        yield Problem(**parts)
    feedback = config.feedback if config.feedback.backend != "off" else None
    alone = {
        "feedback.policy.every": feedback and feedback.policy.every,
        "feedback.probe.every": feedback and feedback.probe.every,
        "loss.distill": feedback and (config.loss.distill.kind != "constant" or config.loss.distill.start),
        "forgetting.ewc.weight": config.forgetting.ewc.weight,
        "algorithms.samples.every": config.algorithms.samples.every,
        "model.quantize": config.model.quantize if config.model.quantize != "none" else None,
    }
    for parts in distributed.problems(train.distributed, alone):
        yield Problem(**parts)


def _check_forgetting(config: RunConfig, world_size: int) -> Iterator[Problem]:
    for parts in forgetting.problems(
        config.forgetting,
        stage=config.stage,
        distilled=config.loss.distill.kind != "constant" or config.loss.distill.start > 0,
        batch_size=config.data.batch_size,
        shards=config.data.shards,
        path=config.model.path,
        adapters=config.model.lora is not None,
        world_size=world_size,
    ):
        yield Problem(**parts)


def _check_hosts(config: RunConfig) -> Iterator[Problem]:
    sandbox, backend = config.sandbox, config.feedback.backend
    for host in sandbox.hosts:
        if problem := host_problem(host, sandbox.tls):
            plain = host.startswith("tcp://") and "plain" in problem
            yield Problem(
                keys=("sandbox.hosts", *(("sandbox.tls",) if plain else ())),
                what=problem,
                got=host,
                expected=ADDRESSES,
                hint="set sandbox.tls to a folder with ca.pem, cert.pem and key.pem" if plain else None,
            )
    if len(set(sandbox.hosts)) < len(sandbox.hosts):
        yield Problem(keys=("sandbox.hosts",), what="a host is named twice", got=sandbox.hosts)
    if backend == "local" and (sandbox.runtime or any(host != RAY_AUTO for host in sandbox.hosts)):
        yield Problem(
            keys=("sandbox.runtime" if sandbox.runtime else "sandbox.hosts", "feedback.backend"),
            what="the local backend has no engines and no container runtimes",
            got=sandbox.runtime or sandbox.hosts,
            hint=f"set feedback.backend=docker (on a Ray cluster, sandbox.hosts=[{RAY_AUTO}] goes with local too)",
        )
