"""Trains the tiny agent of ``support_agent`` with algorithms of ours, from a checkpoint or not, on one rank or two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.core import Algorithm, Callback, DataSpec, State
from composer.loggers import InMemoryLogger, Logger
from composer.optim import DecoupledAdamW
from composer.utils import dist
from support_agent import InProcessExecutor, ListLoader, make_model, make_renderer, sessions

from agentft.algorithms.loss_weights import LossWeights
from agentft.config.schema import FeedbackConfig, LossConfig, PolicyConfig, ProbeConfig, RecordedConfig
from agentft.data.batch import num_samples, num_tokens, split
from agentft.feedback.callback import ExecutionFeedback
from agentft.models.agent_model import CompositeLoss

RECORDED = FeedbackConfig(recorded=RecordedConfig(prefetch_batches=1), probe=ProbeConfig(every=0))
SAMPLED = FeedbackConfig(policy=PolicyConfig(every=2, calls=2), probe=ProbeConfig(every=2, calls=2))

Make = Callable[[ExecutionFeedback], tuple[Sequence[Algorithm], Sequence[Callback]]]
"""Given the feedback callback: algorithms and callbacks to train with."""


class Curve(Callback):
    """Keeps the losses of every batch, all components, as logged."""

    def __init__(self) -> None:
        self.batches: list[dict[str, float]] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        self.batches.append(dict(state.total_loss_dict))


class Result:
    """What a run left: its loss curve, everything logged, and the trained weights."""

    def __init__(self, curve: Curve, memory: InMemoryLogger, trainer: Trainer) -> None:
        self.curve = curve.batches
        self.logged = {name: [float(value) for _, value in values] for name, values in memory.data.items()}
        self.trainer = trainer
        model = trainer.state.model
        self.weights = {name: tensor.clone() for name, tensor in getattr(model, "module", model).state_dict().items()}


def train(
    folder: Path,
    make: Make | None = None,
    *,
    batches: int = 4,
    microbatch: int = 4,
    config: FeedbackConfig = RECORDED,
    load: Path | None = None,
    save_every: int | None = None,
    edit: Callable[[Any], None] | None = None,
    eval_interval: str = "0ba",
) -> Result:
    """Train batches of four of twelve sessions, shared out over the ranks, in the same order always."""
    torch.set_num_threads(1)
    ranks, rank = dist.get_world_size(), dist.get_global_rank()
    known = sessions(12)
    renderer = make_renderer(known)
    loader = ListLoader(renderer, known[rank::ranks], 4 // ranks)
    model = make_model(renderer)
    if edit is not None:
        edit(model)
    feedback = ExecutionFeedback(
        config,
        executor=InProcessExecutor(),
        upcoming=loader.upcoming,
        renderer=renderer,
        run_folder=folder,
        seed=11,
        probe_sessions=known[:3],
    )
    algorithms, callbacks = ([], []) if make is None else make(feedback)
    curve, memory = Curve(), InMemoryLogger()

    def data(part: Any) -> DataSpec:
        return DataSpec(
            part, split_batch=split, get_num_samples_in_batch=num_samples, get_num_tokens_in_batch=num_tokens
        )

    trainer = Trainer(
        model=model,
        train_dataloader=data(loader),
        eval_dataloader=data(ListLoader(renderer, known[:4], 4)) if eval_interval != "0ba" else None,
        eval_interval=eval_interval if eval_interval != "0ba" else 0,
        optimizers=DecoupledAdamW(model.parameters(), lr=1e-3, weight_decay=0.0),
        max_duration=f"{batches}ba",
        device="cpu",
        device_train_microbatch_size=microbatch,
        algorithms=list(algorithms),
        callbacks=[LossWeights(CompositeLoss(LossConfig())), feedback, *callbacks, curve],
        loggers=[memory],
        progress_bar=False,
        log_to_console=False,
        seed=3,
        load_path=None if load is None else str(load),
        save_folder=str(folder / "checkpoints") if save_every else None,
        save_interval=f"{save_every or 1}ba",
        save_filename="ba{batch}.pt",
        save_overwrite=True,
    )
    try:
        trainer.fit()
    finally:
        trainer.close()
    return Result(curve, memory, trainer)
