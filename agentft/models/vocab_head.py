"""The vocabulary head where it is trained, in chunks (floor 3): neither logits nor their gradient exist whole.

``vocab_terms`` takes the final hidden states of the trained positions and the head's weight, and returns the code and
policy sums of ``agentft.losses``. A chunk's logits are made, turned into their own gradient in place, multiplied into
the gradients of hidden states and weight, and overwritten by the next chunk's. That takes three matrix products a
position as plain autograd does, not the four of checkpointing; it works because the gradient of a sum is known up to
one factor, which backward multiplies in. ``checkpointed_terms`` does the same sums for a head that is more than one
matrix (hooks, adapters, shards): it keeps nothing of a chunk and computes it again in backward.

The idea of taking the gradient in the forward pass is that of Liger Kernel's fused linear cross-entropy (Hsu et al.
2024, arXiv:2410.10989); the policy term, its floor and the entropy are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentft import losses
from agentft.errors import ModelError
from agentft.losses import LET_GO, NO_TARGET
from agentft.models.backbone import soft_capped


@dataclass(frozen=True, kw_only=True)
class VocabTargets:
    """What N positions are trained on.

    Attributes:
        labels: [N] int64 next tokens to imitate, ``NO_TARGET`` where none.
        weights: [N] float32 weight of each label.
        tokens: [N] int64 tokens that were written (of executed calls).
        advantages: [N] float32, 0 where a position is no call token.
        entropy_bonus: Weight of the entropy of call tokens.
        policy_rows: How many advantages are not 0; None counts them, which makes a GPU wait.
    """

    labels: Tensor
    weights: Tensor
    tokens: Tensor
    advantages: Tensor
    entropy_bonus: float = 0.0
    policy_rows: int | None = None

    def pick(self, at: Tensor | slice) -> VocabTargets:
        """Return the targets of some of the positions; ``policy_rows`` is not known for them."""
        return VocabTargets(
            labels=self.labels[at],
            weights=self.weights[at],
            tokens=self.tokens[at],
            advantages=self.advantages[at],
            entropy_bonus=self.entropy_bonus,
        )


@dataclass(frozen=True, kw_only=True)
class VocabTerms:
    """``total`` [] = Σ scale·sum, the one that carries the gradient; ``code`` and ``policy`` [] are for the record."""

    total: Tensor
    code: Tensor
    policy: Tensor


def plain_head(head: nn.Module) -> bool:
    """Whether a head is one matrix that ``vocab_terms`` may multiply by itself: no hooks, no adapter, no shards."""
    if type(head) is not nn.Linear or hasattr(head, "parametrizations"):
        return False
    hooked = head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks
    return not hooked and type(head.weight) in (nn.Parameter, Tensor)


def vocabulary_terms(
    head: nn.Module,
    hidden: Tensor,
    targets: VocabTargets,
    *,
    scales: tuple[float, float],
    cap: float | None,
    chunk_tokens: int,
) -> VocabTerms:
    """Return the sums of ``vocab_terms`` for a model's output embeddings, whatever hangs on them."""
    if plain_head(head):
        assert isinstance(head, nn.Linear)
        return vocab_terms(hidden, head.weight, head.bias, targets, scales=scales, cap=cap, chunk_tokens=chunk_tokens)

    def logits_of(chunk: Tensor) -> Tensor:
        return soft_capped(head(chunk), cap)

    return checkpointed_terms(logits_of, hidden, targets, scales=scales, chunk_tokens=chunk_tokens)


def vocab_terms(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: VocabTargets,
    *,
    scales: tuple[float, float] = (1.0, 1.0),
    cap: float | None = None,
    chunk_tokens: int = 256,
) -> VocabTerms:
    """Return code and policy sums (``losses.code_sum``, ``losses.policy_sum``) of a linear vocabulary head.

    Args:
        hidden: [N, H] final hidden states before the tokens that are predicted.
        weight: [V, H] of the head, tied or not.
        bias: [V] of the head, or None.
        targets: Of the N positions.
        scales: Factors of the code and the policy sum in ``total``.
        cap: Logits become cap·tanh(logits / cap) (Gemma); None leaves them.
        chunk_tokens: Positions whose logits exist at a time.

    Inside autocast the products run in its type, sums stay in float32. Backward runs once: the gradient is handed out,
    not kept.
    """
    rows = int((targets.advantages != 0).sum()) if targets.policy_rows is None else targets.policy_rows
    if 0 < rows < len(hidden):  # call tokens first: only they need the entropy
        order = torch.argsort((targets.advantages == 0).to(torch.uint8), stable=True)
        hidden, targets = hidden[order], targets.pick(order)
    device = hidden.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    code, policy, total = _VocabTerms.apply(
        hidden, weight, bias, targets, rows, scales, cap, max(chunk_tokens, 1), compute, torch.is_grad_enabled()
    )
    return VocabTerms(total=total, code=code, policy=policy)


def checkpointed_terms(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: VocabTargets,
    *,
    scales: tuple[float, float] = (1.0, 1.0),
    chunk_tokens: int = 256,
) -> VocabTerms:
    """Return the same sums for any head ``logits_of`` ([n, H] → [n, V]); its chunks are computed again in backward."""

    def sums(at: slice) -> Tensor:
        part, logits = targets.pick(at), logits_of(hidden[at])
        code = losses.code_sum(logits, part.labels, part.weights * (part.labels != NO_TARGET))
        return torch.stack((code, losses.policy_sum(logits, part.tokens, part.advantages, part.entropy_bonus)))

    found = checkpointed_sum(sums, len(hidden), chunk_tokens)
    total = (found * found.new_tensor(scales)).sum()
    code, policy = found.detach().unbind()
    return VocabTerms(total=total, code=code, policy=policy)


def checkpointed_sum(term: Callable[[slice], Tensor], count: int, chunk_tokens: int) -> Tensor:
    """Return Σ term(chunk) over chunks of ``count`` positions; nothing of a chunk is kept, backward computes it again.

    Without positions ``term`` still runs once, on none, so that the head is touched (data parallelism waits for it).
    """
    chunks = list(_chunks(0, count, chunk_tokens)) or [slice(0, 0)]
    return torch.stack([checkpoint(term, at, use_reentrant=False) for at in chunks]).sum(0)


class _VocabTerms(torch.autograd.Function):
    """(code, policy, total) sums; rows with an advantage come first."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: VocabTargets,
        policy_rows: int,
        scales: tuple[float, float],
        cap: float | None,
        chunk_tokens: int,
        compute: torch.dtype,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs = [grad_enabled and need for need in ctx.needs_input_grad[:3]]
        head = _Head(hidden, weight, bias, cap, compute, needs, min(chunk_tokens, max(len(hidden), 1)))
        with torch.autocast(hidden.device.type, enabled=False):
            code, policy = head.sums.new_zeros(()), head.sums.new_zeros(())
            for at in _chunks(0, policy_rows, chunk_tokens):
                code_part, policy_part = _policy_chunk(head, at, targets.pick(at), scales)
                code, policy = code + code_part, policy + policy_part
            for at in _chunks(policy_rows, len(hidden), chunk_tokens):
                code = code + _code_chunk(head, at, targets.pick(at), scales[0])
        ctx.gradients = head.gradients()
        ctx.mark_non_differentiable(code, policy)
        return code, policy, scales[0] * code + scales[1] * policy

    @staticmethod
    def backward(ctx: Any, _code: Tensor, _policy: Tensor, factor: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise ModelError("backward ran twice through the vocabulary head", expected="once a forward pass")
        scaled = [None if part is None else part.mul_(factor.to(part.dtype)) for part in gradients]
        return (*scaled, None, None, None, None, None, None, None)


class _Head:
    """The head's matrices, one chunk of logits, and the gradients that grow chunk by chunk."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cap: float | None,
        compute: torch.dtype,
        needs: list[bool],
        chunk: int,
    ) -> None:
        self.hidden, self.weight, self.bias, self.cap = hidden, weight.to(compute), bias, cap
        self.dtypes = (hidden.dtype, weight.dtype)
        exact = torch.promote_types(compute, torch.float32)  # of logits, gradients and sums
        self.sums = hidden.new_zeros(0, dtype=exact)
        self._products = hidden.new_empty((chunk, len(weight)), dtype=compute)
        self._logits = self._products if compute == exact else hidden.new_empty((chunk, len(weight)), dtype=exact)
        self.d_hidden = torch.zeros_like(hidden) if needs[0] else None
        self.d_weight = torch.empty_like(weight, dtype=exact) if needs[1] else None
        self._empty = True  # d_weight has not been written yet
        self.d_bias = torch.zeros_like(bias, dtype=exact) if needs[2] and bias is not None else None

    def logits(self, at: slice) -> Tensor:
        """Return the (capped) logits [n, V] of some rows in the buffer, which the next call overwrites."""
        n = at.stop - at.start
        products = torch.mm(self.hidden[at].to(self.weight.dtype), self.weight.t(), out=self._products[:n])
        if self.bias is not None:
            products.add_(self.bias.to(products.dtype))
        logits = self._logits[:n]
        if self._logits is not self._products:
            logits.copy_(products)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def add(self, at: slice, d_logits: Tensor, factor: Tensor) -> None:
        """Add the gradients of rows ``at`` whose logits have the gradient factor [n] · d_logits [n, V]."""
        compute = self.weight.dtype
        low = d_logits if d_logits.dtype == compute else self._products[: len(d_logits)].copy_(d_logits)
        if self.d_hidden is not None:
            self.d_hidden[at] = torch.mm(low, self.weight).mul_(factor[:, None].to(compute)).to(self.dtypes[0])
        if self.d_weight is not None:
            scaled = (self.hidden[at] * factor[:, None]).to(compute)
            if compute == self.d_weight.dtype:
                self.d_weight.addmm_(low.t(), scaled, beta=0.0 if self._empty else 1.0)
            elif self._empty:
                self.d_weight.copy_(torch.mm(low.t(), scaled))
            else:
                self.d_weight.add_(torch.mm(low.t(), scaled))
            self._empty = False
        if self.d_bias is not None:
            self.d_bias.addmv_(d_logits.t(), factor.to(d_logits.dtype))

    def wants_gradient(self) -> bool:
        """Whether anything is to be differentiated."""
        return self.d_hidden is not None or self.d_weight is not None or self.d_bias is not None

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of hidden states, weight and bias in the types of their tensors."""
        if self.d_weight is not None and self._empty:
            self.d_weight.zero_()
        d_weight = None if self.d_weight is None else self.d_weight.to(self.dtypes[1])
        d_bias = None if self.d_bias is None or self.bias is None else self.d_bias.to(self.bias.dtype)
        return [self.d_hidden, d_weight, d_bias]


def _code_chunk(head: _Head, at: slice, targets: VocabTargets, scale: float) -> Tensor:
    """Return the code sum [] of rows without an advantage, and add their gradient: weight·(softmax − one-hot)."""
    logits = head.logits(at)
    known, labels = _known(targets)
    slope = _cap_slope(head, logits)
    chosen, (most, where) = logits.gather(1, labels)[:, 0], logits.max(-1)
    chances = torch.softmax(logits, -1, out=logits)
    log_sum = most - chances.gather(1, where[:, None])[:, 0].log()  # the largest chance never underflows
    factor = targets.weights.to(logits.dtype) * known
    if head.wants_gradient():
        chances.scatter_add_(1, labels, -torch.ones_like(labels, dtype=chances.dtype))
        head.add(at, chances if slope is None else chances.mul_(slope), factor * scale)
    return ((log_sum - chosen) * factor).sum()


def _policy_chunk(head: _Head, at: slice, targets: VocabTargets, scales: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return code and policy sum [] of rows with an advantage, and add their gradient.

    With c the scaled weight of the label, a the scaled advantage (0 where log p is below its floor), b the scaled
    bonus and h the entropy, the gradient of a logit is p·(c + a + b·(log p + h)) − c·[label] − a·[token].
    """
    logits = head.logits(at)
    known, labels = _known(targets)
    slope = _cap_slope(head, logits)
    log_chances = logits.sub_(torch.logsumexp(logits, -1, keepdim=True))
    weights, advantages = targets.weights.to(logits.dtype) * known, targets.advantages.to(logits.dtype)
    tokens = targets.tokens[:, None]
    label_log, token_log = (log_chances.gather(1, column)[:, 0] for column in (labels, tokens))
    chances = log_chances.exp()
    entropy = -(chances * log_chances).sum(-1)
    down = advantages < 0
    policy = -(advantages * torch.where(down, token_log.clamp_min(LET_GO), token_log)).sum()
    policy = policy - targets.entropy_bonus * entropy.sum()
    if head.wants_gradient():
        c, b = scales[0] * weights, scales[1] * targets.entropy_bonus
        a = scales[1] * torch.where(down & (token_log < LET_GO), 0.0, advantages)
        d_logits = log_chances.add_(entropy[:, None]).mul_(b).add_((c + a)[:, None]).mul_(chances)
        d_logits.scatter_add_(1, labels, -c[:, None]).scatter_add_(1, tokens, -a[:, None])
        head.add(at, d_logits if slope is None else d_logits.mul_(slope), torch.ones_like(c))
    return -(label_log * weights).sum(), policy


def _known(targets: VocabTargets) -> tuple[Tensor, Tensor]:
    """Return which labels there are [n] bool, and labels [n, 1] with 0 in the place of the others."""
    known = targets.labels != NO_TARGET
    return known, torch.where(known, targets.labels, 0)[:, None]


def _cap_slope(head: _Head, logits: Tensor) -> Tensor | None:
    """Return d capped / d logit [n, V] = 1 − (capped / cap)², or None without a cap."""
    if head.cap is None or not head.wants_gradient():
        return None
    return (logits / head.cap).square_().neg_().add_(1.0)


def _chunks(first: int, end: int, size: int) -> Iterator[slice]:
    """Cut [first, end) into pieces of at most ``size``, as equal as can be: a small rest would be a slow product."""
    count = -(-(end - first) // size)
    borders = [first + (end - first) * k // count for k in range(count + 1)] if count else []
    return (slice(start, stop) for start, stop in pairwise(borders))
