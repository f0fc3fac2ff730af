"""From a ``RunConfig`` to a Composer ``Trainer`` (floor 5): the only place where configuration becomes objects.

Read it top to bottom: shards → tokenizer and renderer → model → optimiser → feedback → callbacks and loggers → trainer.
``agentft/train/run.py`` calls ``build`` once per process, after ``torch.distributed`` is initialised.
"""

from __future__ import annotations

import atexit
import gc
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from composer import Evaluator, Trainer
from composer.algorithms import GradientClipping
from composer.core import Algorithm, Callback, DataSpec, Engine, Precision
from composer.loggers import LoggerDestination, TensorboardLogger
from composer.optim import (
    ComposerScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    DecoupledAdamW,
    LinearWithWarmupScheduler,
)
from composer.utils import dist
from rich.console import Console
from torch.distributed.checkpoint.state_dict import _get_fqns
from transformers import PreTrainedTokenizerBase

from agentft.algorithms.loss_weights import GradientNorms, LossWeights
from agentft.algorithms.padding import PaddingShare
from agentft.algorithms.step_decay import StepPerEpoch
from agentft.config.chat import stage_loss
from agentft.config.checks import parse_time
from agentft.config.schema import OptimizerConfig, RunConfig
from agentft.data.loader import SessionDataset, SessionLoader, build_loader, open_shards
from agentft.data.meta import TOKENIZER_NAME, ShardMeta, check_fingerprint
from agentft.data.noise import InputNoise
from agentft.data.objectives import Objectives
from agentft.data.pretrain import build_objectives, held_out_as, weighted
from agentft.data.shards import template_version
from agentft.errors import ModelError
from agentft.etai import Session
from agentft.feedback.callback import ExecutionFeedback
from agentft.feedback.judged import session_of
from agentft.models.adapters import keep_trained_only
from agentft.models.agent_model import AgentModel, CompositeLoss, build_agent_model, parameter_groups
from agentft.models.backbone import checkpoint_activations
from agentft.sandbox.base import Executor, Limits
from agentft.sandbox.cache import ResultCache
from agentft.sandbox.cache_disk import DiskStore
from agentft.text.chat_template import template_fingerprint
from agentft.text.render import Renderer
from agentft.text.vocab import Vocab, load_tokenizer, tokenizer_fingerprint
from agentft.tools import TOOL_INDEX, USER_TOOLS
from agentft.tools.user import specs, user_specs
from agentft.train.build_extras import build_extras
from agentft.train.checkpoint_file import composer_reads_these
from agentft.train.checkpoints import Checkpoints, RandomState, saved_bytes
from agentft.train.disk import require_room
from agentft.train.forgetting import build_distillation, build_earlier_rows, build_ewc, stage_data
from agentft.train.preflight import run_folder
from agentft.train.progress import ProgressReport
from agentft.train.records import RunRecord
from agentft.train.sharding import OneReduction, share_out, whole_weights

OFF = ((0.0, "ba"), (0.0, "ep"), (0.0, "dur"))
"""Times that switch something off."""

MOST_PROBE_SESSIONS = 500
"""Held-out sessions that the probe draws from, at most; they are kept in memory."""


@dataclass(frozen=True, kw_only=True)
class BuiltRun:
    """A run that is ready: ``trainer.fit()`` trains it, ``close`` releases it, the rest is for the summary."""

    trainer: Trainer
    model: AgentModel
    tokenizer: PreTrainedTokenizerBase
    feedback: ExecutionFeedback | None
    record: RunRecord
    calibration: SessionDataset | None

    def is_trained(self) -> bool:
        """Return whether a checkpoint has brought the run to its end."""
        return self.trainer.state.get_elapsed_duration() == 1.0

    def whole(self, config: RunConfig) -> BuiltRun:
        """Return the run with a model that no other process holds a share of; on the first rank. A collective call."""
        if config.train.distributed.strategy != "fsdp":
            return self
        weights = whole_weights(self.model)
        if dist.get_global_rank() != 0:
            return self
        model = build_model(config, self.tokenizer)
        model.load_state_dict(weights, strict=False)
        return replace(self, model=model)

    def close(self) -> None:
        """Close the trainer with its callbacks, and with them the sandbox, and let go of it. Idempotent."""
        self.trainer.close()
        atexit.unregister(Engine._close)  # Composer would keep the closed trainer until the process ends,
        _get_fqns.cache_clear()  # and torch the model whose state a checkpoint holds
        gc.unfreeze()


def build(config: RunConfig, folder: Path, *, resume_from: Path | None = None) -> BuiltRun:
    """Build everything that a run needs. ``folder`` is the run folder; it exists. ``resume_from`` is a checkpoint.

    Raises:
        DataError: The shards are missing, or were made for another tokenizer, template or text configuration.
        ModelError: The backbone cannot be built or does not fit the shards' tokenizer.
        SandboxError: The sandbox cannot be reached or its image is missing.
    """
    meta = open_shards(config.data)
    tokenizer = load_tokenizer(Path(config.data.shards) / TOKENIZER_NAME)
    renderer = build_renderer(config, tokenizer, meta)
    objectives = build_objectives(config, tokenizer, meta) if config.stage == "pretrain" else None
    train = build_train_loader(config, meta, renderer, objectives)
    held_out = build_loader(config.data, config.data.eval_split, meta, shuffle=False, seed=config.seed, train=False)
    calibration = build_calibration(config, meta)
    model = prepare_model(config, build_model(config, tokenizer))
    feedback = build_feedback(config, folder, renderer, train, held_out)
    record = RunRecord(folder if dist.get_global_rank() == 0 else None, metrics=config.loggers.file)
    composite = CompositeLoss(stage_loss(config), lm_share=config.forgetting.lm_share)
    random_state = RandomState()
    callbacks: list[Callback] = [random_state, LossWeights(composite), PaddingShare()]
    if feedback is not None:
        callbacks.append(feedback)
    callbacks += build_earlier_rows(config, meta)
    if renderer is not None:
        callbacks += build_distillation(config, composite, model, renderer, feedback)
    on_cpu = config.train.device == "cpu" or not torch.cuda.is_available()
    precision = Precision(config.train.precision)
    if on_cpu and precision == Precision.AMP_BF16:  # Composer refuses it there, so the model casts its forward pass
        model.cpu_bfloat16, precision = True, Precision.FP32
    algorithms, more = build_extras(
        config,
        folder,
        model=model,
        renderer=renderer,
        sessions=lambda: probe_sessions(held_out, config.algorithms.samples.count),
        feedback=feedback,
    )
    callbacks += more
    callbacks.append(Checkpoints(folder, config.train.checkpoints, measured=record.measured))  # last: it saves them all
    trainer = build_trainer(
        config,
        model,
        train_dataloader=train,
        eval_dataloader=build_evaluators(config, held_out, objectives),
        max_duration=config.train.duration,
        eval_interval=0 if parse_time(config.train.eval_interval) in OFF else config.train.eval_interval,
        schedulers=build_scheduler(config.optimizer),
        algorithms=[*algorithms, *build_algorithms(config.optimizer), *build_ewc(config, model)],
        callbacks=callbacks,
        loggers=[record, *build_loggers(config, folder)],
        run_name=config.run_name,
        progress_bar=False,
        device=None if config.train.device == "auto" else config.train.device,
        precision=precision,
        device_train_microbatch_size=config.data.microbatch_size,
        load_path=None if resume_from is None else str(resume_from.absolute()),
        seed=config.seed,
        deterministic_mode=on_cpu,
    )
    # Deterministic mode fills what nothing reads before it is written: 3 % of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    random_state.take_over(trainer)
    gc.collect()
    gc.freeze()  # what is there now stays: without this a full collection stops a step for 0.1 s every now and then
    return BuiltRun(
        trainer=trainer, model=model, tokenizer=tokenizer, feedback=feedback, record=record, calibration=calibration
    )


def build_train_loader(
    config: RunConfig, meta: ShardMeta, renderer: Renderer | None, objectives: Objectives | None
) -> DataSpec:
    """Return the batches that are trained on: with noise on their inputs, or as objectives change them, if wanted."""
    share = config.data.input_noise
    noise = InputNoise(renderer.vocab, share, config.seed) if renderer is not None and share else None
    data, split = stage_data(config), config.data.train_split
    return build_loader(data, split, meta, shuffle=True, seed=config.seed, edit=noise, transform=objectives)


def prepare_model(config: RunConfig, model: AgentModel) -> AgentModel:
    """Set the model up to be trained as the configuration says; return it."""
    if config.stage in ("sft", "pretrain"):
        model.heads.requires_grad_(False)  # no targets: without this the weight decay alone would train them
    model.unpadded = config.data.packing == "pack"
    model.vocab_chunk_tokens = config.train.vocab_chunk_tokens
    if config.train.activation_checkpointing:
        checkpoint_activations(model.backbone)
    if config.model.lora is not None:
        keep_trained_only(model)
    return model


def build_trainer(config: RunConfig, model: AgentModel, **options: Any) -> Trainer:
    """Return Composer's trainer of ``model``, shared out if that is wanted, with its optimiser and these options.

    A checkpoint (``load_path``) is read as a file of ours, never unpickled.
    """
    if dist.get_global_rank() == 0:
        require_room(config, run_folder(config), *saved_bytes(model))
    kind, distributed = Trainer, config.train.distributed
    if distributed.strategy == "fsdp":
        on_gpu = config.train.device != "cpu" and torch.cuda.is_available()
        options |= share_out(model, distributed.fsdp, on_gpu=on_gpu, precision=options["precision"])
        kind = OneReduction if distributed.fsdp.gradients == "whole" else Trainer
    optimizer = DecoupledAdamW(
        parameter_groups(model, config.optimizer), lr=config.optimizer.backbone_lr, betas=config.optimizer.betas
    )
    with composer_reads_these():
        return kind(model=model, optimizers=optimizer, **options)


def build_renderer(config: RunConfig, tokenizer: PreTrainedTokenizerBase, meta: ShardMeta) -> Renderer | None:
    """Return the renderer of the run, after checking that the shards (of sessions) were written with an equal one.

    None with a chat template or a corpus: nothing is rendered while training. ``build_objectives`` checks a corpus.
    """
    positions = config.model.feedback_positions
    if config.stage == "pretrain":
        return None
    check_fingerprint(
        meta,
        tokenizer_sha256=tokenizer_fingerprint(tokenizer),
        template_version=template_version(config.text),
        text=config.text,
        positions=positions,
        tools=list(TOOL_INDEX),
        user_tools=user_specs(),
        chat_template_sha256=None if config.text.template == "etai" else template_fingerprint(tokenizer),
        where=config.data.shards,
    )
    if config.text.template != "etai":
        return None
    return Renderer(Vocab.of(tokenizer), config.text, positions, specs())


def build_model(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> AgentModel:
    """Return the backbone with fresh heads; special tokens that a checkpoint does not know start from the mean."""
    new_ids: list[int] = []
    if config.model.path is not None:
        known = load_tokenizer(config.model.path).get_vocab()
        ids = tokenizer.get_vocab()
        moved = [token for token, row in known.items() if ids.get(token) != row]
        if moved:
            raise ModelError(
                "the shards were written with another tokenizer than the model's",
                where="model.path",
                got=f"{len(moved)} of the model's {len(known)} tokens have another id, such as {moved[:3]}",
                hint=f"agentft shards write SESSIONS.jsonl -o FOLDER --tokenizer {config.model.path}",
            )
        new_ids = sorted(row for token, row in ids.items() if token not in known)
    return build_agent_model(
        config.model,
        vocab_size=len(tokenizer),
        tools=list(TOOL_INDEX),
        seed=config.seed,
        entropy_bonus=config.feedback.reward.entropy_bonus if config.feedback.backend != "off" else 0.0,
        new_token_ids=new_ids,
    )


def build_evaluators(config: RunConfig, held_out: DataSpec, objectives: Objectives | None) -> list[Evaluator]:
    """Return the evaluation of the held-out rows as they are and, in pretraining, as each other objective has them."""
    specs, size = {"eval": held_out}, config.data.microbatch_size
    if objectives is not None:
        others = [name for name in weighted(config.objectives) if name != "causal"]
        specs |= {f"eval/{name}": held_out_as(objectives, name, held_out) for name in others}
    return [Evaluator(label=label, dataloader=spec, device_eval_microbatch_size=size) for label, spec in specs.items()]


def build_scheduler(config: OptimizerConfig) -> ComposerScheduler:
    """Return the learning-rate schedule: linear warm-up, then the shape that ``decay`` names."""
    if config.decay == "none":
        return ConstantWithWarmupScheduler(t_warmup=config.warmup)
    if config.decay == "step":
        return StepPerEpoch(t_warmup=config.warmup, per_epoch=config.decay_per_epoch)
    kind = {"cosine": CosineAnnealingWithWarmupScheduler, "linear": LinearWithWarmupScheduler}[config.decay]
    return kind(t_warmup=config.warmup, alpha_f=config.final_lr)


def build_algorithms(config: OptimizerConfig) -> list[Algorithm]:
    """Return clipping (unless it is off) and the gradient norms; Composer runs the list backwards: norms come first."""
    clipping = [GradientClipping(clipping_type="norm", clipping_threshold=config.clip_norm)] if config.clip_norm else []
    return [*clipping, GradientNorms()]


def build_loggers(config: RunConfig, folder: Path) -> list[LoggerDestination]:
    """Return what ``loggers`` asks for beside the run's own record; only the first rank shows and writes."""
    if dist.get_global_rank() != 0:
        return []
    console = Console() if config.loggers.console else None
    found: list[LoggerDestination] = [ProgressReport(console, folder / "train.log" if config.loggers.file else None)]
    if config.loggers.tensorboard:
        found.append(TensorboardLogger(log_dir=str(folder / "tensorboard"), flush_interval=20))
    return found


def build_feedback(
    config: RunConfig, folder: Path, renderer: Renderer | None, train: DataSpec, held_out: DataSpec
) -> ExecutionFeedback | None:
    """Return the callback that executes calls, or None where feedback is off."""
    if config.feedback.backend == "off":
        return None
    assert isinstance(train.dataloader, SessionLoader)
    assert renderer is not None, "a check of the configuration"
    return ExecutionFeedback(
        config.feedback,
        executor=build_executor(config, folder),
        upcoming=train.dataloader.upcoming,
        renderer=renderer,
        run_folder=folder,
        seed=config.seed,
        probe_sessions=probe_sessions(held_out) if config.feedback.probe.every else (),
    )


def build_executor(config: RunConfig, run_folder: Path) -> Executor:
    """Return what runs the calls: a pool of sandboxes with the results kept beside it, or the trace of a run."""
    if config.feedback.backend == "replay":
        from agentft.sandbox.replay import ReplayExecutor

        return ReplayExecutor(str(config.feedback.replay_from), rank=dist.get_global_rank())
    from agentft.sandbox.executor import LiveExecutor
    from agentft.sandbox.hosts import open_hosts
    from agentft.sandbox.pool import open_sandbox
    from agentft.sandbox.services import open_with_tools

    backend, sandbox = config.feedback.backend, config.sandbox
    assert backend != "off"
    limits = Limits(timeout_s=sandbox.timeout_s, memory_mib=sandbox.memory_mib, pids=sandbox.pids, cpus=sandbox.cpus)
    pool = open_sandbox if not sandbox.hosts else partial(open_hosts, sandbox.hosts, tls=sandbox.tls)
    opened = open_with_tools(
        pool,
        USER_TOOLS.values(),
        backend=backend,
        image=sandbox.image,
        workers=sandbox.workers,
        limits=limits,
        run_name=config.run_name,
        runtime=sandbox.runtime,
        reuse=sandbox.reuse,
    )
    return LiveExecutor(opened, opened.workers, cache=build_cache(config, run_folder))


def build_cache(config: RunConfig, run_folder: Path) -> ResultCache:
    """Return the cache of executed calls; its results are in the run's own folder unless the config names another."""
    wanted = config.sandbox.cache
    folder = Path(wanted.folder).expanduser() if wanted.folder else run_folder / "cache"
    disk = DiskStore(folder, mib=wanted.mib) if wanted.mib else None
    return ResultCache(disk=disk, verify_share=wanted.verify_share, seed=config.seed)


def build_calibration(config: RunConfig, meta: ShardMeta) -> SessionDataset | None:
    """Return the sessions that the outcome head is calibrated on; None where there are none or none are asked for."""
    split = config.data.calibration_split
    if split is None or meta.sessions(split) == 0:
        return None
    loader = build_loader(config.data, split, meta, shuffle=False, seed=config.seed, train=False).dataloader
    assert isinstance(loader, SessionLoader)
    return loader.dataset


def probe_sessions(held_out: DataSpec, most: int = MOST_PROBE_SESSIONS) -> list[Session]:
    """Return the sessions of the held-out split, in the order of its shards; the first ``most`` of them."""
    assert isinstance(held_out.dataloader, SessionLoader)
    dataset: SessionDataset = held_out.dataloader.dataset
    return [session_of(dataset[i]["record"]) for i in range(min(dataset.num_samples, most))]
