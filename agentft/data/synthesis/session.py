"""Writes one repair session (floor 3): the plan is executed step by step, and each result is what really came out.

Where a step does not come out as the plan needs (a wrong edit that happens to pass, say), the session is dropped.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from agentft.data.synthesis.case import Case
from agentft.data.synthesis.editor import editor_state
from agentft.data.synthesis.plan import EASY, EASY_SHARE, WEIGHTS, Action, Plan, plan_session
from agentft.data.synthesis.wording import EXPLANATIONS, NOT_RUN, THOUGHTS, VERIFIED, instruction, say
from agentft.errors import SandboxError
from agentft.etai import CursorTarget, IdeContext, InlineWorkspace, Session, TraceStep
from agentft.sandbox.base import ExecResult, Lease
from agentft.sandbox.execute import run_tool
from agentft.tools import ToolCall

THOUGHT_SHARE = 0.9
ALWAYS_THOUGHT = frozenset({"revert", "after_revert"})


class Dropped(Exception):  # noqa: N818 - an outcome, not an error
    """This case gives no session; the text says why."""


def write_session(case: Case, lease: Lease) -> tuple[str, Session]:
    """Return (opening, repair session) of ``case``; every result in it was produced by ``lease``.

    Raises:
        Dropped: the case gives no session.
        SandboxError: the sandbox failed.
    """
    rng = random.Random(f"{case.seed}:{case.session_id}")
    probe = _Probe(case, lease)
    order = _in_random_order(rng)
    if rng.random() >= EASY_SHARE:
        order = [opening for opening in order if opening not in EASY]
    for opening in order:
        at_cursor = _editor(case, rng, at_cursor=True) if opening == "cursor" else None
        plan = plan_session(case, at_cursor, probe, rng, opening)
        if plan is not None:
            ide = at_cursor or _editor(case, rng, at_cursor=False)
            return opening, _record(case, plan, ide, _execute(plan, probe, lease, rng), rng, lease)
    raise Dropped("no opening fits (or only one that is common enough)")


class _Probe:
    """The failing run on the broken workspace, executed at most once."""

    def __init__(self, case: Case, lease: Lease) -> None:
        self.case, self._lease = case, lease
        self.result: ExecResult | None = None

    def __call__(self) -> ExecResult:
        if self.result is None:
            _fill(self._lease, self.case.files)
            self.result = run_tool(self._lease, ToolCall("pytest_run", {"targets": self.case.test}))
            _must_live(self.result)
        return self.result


def _execute(plan: Plan, probe: _Probe, lease: Lease, rng: random.Random) -> list[TraceStep]:
    _fill(lease, plan.files)
    if plan.opening == "undo":  # the user says that the attempt did not help: it must be so
        attempted = run_tool(lease, ToolCall("pytest_run", {"targets": probe.case.test}))
        _must_live(attempted)
        if attempted.exit_code != 1:
            raise Dropped("the attempt helped, or broke the import")
    steps: list[TraceStep] = []
    for number, action in enumerate(plan.actions, start=1):
        untouched = plan.opening != "undo" and all(step.tool_called != "file_edit" for step in steps)
        known = probe.result if untouched and action.args.get("targets") == probe.case.test else None
        result = known or run_tool(lease, ToolCall(action.tool, action.args))
        _must_live(result)
        _check(action, result)
        steps.append(
            TraceStep(
                step=number,
                thought=_thought(action, rng),
                mistake=action.mistake,
                tool_called=action.tool,
                tool_args=dict(action.args),
                execution_result=result.to_record(),
            )
        )
    return steps


def _check(action: Action, result: ExecResult) -> None:
    """Drop the session where a step did not come out as planned."""
    if result.exit_code != action.exit_code:
        if action.tool != "pytest_run":
            raise Dropped(f"{action.tool} failed")
        if action.thought in ("neighbour", "confirm", "whole"):
            raise Dropped("another test does not pass")
        raise Dropped(
            "a wrong edit passed or broke the import" if action.exit_code == 1 else "the repair does not pass"
        )
    if action.must_show is not None and f"{action.must_show}: " not in result.stdout:
        raise Dropped("a read does not show the place")


def _thought(action: Action, rng: random.Random) -> str | None:
    wanted = rng.random() < THOUGHT_SHARE or action.thought in ALWAYS_THOUGHT
    text = say(rng, THOUGHTS[action.thought], action.facts)
    return text if wanted else None


def _record(
    case: Case, plan: Plan, ide: IdeContext, steps: Sequence[TraceStep], rng: random.Random, lease: Lease
) -> Session:
    _check_repaired(case, plan, lease)
    facts = _facts(case, plan, rng)
    before = [wish for wish in plan.wishes if wish == "confirm"]
    after = [wish for wish in plan.wishes if wish != "confirm"]
    asked = instruction(rng, "run" if plan.opening == "confirm" else plan.opening, case.intent, before, after, facts)
    searched = any(step.tool_called == "code_search" for step in steps)
    touched = {str(step.tool_args["path"]) for step in steps if "path" in step.tool_args} & set(case.package.sources)
    line, column = case.defect.original.position(case.defect.start)
    return Session(
        session_id=case.session_id,
        user_instruction=asked,
        ide_context=ide,
        execution_trace=list(steps),
        final_output=_final_output(case, plan, facts, rng),
        intents=[case.intent, *(["explore_code"] if searched else [])],
        complexity="multi_file" if len(touched) > 1 else "single_function",
        language="python",
        licence=case.package.licence,
        cursor_target=CursorTarget(
            file=case.defect.path,
            line=line,
            column=column,
            placement="before" if case.defect.inserts_lines else "after",
        ),
        workspace=InlineWorkspace(files=dict(plan.files)),
        source=f"synth:{case.package.name}=={case.package.version}",
        repository=case.package.name,
    )


def _check_repaired(case: Case, plan: Plan, lease: Lease) -> None:
    """The file is what it was before the defect; where the session ran no test at the end, one is run now."""
    if lease.read_file(case.defect.path) != case.defect.original.text.encode():
        raise Dropped("the file is not repaired")
    if not plan.verified:
        result = run_tool(lease, ToolCall("pytest_run", {"targets": case.test}))
        _must_live(result)
        if result.exit_code != 0:
            raise Dropped("the repair does not pass")


def _facts(case: Case, plan: Plan, rng: random.Random) -> dict[str, object]:
    message = (case.verdict.errors or {}).get(case.test, "")
    error = case.error or "an assertion"
    text = message if message.startswith(error) and len(message) < 80 else error
    return {
        "test": case.test,
        "error": text if rng.random() < 0.4 else error,
        "name": case.name,
        "file": case.defect.path,
        "line": case.line,
        "neighbour": case.neighbour,
        "testfile": case.test_file,
        **plan.facts,
    }


def _final_output(case: Case, plan: Plan, facts: Mapping[str, object], rng: random.Random) -> str:
    defect = case.defect
    kind = "implement" if case.intent == "implement_function" else "insert" if defect.inserts_lines else "replace"
    repair = defect.repair
    gone = " ".join(defect.original.text[defect.start : defect.end].split())
    said = {
        **facts,
        "file": defect.path,
        "line": repair.line,
        "old": _short(repair.old),
        "new": _short(repair.new),
        "gone": _short(gone),
    }
    return f"{say(rng, EXPLANATIONS[kind], said)} {say(rng, VERIFIED if plan.verified else NOT_RUN, said)}"


def _editor(case: Case, rng: random.Random, *, at_cursor: bool) -> IdeContext:
    others = [path for path in case.files if path.endswith(".py") and path not in (case.defect.path, case.test_file)]
    related = [case.defect.path, case.test_file, *rng.sample(others, min(1, len(others)))]
    fault = (case.defect.path, case.line)
    return editor_state(rng, case.files, fault, case.name, related, at_cursor=at_cursor)


def _in_random_order(rng: random.Random) -> list[str]:
    """Return the openings in a random order in which heavier ones tend to come first."""
    return sorted(WEIGHTS, key=lambda name: rng.random() ** (1.0 / WEIGHTS[name]), reverse=True)


def _fill(lease: Lease, files: Mapping[str, str]) -> None:
    lease.reset()
    lease.write_files({path: text.encode() for path, text in files.items()})


def _must_live(result: ExecResult) -> None:
    if result.status == "infra":
        raise SandboxError("the sandbox failed while a session was written", got=result.stderr)


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 60 else f"{flat[:57]}…"
