"""mini-swe-agent trajectories (floor 3): ``{info, messages, trajectory_format}`` or the bare list of messages.

The agent has one tool, ``bash``. Its commands stand in ``extra.actions``, in ``tool_calls``, or as one code block in
the text (older releases). ``returncode`` −1 means that the command timed out or was not executed: the exit code is
null and ``status`` is ``timeout`` or ``not_executed``. A turn without exactly one command is a format error.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from agentft.data.importers.common import (
    Draft,
    as_dict,
    as_list,
    as_str,
    function_call,
    join,
    repository_of,
    text_of,
    whole,
    wrong_type,
)
from agentft.etai import RecordError

NAME = "mini-swe-agent"
_COMMANDS = [re.compile(rf"```{tag}\s*\n(.*?)\n?```", re.DOTALL) for tag in ("mswea_bash_command", "bash")]
_RETURN_CODE = re.compile(r"<returncode>\s*(-?\d+)\s*</returncode>")
_OUTPUT = re.compile(r"<output>\n?(.*)</output>", re.DOTALL)
_CUT = re.compile(
    r"<output_head>\n?(.*)</output_head>.*?<elided_chars>\s*(.*?)\s*</elided_chars>.*?<output_tail>\n?(.*)</output_tail>",
    re.DOTALL,
)
_TIMED_OUT = re.compile(r"The last command .* timed out", re.DOTALL)


def record(document: object, notes: Counter[str]) -> dict[str, Any]:
    """Turn one trajectory into an ETAI record.

    Raises:
        RecordError: no messages, or a field of the wrong type.
    """
    envelope = {"messages": document} if isinstance(document, list) else as_dict(document, "")
    info = as_dict(envelope.get("info"), "info")
    draft, ended = Draft(NAME, notes), as_str(info.get("exit_status"), "info.exit_status")
    for index, message in enumerate(as_list(envelope.get("messages"), "messages")):
        field = f"messages[{index}]"
        if not isinstance(message, dict):
            raise wrong_type(field, message, "an object")
        role, extra = message.get("role"), as_dict(message.get("extra"), f"{field}.extra")
        text = text_of(message.get("content"), f"{field}.content", notes)
        if role == "assistant":
            _assistant(draft, message, extra, text, field)
        elif role == "exit":
            ended = ended or as_str(extra.get("exit_status"), f"{field}.extra.exit_status")
            if draft.waiting:
                draft.result({"stdout": text, "combined": True})
        elif role in ("user", "tool") and draft.started:
            _observation(draft, message, extra, text, field)
        elif role == "user":
            draft.user(text)
        elif role == "system":
            notes["system_prompts_left_out"] += 1
        else:
            raise RecordError("unknown role", reason="wrong_value", field=f"{field}.role", got=role)
    return draft.record(
        envelope, exit_status=ended or None, repository=repository_of(envelope.get("repo"), envelope.get("instance_id"))
    )


def _assistant(draft: Draft, message: dict[str, Any], extra: dict[str, Any], text: str, field: str) -> None:
    """Add the turn's commands; without one the turn is kept as what the agent said."""
    draft.turn()
    calls: list[tuple[str, dict[str, Any], str | None]] = []
    for index, action in enumerate(as_list(extra.get("actions"), f"{field}.extra.actions")):
        place = f"{field}.extra.actions[{index}]"
        action = as_dict(action, place)
        command = as_str(action.get("command"), f"{place}.command")
        calls.append(
            ("bash", {"command": command}, as_str(action.get("tool_call_id"), f"{place}.tool_call_id") or None)
        )
    if not calls:
        for index, call in enumerate(as_list(message.get("tool_calls"), f"{field}.tool_calls")):
            calls.append(function_call(call, f"{field}.tool_calls[{index}]", draft.notes))
    pattern = next((p for p in _COMMANDS if p.search(text)), _COMMANDS[0])
    if not calls and len(blocks := pattern.findall(text)) == 1:
        calls.append(("bash", {"command": blocks[0]}, None))
    reasoning = as_str(message.get("reasoning_content"), f"{field}.reasoning_content")
    thought = join(reasoning, pattern.sub("", text))
    for index, (name, args, call_id) in enumerate(calls):
        draft.call(name, args, thought=thought if index == 0 else None, call_id=call_id)
    if not calls:
        draft.say(text)


def _observation(draft: Draft, message: dict[str, Any], extra: dict[str, Any], text: str, field: str) -> None:
    result = observation_result(text, extra, field)
    call_id = as_str(message.get("tool_call_id"), f"{field}.tool_call_id") or None
    if draft.waiting or call_id is not None:
        draft.result(result, call_id)
        return
    talking = draft.talking
    draft.user(text)
    if talking:
        draft.steps[-1]["mistake"] = True
        draft.steps[-1]["execution_result"]["status"] = "format_error"


def observation_result(text: str, extra: dict[str, Any], field: str) -> dict[str, Any]:
    """Return the result that an observation states, in ``extra`` or in its text."""
    result: dict[str, Any] = {"stdout": text, "combined": True}
    code = extra.get("returncode")
    if code is None and (match := _RETURN_CODE.search(text)):
        code = int(match[1])
    if cut := _CUT.search(text):
        result |= {"stdout": f"{cut[1]}\n[... {cut[2]} ...]\n{cut[3]}", "truncated": True}
    elif match := _OUTPUT.search(text):
        result["stdout"] = match[1]
    if extra.get("raw_output") is not None:
        result |= {"stdout": as_str(extra["raw_output"], f"{field}.extra.raw_output"), "truncated": False}
    result["exit_code"] = whole(code)
    problem = as_str(extra.get("exception_info"), f"{field}.extra.exception_info") or text
    if code == -1:
        result["status"] = "timeout" if "timed out" in problem else "not_executed"
    elif code is None and _TIMED_OUT.match(problem):
        result["status"] = "timeout"
    return result
