"""Path Accuracy@3 (floor 4): from the start of a held-out session, does the agent repair it within three steps?

    accuracy = path_accuracy(model, renderer, sessions, executor)
    print(accuracy.value, accuracy.same_files, accuracy.count)

The agent sees what the session showed before its first step, acts greedily within the grammar of a turn, and reads the
real result of every call, as tokens. After each edit that was applied, the files that the human changed are read, and
the state is graded: the session's last run of code is run on the agent's own files and the session's own tests, in a
container where the agent never was (``sandbox.grader``). Two verdicts are kept:

* ``passed``: that run ends with exit code 0, and nothing that judges was tampered with. This is the value.
* ``same_files``: every file that the human changed reads the same as the human left it (the stricter path).

Sessions that cannot be executed, that edit nothing, whose own last run does not pass, or in which the human changed
what judges (tests, or a file that the last run names), are not counted; neither is what a sandbox loses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentft.errors import DataError
from agentft.etai import Session
from agentft.models.agent_model import AgentModel
from agentft.models.turns import MAX_TURN_TOKENS, write_turns
from agentft.sandbox.base import ExecResult, Executor, Verdict
from agentft.sandbox.calls import SessionCalls, last_run, session_calls
from agentft.sandbox.grader import named_files
from agentft.sandbox.restore import is_test
from agentft.text.draft import Draft
from agentft.text.render import Renderer
from agentft.text.results import format_error_result
from agentft.tools import TOOLS, FormatError, ToolCall

RESERVED_TOKENS = 64
"""Left free for each further turn and result beyond the shown part of the session."""

_EDITS = frozenset({"file_edit", "file_write"})
_CHANGE_NOTHING = frozenset(
    {"file_read", "file_list", "code_search", "git_status", "git_diff", "git_log"}
    | {"pytest_run", "jest_run", "type_check", "lint_run"}
)
"""Tools whose earlier calls need not be repeated to rebuild the state of the files."""


@dataclass(frozen=True, kw_only=True)
class PathAccuracy:
    """Shares over ``count`` sessions; ``lost`` of them are not counted because the sandbox failed.

    ``calls`` is how many calls the agent made, ``parse_ok`` how many of them parsed, ``edits`` how many edits applied;
    in ``tampered`` sessions the agent changed what it is judged by, which is never a repair.
    """

    value: float
    same_files: float
    count: int
    lost: int
    steps: int
    calls: int
    parse_ok: int
    edits: int
    tampered: int
    repaired: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as they are written to ``summary.json``."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(kw_only=True)
class _Episode:
    """One session while the agent acts on it."""

    plan: SessionCalls
    draft: Draft
    test: ToolCall
    human: tuple[str, ...]
    changing: list[ToolCall] = field(default_factory=list)
    calls: int = 0
    parse_ok: int = 0
    edits: int = 0
    passed: bool = False
    same_files: bool = False
    tampered: bool = False
    lost: bool = False
    ended: bool = False

    @property
    def acting(self) -> bool:
        """Whether the agent still has something to do."""
        return not (self.ended or self.lost or self.passed)


def path_accuracy(
    model: AgentModel,
    renderer: Renderer,
    sessions: Sequence[Session],
    executor: Executor,
    *,
    steps: int = 3,
    wait_s: float = 120.0,
) -> PathAccuracy:
    """Let ``model`` act on every session that can be executed, for at most ``steps`` calls each.

    Args:
        model: The agent; its mode is given back.
        renderer: The renderer of the shards that it was trained on.
        sessions: Held-out sessions.
        executor: Runs the calls; it is not closed.
        steps: Calls an agent may make.
        wait_s: Longest wait for one round of executions; what has no result by then is lost.

    Raises:
        DataError: No session can be executed.
    """
    started = [_start(renderer, session) for session in sessions]
    episodes = [episode for episode in started if episode is not None]
    if not episodes:
        raise DataError(
            "no session can be replayed",
            got=f"{len(sessions)} sessions",
            expected="sessions with inline files and a last run of code that passes",
        )
    solved = _human_files(episodes, executor, wait_s)
    for number in range(1, steps + 1):
        acting = [episode for episode in episodes if episode.acting]
        if not acting:
            break
        calls = _act(model, renderer, acting)
        _execute(renderer, acting, calls, executor, number, solved, wait_s)
    return _count(episodes, steps)


def _start(renderer: Renderer, session: Session) -> _Episode | None:
    """Return an episode at the session's first step; None if the session cannot be executed or graded."""
    plan = session_calls(session)
    if plan is None:
        return None
    runs = [step for step in session.execution_trace if TOOLS[step.tool_called].runs_code]
    if not runs or runs[-1].execution_result is None or runs[-1].execution_result.exit_code != 0:
        return None
    human = sorted({str(call.args["path"]) for call in plan.calls if call.name in _EDITS})
    test = last_run(session)
    if not human or test is None or any(is_test(path) or path in named_files(test) for path in human):
        return None
    try:
        draft = renderer.prompt(session, 1, reserve=RESERVED_TOKENS)
    except DataError:
        return None
    return _Episode(plan=plan, draft=draft, test=test, human=tuple(human))


def _human_files(episodes: Sequence[_Episode], executor: Executor, wait_s: float) -> dict[str, list[ExecResult]]:
    """Return, by session, what reading the human's files gives after all of the human's calls."""
    futures = {}
    for episode in episodes:
        changing = [call for call in episode.plan.calls if call.name not in _CHANGE_NOTHING]
        reads = [ToolCall("file_read", {"path": path}) for path in episode.human]
        key = f"path/0/{episode.plan.session_id}/0"
        futures[episode.plan.session_id] = (
            executor.submit(episode.plan.workspace, (*changing, *reads), key=key),
            len(changing),
        )
    solved = {}
    for session_id, (future, skip) in futures.items():
        solved[session_id] = _results(future, wait_s)[skip:]
    for episode in episodes:
        found = solved[episode.plan.session_id]
        episode.lost = len(found) != len(episode.human) or any(result.status == "infra" for result in found)
    return solved


def _act(model: AgentModel, renderer: Renderer, episodes: Sequence[_Episode]) -> list[ToolCall | FormatError | None]:
    """Let the agent write one turn in each episode; None is the final answer."""
    turns = write_turns(model, renderer, [episode.draft for episode in episodes])
    calls: list[ToolCall | FormatError | None] = []
    for episode, turn in zip(episodes, turns, strict=True):
        call = renderer.append_agent(episode.draft, turn.ids)
        if call is None and renderer.vocab.trace_end not in turn.ids[:1]:
            call = FormatError(renderer.vocab.decode(turn.ids), "no call in this turn")
        calls.append(call)
    return calls


def _execute(
    renderer: Renderer,
    episodes: Sequence[_Episode],
    calls: Sequence[ToolCall | FormatError | None],
    executor: Executor,
    number: int,
    solved: Mapping[str, list[ExecResult]],
    wait_s: float,
) -> None:
    """Run each episode's call, grade the state behind an edit, and append the result to what the agent sees."""
    futures = {}
    for index, (episode, call) in enumerate(zip(episodes, calls, strict=True)):
        episode.calls += call is not None
        if isinstance(call, ToolCall):
            episode.parse_ok += 1
            key = f"path/{number}/{episode.plan.session_id}/{number}"
            request, verdict = _request(episode, call)
            futures[index] = executor.submit(episode.plan.workspace, request, key=key, verdict=verdict)
    for index, (episode, call) in enumerate(zip(episodes, calls, strict=True)):
        if call is None:
            episode.ended = True
        elif isinstance(call, FormatError):
            renderer.append_result(episode.draft, call, format_error_result(call.reason))
        else:
            results = _results(futures[index], wait_s)[len(episode.changing) :]
            _judge(episode, call, results, solved[episode.plan.session_id])
            if not episode.lost:
                renderer.append_result(episode.draft, call, results[0].to_record())
        if len(episode.draft) + MAX_TURN_TOKENS > renderer.text.max_tokens:
            episode.ended = True


def _request(episode: _Episode, call: ToolCall) -> tuple[tuple[ToolCall, ...], Verdict | None]:
    """Return what rebuilds the state, and the call; after an edit also reads of the human's files, and the verdict."""
    before = (*episode.changing, call)
    if call.name not in _EDITS:
        return before, None
    return (*before, *(ToolCall("file_read", {"path": path}) for path in episode.human)), Verdict(episode.test)


def _judge(episode: _Episode, call: ToolCall, results: list[ExecResult], solved: list[ExecResult]) -> None:
    """Note how the call ended. ``results`` begin with the call's own; after an edit its grading follows."""
    if not results or any(result.status == "infra" for result in results):
        episode.lost = True
        return
    own, *grading = results
    if call.name not in _CHANGE_NOTHING:
        episode.changing.append(call)
    if call.name not in _EDITS or own.exit_code != 0:
        return
    episode.edits += 1
    *reads, test = grading
    episode.tampered |= bool(test.fields.get("tampered"))
    episode.passed = test.status == "ok" and test.exit_code == 0 and not episode.tampered
    episode.same_files |= all(mine.stdout == theirs.stdout for mine, theirs in zip(reads, solved, strict=True))


def _results(future: Any, wait_s: float) -> list[ExecResult]:
    """Return the results of a request; an empty list if the sandbox did not give them."""
    try:
        return list(future.result(timeout=wait_s))
    except Exception:  # whatever a sandbox does, it costs a session and not the evaluation
        return []


def _count(episodes: Sequence[_Episode], steps: int) -> PathAccuracy:
    counted = [episode for episode in episodes if not episode.lost]
    share = 1 / len(counted) if counted else 0.0
    return PathAccuracy(
        value=sum(episode.passed for episode in counted) * share,
        same_files=sum(episode.same_files for episode in counted) * share,
        count=len(counted),
        lost=len(episodes) - len(counted),
        steps=steps,
        calls=sum(episode.calls for episode in counted),
        parse_ok=sum(episode.parse_ok for episode in counted),
        edits=sum(episode.edits for episode in counted),
        tampered=sum(episode.tampered for episode in counted),
        repaired=tuple(episode.plan.session_id for episode in counted if episode.passed),
    )
