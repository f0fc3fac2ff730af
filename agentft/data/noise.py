"""Noise on what the model reads (floor 3): a share of the input tokens becomes random ones while training.

A small model that sees a few hundred sessions several times learns their names and file contents by heart, and what its
heads say then hangs on words that no other repository has. Random replacement of input tokens (SwitchOut, Wang et al.
2018, arXiv:1808.07512, here with a fixed share and on inputs only) makes them read the structure instead.

    noise = InputNoise(vocab, share=0.1, seed=17)
    noise(batch, epoch=0, numbers=np.array([3, 8]))  # edits ``input_ids`` of a collated batch in place

Replaced are plain tokens of the context, the instruction, the tool results and of what the agent writes and imitates
(template ``etai``); labels stay, so that it learns to write what was there. Never: special tokens and handles, steps
that it does not imitate (the policy gradient takes their tokens from ``input_ids``), padding. The draw hangs on (seed,
epoch, number of the sample) alone, so it is the same on any number of processes and after a resume, and however the
batch is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentft.losses import NO_TARGET
from agentft.text.vocab import Vocab


class InputNoise:
    """Replaces ``share`` of the eligible tokens, each on its own, by plain tokens drawn uniformly."""

    def __init__(self, vocab: Vocab, share: float, seed: int) -> None:
        self.vocab, self.share, self.seed = vocab, share, seed
        self._plain = np.setdiff1d(np.arange(vocab.size), list(vocab.special))
        self._special = torch.zeros(vocab.size, dtype=torch.bool)
        self._special[list(vocab.special)] = True

    def __call__(self, batch: dict[str, Any], epoch: int, numbers: npt.NDArray[np.int64]) -> None:
        """Edit ``input_ids`` [B, T] int64; ``numbers`` [B] are the samples' numbers in their split."""
        ids: Tensor = batch["input_ids"]
        eligible = self.eligible(batch)
        for row, number in enumerate(numbers):
            chance = np.random.default_rng((self.seed, epoch, int(number)))
            length = int(batch["lengths"][row])
            hit = torch.from_numpy(chance.random(length) < self.share) & eligible[row, :length]
            drawn = torch.from_numpy(chance.choice(self._plain, length))
            ids[row, :length] = torch.where(hit, drawn, ids[row, :length])

    def eligible(self, batch: Mapping[str, Any]) -> Tensor:
        """Return [B, T] bool: plain tokens before the trace, inside a result, or with a label."""
        ids, vocab = batch["input_ids"], self.vocab
        before_trace = (ids == vocab.trace_start).cumsum(1) == 0
        in_result = (ids == vocab.result).cumsum(1) > (ids == vocab.result_end).cumsum(1)
        real = torch.arange(ids.shape[1]) < batch["lengths"][:, None]
        return (before_trace | in_result | (batch["labels"] != NO_TARGET)) & ~self._special[ids] & real
