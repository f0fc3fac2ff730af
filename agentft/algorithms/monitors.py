"""Figures about machine and model (floor 4): speed in useful tokens, memory of the process, outputs of the layers.

What Composer's own callbacks do with our batches (measured, mosaicml 0.32.1): ``LRMonitor`` and ``SpeedMonitor`` never
look into a batch and fit; ``SpeedMonitor`` counts real tokens, trained and context together. ``MemoryMonitor`` fits
and reports on CUDA only. ``ActivationMonitor`` hooks every module and fails where an output is empty (a microbatch
without an outcome anchor): hence ``LayerOutputs``. ``EarlyStopper`` and ``NaNMonitor``: see ``early_stop``, ``spikes``.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Logger, State
from composer.utils import dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from agentft.algorithms.layer_skip import decoder_layers
from agentft.data.batch import num_tokens
from agentft.models.agent_model import agent_of

GIB = 1 << 30


class TokenSpeed(Callback):
    """Logs ``speed/trained_tokens_per_s``, ``context_tokens_per_s`` and ``sessions_per_s``, all ranks together.

    Trained tokens are targets of the code loss; context is every other real token of a row; padding is neither. The
    mean runs over the newest ``window`` batches of this process, evaluation left out.
    """

    def __init__(self, window: int) -> None:
        self._marks: deque[tuple[float, ...]] = deque(maxlen=window + 1)
        self._counts = [0, 0, 0]

    def batch_start(self, state: State, logger: Logger) -> None:
        """Count what is about to be trained; the first batch also starts the clock."""
        if not self._marks:
            self._marks.append((state.timestamp.total_wct.total_seconds(), 0, 0, 0))
        tokens = num_tokens(state.batch)
        trained = tokens["loss_generating"]
        for at, count in enumerate((trained, tokens["total"] - trained, len(state.batch["lengths"]))):
            self._counts[at] += count

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the means so far."""
        self._marks.append((state.timestamp.total_wct.total_seconds(), *self._counts))
        first, last = self._marks[0], self._marks[-1]
        seconds = last[0] - first[0]
        if seconds <= 0:
            return
        counts = torch.tensor(
            [end - start for end, start in zip(last[1:], first[1:], strict=True)], dtype=torch.float64
        )
        counts = state.device.tensor_to_device(counts)
        dist.all_reduce(counts, reduce_operation="SUM")
        names = ("trained_tokens", "context_tokens", "sessions")
        rates = (counts / seconds).tolist()
        logger.log_metrics({f"speed/{name}_per_s": rate for name, rate in zip(names, rates, strict=True)})


class ProcessMemory(Callback):
    """Logs ``memory/resident_gib`` and ``memory/peak_resident_gib`` of this process (Linux)."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log both."""
        now, peak = resident_bytes()
        logger.log_metrics({"memory/resident_gib": now / GIB, "memory/peak_resident_gib": peak / GIB})


def resident_bytes() -> tuple[int, int]:
    """Return the resident memory of this process and its peak, in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Vm"))
    fields = {line[0]: int(line[1]) * 1024 for line in lines}
    return fields["VmRSS:"], fields["VmHWM:"]


class LayerOutputs(Callback):
    """Logs ``activations/layer<n>/rms`` and ``/max`` of every decoder layer's output, each ``every`` batches.

    Over the real tokens of this rank's batch. rms = √mean x², max = max |x|: what grows before a run diverges. Hooks
    are there only during the forward passes of those batches, and nothing is read back before the batch has ended.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._hooks: list[RemovableHandle] = []
        self._sums: list[Tensor] = []  # one a layer and microbatch: [3] sum of squares, count, max
        self._real: Tensor | None = None

    def before_forward(self, state: State, logger: Logger) -> None:
        """Hook the layers, in batches that are due."""
        if state.timestamp.batch.value % self.every:
            return
        batch: dict[str, Any] = state.batch
        columns = torch.arange(batch["input_ids"].shape[1], device=batch["input_ids"].device)
        self._real = columns < batch["lengths"][:, None]
        self._hooks = [layer.register_forward_hook(self._note) for layer in decoder_layers(agent_of(state).backbone)]

    def after_forward(self, state: State, logger: Logger) -> None:
        """Take the hooks away (activation checkpointing runs layers again later)."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log what was seen."""
        if not self._sums:
            return
        layers = len(decoder_layers(agent_of(state).backbone))
        seen = torch.stack(self._sums).reshape(-1, layers, 3)  # [microbatches, layers, 3]
        self._sums = []
        squares, counts = seen[..., 0].sum(0), seen[..., 1].sum(0)
        rms, largest = (squares / counts).sqrt().tolist(), seen[..., 2].amax(0).tolist()
        for number in range(layers):
            name = f"activations/layer{number}"
            logger.log_metrics({f"{name}/rms": rms[number], f"{name}/max": largest[number]})

    @torch.no_grad()
    def _note(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        hidden: Tensor = (output[0] if isinstance(output, tuple) else output).float()
        assert self._real is not None
        if hidden.shape[:2] == self._real.shape:  # else the rows are packed, and nothing of them is padding
            hidden = hidden[self._real]
        count = hidden.new_tensor(float(hidden.numel()))
        self._sums.append(torch.stack((hidden.square().sum(), count, hidden.abs().max())))
