"""Noise on what the agent is shown (floor 3): a share of the shown tokens becomes random ones while training.

A small model that sees a few hundred sessions several times learns their names and file contents by heart, and what its
heads say then hangs on words that no other repository has. Random replacement of input tokens (SwitchOut, Wang et al.
2018, arXiv:1808.07512, here with a fixed share and on inputs only) makes them read the structure instead.

    noise = ContextNoise(vocab, share=0.1, seed=17)
    noise(batch, epoch=0, numbers=np.array([3, 8]))  # edits ``input_ids`` of a collated batch in place

Replaced are plain tokens of the context, the instruction and the tool results (template ``etai``). Never: special
tokens and handles, what the agent writes (mistakes too), labels, padding. The draw hangs on (seed, epoch, number of the
sample) alone, so it is the same on any number of processes and after a resume, and however the batch is cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentft.text.vocab import Vocab


class ContextNoise:
    """Replaces ``share`` of the eligible tokens, each on its own, by plain tokens drawn uniformly."""

    def __init__(self, vocab: Vocab, share: float, seed: int) -> None:
        self.vocab, self.share, self.seed = vocab, share, seed
        self._plain = np.setdiff1d(np.arange(vocab.size), list(vocab.special))
        self._special = torch.zeros(vocab.size, dtype=torch.bool)
        self._special[list(vocab.special)] = True

    def __call__(self, batch: dict[str, Any], epoch: int, numbers: npt.NDArray[np.int64]) -> None:
        """Edit ``input_ids`` [B, T] int64; ``numbers`` [B] are the samples' numbers in their split."""
        ids: Tensor = batch["input_ids"]
        eligible = self.eligible(ids, batch["lengths"])
        for row, number in enumerate(numbers):
            chance = np.random.default_rng((self.seed, epoch, int(number)))
            length = int(batch["lengths"][row])
            hit = torch.from_numpy(chance.random(length) < self.share) & eligible[row, :length]
            drawn = torch.from_numpy(chance.choice(self._plain, length))
            ids[row, :length] = torch.where(hit, drawn, ids[row, :length])

    def eligible(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return [B, T] bool: plain tokens before the trace, or inside a result."""
        vocab = self.vocab
        before_trace = (ids == vocab.trace_start).cumsum(1) == 0
        in_result = (ids == vocab.result).cumsum(1) > (ids == vocab.result_end).cumsum(1)
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        return (before_trace | in_result) & ~self._special[ids] & real
