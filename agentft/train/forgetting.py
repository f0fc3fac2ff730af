"""Objects against forgetting and repeating (floor 5), for ``agentft.train.build``: earlier rows, EWC, distillation.

Each function returns a list: what its settings ask for, or nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from composer.core import Algorithm, Callback

from agentft.algorithms.ewc import ElasticWeightConsolidation
from agentft.config.schema import DataConfig, RunConfig
from agentft.data.meta import ShardMeta
from agentft.data.replay_buffer import EarlierRows, EarlierSource, check_replay, open_earlier
from agentft.feedback.callback import ExecutionFeedback
from agentft.feedback.distillation import FeedbackDistillation
from agentft.models.agent_model import AgentModel, CompositeLoss
from agentft.models.fisher import check_belongs, load_fisher
from agentft.text.render import Renderer
from agentft.tools import TOOL_INDEX


def stage_data(config: RunConfig) -> DataConfig:
    """Return the data section for the loader of the stage's own samples: replayed ones take places in its batches."""
    rows = int(config.forgetting.replay_rows(config.data.batch_size))
    return replace(config.data, batch_size=config.data.batch_size - rows) if rows else config.data


def build_earlier_rows(config: RunConfig, meta: ShardMeta) -> list[Callback]:
    """Return the callback that adds rows of earlier stages to each batch.

    Args:
        config: Of the run.
        meta: Of the run's own shards.

    Raises:
        DataError: The earlier shards are missing or do not fit the run.
    """
    forgetting, text = config.forgetting, config.text
    wanted = {forgetting.lm_shards, forgetting.replay.shards} - {None}
    if not wanted:
        return []
    opened = {
        folder: open_earlier(
            str(folder),
            config.data,
            tokenizer_sha256=meta.tokenizer_sha256,
            positions=config.model.feedback_positions,
        )
        for folder in sorted(map(str, wanted))
    }
    replay = lm = None
    if forgetting.replay.shards is not None:
        rows, earlier = opened[forgetting.replay.shards]
        check_replay(forgetting.replay.shards, earlier, text=text, tools=list(TOOL_INDEX))
        count = int(forgetting.replay_rows(config.data.batch_size))
        replay = EarlierSource(rows=rows, count=count, seed=config.seed)
    if forgetting.lm_shards is not None:
        lm = EarlierSource(rows=opened[forgetting.lm_shards][0], count=forgetting.lm_rows, seed=config.seed + 1)
    return [EarlierRows(replay=replay, lm=lm, max_tokens=text.max_tokens)]


def build_ewc(config: RunConfig, model: AgentModel) -> list[Algorithm]:
    """Return the penalty on moving the weights of ``model`` away from where they are now.

    Raises:
        ModelError: The Fisher information is missing, or belongs to other weights than those of ``model.path``.
    """
    ewc = config.forgetting.ewc
    if not ewc.weight:
        return []
    fisher = load_fisher(Path(str(ewc.fisher)).expanduser())
    check_belongs(fisher, Path(str(config.model.path)).expanduser(), where="forgetting.ewc.fisher")
    return [ElasticWeightConsolidation(model.backbone, fisher.diagonal, weight=ewc.weight)]


def build_distillation(
    config: RunConfig,
    composite: CompositeLoss,
    model: AgentModel,
    renderer: Renderer,
    feedback: ExecutionFeedback | None,
) -> list[Callback]:
    """Return the callback that teaches failed calls; it goes behind ``LossWeights`` and ``feedback``."""
    if "distill" not in composite.schedules:
        return []
    wanted = config.feedback.distillation
    model.distill_temperature = wanted.temperature
    judged = feedback.judged if feedback is not None else list
    return [
        FeedbackDistillation(
            wanted, renderer=renderer, rows=config.data.microbatch_size, judged=judged, seed=config.seed
        )
    ]
