"""What rendering gives (floor 2): token ids, what is trained, positions and anchors, born together."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt


class Kind(IntEnum):
    """What a token is part of; decides colour in ``agentft inspect`` and nothing else."""

    STRUCTURE = 0
    CONTEXT = 1
    INSTRUCTION = 2
    THOUGHT = 3
    CALL = 4
    RESULT = 5
    OUTPUT = 6
    MISTAKE = 7


@dataclass(frozen=True, kw_only=True)
class StepAnchor:
    """Where one step's decisions are read off.

    ``tool_at``: position of the tool-start token; ``tool`` is the row of the tool head (−1: unknown tool, no target).
    ``call_start``/``call_end``: half-open token span of the call: the tool-start token up to and with its tool-end.
    ``result_at``: position of the result-start token (−1 if the step has no result).
    ``outcome``: 1.0 passed, 0.0 failed, NaN not known.  ``mistake``: shown, never imitated.
    """

    step: int
    tool_at: int
    tool: int
    call_start: int
    call_end: int
    result_at: int
    outcome: float
    mistake: bool
    runs_code: bool


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """What truncation removed: tokens cut out of results and of the instruction, and whole steps left out.

    Tokens of outputs too long to be encoded whole are estimated from their characters.
    """

    result_tokens: int = 0
    steps: int = 0
    instruction_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """One session as tokens.

    Attributes:
        input_ids: [T] int32.
        loss_mask: [T] bool; True where the token is a training target (the agent wrote it, and it was no mistake).
        position_ids: [T] int32; result tokens count from the feedback range when that is on.
        kinds: [T] uint8, see ``Kind``.
        intent_at: position of the token that has seen instruction and editor context, before any step.
        steps: one anchor per rendered step, in order.
        cursor_at: position of the output token (−1 if left out).
        handles: text of each handle in use, for reading the tokens back ("<F1>" → path, "<F1><L07>" → line number).
    """

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    position_ids: npt.NDArray[np.int32]
    kinds: npt.NDArray[np.uint8]
    intent_at: int
    steps: tuple[StepAnchor, ...]
    cursor_at: int
    dropped: Dropped
    handles: dict[str, str] = field(default_factory=dict)
