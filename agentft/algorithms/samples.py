"""What the model would write (floor 4): readable generations while training, always at the same places.

Every ``every`` batches the first ``count`` held-out sessions are continued by one turn each: session i at its turn
i + 1 (the last of its turns is the answer), whatever the model chooses to write there, without the grammar of calls.
The most likely token is taken each time, so that two samples differ only by what was learned in between; nothing random
is drawn, and the model's mode is put back: losses are what they are without samples, bit for bit.

``runs/<name>/samples.txt`` is for reading, ``samples.jsonl`` for programs: {batch, session_id, turn, turns, prompt_end,
written, recorded, stopped, tokens}. The first rank generates and writes, so the whole model has to be there (no FSDP).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer import Callback, Logger, State
from composer.utils import dist

from agentft.config.algorithms import SamplesConfig
from agentft.errors import DataError
from agentft.etai import Session
from agentft.models.agent_model import AgentModel, agent_of
from agentft.models.generate import evaluating, prompt_of, sample_turns
from agentft.text.draft import Draft
from agentft.text.parse import to_text
from agentft.text.render import Renderer
from agentft.tools import ToolCall

log = logging.getLogger(__name__)
SHOWN_CHARS = 600
"""How much of a prompt's end is shown."""


class Samples(Callback):
    """Writes ``samples.txt`` and ``samples.jsonl`` into a run folder."""

    def __init__(
        self, config: SamplesConfig, renderer: Renderer, sessions: Sequence[Session], run_folder: Path
    ) -> None:
        self.config, self.renderer, self.folder = config, renderer, run_folder
        chosen = sessions[: config.count]
        self._places = [(session, number % turns_of(session) + 1) for number, session in enumerate(chosen)]

    def batch_end(self, state: State, logger: Logger) -> None:
        """Sample when it is due."""
        done = state.timestamp.batch.value
        if done % self.config.every or dist.get_global_rank() != 0:
            return
        samples = generate(agent_of(state), self.renderer, self._places, self.config.max_tokens)
        lines = [{"batch": done, **sample} for sample in samples]
        with (self.folder / "samples.jsonl").open("a") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        with (self.folder / "samples.txt").open("a") as file:
            file.writelines(readable(line) for line in lines)


def turns_of(session: Session) -> int:
    """Return the number of the agent's turns: its steps and its answer."""
    return len(session.execution_trace) + 1


def generate(
    model: AgentModel, renderer: Renderer, places: Sequence[tuple[Session, int]], max_tokens: int
) -> list[dict[str, Any]]:
    """Return what ``model`` writes at each place (session, turn from 1); a session that does not fit is left out."""
    drafts: list[tuple[Session, int, Draft]] = []
    for session, turn in places:
        try:
            drafts.append((session, turn, renderer.prompt(session, turn, reserve=max_tokens)))
        except DataError as error:
            log.warning("no sample of %s: %s", session.session_id, error.what)
    start = renderer.positions.start if renderer.positions.enabled else None
    with evaluating(model):
        written = sample_turns(
            model.backbone,
            [prompt_of(draft.finish(), feedback_start=start) for _, _, draft in drafts],
            stop_ids=renderer.vocab.end_of_turn,
            max_new_tokens=max_tokens,
            temperature=0.0,
        )
    return [
        {
            "session_id": session.session_id,
            "turn": turn,
            "turns": turns_of(session),
            "prompt_end": _text(renderer, draft, draft.ids)[-SHOWN_CHARS:],
            "written": _text(renderer, draft, sampled.ids),
            "recorded": _recorded(renderer, session, turn, draft),
            "stopped": sampled.stopped,
            "tokens": len(sampled.ids),
        }
        for (session, turn, draft), sampled in zip(drafts, written, strict=True)
    ]


def _text(renderer: Renderer, draft: Draft, ids: Sequence[int]) -> str:
    return to_text(ids, renderer.vocab, draft.handles)


def _recorded(renderer: Renderer, session: Session, turn: int, draft: Draft) -> str:
    """Return what the record has at this turn, in the form of what is sampled."""
    vocab = renderer.vocab
    if turn > len(session.execution_trace):
        ids = [vocab.trace_end, vocab.output, *vocab.encode(session.final_output), vocab.eot]
    else:
        step = session.execution_trace[turn - 1]
        thought = vocab.encode(step.thought) if step.thought and renderer.text.show_thoughts else ()
        call = renderer.call_ids(ToolCall(step.tool_called, step.tool_args), draft.handles)
        ids = [vocab.step, *thought, *call]
    return _text(renderer, draft, ids)


def readable(line: dict[str, Any]) -> str:
    """Return a sample as text for a person."""
    end = "" if line["stopped"] else " (cut: it did not end)"
    return (
        f"=== batch {line['batch']} · {line['session_id']} · turn {line['turn']} of {line['turns']} ===\n"
        f"--- the prompt ends\n…{line['prompt_end']}\n"
        f"--- written: {line['tokens']} tokens{end}\n{line['written']}\n"
        f"--- recorded\n{line['recorded']}\n\n"
    )
