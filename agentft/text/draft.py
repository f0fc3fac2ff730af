"""A rendering that still grows (floor 2): four parallel lists, handles, anchors, and what was left out so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentft.config.schema import FeedbackPositionsConfig
from agentft.errors import DataError
from agentft.text.handles import Handles
from agentft.text.rendered import Dropped, Kind, Rendered, StepAnchor


class Draft:
    """Tokens so far. ``add`` keeps ids, mask, positions and kinds in step; ``finish`` gives them as arrays."""

    def __init__(self, handles: Handles, positions: FeedbackPositionsConfig, session_id: str) -> None:
        self.handles, self.session_id, self._config = handles, session_id, positions
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.positions: list[int] = []
        self.kinds: list[int] = []
        self.steps: list[StepAnchor] = []
        self.intent_at = self.cursor_at = -1
        self.cut_result_tokens = self.cut_instruction_tokens = self.left_out_steps = 0
        self._spoken = 0
        self._fed_back = 0

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: Sequence[int], kind: Kind, *, trained: bool = False, feedback: bool = False) -> None:
        """Append tokens of one kind; ``feedback`` tokens are numbered from the reserved range when that is on."""
        count = len(ids)
        if feedback and self._config.enabled:
            start = self._config.start + self._fed_back
            self._fed_back += count
        else:
            start = self._spoken
            self._spoken += count
        self.ids += ids
        self.mask += [trained] * count
        self.kinds += [int(kind)] * count
        self.positions += range(start, start + count)

    def next_step(self) -> int:
        """Return the number of the step that would come next."""
        return self.steps[-1].step + 1 if self.steps else self.left_out_steps + 1

    def copy(self) -> Draft:
        """Return an independent copy, to try several continuations of one prefix."""
        other = Draft(self.handles.copy(), self._config, self.session_id)
        for name, value in vars(self).items():
            if name != "handles":
                setattr(other, name, value.copy() if isinstance(value, list) else value)
        return other

    def finish(self) -> Rendered:
        """Return the tokens as arrays.

        Raises:
            DataError: the conversation's positions reach the range of the results.
        """
        if self._config.enabled and self._spoken > self._config.start:
            raise DataError(
                "the conversation reaches the positions of the results",
                where=self.session_id,
                got=f"{self._spoken} tokens besides results",
                expected=f"at most feedback_positions.start = {self._config.start}",
                hint="lower text.max_tokens or raise model.feedback_positions.start",
            )
        dropped = Dropped(
            result_tokens=self.cut_result_tokens,
            steps=self.left_out_steps,
            instruction_tokens=self.cut_instruction_tokens,
        )
        return Rendered(
            input_ids=np.array(self.ids, np.int32),
            loss_mask=np.array(self.mask, np.bool_),
            position_ids=np.array(self.positions, np.int32),
            kinds=np.array(self.kinds, np.uint8),
            intent_at=self.intent_at,
            steps=tuple(self.steps),
            cursor_at=self.cursor_at,
            dropped=dropped,
            handles=self.handles.table(),
        )
