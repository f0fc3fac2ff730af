"""The six loss components (floor 2): pure functions from predictions and targets to a sum and a count.

A component's loss is sum ÷ denominator. The sum runs over one microbatch; the denominator covers the whole global
batch (see ``agentft.data.batch``), so the loss does not depend on how the batch was cut. Without targets every sum is
exactly 0, with zero gradients and no NaN, and still touches its inputs (data parallelism needs every gradient).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

COMPONENTS: tuple[str, ...] = ("code", "intent", "tool", "cursor", "reward", "policy")
"""Names of the components, in the order in which they are logged."""

EXTRA_COMPONENTS: tuple[str, ...] = ("lm", "distill")
"""Components that only some runs have (``agentft.models.extra_losses``), logged after the others."""

NO_TARGET = -100
"""Label of a token or tool that is not trained."""

LET_GO = -4.6
"""Log-probability (of about 1 %) below which the policy term pushes a token down no further."""

CELLS_PER_UNIT = 64.0
"""Cursor distances enter the Huber loss in units of 64 cells, about a window; a cell is one character of the editor."""


def code_sum(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Weighted cross-entropy of next tokens.

    Args:
        logits: [N, V] any float type.
        labels: [N] int64, ``NO_TARGET`` where not trained.
        weights: [N] float32 weight of each label.

    Returns:
        [] float32, Σ weight·CE.
    """
    losses = F.cross_entropy(logits.float(), labels, ignore_index=NO_TARGET, reduction="none")
    return (losses * weights).sum()


def policy_sum(logits: Tensor, tokens: Tensor, advantages: Tensor, entropy_bonus: float) -> Tensor:
    """Policy gradient on the tokens of executed calls: Σ −advantage·log p(token) − bonus·entropy.

    Where the advantage is negative, log p counts as at least ``LET_GO``: a token that has become unlikely is let go.
    Without that floor, calls that are shown again every epoch are pushed down for ever, and the loss has no bottom.

    Args:
        logits: [N, V] any float type.
        tokens: [N] int64, the token that was written.
        advantages: [N] float32; rows with 0 are no call tokens and add nothing, entropy included.
        entropy_bonus: Weight of the entropy, in loss units a nat.
    """
    rows = advantages.nonzero()[:, 0]
    log_probs = F.log_softmax(logits[rows].float(), dim=-1)
    chosen = log_probs.gather(1, tokens[rows, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    chosen = torch.where(advantages[rows] < 0, chosen.clamp_min(LET_GO), chosen)
    return -(advantages[rows] * chosen + entropy_bonus * entropy).sum()


def intent_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Multi-label binary cross-entropy, averaged over the intents of an anchor. Both [N, I]; returns [] float32."""
    losses = F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none")
    return losses.sum() / max(logits.shape[-1], 1)


def tool_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over the tools. logits [N, tools], targets [N] int64 with ``NO_TARGET`` for none."""
    return F.cross_entropy(logits.float(), targets, ignore_index=NO_TARGET, reduction="none").sum()


def cursor_sum(predicted: Tensor, targets: Tensor, view: Tensor) -> Tensor:
    """Huber loss (δ = 1 unit = 64 cells) of x and y plus binary cross-entropy of before/after.

    Args:
        predicted: [N, 3]: x px, y px, logit of "after".
        targets: [N, 3] float32: x px, y px, 1 for after.
        view: [N, 4] float32: scroll_top px, zoom, line_height px, char_width px.
    """
    unit_px = cell_px(view) * CELLS_PER_UNIT
    place = F.huber_loss(predicted[:, :2].float() / unit_px, targets[:, :2] / unit_px, reduction="sum", delta=1.0)
    after = F.binary_cross_entropy_with_logits(predicted[:, 2].float(), targets[:, 2], reduction="sum")
    return place + after


def reward_sum(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Squared error of sigmoid(logit) against the outcome. All [N]; mask 0 where the outcome is not known."""
    return (mask * (torch.sigmoid(logits.float()) - targets) ** 2).sum()


def distill_sum(student: Tensor, teacher: Tensor, temperatures: Tensor) -> Tensor:
    """Σ τ²·KL(softmax(teacher/τ)‖softmax(student/τ)) (Hinton et al. 2015); no gradient reaches the teacher.

    Args:
        student: [N, V] logits, any float type.
        teacher: [N, V] logits of the same tokens.
        temperatures: [N] float32, τ of each position.
    """
    soft = temperatures[:, None]
    taught = F.log_softmax(teacher.detach().float() / soft, dim=-1)
    learnt = F.log_softmax(student.float() / soft, dim=-1)
    return (F.kl_div(learnt, taught, log_target=True, reduction="none").sum(-1) * temperatures**2).sum()


def cell_px(view: Tensor) -> Tensor:
    """Return [N, 2], width and height of a character cell in px, of viewports [N, 4] (see ``cursor_sum``)."""
    return torch.stack((view[:, 3] * view[:, 1], view[:, 2] * view[:, 1]), dim=-1)


def tokens_at(batch: Mapping[str, Any], at: tuple[Tensor, ...]) -> Tensor:
    """Return [N] int64, the tokens that stand at rows and columns ``at``: labels, as inputs there may be noisy."""
    labels = batch["labels"][at]
    return torch.where(labels == NO_TARGET, batch["input_ids"][at], labels)


def trained_places(batch: Mapping[str, Any]) -> Tensor:
    """Return [N, 2] int64, row and column of every token that is imitated or that a reward is given for."""
    trained = (batch["labels"][:, 1:] != NO_TARGET) | (batch["policy_weight"][:, 1:] != 0)
    before = trained.nonzero()
    return before + before.new_tensor([0, 1])


def batch_counts(batch: Mapping[str, Any]) -> dict[str, float]:
    """Return ``target_counts``, as the batch brings them (no GPU waits for them then) or counted now."""
    found: dict[str, float] = dict(batch.get("counts") or target_counts(batch))
    return found


def batch_denominators(batch: Mapping[str, Any]) -> dict[str, float]:
    """Return what each sum is divided by: the batch's ``denominators``, else its own counts."""
    given = batch.get("denominators") or {name: count or 1.0 for name, count in batch_counts(batch).items()}
    return dict(given)


def target_counts(batch: Mapping[str, Any]) -> dict[str, float]:
    """Return how much of each component a batch holds: the denominators of its means.

    ``code`` and ``lm`` are sums of token weights, ``policy`` and ``distill`` numbers of call tokens, the others are
    numbers of anchors with a target. ``lm`` and ``distill`` are there when the batch has their keys.
    """
    labelled = batch["labels"][:, 1:] != NO_TARGET
    extra: dict[str, float] = {}
    if "lm_weight" in batch:
        extra["lm"] = float(batch["lm_weight"][:, 1:].sum(dtype=torch.float64))
    if "distill_at" in batch:
        extra["distill"] = float(len(batch["distill_at"]))
    return {
        "code": float((batch["token_weight"][:, 1:] * labelled).sum(dtype=torch.float64)),
        "intent": float(len(batch["intent_target"])),
        "tool": float((batch["tool_target"] != NO_TARGET).sum()),
        "cursor": float(len(batch["cursor_target"])),
        "reward": float(batch["outcome_mask"].sum(dtype=torch.float64)),
        "policy": float((batch["policy_weight"][:, 1:] != 0).sum()),
        **extra,
    }
