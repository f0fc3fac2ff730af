"""The model that Composer trains (floor 3): one backbone pass, four heads, six loss components.

``forward`` runs the backbone once, the vocabulary head only where a token is trained, and each head at its anchors.
``loss`` divides sums by the batch's ``denominators`` (without them: by the batch's own counts) and adds them up with
the weights that ``agentft.algorithms.loss_weights`` sets for the moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from composer.core import State
from composer.models import ComposerModel
from torch import Tensor, nn
from torchmetrics import Metric
from transformers import PreTrainedModel

from agentft import losses, schedules
from agentft.config.schema import LossConfig, ModelConfig, OptimizerConfig, ScheduleConfig
from agentft.etai import INTENTS
from agentft.losses import COMPONENTS, EXTRA_COMPONENTS, NO_TARGET
from agentft.models.backbone import build_backbone, hidden_states, logit_cap, vocabulary_logits
from agentft.models.extra_losses import extra_sums
from agentft.models.heads import HEADS, AgentHeads
from agentft.models.vocab_head import VocabTargets, vocabulary_terms
from agentft.schedules import TrainTime

IN_CHUNKS = ("code", "policy")
"""The components that ``AgentModel.vocab_chunk_tokens`` computes chunk by chunk."""


class CompositeLoss:
    """Component weights over time.

    Args:
        config: The ``loss`` section: one schedule a component; ``distill`` counts where it is ever more than 0.
        lm_share: Share s of the component ``lm``: it gets the weight s, all others are multiplied by 1 − s.
    """

    def __init__(self, config: LossConfig, *, lm_share: float = 0.0) -> None:
        self.lm_share = lm_share
        self.schedules: dict[str, ScheduleConfig] = {name: getattr(config, name) for name in COMPONENTS}
        if config.distill != ScheduleConfig(start=0.0):
            self.schedules["distill"] = config.distill

    def weights(self, time: TrainTime) -> dict[str, float]:
        """Return the weight of each component at ``time``; those of ``EXTRA_COMPONENTS`` only where they are on."""
        found = {name: schedules.value(schedule, time) for name, schedule in self.schedules.items()}
        if not self.lm_share:
            return found
        return {name: (1 - self.lm_share) * weight for name, weight in found.items()} | {"lm": self.lm_share}


class AgentModel(ComposerModel):
    """Backbone and heads.

    Attributes:
        backbone: The Hugging Face causal LM.
        heads: See ``AgentHeads``.
        loss_weights: Weight of each component now; which of ``EXTRA_COMPONENTS`` a run has is seen here.
        distill_temperature: Of the component ``distill``.
        cpu_bfloat16: Run the forward pass in bfloat16 autocast on a CPU, which Composer's ``precision`` refuses to do.
        unpadded: Rows go through the backbone end to end, without their padding; the losses are the same.
        vocab_chunk_tokens: Trained positions whose logits exist at a time; 0 keeps all of them (see ``forward``).
        statistics: component → [2] float64, sum and count over the microbatches since ``reset_statistics``.
    """

    def __init__(
        self,
        config: ModelConfig,
        backbone: PreTrainedModel,
        heads: AgentHeads,
        *,
        tools: Sequence[str],
        entropy_bonus: float = 0.0,
    ) -> None:
        super().__init__()
        self.config, self.backbone, self.heads = config, backbone, heads
        self.tools, self.intents = tuple(tools), INTENTS
        self.entropy_bonus = entropy_bonus
        self.loss_weights: dict[str, float] = dict.fromkeys(COMPONENTS, 1.0)
        self.distill_temperature = 1.0
        self.cpu_bfloat16 = False
        self.vocab_chunk_tokens = 0
        self.unpadded = False
        self.statistics: dict[str, Tensor] = {}

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return predictions for a batch (docs/design.md, "Batch dictionary").

        Returns:
            ``next_at`` [N, 2] row and column of the N trained tokens, ``logits`` [N, V] that predict them (with
            ``vocab_chunk_tokens`` in their place ``code_sum``, ``policy_sum`` and ``vocab_total`` [] of
            ``agentft.models.vocab_head``; their gradient is in the loss's ``total`` only), ``hidden`` [B, T, H], the
            heads' ``intent``, ``tool``, ``cursor``, ``reward``, and ``extra_<name>``,
            the sum of each of ``EXTRA_COMPONENTS`` that the batch has keys for.
        """
        if self.cpu_bfloat16 and batch["input_ids"].device.type == "cpu":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self._predict(batch)
        return self._predict(batch)

    def _predict(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        lengths = batch["lengths"] if self.unpadded else None
        hidden = hidden_states(self.backbone, batch["input_ids"], batch["position_ids"], lengths)
        next_at = batch["next_at"] if "next_at" in batch else losses.trained_places(batch)
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, next_at[:, 0] * hidden.shape[1] + next_at[:, 1] - 1)
        extra = extra_sums(self.vocabulary_logits, hidden, batch, self.distill_temperature)
        chunks = self.vocab_chunk_tokens > 0
        token_part = self._in_chunks(rows, next_at, batch) if chunks else {"logits": self.vocabulary_logits(rows)}
        return {
            "hidden": hidden,
            "next_at": next_at,
            **token_part,
            **self.heads(hidden, batch),
            **{f"extra_{name}": part for name, part in extra.items()},
        }

    def vocabulary_logits(self, hidden: Tensor) -> Tensor:
        """Return next-token logits [..., V] of final hidden states [..., H]."""
        return vocabulary_logits(self.backbone, hidden)

    def _in_chunks(self, rows: Tensor, next_at: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the sums of both components that need logits, and their weighted total, which has the gradient."""
        at = next_at.unbind(1)
        counts, denominators = losses.batch_counts(batch), losses.batch_denominators(batch)
        found = vocabulary_terms(
            self.backbone.get_output_embeddings(),
            rows,
            VocabTargets(
                labels=batch["labels"][at],
                weights=batch["token_weight"][at],
                tokens=losses.tokens_at(batch, at),
                advantages=batch["policy_weight"][at],
                entropy_bonus=self.entropy_bonus,
                policy_rows=int(counts["policy"]),
            ),
            scales=(
                self.loss_weights["code"] / denominators["code"],
                self.loss_weights["policy"] / denominators["policy"],
            ),
            cap=logit_cap(self.backbone),
            chunk_tokens=self.vocab_chunk_tokens,
        )
        return {"code_sum": found.code, "policy_sum": found.policy, "vocab_total": found.total}

    def loss(  # type: ignore[override]
        self, outputs: Mapping[str, Tensor], batch: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Return ``total`` (weighted) and the plain loss of each component; also adds to ``statistics``."""
        sums = self.component_sums(outputs, batch)
        counts, denominators = losses.batch_counts(batch), losses.batch_denominators(batch)
        for name in self.loss_weights.keys() - sums.keys():  # nothing was prepared for it: no target in this batch
            sums[name], counts[name], denominators[name] = sums["code"].new_zeros(()), 0.0, 1.0
        parts = {name: sums[name] / denominators[name] for name in self.loss_weights}
        for name in parts:
            seen = torch.stack((sums[name].detach().double(), sums[name].new_tensor(counts[name]).double()))
            self.statistics[name] = self.statistics[name] + seen if name in self.statistics else seen
        weighted = {name: self.loss_weights[name] * part for name, part in parts.items()}
        if "vocab_total" in outputs:  # the weighted sum of these two, and the only one of them with a gradient
            weighted = {name: part for name, part in weighted.items() if name not in IN_CHUNKS}
            weighted["vocabulary"] = outputs["vocab_total"]
        total = torch.stack(list(weighted.values())).sum()
        return {"total": total, **parts}

    def component_sums(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the sum [] float32 of each component over this batch."""
        return {
            **self._token_sums(outputs, batch),
            "intent": losses.intent_sum(outputs["intent"], batch["intent_target"]),
            "tool": losses.tool_sum(outputs["tool"], batch["tool_target"]),
            "cursor": losses.cursor_sum(outputs["cursor"], batch["cursor_target"], batch["cursor_view"]),
            "reward": losses.reward_sum(outputs["reward"], batch["outcome_target"], batch["outcome_mask"]),
            **{name: outputs[f"extra_{name}"] for name in EXTRA_COMPONENTS if f"extra_{name}" in outputs},
        }

    def _token_sums(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Any]) -> dict[str, Tensor]:
        if "vocab_total" in outputs:
            return {"code": outputs["code_sum"], "policy": outputs["policy_sum"]}
        logits, at = outputs["logits"], outputs["next_at"].unbind(1)
        labels, advantages = batch["labels"][at], batch["policy_weight"][at]
        return {
            "code": losses.code_sum(logits, labels, batch["token_weight"][at] * (labels != NO_TARGET)),
            "policy": losses.policy_sum(logits, losses.tokens_at(batch, at), advantages, self.entropy_bonus),
        }

    def reset_statistics(self) -> None:
        """Forget the sums and counts seen so far."""
        self.statistics = {}

    @torch.no_grad()
    def predictions(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the heads say, as float32: ``intent_probs`` [Ni, intents], ``tool_probs`` [Nt, tools],
        ``cursor`` [Nc, 3] (x px, y px, probability of "after") and ``outcome`` [Nr] (probability of passing).
        """
        cursor = outputs["cursor"].float()
        return {
            "intent_probs": outputs["intent"].float().sigmoid(),
            "tool_probs": outputs["tool"].float().softmax(-1),
            "cursor": torch.cat((cursor[:, :2], cursor[:, 2:].sigmoid()), dim=-1),
            "outcome": outputs["reward"].float().sigmoid(),
        }

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        """Return one mean per component for evaluation; nothing for training, where the loss is logged anyway."""
        return {} if is_train else {name: ComponentMean(name) for name in COMPONENTS if name != "policy"}

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        """Add this batch to a ``ComponentMean``."""
        assert isinstance(metric, ComponentMean)
        sums = outputs.setdefault("component_sums", None) or self.component_sums(outputs, batch)
        outputs["component_sums"] = sums
        metric.update(sums[metric.component], losses.batch_counts(batch)[metric.component])


def agent_of(state: State) -> AgentModel:
    """Return the agent of a trainer's state, inside whatever data parallelism has wrapped around it."""
    model = getattr(state.model, "module", state.model)
    assert isinstance(model, AgentModel)
    return model


class ComponentMean(Metric):
    """Mean of one loss component over an evaluation, exact over batches and ranks. NaN without targets."""

    total: Tensor
    count: Tensor

    def __init__(self, component: str) -> None:
        super().__init__()
        self.component = component
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: float) -> None:
        """Add a sum and a count."""
        self.total += total.double()
        self.count += count

    def compute(self) -> Tensor:
        """Return sum ÷ count."""
        return self.total / self.count


def build_agent_model(
    config: ModelConfig,
    *,
    vocab_size: int,
    tools: Sequence[str],
    seed: int,
    entropy_bonus: float = 0.0,
    new_token_ids: Sequence[int] = (),
) -> AgentModel:
    """Return a new agent: the backbone of ``config`` and freshly initialised heads (both fixed by ``seed``).

    Raises:
        ModelError: See ``build_backbone``.
    """
    backbone = build_backbone(config, vocab_size, seed, new_token_ids=new_token_ids)
    with torch.random.fork_rng():
        torch.manual_seed(seed + 1)
        heads = AgentHeads(backbone.config.get_text_config().hidden_size, len(INTENTS), len(tools))
    return AgentModel(config, backbone, heads, tools=tools, entropy_bonus=entropy_bonus)


def parameter_groups(model: AgentModel, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return optimiser groups, each with a ``name``: ``backbone``, ``backbone_no_decay`` and one per head.

    Vectors of the backbone (norms, biases) are not decayed. ``weight_decay`` is in the units of Composer's
    ``DecoupledAdamW``, which shrinks weights by weight_decay · lr / first lr a step: the config's value is multiplied
    by the group's learning rate, so that it means what it means for AdamW (0.01 as it stands would halve every weight
    in 70 steps).
    """
    trained = [p for p in model.backbone.parameters() if p.requires_grad]
    rates = {name: getattr(config, f"{name}_lr") for name in HEADS}
    groups = [
        _group("backbone", [p for p in trained if p.ndim > 1], config.backbone_lr, config.weight_decay),
        _group("backbone_no_decay", [p for p in trained if p.ndim <= 1], config.backbone_lr, 0.0),
        *(
            _group(name, list(getattr(model.heads, name).parameters()), rates[name], config.weight_decay)
            for name in HEADS
        ),
    ]
    return [group for group in groups if group["params"]]


def _group(name: str, params: list[nn.Parameter], lr: float, weight_decay: float) -> dict[str, Any]:
    return {"name": name, "params": params, "lr": lr, "weight_decay": weight_decay * lr}
