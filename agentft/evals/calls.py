"""The model's own next calls on recorded sessions (floor 4): well-formed, right tool, right file, the very same call?

    metrics = call_metrics(model, renderer, train, sessions, grammar=False)

At every recorded call that was no mistake the model reads the session up to there and writes one turn greedily; nothing
is executed. A call that is not well-formed counts as wrong everywhere. Without a grammar the shares show what the model
writes by itself; with it (as sampling and replay use it) every call parses and the others show what it chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from agentft.data.progress import track
from agentft.errors import DataError
from agentft.etai import Session
from agentft.evals import baselines
from agentft.evals.facts import SessionFacts, StepFacts
from agentft.evals.metrics import Metric
from agentft.models.agent_model import AgentModel
from agentft.models.turns import MAX_TURN_TOKENS, write_turns
from agentft.text.draft import Draft
from agentft.text.parse import parse_turn
from agentft.text.render import Renderer
from agentft.text.rendered import Kind
from agentft.tools import FormatError, ToolCall, ToolSpec

BATCH = 16


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Right before a recorded call: what it was, and what is known without reading."""

    draft: Draft
    recorded: ToolCall
    facts: StepFacts
    shown: tuple[str, ...]
    last: str | None


def call_metrics(
    model: AgentModel,
    renderer: Renderer,
    train: Sequence[SessionFacts],
    sessions: Sequence[tuple[Session, SessionFacts]],
    *,
    grammar: bool,
    progress: bool = False,
) -> dict[str, Metric]:
    """Return ``parsed``, ``right_tool``, ``right_file`` and ``same_call``: shares of the calls on ``sessions``.

    Args:
        model: The agent; its mode is given back.
        renderer: The renderer of the shards that it was trained on.
        train: Facts of the training sessions, for the baselines.
        sessions: Held-out sessions with their facts; steps whose context does not fit are left out.
        grammar: Hold the model to well-formed calls.
        progress: Show a bar on standard error.

    ``right_file`` counts recorded calls that name a file (an argument that refers to one, or the tests of a run); its
    baselines are the file of the call before (the file that is open before the first), and chance among files shown.
    """
    places = sorted(_places(renderer, sessions), key=lambda place: len(place.draft))
    written: list[ToolCall | FormatError] = []
    with track("calls in the grammar" if grammar else "calls", len(places), enabled=progress) as advance:
        for at in range(0, len(places), BATCH):
            for call in _write(model, renderer, places[at : at + BATCH], grammar):
                written.append(call)
                advance()
    if not places:
        return {name: Metric(value=None, count=0) for name in ("parsed", "right_tool", "right_file", "same_call")}
    steps = [place.facts for place in places]
    pairs = list(zip(places, written, strict=True))
    named = [(place, call, file) for place, call in pairs if (file := file_of(place.recorded, renderer.specs))]

    def share(guesses: Sequence[str]) -> float:
        return fmean(guess == step.tool for guess, step in zip(guesses, steps, strict=True))

    return {
        "parsed": Metric(value=fmean(isinstance(call, ToolCall) for call in written), count=len(pairs)),
        "right_tool": Metric(
            value=fmean(isinstance(call, ToolCall) and call.name == place.recorded.name for place, call in pairs),
            count=len(pairs),
            baselines={
                "majority": share(baselines.majority_tool(train, steps)),
                "bigram_exit": share(baselines.bigram_exit_tool(train, steps)),
            },
        ),
        "right_file": Metric(
            value=fmean(_file(call, renderer.specs) == file for _, call, file in named) if named else None,
            count=len(named),
            baselines={
                "last_file": fmean(place.last == file for place, _, file in named),
                "chance": fmean((file in place.shown) / max(1, len(place.shown)) for place, _, file in named),
            }
            if named
            else {},
        ),
        "same_call": Metric(value=fmean(call == place.recorded for place, call in pairs), count=len(pairs)),
    }


def file_of(call: ToolCall, specs: Mapping[str, ToolSpec]) -> str | None:
    """Return the file that a call names: an argument that refers to a file, or the first target of a test run."""
    spec = specs.get(call.name)
    path = next((call.args.get(p.name) for p in spec.parameters if p.refers_to == "file"), None) if spec else None
    if path is None and isinstance(targets := call.args.get("targets"), str) and targets.split():
        path = targets.split()[0].split("::")[0]
    return path if isinstance(path, str) else None


def _file(call: ToolCall | FormatError, specs: Mapping[str, ToolSpec]) -> str | None:
    return file_of(call, specs) if isinstance(call, ToolCall) else None


def _places(renderer: Renderer, sessions: Sequence[tuple[Session, SessionFacts]]) -> Iterator[_Place]:
    for session, facts in sessions:
        cursor = session.ide_context.cursor_position
        last = cursor.file if cursor else next(iter(session.ide_context.open_files), None)
        for number, (step, fact) in enumerate(zip(session.execution_trace, facts.steps, strict=True), start=1):
            call = ToolCall(step.tool_called, step.tool_args)
            if not step.mistake and call.name in renderer.specs:
                try:
                    draft = renderer.prompt(session, number, reserve=MAX_TURN_TOKENS + 1)
                except DataError:
                    continue
                draft.add([renderer.vocab.step], Kind.THOUGHT)
                shown = draft.handles.paths()
                yield _Place(draft=draft, recorded=call, facts=fact, shown=shown, last=last)
            last = file_of(call, renderer.specs) or last


def _write(
    model: AgentModel, renderer: Renderer, places: Sequence[_Place], grammar: bool
) -> list[ToolCall | FormatError]:
    turns = write_turns(model, renderer, [place.draft for place in places], grammar=grammar)
    calls = []
    for place, turn in zip(places, turns, strict=True):
        ids = [renderer.vocab.step, *turn.ids]
        call = parse_turn(ids, renderer.vocab, place.draft.handles, renderer.specs).call
        assert call is not None, "a turn that begins with <|step|> holds a call or an error"
        calls.append(call)
    return calls
