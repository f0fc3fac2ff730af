"""A tiny agent learns one task, then another, and keeps more of the first with each of the three means than without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from composer.core import Algorithm
from support_two_tasks import Listed, learn, loss_of, task, tiny_agent

from agentft.algorithms.ewc import ElasticWeightConsolidation
from agentft.data.replay_buffer import EarlierRows, EarlierSource
from agentft.evals.fisher import row_of
from agentft.models.agent_model import AgentModel
from agentft.models.fisher import diagonal_fisher

SEED = 0
A, B = task(0, SEED), task(1, SEED)
DRAWS = 30
"""How often every row is measured: a model that is sure of its answers seldom draws another one."""


@pytest.fixture(scope="module")
def after_a() -> AgentModel:
    model = tiny_agent(SEED)
    learn(model, A, batches=150, seed=SEED)
    assert loss_of(model, A) < 0.1
    return model


@pytest.fixture(scope="module")
def learn_b(after_a: AgentModel) -> Callable[..., tuple[float, float]]:
    """Learn B from where A ended; give what is left of A, and the loss on B."""

    def train(hold: Callable[[AgentModel], Sequence[Algorithm]] = lambda _: (), **options: Any) -> tuple[float, float]:
        model = copy.deepcopy(after_a)
        learn(model, B, batches=100, seed=50, algorithms=hold(model), **options)
        return loss_of(model, A), loss_of(model, B)

    return train


@pytest.fixture(scope="module")
def plain(learn_b: Callable[..., tuple[float, float]]) -> float:
    left, learnt = learn_b()
    assert learnt < 0.1
    assert left > 3.0, "a task that is not forgotten proves nothing"
    return left


def earlier(rows: Listed) -> EarlierSource:
    return EarlierSource(rows=rows, count=4, seed=1)


def test_language_modelling_on_earlier_rows_keeps_the_first_task(learn_b: Any, plain: float) -> None:
    left, learnt = learn_b(lm_share=0.1, callbacks=[EarlierRows(replay=None, lm=earlier(A), max_tokens=8)])
    assert left < plain / 4
    assert learnt < 0.2


def test_replayed_samples_keep_the_first_task(learn_b: Any, plain: float) -> None:
    left, learnt = learn_b(batch_size=12, callbacks=[EarlierRows(replay=earlier(A), lm=None, max_tokens=8)])
    assert left < plain / 10
    assert learnt < 0.2


def test_elastic_weight_consolidation_keeps_the_first_task(after_a: AgentModel, learn_b: Any, plain: float) -> None:
    diagonal, samples, _ = diagonal_fisher(after_a.backbone, map(row_of, list(A) * DRAWS), kind="true")
    assert samples == DRAWS * len(A)
    left, learnt = learn_b(hold=lambda model: [ElasticWeightConsolidation(model.backbone, diagonal, weight=1000.0)])
    assert left < plain / 2
    assert learnt < 0.2
