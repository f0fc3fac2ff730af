"""RASPBerry (floor 4): tools that have failed of late are made less likely, by a margin in the tool head's loss.

The record: for each tool the newest ``window`` executions that the batches brought (recorded and sampled calls, of all
ranks; never the probe, which is held out). Failed is what feedback *credits* as failed (``feedback.reward.credit``): a
call that could not do its work, an edit after which the code still fails. A test run that finds a failure has done its
work and is no failure of the tool, and what the sandbox lost counts nowhere. The failure rate is

    r_k = failures of tool k among its newest executions / window,

so that a tool with few executions is hardly touched: the missing ones count as passed.

The suppression: in each batch a share p of the tool anchors is drawn, and there the loss sees the logits

    z' = z + α·r        (z [tools] of the tool head, r [tools] from the record of *earlier* batches, no gradient into r)

in place of z. Adding in training is what lowers: cross-entropy fits z', so the trained z ends α·r below where it would
have been, and that z is what decides at decoding and in the log. *Subtracting* α·r in the loss would do the opposite,
because training makes up for it (the same sign as in logit adjustment, Menon et al. 2021, arXiv:2007.07314, where the
margin is a class prior). To first order in α the change of the loss is

    α·(Σ_k π_k r_k − r_y),   π = softmax(z), y the tool that was called,

that is, α times the failure rate to be expected of the tool that the model would choose, plus a constant: it is
differentiable in z, its gradient on z_k is α·π_k·(r_k − Σ_j π_j r_j), and tools that all fail alike change nothing.
Formula, record and draw are ours; window 10, p 0.1 and α 0.5 are the project's.

The draw hangs on (seed, batch, session, place of the anchor) and the record is gathered over ranks, so the loss does
not depend on how a batch is cut or shared out. The record is part of a checkpoint. Without failures nothing is touched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from composer import Algorithm, Event, Logger, State
from composer.utils import dist
from torch import Tensor

from agentft.config.algorithms import RaspberryConfig
from agentft.data.batch import Batch
from agentft.feedback.callback import ExecutionFeedback
from agentft.feedback.judged import Judged, in_share


class FailureRecord:
    """The newest outcomes of each tool. ``tools`` are the rows of the tool head."""

    def __init__(self, tools: Sequence[str], window: int) -> None:
        self.tools, self.window = tuple(tools), window
        self.outcomes: dict[str, deque[bool]] = {}

    def add(self, outcomes: Iterable[tuple[str, bool]]) -> None:
        """Add (tool, failed) in order; tools that the head does not know are left out."""
        for tool, failed in outcomes:
            if tool in self.tools:
                self.outcomes.setdefault(tool, deque(maxlen=self.window)).append(failed)

    def rates(self) -> Tensor:
        """Return the failure rate of each tool, [tools] float32."""
        return torch.tensor([sum(self.outcomes.get(tool, ())) / self.window for tool in self.tools])


def new_outcomes(judged: Iterable[Judged], failed_credit: float) -> list[tuple[str, bool]]:
    """Return (tool, failed) of the credited calls of a batch over all ranks, ordered by key (a collective call)."""
    own = [
        (call.key, call.call.name, call.credit <= failed_credit)
        for call in judged
        if call.role == "call" and call.source != "probe" and call.credit is not None
    ]
    everyone = [entry for part in dist.all_gather_object(own) for entry in part]
    return [(tool, failed) for _, tool, failed in sorted(everyone)]


def drawn_anchors(batch: Batch, share: float, name: str) -> Tensor:
    """Return [Nt] float32, 1 at the tool anchors that are drawn; a function of ``name``, session and place."""

    def drawn(row: int, column: int) -> bool:
        return in_share(f"{name}/{batch['session_id'][row]}/{column}", share)

    return torch.tensor([float(drawn(row, column)) for row, column in batch["tool_at"].tolist()])


class RASPBerry(Algorithm):
    """Suppresses tools that fail, as the module's text says. Without the callback's executions there is no record."""

    def __init__(
        self, config: RaspberryConfig, feedback: ExecutionFeedback, *, tools: Sequence[str], failed: float, seed: int
    ) -> None:
        self.config, self.seed = config, seed
        self.record = FailureRecord(tools, config.window)
        self._feedback, self._failed = feedback, failed
        self._rates: Tensor | None = None
        self._plain: Tensor | None = None

    def match(self, event: Event, state: State) -> bool:
        """Draw at the start of a batch; change the logits around the loss only."""
        return event in (Event.BATCH_START, Event.BEFORE_LOSS, Event.AFTER_LOSS)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Act on one of the three events."""
        if event == Event.BATCH_START:
            self._start(state, logger)
            return
        outputs = cast(dict[str, Tensor], state.outputs)
        if event == Event.BEFORE_LOSS and self._rates is not None:
            self._plain = outputs["tool"]
            outputs["tool"] = suppressed(self._plain, state.batch["suppressed"], self._rates, self.config.alpha)
        elif event == Event.AFTER_LOSS and self._plain is not None:
            outputs["tool"], self._plain = self._plain, None  # what is logged is what the head says

    def _start(self, state: State, logger: Logger) -> None:
        rates = self.record.rates()
        self._rates = state.device.tensor_to_device(rates) if bool(rates.any()) else None
        number = state.timestamp.batch.value
        if self._rates is not None:
            gates = drawn_anchors(state.batch, self.config.p, f"{self.seed}/raspberry/{number}")
            state.batch |= {"suppressed_at": state.batch["tool_at"], "suppressed": gates}
            failing = [(tool, rate) for tool, rate in zip(self.record.tools, rates.tolist(), strict=True) if rate]
            logger.log_metrics({f"raspberry/failure_rate/{tool}": rate for tool, rate in failing})
            logger.log_metrics({"raspberry/anchors": float(gates.sum())})
        self.record.add(new_outcomes(self._feedback.judged(), self._failed))

    def state_dict(self) -> dict[str, Any]:
        """Return the record; the same on every rank."""
        return {"outcomes": {tool: [int(failed) for failed in window] for tool, window in self.record.outcomes.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the record of a checkpoint; a shorter window keeps the newest outcomes."""
        self.record.outcomes.clear()
        self.record.add((tool, bool(failed)) for tool, window in state["outcomes"].items() for failed in window)


def suppressed(logits: Tensor, drawn: Tensor, rates: Tensor, alpha: float) -> Tensor:
    """Return the logits that the loss sees: [Nt, tools] + α·drawn [Nt]·rates [tools] (the module's text says why +)."""
    return logits + (alpha * drawn[:, None] * rates[None, :]).to(logits.dtype)
