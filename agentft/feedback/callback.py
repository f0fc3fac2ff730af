"""Execution feedback while training (floor 4): the Composer callback that runs calls and lets the model feel it.

What happens when, in Composer's events:

* ``before_dataloader``: the recorded calls of the coming batches are submitted (they run while earlier batches train).
* ``after_dataloader``: their results are awaited and written into the batch: fresh outcome targets, advantages on the
  call tokens. Every ``policy.every`` batches, calls sampled from the current model join the batch as extra rows.
* ``after_loss``: what the heads predicted about those calls is noted, per microbatch.
* ``batch_end``: one trace line per executed call. Every ``probe.every`` batches calls are sampled on held-out sessions;
  they run while the next batches train and are logged ``recorded.prefetch_batches`` batches later.
* ``batch_checkpoint``: if too many executions were lost, a checkpoint is saved and ``RewardError`` ends the run.

Nothing that depends on time enters a loss: results are awaited, sampling has its own generator, and the model's mode
and the global random state are left as they were. Two runs with one seed are equal bit for bit; so is a replay.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from composer.callbacks import CheckpointSaver
from composer.core import Callback, State, TimeUnit
from composer.loggers import Logger
from composer.utils import dist

from agentft.config.schema import FeedbackConfig
from agentft.data.batch import join
from agentft.errors import RewardError
from agentft.etai import Session
from agentft.feedback.executions import Executions, WaitWatch
from agentft.feedback.judged import (
    Judged,
    assign_advantages,
    credit_totals,
    in_share,
    judge_session,
    read_predictions,
    request_key,
    session_of,
    trace_line,
    write_targets,
)
from agentft.feedback.sampling import (
    Sampled,
    judge_calls,
    plan_calls,
    predict,
    rows_of,
    sample_calls,
    submit_calls,
    without_intents,
)
from agentft.feedback.trace import Source, TraceWriter
from agentft.models.agent_model import AgentModel, agent_of
from agentft.sandbox.base import Executor
from agentft.sandbox.calls import SessionCalls, session_calls
from agentft.text.render import Renderer

log = logging.getLogger(__name__)
LEAST_EXECUTIONS = 20
"""How many executions there must be before a share of lost ones can stop a run."""


class _Coming(Protocol):
    @property
    def samples(self) -> Sequence[dict[str, Any]]: ...


class ExecutionFeedback(Callback):
    """Runs the calls of recorded, training and held-out sessions, and puts what happened into batch, logs and trace.

    Args:
        config: The ``feedback`` section.
        executor: Runs the calls; closed with the callback.
        upcoming: ``n`` → the next n batches of this rank (``SessionLoader.upcoming``), each with its ``samples``.
        renderer: Renders prompts for sampled calls.
        run_folder: ``runs/<name>``; the trace goes to ``traces/rank<k>.jsonl`` below it, the name into its lines.
        seed: Seed of all sampling.
        probe_sessions: Held-out sessions, whole on every rank; each rank probes its part of them.
    """

    def __init__(
        self,
        config: FeedbackConfig,
        *,
        executor: Executor,
        upcoming: Callable[[int], Sequence[_Coming]],
        renderer: Renderer,
        run_folder: Path | str,
        seed: int,
        probe_sessions: Sequence[Session] = (),
    ) -> None:
        self.config, self.renderer, self.seed = config, renderer, seed
        self.executions = Executions(executor, wait_s=config.wait_s)
        self._waits = WaitWatch(config.recorded.prefetch_batches)
        self.run = Path(run_folder).name
        self._executor, self._upcoming = executor, upcoming
        self._rank, self._ranks = dist.get_global_rank(), dist.get_world_size()
        self._trace = TraceWriter(Path(run_folder) / "traces" / f"rank{self._rank}.jsonl")
        self._probe_sessions = probe_sessions[self._rank :: self._ranks]
        self._plans: dict[str, SessionCalls] = {}
        self._judged: list[Judged] = []
        self.probed: list[Judged] = []  # this rank's probe calls that came back after the newest batch
        self._probes: list[tuple[int, list[Sampled]]] = []
        self._probe_counts = {"calls": 0, "parse_ok": 0, "exit0": 0}
        self._lost = (0, 0)
        self._closed = False

    # Recorded calls

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Submit the recorded calls of the batch that is about to be drawn and of those after it."""
        now = state.timestamp.batch.value
        for offset, coming in enumerate(self._upcoming(self._coming(state))):
            for sample in coming.samples:
                self._submit(now + offset, str(sample["session_id"]), sample["record"])

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Wait for this batch's results and put them into it."""
        number, batch = state.timestamp.batch.value, state.batch
        waited, queued = self.executions.wait_s, self.executions.queued_s
        judged = self._judge_recorded(number, batch)
        advice = self._waits.batch(self.executions.wait_s - waited, self.executions.queued_s - queued)
        if advice is not None:
            log.warning(advice)
        if self.config.policy.every and number % self.config.policy.every == 0:
            batch, sampled = self._policy_round(agent_of(state), number, batch)
            judged += sampled
        sums = _sum_over_ranks(
            state, *credit_totals(judged, "recorded"), *credit_totals(judged, "policy"), *self.executions.lost()
        )
        assign_advantages(judged, "recorded", *sums[0:2])
        assign_advantages(judged, "policy", *sums[2:4])
        self._lost = (int(sums[4]), int(sums[5]))
        write_targets(batch, judged)
        state.batch = batch
        self._judged = judged
        self._log(logger, judged, self.executions.wait_s - waited)

    def after_loss(self, state: State, logger: Logger) -> None:
        """Note what the heads predicted about the recorded calls of this microbatch."""
        recorded = [call for call in self._judged if call.source == "recorded"]
        if not recorded:
            return
        model = agent_of(state)
        said = model.predictions(cast(dict[str, torch.Tensor], state.outputs))
        predictions = read_predictions(state.batch, said, tools=model.tools, intents=model.intents)
        for call in recorded:
            call.prediction = predictions.get((call.session_id, call.step), call.prediction)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write this batch's trace lines; start and collect probes."""
        done = state.timestamp.batch.value
        self._write(self._judged, done - 1)
        self._judged, self.probed = [], []
        self._collect_probes(logger, before=done - self.config.recorded.prefetch_batches)
        if self.config.probe.every and done % self.config.probe.every == 0:
            self._start_probe(agent_of(state), done)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """End the run, with a checkpoint, when more executions were lost than the limit allows."""
        lost, of = self._lost
        if of < LEAST_EXECUTIONS or lost <= self.config.max_infra_share * of:
            return
        savers = [callback for callback in state.callbacks if isinstance(callback, CheckpointSaver)]
        for saver in savers:
            saver._save_checkpoint(state, logger)  # what Trainer.save_checkpoint_to_save_folder calls
        raise RewardError(
            f"the sandbox lost {lost} of the newest {of} executions: their rewards cannot be trusted",
            where=f"batch {state.timestamp.batch.value}",
            got=self.executions.last_loss or "no reason given (another rank may know it)",
            expected=f"at most {self.config.max_infra_share:.0%} (feedback.max_infra_share)",
            hint="`agentft doctor` looks at the sandbox; "
            + ("a checkpoint was saved, so train again to go on from it" if savers else "no checkpoint folder is set"),
        )

    def fit_end(self, state: State, logger: Logger) -> None:
        """Probe the finished model unless that has just happened, and collect what is still out."""
        done = state.timestamp.batch.value
        if self.config.probe.every and done % self.config.probe.every:
            self._start_probe(agent_of(state), done)
        self._collect_probes(logger)

    def close(self, state: State | None = None, logger: Logger | None = None) -> None:
        """Write what is left, close the trace and the executor. Runs after a failure too; idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._write(self._judged, max(0, state.timestamp.batch.value) if state is not None else 0)
            self._trace.close()
        finally:
            self.executions.drop()
            self._executor.close()

    def judged(self) -> list[Judged]:
        """Return the calls of the batch at hand that were executed, from ``after_dataloader`` to ``batch_end``."""
        return self._judged

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of every rank: a collective call, because Composer keeps the first rank's state only."""
        own = {"executions": self.executions.counts(), "probe": dict(self._probe_counts)}
        return {"ranks": dist.all_gather_object(own)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting; on fewer ranks than before, each takes over those of several."""
        for part in state["ranks"][self._rank :: self._ranks]:
            self.executions.add_counts(part["executions"])
            for name, count in part["probe"].items():
                self._probe_counts[name] += count

    def summary(self) -> dict[str, Any]:
        """Return this rank's {sandbox, executor, probe, traces}.

        ``sandbox`` is {executions, by_status, median_ms, cache_hits}, ``executor`` the executor's own ``stats``,
        ``probe`` {calls, parse_ok, exit0} over all its rounds, ``traces`` {path, lines}: the folder of the trace files
        and the lines that this rank wrote.
        """
        return {
            "sandbox": self.executions.summary(),
            "executor": self._executor.stats(),
            "probe": dict(self._probe_counts),
            "traces": {"path": str(self._trace.path.parent), "lines": self._trace.lines},
        }

    def _coming(self, state: State) -> int:
        """Return how many batches to look at, the next one included, but none beyond the end of the run."""
        coming, end = 1 + self.config.recorded.prefetch_batches, state.max_duration
        if end is None or end.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH):
            return coming
        last = end.value * int(state.dataloader_len or 1) if end.unit == TimeUnit.EPOCH else end.value
        return max(0, min(coming, last - state.timestamp.batch.value))

    def _submit(self, batch: int, session_id: str, record: str) -> str | None:
        """Start a session's recorded calls for one batch; return the key, None if it is not executed."""
        if not in_share(session_id, self.config.recorded.share):
            return None
        prefix = f"recorded/{batch}/{session_id}"
        if prefix not in self._plans:
            plan = session_calls(session_of(record))
            if plan is None:
                return None
            self._plans[prefix] = plan
            key = request_key("recorded", batch, session_id, plan.steps[-1])
            self.executions.submit(key, plan.workspace, plan.calls)
        return prefix

    def _judge_recorded(self, number: int, batch: dict[str, Any]) -> list[Judged]:
        rows: dict[str, int] = {}
        for row, session_id in enumerate(batch["session_id"]):
            prefix = self._submit(number, session_id, batch["record"][row])
            if prefix is not None:
                rows.setdefault(prefix, row)
        plans = {prefix: self._plans.pop(prefix) for prefix in rows}
        keys = {prefix: f"{prefix}/{plan.steps[-1]}" for prefix, plan in plans.items()}
        answers = self.executions.take(keys.values())
        judged: list[Judged] = []
        for prefix, row in rows.items():
            judged += judge_session(
                plans[prefix],
                answers[keys[prefix]],
                batch=number,
                row=row,
                anchors=batch["steps"][row],
                config=self.config.reward,
            )
        return judged

    # Sampled calls

    def _policy_round(
        self, model: AgentModel, number: int, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], list[Judged]]:
        """Sample calls at sessions of this batch, run them, and join them to the batch as rows."""
        config = self.config.policy
        generator = self._generator("policy", number)
        sessions = [session_of(record) for record in batch["record"]]
        plans = plan_calls(sessions, max(1, config.calls // self._ranks), generator)
        sampled = sample_calls(
            model, self.renderer, plans,
            source="policy", batch=number, temperature=config.temperature, generator=generator,
            grammar=self.config.grammar,
        )  # fmt: skip
        if not sampled:
            return batch, []
        with self.executions.at_once():  # this batch waits for them; what is queued is for later ones
            submit_calls(sampled, self.executions)
        rows = rows_of(sampled)
        predict(model, rows, sampled)
        groups = judge_calls(sampled, self.executions, source="policy", batch=number, config=self.config.reward)
        for row, group in enumerate(groups, len(batch["lengths"])):
            for call in group:
                call.row = row if call.role == "call" else None
        judged = [call for group in groups for call in group]
        return join([batch, without_intents(rows)]), judged

    def _start_probe(self, model: AgentModel, number: int) -> None:
        config = self.config.probe
        generator = self._generator("probe", number)
        plans = plan_calls(self._probe_sessions, max(1, config.calls // self._ranks), generator)
        sampled = sample_calls(
            model, self.renderer, plans,
            source="probe", batch=number, temperature=config.temperature, generator=generator,
            grammar=self.config.grammar,
        )  # fmt: skip
        if sampled:
            submit_calls(sampled, self.executions)
            predict(model, rows_of(sampled), sampled)
            self._probes.append((number, sampled))

    def _collect_probes(self, logger: Logger, *, before: int | None = None) -> None:
        """Log and trace the probes that were started up to batch ``before`` (all, if None)."""
        while self._probes and (before is None or self._probes[0][0] <= before):
            number, sampled = self._probes.pop(0)
            groups = judge_calls(sampled, self.executions, source="probe", batch=number, config=self.config.reward)
            self._write([call for group in groups for call in group], number)
            own = [call for group in groups for call in group if call.role == "call"]
            self.probed += own
            rewards = [call.outcome.reward for call in own if call.outcome.mask]
            found = {
                "calls": len(own),
                "parse_ok": sum(call.result is not None for call in own),
                "exit0": sum(call.result is not None and call.outcome.target == 1.0 for call in own),
            }
            for name, count in found.items():
                self._probe_counts[name] += count
            metrics: dict[str, float] = {f"probe/{name}": float(count) for name, count in found.items()}
            if rewards:
                metrics["probe/reward_mean"] = sum(rewards) / len(rewards)
            logger.log_metrics(metrics)

    # Helpers

    def _generator(self, source: Source, batch: int) -> torch.Generator:
        name = f"{self.seed}/{source}/{batch}/{self._rank}"
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))

    def _write(self, judged: Sequence[Judged], batch: int) -> None:
        for call in judged:
            self._trace.write(trace_line(call, run=self.run, batch=batch))

    def _log(self, logger: Logger, judged: Sequence[Judged], wait_s: float) -> None:
        ran = [call for call in judged if call.result is not None]
        rewards = [call.outcome.reward for call in judged if call.role == "call" and call.outcome.mask]
        metrics: dict[str, float] = {
            "feedback/executions": float(len(ran)),
            "feedback/wait_ms": wait_s * 1000,
            "feedback/cache_hits": float(sum(call.result is not None and call.result.cached for call in ran)),
            "feedback/infra": float(sum(call.outcome.mask == 0.0 for call in ran)),
        }
        if rewards:
            metrics["feedback/reward_mean"] = sum(rewards) / len(rewards)
        logger.log_metrics(metrics)


def _sum_over_ranks(state: State, *values: float) -> list[float]:
    """Return the sums of numbers over all ranks (a collective call)."""
    total = state.device.tensor_to_device(torch.tensor(values, dtype=torch.float64))
    dist.all_reduce(total, reduce_operation="SUM")
    return total.tolist()
