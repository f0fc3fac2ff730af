"""Trains the tiny agent of ``support_agent`` with execution feedback, on Composer, and keeps what went through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from composer import Trainer
from composer.core import Callback, DataSpec, State
from composer.loggers import InMemoryLogger, Logger
from composer.optim import DecoupledAdamW
from support_agent import ListLoader, make_model

from agentft.config.schema import FeedbackConfig
from agentft.data.batch import num_samples, num_tokens, split
from agentft.data.packing import Packing
from agentft.etai import Session
from agentft.feedback.callback import ExecutionFeedback
from agentft.sandbox.base import Executor
from agentft.text.render import Renderer


class Seen(Callback):
    """Keeps each batch as it goes into training, the loss of each microbatch and the total of each batch."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.totals: list[float] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        self.batches.append(state.batch)

    def after_loss(self, state: State, logger: Logger) -> None:
        self.losses.append(float(state.loss["total"].detach()))  # type: ignore[call-overload, index]

    def batch_end(self, state: State, logger: Logger) -> None:
        self.totals.append(state.total_loss_dict["loss/train/total"])


Trained = tuple[Seen, ExecutionFeedback, InMemoryLogger]


def train_agent(
    folder: Path,
    executor: Executor,
    config: FeedbackConfig,
    *,
    renderer: Renderer,
    known: Sequence[Session],
    batches: int = 5,
    duration: str | None = None,
    batch_size: int = 4,
    dropout: float = 0.0,
    packing: Packing = "buckets",
    more: Sequence[Callback] = (),
    behind: Callable[[ExecutionFeedback], Sequence[Callback]] = lambda _: (),
) -> Trained:
    """Train for ``batches`` batches (or ``duration``) on this rank's share of ``known``.

    ``behind`` gives callbacks that need the feedback; they come right after it.
    """
    loader = ListLoader(renderer, known, batch_size)
    model = make_model(renderer, dropout=dropout)
    model.unpadded = packing == "pack"
    feedback = ExecutionFeedback(
        config,
        executor=executor,
        upcoming=loader.upcoming,
        renderer=renderer,
        run_folder=folder,
        seed=11,
        probe_sessions=known[:3],
    )
    seen, memory = Seen(), InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=DataSpec(
            loader,
            split_batch=partial(split, packing=packing, pack_tokens=512),
            get_num_samples_in_batch=num_samples,
            get_num_tokens_in_batch=num_tokens,
        ),
        optimizers=DecoupledAdamW(model.parameters(), lr=1e-3),
        max_duration=duration or f"{batches}ba",
        device="cpu",
        device_train_microbatch_size=3,
        callbacks=[feedback, *behind(feedback), seen, *more],
        loggers=[memory],
        progress_bar=False,
        seed=3,
        save_folder=str(folder / "checkpoints"),
        save_interval=f"{batches}ba",
    )
    try:
        trainer.fit()
    finally:
        trainer.close()
    return seen, feedback, memory
