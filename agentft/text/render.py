"""A session as tokens (floor 2): ids, what is trained, positions and anchors, born together.

    renderer = Renderer(vocab, TextConfig(), FeedbackPositionsConfig())
    rendered = renderer.render(session)                        # the whole session
    draft = renderer.prompt(session, upto_step=3)              # everything before the third step
    call = renderer.append_agent(draft, sampled_ids)           # what the model wrote
    ids, positions = renderer.append_result(draft, call, result)   # what happened: more tokens, nothing re-tokenised

Appending turn by turn gives the same tokens as rendering whole. The layout is in docs/design.md.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from agentft.config.schema import FeedbackPositionsConfig, TextConfig
from agentft.errors import DataError
from agentft.etai import ExecutionResult, IdeContext, Session, TraceStep
from agentft.text.draft import Draft
from agentft.text.handles import Handles
from agentft.text.parse import call_file, parse_call
from agentft.text.rendered import Kind, Rendered, StepAnchor
from agentft.text.results import ResultWriter, shorten
from agentft.text.vocab import FILE_HANDLES, SPECIAL_TOKENS, Vocab
from agentft.tools import BUILTIN_TOOLS, FormatError, ToolCall, ToolSpec

TEMPLATE_VERSION = 1
LEAST_RESULT_TOKENS = 24
LEAST_INSTRUCTION_TOKENS = 16
GIT_STATUS_TOKENS = 48

_FAILED_STATUS = ("timeout", "oom", "pids", "output_limit")


@dataclass(frozen=True)
class _Plan:
    """How much of a session is shown: the first step, the budget of each result, that of the instruction."""

    first: int
    result: int
    instruction: int


class Renderer:
    """Renders sessions with one vocabulary and one text configuration. Holds no state between calls."""

    def __init__(
        self,
        vocab: Vocab,
        text: TextConfig,
        positions: FeedbackPositionsConfig,
        tools: tuple[ToolSpec, ...] = BUILTIN_TOOLS,
    ) -> None:
        self.vocab, self.text, self.positions = vocab, text, positions
        self.specs = {spec.name: spec for spec in tools}
        self.rows = {spec.name: row for row, spec in enumerate(tools)}

    def render(self, session: Session) -> Rendered:
        """Return the whole session in at most ``text.max_tokens`` tokens; see ``docs/design.md`` for the layout.

        Results shrink first; if that is not enough, an instruction of more than half the budget is cut to half, then
        the oldest steps go, then the rest of the instruction. Context and final output stay whole.

        Raises:
            DataError: what must stay whole does not fit, or the positions reach the feedback range.
        """
        return self._fit(session, len(session.execution_trace), self.text.max_tokens, final=True).finish()

    def render_prompt(self, session: Session, upto_step: int, reserve: int = 0) -> Rendered:
        """Return everything before the agent's turn ``upto_step`` (from 1, by place in the trace); see ``prompt``."""
        return self.prompt(session, upto_step, reserve).finish()

    def prompt(self, session: Session, upto_step: int, reserve: int = 0) -> Draft:
        """Return a draft that ends right before the agent's turn ``upto_step``; one past the last step is the answer.

        At least ``reserve`` of ``text.max_tokens`` are left free for what is appended.

        Raises:
            DataError: context and instruction do not fit.
        """
        if not 1 <= upto_step <= len(session.execution_trace) + 1:
            raise DataError(
                "no such step",
                where=session.session_id,
                got=upto_step,
                expected=f"1 to {len(session.execution_trace) + 1}",
            )
        return self._fit(session, upto_step - 1, self.text.max_tokens - reserve, final=False)

    def append_agent(self, draft: Draft, ids: Sequence[int], *, mistake: bool = False) -> ToolCall | FormatError | None:
        """Append one turn that the agent wrote, and return its call (None where the turn holds none).

        The tokens count as trained unless ``mistake``. ``ids`` is a turn from ``<|step|>`` to ``<|tool_end|>``, or
        from ``<|trace_end|>`` to ``<|eot|>``; a turn that breaks off is kept as it is.
        """
        ids, vocab = [int(i) for i in ids], self.vocab
        if ids and ids[0] == vocab.trace_end:
            at = len(draft.ids)
            draft.add(ids, Kind.OUTPUT, trained=True)
            draft.cursor_at = at + ids.index(vocab.output) if vocab.output in ids else -1
            return None
        cut = ids.index(vocab.tool_start) if vocab.tool_start in ids else len(ids)
        kinds = (Kind.MISTAKE, Kind.MISTAKE) if mistake else (Kind.THOUGHT, Kind.CALL)
        draft.add(ids[:cut], kinds[0], trained=not mistake)
        if cut == len(ids):
            return None
        call = parse_call(ids[cut:], vocab, draft.handles, self.specs)
        name_end = ids.index(vocab.args, cut) if vocab.args in ids[cut:] else cut + 1
        name = call.name if isinstance(call, ToolCall) else vocab.decode(ids[cut + 1 : name_end])
        self._add_call(draft, name, ids[cut:], kinds[1], mistake)
        return call

    def append_result(
        self, draft: Draft, call: ToolCall | FormatError | None, result: ExecutionResult, budget: int | None = None
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Append what happened when the last turn's call ran; return the new ids and positions, both [N] int32.

        ``budget`` is the longest result in tokens (``text.result_tokens`` if None).
        """
        at = len(draft.ids)
        known = call if isinstance(call, ToolCall) else None
        spec = self.specs.get(known.name) if known else None
        writer = ResultWriter(self.vocab, draft.handles, self.text.result_tokens if budget is None else budget)
        writer.write(known, spec, result)
        draft.add(writer.ids, Kind.RESULT, feedback=True)
        draft.cut_result_tokens += writer.cut
        if draft.steps and draft.steps[-1].call_end == at:
            draft.steps[-1] = replace(draft.steps[-1], result_at=at, outcome=outcome(result))
        return np.array(draft.ids[at:], np.int32), np.array(draft.positions[at:], np.int32)

    def least_tokens(self, session: Session) -> int:
        """Return the smallest ``max_tokens`` with which ``render`` keeps this session's context and answer whole."""
        steps = len(session.execution_trace)
        return len(self._draft(session, self._least_plan(steps), steps, final=True))

    def call_ids(self, call: ToolCall, handles: Handles) -> list[int]:
        """Return the tokens of a call from tool-start to tool-end, pointing by handle where it can."""
        vocab, spec = self.vocab, self.specs.get(call.name)
        refers = {p.name: p.refers_to for p in spec.parameters} if spec else {}
        file = call_file(call.args, spec, handles) if spec else None
        ids = [vocab.tool_start, *vocab.encode(call.name), vocab.args]
        for key, value in call.args.items():
            ids += [vocab.arg, *vocab.encode(key)]
            if isinstance(value, str):
                known = handles.file(value) if refers.get(key) == "file" else None
                exact = known is not None and handles.path(known) == value
                ids += [vocab.val, *([vocab.files[known]] if known is not None and exact else vocab.encode(value))]
                continue
            is_line = refers.get(key) == "line" and isinstance(value, int) and not isinstance(value, bool)
            line = handles.line(file, value) if is_line else None
            text = json.dumps(value, ensure_ascii=False)
            ids += [vocab.json, vocab.lines[line]] if line is not None else [vocab.json, *vocab.encode(text)]
        return [*ids, vocab.tool_end]

    def _least_plan(self, steps: int) -> _Plan:
        return _Plan(steps, min(LEAST_RESULT_TOKENS, self.text.result_tokens), LEAST_INSTRUCTION_TOKENS)

    def _fit(self, session: Session, upto: int, limit: int, *, final: bool) -> Draft:
        """Return the draft that shows most within ``limit`` tokens."""

        def attempt(plan: _Plan) -> Draft | None:
            draft = self._draft(session, plan, upto, final=final)
            return draft if len(draft) <= limit else None

        whole = attempt(_Plan(0, self.text.result_tokens, limit))
        if whole is not None:
            return whole
        least = self._least_plan(upto)
        uncut = _Plan(0, least.result, limit)
        draft = attempt(uncut)
        if draft is not None:
            return _search(attempt, uncut, draft, "result", self.text.result_tokens)[1]
        smallest = attempt(least)
        if smallest is None:
            raise DataError(
                "context and answer do not fit",
                where=session.session_id,
                got=f"{limit} tokens for them",
                expected=f"at least {len(self._draft(session, least, upto, final=final))}",
                hint="raise text.max_tokens, or leave this session out",
            )
        roomy = replace(least, instruction=max(least.instruction, limit // 2))
        draft = attempt(roomy)
        if draft is None:
            return _search(attempt, least, smallest, "instruction", roomy.instruction)[1]
        plan, draft = _search(attempt, roomy, draft, "first", -1)
        return _search(attempt, plan, draft, "result", self.text.result_tokens + 1)[1]

    def _draft(self, session: Session, plan: _Plan, upto: int, *, final: bool) -> Draft:
        vocab = self.vocab
        draft = Draft(Handles(off=not self.text.handles), self.positions, session.session_id)
        self._add_context(draft, session.ide_context)
        instruction, draft.cut_instruction_tokens = shorten(vocab, session.user_instruction, plan.instruction)
        draft.add([vocab.instruction], Kind.STRUCTURE)
        draft.add(instruction, Kind.INSTRUCTION)
        draft.intent_at = len(draft)
        draft.add([vocab.trace_start], Kind.STRUCTURE)
        draft.left_out_steps = min(plan.first, upto)
        if draft.left_out_steps:
            draft.add(vocab.encode(f"[... {plan.first} earlier steps left out ...]"), Kind.STRUCTURE)
        for step in session.execution_trace[plan.first : upto]:
            self._add_step(draft, step, plan.result)
        if final:
            draft.cursor_at = len(draft) + 1
            draft.add([vocab.trace_end, vocab.output], Kind.OUTPUT, trained=True)
            draft.add([*vocab.encode(session.final_output), vocab.eot], Kind.OUTPUT, trained=True)
        return draft

    def _add_context(self, draft: Draft, context: IdeContext) -> None:
        vocab, cursor = self.vocab, context.cursor_position
        draft.add([vocab.context], Kind.STRUCTURE)
        files = list(dict.fromkeys(context.open_files))
        shown = files[:FILE_HANDLES]
        if cursor is not None and cursor.file not in shown:
            shown = [*shown[: FILE_HANDLES - 1], cursor.file]
        for path in shown:
            handle = draft.handles.bind_file(path)
            label = [] if handle is None else [vocab.files[handle]]
            draft.add([vocab.file, *label, *vocab.encode(path)], Kind.CONTEXT)
        more = len(set(files) - set(shown))
        if more:
            draft.add(vocab.encode(f"\n{more} more files"), Kind.CONTEXT)
        if cursor is not None:
            handle = draft.handles.file(cursor.file)
            place = f"{cursor.line}:{cursor.column}"
            if handle is None or draft.handles.path(handle) != cursor.file:
                draft.add([vocab.cursor, *vocab.encode(f"{cursor.file}:{place}")], Kind.CONTEXT)
            else:
                draft.add([vocab.cursor, vocab.files[handle], *vocab.encode(place)], Kind.CONTEXT)
        for label_text, text in (("git status", context.git_status), ("last commit", context.last_commit_message)):
            if text:
                ids, _ = shorten(vocab, f"\n{label_text}: {text}", GIT_STATUS_TOKENS)
                draft.add(ids, Kind.CONTEXT)

    def _add_step(self, draft: Draft, step: TraceStep, budget: int) -> None:
        vocab, call = self.vocab, ToolCall(step.tool_called, step.tool_args)
        thought = vocab.encode(step.thought) if step.thought and self.text.show_thoughts else ()
        kinds = (Kind.MISTAKE, Kind.MISTAKE) if step.mistake else (Kind.THOUGHT, Kind.CALL)
        draft.add([vocab.step, *thought], kinds[0], trained=not step.mistake)
        self._add_call(draft, call.name, self.call_ids(call, draft.handles), kinds[1], step.mistake, step.step)
        if step.execution_result is not None:
            self.append_result(draft, call, step.execution_result, budget)

    def _add_call(
        self, draft: Draft, name: str, ids: Sequence[int], kind: Kind, mistake: bool, number: int | None = None
    ) -> None:
        at = len(draft)
        draft.add(ids, kind, trained=not mistake)
        spec = self.specs.get(name)
        anchor = StepAnchor(
            step=draft.next_step() if number is None else number,
            tool_at=at,
            tool=self.rows.get(name, -1),
            call_start=at,
            call_end=at + len(ids),
            result_at=-1,
            outcome=math.nan,
            mistake=mistake,
            runs_code=spec.runs_code if spec else False,
        )
        draft.steps.append(anchor)


def outcome(result: ExecutionResult | None) -> float:
    """Return 1.0 passed, 0.0 failed, NaN where the source does not know or the sandbox was to blame."""
    if result is None or result.status == "infra":
        return math.nan
    if result.status in _FAILED_STATUS:
        return 0.0
    return math.nan if result.exit_code is None else float(result.exit_code == 0)


def _search(
    attempt: Callable[[_Plan], Draft | None], plan: _Plan, draft: Draft, name: str, beyond: int
) -> tuple[_Plan, Draft]:
    """Move one field of a plan that fits (with its draft) as near to ``beyond`` as still fits."""
    while abs(getattr(plan, name) - beyond) > 1:
        middle = replace(plan, **{name: (getattr(plan, name) + beyond) // 2})
        tried = attempt(middle)
        if tried is None:
            beyond = getattr(middle, name)
        else:
            plan, draft = middle, tried
    return plan, draft


def session_texts(sessions: Iterable[Session], text: TextConfig | None = None) -> Iterator[str]:
    """Yield every piece of text that rendering encodes, in order and as often as it does: what a tokenizer learns."""
    recorder = _Recorder()
    vocab = Vocab.from_ids({token: i for i, token in enumerate(SPECIAL_TOKENS)}, len(SPECIAL_TOKENS), recorder)
    everything = replace(text or TextConfig(), max_tokens=sys.maxsize)
    renderer = Renderer(vocab, everything, FeedbackPositionsConfig(enabled=False))
    for session in sessions:
        renderer.render(session)
        yield from recorder.texts
        recorder.texts.clear()


class _Recorder:
    """A codec that only remembers what it was asked to encode."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str) -> tuple[int, ...]:
        self.texts.append(text)
        return ()

    def decode(self, ids: Sequence[int]) -> str:
        return ""
