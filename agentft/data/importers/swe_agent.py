"""SWE-agent trajectories (floor 3): ``trajectory`` with ``history``, or ``history`` alone; v0 and v1.

One document is one attempt (``detect.split`` takes ``attempts`` apart). The agent acts through one shell: a call
that the history holds in structured form keeps its name and arguments (v1), a bare ``submit`` is the tool of that
name, any other action is a command of the tool ``bash``. There are no exit codes.

``state`` gives ``working_dir`` and ``open_file`` after the step: v0 stores it as JSON text taken *before* the
action, so that there the next step's state counts.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from agentft.data.importers.common import (
    MESSAGE_TOOL,
    Draft,
    as_dict,
    as_list,
    as_str,
    function_call,
    git_workspace,
    join,
    repository_of,
    seconds,
    text_of,
    wrong_type,
)
from agentft.etai import RecordError

NAME = "swe-agent"
_EXIT_ACTIONS = {"", "exit_api", "exit_context", "exit_cost", "exit_error", "exit_format", "exit_environment_error"}
_PROMPT_TAIL = re.compile(r"\n?\(Open file: ([^\n]*)\)\r?\n\(Current directory: ([^\n]*)\)\r?\nbash-\$\s*\Z")
_NO_OUTPUT = "Your command ran successfully and did not produce any output."
_CODE_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


def record(document: object, notes: Counter[str]) -> dict[str, Any]:
    """Turn one trajectory into an ETAI record.

    Raises:
        RecordError: neither trajectory nor history, or a field of the wrong type.
    """
    if not isinstance(document, dict):
        raise wrong_type("", document, "an object with trajectory or history")
    steps = _objects(document.get("trajectory"), "trajectory")
    history = [item for item in _objects(document.get("history"), "history") if not item.get("is_demo")]
    demos = len(as_list(document.get("history"), "history")) - len(history)
    notes["demonstration_turns_left_out"] += demos
    info, replay = as_dict(document.get("info"), "info"), _replay_config(document, notes)
    draft = Draft(NAME, notes)
    draft.instruct(_instruction(history, steps, replay, notes))
    if steps:
        _read_trajectory(draft, steps, history)
    elif history:
        _read_history(draft, history)
    else:
        raise RecordError("neither trajectory nor history", reason="missing_field", field="trajectory")
    repo = as_dict(as_dict(replay.get("env"), "replay_config.env").get("repo"), "replay_config.env.repo")
    problem = as_dict(replay.get("problem_statement"), "replay_config.problem_statement")
    directories = [step["execution_result"].get("working_dir") for step in draft.steps if step["execution_result"]]
    return draft.record(
        {"instance_id": problem.get("id"), **{key: value for key, value in document.items() if value is not None}},
        exit_status=as_str(info.get("exit_status"), "info.exit_status") or None,
        repository=repository_of(
            repo.get("github_url"),
            document.get("repo"),
            problem.get("id"),
            document.get("instance_id"),
            *directories[:1],
        ),
        workspace=git_workspace(repo.get("github_url"), repo.get("base_commit")),
    )


def _objects(value: object, field: str) -> list[dict[str, Any]]:
    items = as_list(value, field)
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise wrong_type(f"{field}[{index}]", item, "an object")
    return items


def _replay_config(document: dict[str, Any], notes: Counter[str]) -> dict[str, Any]:
    try:
        return as_dict(document.get("replay_config"), "replay_config")
    except RecordError:
        notes["unreadable_replay_config"] += 1
        return {}


def _instruction(
    history: list[dict[str, Any]], steps: list[dict[str, Any]], replay: dict[str, Any], notes: Counter[str]
) -> str:
    """Return what the user said before the agent's first turn: history, first query, or problem statement."""
    query = _objects(steps[0].get("query"), "trajectory[0].query") if steps else []
    for field, messages in (("history", history), ("trajectory[0].query", query)):
        texts = []
        for index, message in enumerate(messages):
            if message.get("role") == "assistant":
                break
            if message.get("role") == "user" and not message.get("is_demo"):
                texts.append(_without_tail(text_of(message.get("content"), f"{field}[{index}].content", notes))[0])
        if texts:
            return join(*texts)
    problem = as_dict(replay.get("problem_statement"), "replay_config.problem_statement")
    return as_str(problem.get("text"), "replay_config.problem_statement.text")


def _read_trajectory(draft: Draft, steps: list[dict[str, Any]], history: list[dict[str, Any]]) -> None:
    turns = [item for item in history if item.get("role") == "assistant"]
    for index, step in enumerate(steps):
        field = f"trajectory[{index}]"
        action = as_str(step.get("action"), f"{field}.action").strip("\n")
        response = text_of(step.get("response"), f"{field}.response", draft.notes)
        thought = as_str(step.get("thought"), f"{field}.thought")
        if action.strip() in _EXIT_ACTIONS and _made_by_harness(thought or response):
            draft.notes["exit_turns_left_out"] += 1
            continue
        turn = _take_turn(turns, action)
        result = _result(as_str(step.get("observation"), f"{field}.observation"), _state_after(steps, index))
        result["duration_s"] = seconds(step.get("execution_time"))
        draft.turn()
        if not action.strip():
            _format_error(draft, response or thought, result)
            continue
        _calls(draft, turn, action, thought or _prose(response), field)
        draft.result(result)


def _made_by_harness(text: str) -> bool:
    return not text.strip() or text.strip().lower().startswith("exit due to")


def _take_turn(turns: list[dict[str, Any]], action: str) -> dict[str, Any]:
    """Remove and return the next assistant turn of the history that took this action."""
    for index, turn in enumerate(turns):
        if isinstance(turn.get("action"), str) and turn["action"].strip() == action.strip():
            del turns[: index + 1]
            return turn
    return {}


def _calls(draft: Draft, turn: dict[str, Any], action: str, thought: str, field: str) -> None:
    """Add the structured calls of a turn, or its action as a shell command."""
    blocks = as_list(turn.get("thinking_blocks"), f"{field}.thinking_blocks")
    thinking = [block.get("thinking") for block in blocks if isinstance(block, dict)]
    thought = join(*(text for text in thinking if isinstance(text, str)), thought)
    calls = as_list(turn.get("tool_calls"), f"{field}.tool_calls")
    if not calls and action.strip() == "submit":
        draft.call("submit", {}, thought=thought)
    elif not calls:
        draft.call("bash", {"command": action}, thought=thought)
    for index, call in enumerate(calls):
        name, args, call_id = function_call(call, f"{field}.tool_calls[{index}]", draft.notes)
        draft.call(name, args, thought=thought if index == 0 else None, call_id=call_id)


def _format_error(draft: Draft, text: str, result: dict[str, Any]) -> None:
    """Keep a turn whose action could not be read: shown, never imitated."""
    step = draft.call(MESSAGE_TOOL, {"content": text})
    step["mistake"] = True
    draft.result({**result, "status": "format_error"})


def _state_after(steps: list[dict[str, Any]], index: int) -> dict[str, Any]:
    state = steps[index].get("state")
    if isinstance(state, str):
        state = steps[index + 1].get("state") if index + 1 < len(steps) else None
    try:
        return as_dict(state, f"trajectory[{index}].state")
    except RecordError:
        return {}


def _result(output: str, state: dict[str, Any]) -> dict[str, Any]:
    fields = {key: state[key] for key in ("working_dir", "open_file") if isinstance(state.get(key), str)}
    if fields.get("open_file") == "n/a":
        fields["open_file"] = None
    return {"stdout": output, "combined": True, **fields}


def _without_tail(text: str) -> tuple[str, dict[str, Any]]:
    """Cut the shell prompt that SWE-agent appends to observations; what it says becomes the state."""
    match = _PROMPT_TAIL.search(text)
    if not match:
        return text, {}
    return text[: match.start()], {"open_file": match[1], "working_dir": match[2]}


def _read_history(draft: Draft, history: list[dict[str, Any]]) -> None:
    """Read a history that comes without a trajectory; its first user message has been taken already."""
    for index, item in enumerate(history):
        field, role = f"history[{index}]", item.get("role")
        text = text_of(item.get("content"), f"{field}.content", draft.notes)
        if role == "assistant":
            draft.turn()
            action = as_str(item.get("action"), f"{field}.action") or _last_block(text)
            thought = as_str(item.get("thought"), f"{field}.thought") or _prose(text)
            if action.strip() in _EXIT_ACTIONS and _made_by_harness(thought):
                draft.notes["exit_turns_left_out"] += 1
            elif action.strip() or item.get("tool_calls"):
                _calls(draft, item, action.strip("\n"), thought, field)
            else:
                draft.say(text)
        elif role in ("tool", "user") and draft.started:
            output, state = _without_tail(text)
            output = "" if output.strip() == _NO_OUTPUT else output
            ids = as_list(item.get("tool_call_ids"), f"{field}.tool_call_ids")
            if draft.waiting:
                draft.result(_result(output, state), ids[0] if ids and isinstance(ids[0], str) else None)
            else:
                draft.user(output)
        elif role not in ("system", "user", "tool"):
            raise RecordError("unknown role", reason="wrong_value", field=f"{field}.role", got=role)


def _last_block(text: str) -> str:
    blocks = _CODE_BLOCK.findall(text)
    return blocks[-1] if blocks else ""


def _prose(text: str) -> str:
    return _CODE_BLOCK.sub("", text).strip()
