"""OpenHands V0 event histories (floor 3): a list of events, ``{"trajectory": […]}``, or ``history`` of an eval row.

An observation belongs to the action whose id it names as its cause; ids have gaps. The call is taken as the model
wrote it (``tool_call_metadata``), else from the action's own arguments. Exit code −1 means "not known". ``finish``
is the final output, not a step; ``exit_status`` is ``finish``, with what the agent claimed: ``finish (partial)``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from agentft.data.importers.common import (
    Draft,
    arguments_of,
    as_dict,
    as_list,
    as_str,
    function_call,
    git_workspace,
    repository_of,
    text_of,
    whole,
    wrong_type,
)

NAME = "openhands"
_BOOKKEEPING = {
    "change_agent_state",
    "agent_state_changed",
    "null",
    "recall",
    "system",
    "condensation",
    "loop_recovery",
}
_NOT_ARGUMENTS = {
    "thought",
    "confirmation_state",
    "hidden",
    "blocking",
    "is_static",
    "impl_source",
    "security_risk",
    "translated_ipython_code",
    "cwd",
}
_CUT_MARKERS = ("[... Observation truncated due to length ...]", "<response clipped>")


def events_of(document: object) -> list[Any]:
    """Return the events of a document; pairs of action and observation (old eval rows) are flattened.

    Raises:
        RecordError: no list of events.
    """
    if isinstance(document, dict):
        key = "trajectory" if document.get("trajectory") is not None else "history"
        document = as_list(document.get(key), key)
    events = as_list(document, "history")
    return [event for item in events for event in (item if isinstance(item, list) else [item])]


def record(document: object, notes: Counter[str]) -> dict[str, Any]:
    """Turn one event history into an ETAI record.

    Raises:
        RecordError: no events, or a field of the wrong type.
    """
    row = document if isinstance(document, dict) else {}
    draft, steps, ended = Draft(NAME, notes), dict[object, dict[str, Any]](), None
    responses: set[str] = set()
    for index, event in enumerate(events_of(document)):
        field = f"events[{index}]"
        if not isinstance(event, dict):
            raise wrong_type(field, event, "an object")
        kind = as_str(event.get("action"), f"{field}.action")
        if as_str(event.get("observation"), f"{field}.observation"):
            _observe(draft, event, steps, field)
        elif kind in _BOOKKEEPING or not kind:
            notes["system_prompts_left_out"] += kind == "system"
        elif kind == "message":
            args = as_dict(event.get("args"), f"{field}.args")
            text = text_of(args.get("content"), f"{field}.args.content", notes)
            (draft.user if event.get("source") == "user" else draft.say)(text)
        elif kind in ("finish", "reject"):
            final, ended = _finish(event, kind, field, notes)
            draft.say(final)
        else:
            draft.turn()
            step = _call(draft, event, kind, responses, field)
            if isinstance(event.get("id"), int | str):
                steps[event["id"]] = step
    if not draft.has_instruction and row.get("instruction") is not None:
        draft.instruct(as_str(row["instruction"], "instruction"))
    instance = as_dict(row.get("instance"), "instance")
    repo = repository_of(instance.get("repo"), row.get("instance_id"))
    return draft.record(
        row,
        exit_status=ended or (as_str(row.get("error"), "error") or None),
        repository=repo,
        workspace=git_workspace(repo and f"https://github.com/{repo}", instance.get("base_commit")),
        language=as_str(instance.get("language"), "instance.language").lower() or None,
    )


def _finish(event: dict[str, Any], kind: str, field: str, notes: Counter[str]) -> tuple[str, str]:
    """Return the agent's final words and how it ended."""
    args = as_dict(event.get("args"), f"{field}.args")
    final = as_str(args.get("final_thought"), f"{field}.args.final_thought")
    thought = as_str(args.get("thought"), f"{field}.args.thought")
    notes["final_reasoning_left_out"] += bool(final.strip() and thought.strip())
    claim = args.get("task_completed")
    return final or thought, f"{kind} ({claim})" if isinstance(claim, str) and claim else kind


def _call(draft: Draft, event: dict[str, Any], kind: str, responses: set[str], field: str) -> dict[str, Any]:
    """Add the step of an action; the text of a turn with several calls is the thought of the first."""
    args = as_dict(event.get("args"), f"{field}.args")
    thought = as_str(args.get("thought"), f"{field}.args.thought")
    metadata = as_dict(event.get("tool_call_metadata"), f"{field}.tool_call_metadata")
    if not metadata:
        own = {
            key: value
            for key, value in args.items()
            if key not in _NOT_ARGUMENTS or (kind, key) == ("think", "thought")
        }
        return draft.call(kind, own, thought=None if kind == "think" else thought)
    place = f"{field}.tool_call_metadata"
    response = as_dict(metadata.get("model_response"), f"{place}.model_response")
    choices = as_list(response.get("choices"), f"{place}.model_response.choices")
    message = as_dict(as_dict(choices[0], f"{place}.choices[0]").get("message"), f"{place}.message") if choices else {}
    calls = as_list(message.get("tool_calls"), f"{place}.message.tool_calls")
    wanted = metadata.get("tool_call_id")
    for index, call in enumerate(calls):
        if isinstance(call, dict) and (call.get("id") == wanted or len(calls) == 1):
            name, arguments, _ = function_call(call, f"{place}.tool_calls[{index}]", draft.notes)
            break
    else:
        name = as_str(metadata.get("function_name"), f"{place}.function_name") or kind
        arguments = arguments_of({k: v for k, v in args.items() if k not in _NOT_ARGUMENTS}, draft.notes)
    content = text_of(message.get("content"), f"{place}.message.content", draft.notes)
    response_id = as_str(response.get("id"), f"{place}.model_response.id")
    seen = bool(response_id) and response_id in responses
    responses.add(response_id)
    spoken = None if seen else content or (None if kind == "think" else thought)
    return draft.call(name, arguments, thought=spoken)


def _observe(draft: Draft, event: dict[str, Any], steps: dict[object, dict[str, Any]], field: str) -> None:
    kind, cause = event["observation"], event.get("cause")
    if kind in _BOOKKEEPING:
        return
    step = steps.get(cause) if isinstance(cause, int | str) else None
    if step is None:
        draft.notes["results_without_call"] += 1
        return
    extras = as_dict(event.get("extras"), f"{field}.extras")
    metadata = as_dict(extras.get("metadata"), f"{field}.extras.metadata")
    content = text_of(event.get("content"), f"{field}.content", draft.notes)
    suffix = as_str(metadata.get("suffix"), f"{field}.extras.metadata.suffix")
    stated = metadata.get("exit_code", extras.get("exit_code"))
    result: dict[str, Any] = {"stdout": content, "combined": True, "exit_code": whole(stated)}
    if kind in ("error", "user_rejected"):
        result["status"] = kind
    elif stated == -1 and ("timed out" in suffix or "no new output" in suffix):
        result["status"] = "timeout"
    if any(marker in content for marker in _CUT_MARKERS):
        result["truncated"] = True
    if directory := as_str(metadata.get("working_dir"), f"{field}.extras.metadata.working_dir"):
        result["working_dir"] = directory
    draft.attach(step, result)
