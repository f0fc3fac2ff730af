"""Resume through Composer's own checkpoints: the batches after a stop are exactly those of the uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Callback, Trainer
from composer.core import State
from composer.loggers import Logger
from composer.models import ComposerModel

from agentft.config.schema import DataConfig
from agentft.data.loader import SessionLoader, build_loader, open_shards
from agentft.data.shards import ShardReport


class Tiny(ComposerModel):
    """Predicts nothing worth having: one weight, a loss per row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.weight * batch["lengths"].float()

    def loss(self, outputs: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        return (outputs / 1000).square().mean()


class Recorder(Callback):
    """Remembers the batches that were trained on, looking ahead all the while; may stop the run in a batch."""

    def __init__(self, stop_in: int | None = None) -> None:
        self.batches: list[list[str]] = []
        self.ahead: list[list[str]] = []
        self._stop_in = stop_in

    def batch_start(self, state: State, logger: Logger) -> None:
        loader = state.dataloader
        assert isinstance(loader, SessionLoader)
        self.batches.append(list(state.batch["session_id"]))
        self.ahead.append([sample["session_id"] for sample in loader.upcoming(3)[0].samples])
        if self._stop_in is not None and len(self.batches) == self._stop_in:
            raise KeyboardInterrupt

    def batch_end(self, state: State, logger: Logger) -> None:
        assert int(state.timestamp.sample_in_epoch.value) == int(state.timestamp.batch_in_epoch.value) * 8


def _trainer(folder: Path, recorder: Recorder, duration: str, **more: Any) -> Trainer:
    data = DataConfig(shards=str(folder), batch_size=8)
    meta, model = open_shards(data), Tiny()
    return Trainer(
        model=model,
        train_dataloader=build_loader(data, "train", meta, shuffle=True, seed=17),
        eval_dataloader=build_loader(data, "test", meta, shuffle=False, seed=17, train=False),
        eval_interval="2ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=1e-3),
        max_duration=duration,
        callbacks=[recorder],
        device="cpu",
        device_train_microbatch_size=4,
        progress_bar=False,
        **more,
    )


@pytest.fixture(scope="module")
def plain(written: ShardReport) -> list[list[str]]:
    """The 15 batches of three epochs without a stop."""
    recorder = Recorder()
    trainer = _trainer(written.folder, recorder, "3ep")
    trainer.fit()
    trainer.close()
    assert len(recorder.batches) == 15
    assert recorder.ahead[:-1] == recorder.batches[1:], "the look ahead is what comes, over evaluations and epochs"
    return recorder.batches


@pytest.mark.parametrize("stop", ["3ba", "5ba", "1ep", "7ba", "2ep"])
def test_resumed_run_sees_the_same_batches(
    written: ShardReport, plain: list[list[str]], tmp_path: Path, stop: str
) -> None:
    first, second = Recorder(), Recorder()
    trainer = _trainer(written.folder, first, stop, save_folder=str(tmp_path), save_interval="1ba")
    trainer.fit()
    trainer.close()
    latest = tmp_path / "latest-rank0.pt"
    trainer = _trainer(written.folder, second, "3ep", load_path=str(latest))
    trainer.fit()
    trainer.close()
    assert first.batches + second.batches == plain


def test_checkpoint_at_the_end_of_an_epoch(written: ShardReport, plain: list[list[str]], tmp_path: Path) -> None:
    """Saved on the event after the epoch, where Composer counts zero samples of the next one."""
    first, second = Recorder(stop_in=8), Recorder()
    trainer = _trainer(written.folder, first, "3ep", save_folder=str(tmp_path), save_interval="1ep")
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    trainer.close()
    trainer = _trainer(written.folder, second, "3ep", load_path=str(tmp_path / "latest-rank0.pt"))
    trainer.fit()
    trainer.close()
    assert second.batches == plain[5:]
