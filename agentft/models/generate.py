"""Sampling turns (floor 3): continue rendered sessions token by token, many at once, with a key-value cache.

A turn ends with ``<|tool_end|>`` (a call: execute it, append the result as tokens, sample again) or ``<|eot|>``.

    turns = sample_turns(model.backbone, [prompt_of(rendered)], stop_ids=stop, max_new_tokens=96, temperature=0.0)

Rows are padded on the left, so that the newest tokens of all rows stand in one column. Positions jump over results and
padding, hence the explicit float [B,1,Q,K] mask: without one, the backbone takes a jump for the start of a document.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from agentft.models.backbone import decoder_of, layer_masks, vocabulary_logits
from agentft.text.rendered import Rendered

Processor = Callable[[Tensor, Tensor], Tensor]
"""(ids so far [B,K], logits [B,V]) → logits [B,V], as a ``transformers.LogitsProcessor``; forbidden tokens get −inf."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A row to continue: ``input_ids`` and ``position_ids`` [T] int, and the position of the first new token."""

    input_ids: npt.NDArray[np.int32]
    position_ids: npt.NDArray[np.int32]
    next_position: int


@dataclass(frozen=True, kw_only=True)
class SampledTurn:
    """What was sampled, the stop token included.

    ``logprobs`` [n] float32 are log-probabilities in nats under the distribution that was sampled from (temperature and
    processor applied; at temperature 0 that of temperature 1). ``stopped`` is False if the limit cut the turn.
    """

    ids: tuple[int, ...]
    logprobs: npt.NDArray[np.float32]
    stopped: bool


def prompt_of(rendered: Rendered, *, feedback_start: int | None = None) -> Prompt:
    """Return a rendered session as a prompt; with feedback positions on, give the first position of their range.

    The next token continues the count of all tokens outside that range.
    """
    positions = rendered.position_ids
    told = positions if feedback_start is None else positions[positions < feedback_start]
    return Prompt(
        input_ids=rendered.input_ids,
        position_ids=positions,
        next_position=int(told[-1]) + 1 if len(told) else 0,
    )


@torch.no_grad()
def sample_turns(
    backbone: PreTrainedModel,
    prompts: Sequence[Prompt],
    *,
    stop_ids: Collection[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    processor: Processor | None = None,
    use_cache: bool = True,
) -> list[SampledTurn]:
    """Sample one turn after each prompt.

    Args:
        backbone: A Hugging Face causal LM in evaluation mode; its device is used.
        prompts: Rows of any length; they are padded together.
        stop_ids: Tokens that end a turn.
        max_new_tokens: Longest turn.
        temperature: 0 takes the most likely token and draws nothing.
        generator: Source of all randomness, on the CPU; needed when ``temperature`` is above 0. The global random
            state is never touched.
        processor: Edits the logits of each step, such as ``routing.ToolLogitsProcessor`` (with its ``HeadTap`` open).
        use_cache: Keep keys and values; without it each step reads the whole row again (the reference for tests).

    Returns:
        One turn per prompt, in order.
    """
    if not prompts:
        return []
    if temperature > 0 and generator is None:
        raise ValueError("sampling needs a generator")
    rows = _Rows(backbone, prompts, use_cache)
    stops = torch.tensor(sorted(stop_ids))
    running = torch.ones(len(prompts), dtype=torch.bool)
    ids: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        logits = rows.next_logits()
        if processor is not None:
            logits = processor(rows.ids, logits)
        tokens, chosen = _choose(logits.float().cpu(), temperature, generator)
        for row in torch.nonzero(running)[:, 0].tolist():
            ids[row].append(int(tokens[row]))
            logprobs[row].append(float(chosen[row]))
        rows.append(tokens, running)
        running &= ~torch.isin(tokens, stops)
        if not running.any():
            break
    return [
        SampledTurn(ids=tuple(ids[row]), logprobs=np.asarray(logprobs[row], np.float32), stopped=not bool(running[row]))
        for row in range(len(prompts))
    ]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` in evaluation mode for a while; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Return chosen tokens [B] and their log-probabilities [B]; one uniform number is drawn per row."""
    scaled = logits / temperature if temperature > 0 else logits
    logprobs = torch.log_softmax(scaled, dim=-1)
    if temperature > 0:
        cumulative = logprobs.double().exp().cumsum(-1)
        draw = torch.rand(len(logits), 1, dtype=torch.float64, generator=generator) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, draw, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    else:
        tokens = logits.argmax(-1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


class _Rows:
    """The growing, left-padded rows: ids, positions and validity [B,K], and the cache of what was read."""

    def __init__(self, backbone: PreTrainedModel, prompts: Sequence[Prompt], use_cache: bool) -> None:
        self._backbone = backbone
        self._decoder = decoder_of(backbone)
        self._device = backbone.device
        longest = max(len(prompt.input_ids) for prompt in prompts)
        shape = (len(prompts), longest)
        ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        valid = torch.zeros(shape, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            start = longest - len(prompt.input_ids)
            ids[row, start:] = torch.as_tensor(np.asarray(prompt.input_ids, np.int64))
            positions[row, start:] = torch.as_tensor(np.asarray(prompt.position_ids, np.int64))
            valid[row, start:] = True
        self.ids, self._positions, self._valid = (x.to(self._device) for x in (ids, positions, valid))
        self._next = torch.tensor([prompt.next_position for prompt in prompts], device=self._device)
        self._cache = DynamicCache() if use_cache else None
        self._read = 0

    def next_logits(self) -> Tensor:
        """Return the logits [B,V] after the newest token, reading what is not yet cached."""
        output = self._decoder(
            input_ids=self.ids[:, self._read :],
            attention_mask=layer_masks(self._backbone, self._mask()),
            position_ids=self._positions[:, self._read :],
            past_key_values=self._cache,
            use_cache=self._cache is not None,
        )
        if self._cache is not None:
            self._read = self.ids.shape[1]
        return vocabulary_logits(self._backbone, output.last_hidden_state[:, -1:])[:, -1]

    def append(self, tokens: Tensor, running: Tensor) -> None:
        """Add one token [B] per row; in rows that have ended it stays invisible."""
        self.ids = torch.cat([self.ids, tokens[:, None].to(self._device)], 1)
        self._positions = torch.cat([self._positions, self._next[:, None]], 1)
        self._valid = torch.cat([self._valid, running[:, None].to(self._device)], 1)
        self._next = self._next + 1

    def _mask(self) -> Tensor:
        """Return the additive mask [B,1,Q,K]: causal by column, blind to padding; a padding query sees itself."""
        width = self.ids.shape[1]
        columns = torch.arange(width, device=self._device)
        queries = columns[self._read :, None]
        seen = self._valid[:, None, :] & (columns <= queries)
        seen = seen | (columns == queries)
        dtype = self._backbone.dtype
        mask = torch.zeros(seen.shape, dtype=dtype, device=self._device)
        return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
