"""Turns that a model writes after drafts (floor 3): prompts, positions and grammar in one place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentft.models.agent_model import AgentModel
from agentft.models.generate import SampledTurn, evaluating, prompt_of, sample_turns
from agentft.models.grammar import TurnGrammar
from agentft.text.draft import Draft
from agentft.text.render import Renderer

MAX_TURN_TOKENS = 256
"""Longest turn: a thought and a call, or the answer."""


def write_turns(
    model: AgentModel,
    renderer: Renderer,
    drafts: Sequence[Draft],
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    grammar: bool = True,
) -> list[SampledTurn]:
    """Let the model write one turn after each draft, in evaluation mode; its mode is given back.

    Args:
        model: The agent.
        renderer: The renderer of the drafts.
        drafts: Right before a turn, or a few tokens into it; they are not changed.
        temperature: 0 takes the most likely token.
        generator: Source of randomness; needed when ``temperature`` is above 0.
        grammar: Hold the model to well-formed turns.
    """
    start = renderer.positions.start if renderer.positions.enabled else None
    handles = [draft.handles for draft in drafts]
    with evaluating(model):
        return sample_turns(
            model.backbone,
            [prompt_of(draft.finish(), feedback_start=start) for draft in drafts],
            stop_ids=renderer.vocab.end_of_turn,
            max_new_tokens=MAX_TURN_TOKENS,
            temperature=temperature,
            generator=generator,
            processor=TurnGrammar(renderer.vocab, renderer.specs, handles) if grammar else None,
        )
