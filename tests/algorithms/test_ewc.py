"""Elastic weight consolidation: its gradient is that of the penalty, and what it cannot hold it refuses."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from composer import Event
from composer.core import State
from composer.loggers import InMemoryLogger, Logger
from support_two_tasks import learn, task, tiny_agent

from agentft.algorithms.ewc import ElasticWeightConsolidation
from agentft.algorithms.loss_weights import GradientNorms
from agentft.errors import ModelError


class _Held:
    """As much of a trainer's state as the algorithm looks at."""

    def __init__(self, model: Any) -> None:
        self.model = model


def random_diagonal(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {name: torch.rand(p.shape, generator=generator) for name, p in model.backbone.named_parameters()}


def test_the_gradient_is_that_of_the_penalty() -> None:
    model = tiny_agent(1)
    diagonal, start = random_diagonal(model), {n: p.detach().clone() for n, p in model.backbone.named_parameters()}
    ewc = ElasticWeightConsolidation(model.backbone, diagonal, weight=3.0)
    state, logged = cast(State, _Held(model)), InMemoryLogger()
    logger = Logger(state, [logged])
    ewc.apply(Event.FIT_START, state, logger)
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    penalty = sum(
        1.5 * (diagonal[name] * (p - start[name]) ** 2).sum() for name, p in model.backbone.named_parameters()
    )
    expected = torch.autograd.grad(penalty, list(model.backbone.parameters()))
    first = next(model.backbone.parameters())
    first.grad = torch.ones_like(first)
    metrics: dict[str, float] = {}
    logger.log_metrics = lambda found, step=None: metrics.update(found)  # type: ignore[method-assign]
    ewc.apply(Event.AFTER_TRAIN_BATCH, state, logger)
    for index, (parameter, wanted) in enumerate(zip(model.backbone.parameters(), expected, strict=True)):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, wanted + float(index == 0))
    assert metrics["ewc/penalty"] == pytest.approx(float(penalty), rel=1e-5)
    norm = torch.nn.utils.get_total_norm(list(expected))
    assert metrics["ewc/gradnorm"] == pytest.approx(float(norm), rel=1e-5)


def test_it_acts_before_norms_are_taken_and_holds_completely_where_it_is_strong() -> None:
    free, held = tiny_agent(1), tiny_agent(1)
    ewc = ElasticWeightConsolidation(held.backbone, random_diagonal(held), weight=1e6)
    start = [p.detach().clone() for p in held.backbone.parameters()]
    rows = task(0, 1)
    learn(free, rows, batches=20, seed=1)
    logged = learn(held, rows, batches=20, seed=1, algorithms=[GradientNorms(), ewc])

    def moved(model: Any) -> float:
        return sum(float((p - s).norm()) for p, s in zip(model.backbone.parameters(), start, strict=True))

    assert moved(held) < moved(free) / 3
    assert float(logged.data["ewc/penalty"][0][1]) == 0.0
    assert float(logged.data["ewc/penalty"][-1][1]) > 0.0


def test_rows_that_a_weight_has_gained_are_free() -> None:
    model = tiny_agent(1)
    diagonal = random_diagonal(model)
    model.backbone.resize_token_embeddings(30, mean_resizing=False)
    ewc = ElasticWeightConsolidation(model.backbone, diagonal, weight=1.0)
    fisher = ewc._fisher["model.embed_tokens.weight"]
    assert torch.equal(fisher[:26], diagonal["model.embed_tokens.weight"])
    assert not fisher[26:].any()


def test_what_does_not_cover_the_weights_is_refused() -> None:
    model = tiny_agent(1)
    diagonal = random_diagonal(model)
    with pytest.raises(ModelError, match="another shape"):
        ElasticWeightConsolidation(model.backbone, diagonal | {"lm_head.weight": torch.zeros(3, 3)}, weight=1.0)
    del diagonal["lm_head.weight"]
    with pytest.raises(ModelError, match="does not cover"):
        ElasticWeightConsolidation(model.backbone, diagonal, weight=1.0)
    for parameter in model.backbone.parameters():
        parameter.requires_grad = False
    with pytest.raises(ModelError, match="does not cover"):
        ElasticWeightConsolidation(model.backbone, diagonal, weight=1.0)
