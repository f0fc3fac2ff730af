"""The rules of each format on small documents whose right answer can be seen by eye."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from foreign import ALL, MINI_V2, OPENAI, OPENHANDS, SWE_V1, call, imported

from agentft.data.importers.detect import detect, split
from agentft.etai import RecordError, Session, TraceStep


def calls(session: Session) -> list[tuple[str, dict[str, Any]]]:
    return [(step.tool_called, step.tool_args) for step in session.execution_trace]


def result(step: TraceStep) -> dict[str, Any]:
    assert step.execution_result is not None
    return step.execution_result.model_dump()


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Go."}, *messages]}


@pytest.mark.parametrize("name", ALL)
def test_each_document_is_detected_as_what_it_is(name: str) -> None:
    assert detect(ALL[name]) == name
    assert imported(ALL[name])[0].source in (name, "mine")


def test_openai_parallel_calls_thoughts_and_replies() -> None:
    session, notes = imported(OPENAI)
    assert session.session_id == "chat-7"
    assert session.user_instruction == "Why does it fail?\n[image]"
    assert calls(session) == [
        ("read", {"path": "a.py"}),
        ("read", {"path": "b.py"}),
        ("message", {"content": "Shall I fix it?"}),
        ("run", {"_raw": "{broken"}),
    ]
    first, second, reply, run = session.execution_trace
    assert (first.thought, second.thought) == ("Two files matter.\n\nI look at both.", None)
    assert [result(step)["stdout"] for step in (first, second, reply)] == ["A", "B", "Yes."]
    assert [result(step)["exit_code"] for step in session.execution_trace] == [None, None, None, 2]
    assert (result(run)["stdout"], result(run)["stderr"], result(run)["combined"]) == ("out", "err", False)
    assert session.final_output == "It fails."
    assert notes == {
        "images_left_out": 1,
        "malformed_arguments": 1,
        "system_prompts_left_out": 1,
        "tool_lists_left_out": 1,
    }


def test_openai_plain_chat_without_a_system_prompt_gets_none() -> None:
    session, notes = imported(chat({"role": "assistant", "content": "Hello."}))
    assert (session.user_instruction, session.final_output, session.execution_trace) == ("Go.", "Hello.", [])
    assert notes == {}
    bare, _ = imported(chat({"role": "assistant", "content": "Hello."})["messages"])
    assert bare == session


def test_openai_kimi_ids_repeat_and_give_names() -> None:
    session, _ = imported(
        chat(
            {"role": "assistant", "tool_calls": [call("", '{"q": 1}', "functions.search:0")]},
            {"role": "tool", "tool_call_id": "functions.search:0", "content": "one"},
            {"role": "assistant", "tool_calls": [call("search", "", "functions.search:0")]},
            {"role": "tool", "tool_call_id": "functions.search:0", "content": "two"},
        )
    )
    assert calls(session) == [("search", {"q": 1}), ("search", {})]
    assert [result(step)["stdout"] for step in session.execution_trace] == ["one", "two"]
    assert session.final_output == ""


def test_openai_legacy_function_call_and_truncated_last_turn() -> None:
    session, _ = imported(
        chat(
            {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": '["not an object"]'}},
            {"role": "function", "name": "f", "content": "done"},
            {"role": "assistant", "content": "Again.", "tool_calls": [call("f", "{}", "x"), call("g", "{}", "y")]},
            {"role": "tool", "tool_call_id": "y", "content": "g is done"},
        )
    )
    assert calls(session) == [("f", {"_raw": '["not an object"]'}), ("f", {}), ("g", {})]
    assert [step.execution_result is None for step in session.execution_trace] == [False, True, False]


def test_openai_interruptions_stay_with_the_step_before() -> None:
    session, notes = imported(
        chat(
            {"role": "assistant", "tool_calls": [call("f", "{}", "x")]},
            {"role": "user", "content": "Wait!"},
            {"role": "tool", "tool_call_id": "x", "content": "late"},
            {"role": "tool", "tool_call_id": "nobody", "content": "lost"},
            {"role": "assistant", "content": "Fine."},
        )
    )
    [step] = session.execution_trace
    assert (result(step)["stdout"], result(step)["user_message"]) == ("late", "Wait!")
    assert notes == {"interruptions": 1, "results_without_call": 1}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"metadata": {"exit_code": 1}, "output": "x"}', 1),
        ('{"exit_code": -1}', None),
        ('{"exit_code": true}', None),
        ('{"exit_code": "0"}', None),
        ("exit code: 0", None),
        ("{not json", None),
    ],
)
def test_openai_exit_codes_only_where_stated(text: str, code: int | None) -> None:
    session, _ = imported(
        chat({"role": "assistant", "tool_calls": [call("f", "{}")]}, {"role": "tool", "content": text})
    )
    [step] = session.execution_trace
    assert (result(step)["exit_code"], result(step)["stdout"], result(step)["combined"]) == (code, text, True)


def test_swe_agent_v1() -> None:
    session, notes = imported(SWE_V1)
    assert session.user_instruction == "Fix the bug."
    assert session.session_id.startswith("acme__tool-12-")
    assert (session.repository, session.exit_status) == ("acme/tool", "submitted (exit_cost)")
    assert session.workspace is not None
    assert session.workspace.model_dump() == {"kind": "git", "url": "https://github.com/acme/tool", "commit": "a" * 40}
    assert calls(session) == [
        ("find_file", {"file_name": "a.py"}),
        ("message", {"content": "oops"}),
        ("bash", {"command": "ls"}),
    ]
    find, wrong, listing = session.execution_trace
    assert find.thought == "Where is it?\n\nLooking."
    assert result(find)["stdout"] == "Found\r\n/r/a.py"
    assert (result(find)["duration_s"], result(find)["exit_code"], result(find)["combined"]) == (0.5, None, True)
    assert (result(find)["working_dir"], result(find)["open_file"]) == ("/acme__tool", None)
    assert (wrong.mistake, result(wrong)["status"], find.mistake) == (True, "format_error", False)
    assert (listing.thought, result(listing)["open_file"]) == ("List.", "/r/a.py")
    assert session.final_output == "", "an exit on cost is no answer, and a diff is not what the agent wrote"
    assert notes == {"demonstration_turns_left_out": 1, "exit_turns_left_out": 1}


def test_swe_agent_attempts_are_sessions_of_their_own() -> None:
    document = {**SWE_V1, "id": "run-1", "attempts": [SWE_V1, {**SWE_V1, "trajectory": SWE_V1["trajectory"][:1]}]}
    parts = dict(split(document, "x.traj"))
    assert list(parts) == ["x.traj.attempts[0]", "x.traj.attempts[1]"]
    sessions = [imported(part)[0] for part in parts.values()]
    assert [len(session.execution_trace) for session in sessions] == [3, 1]
    assert sessions[0] == imported(SWE_V1)[0]
    assert [where for where, _ in split({"attempts": [SWE_V1]}, "y")] == ["y.attempts[0]"]


@pytest.mark.parametrize("action", ["exit_cost", "exit_context", "exit_format"])
def test_swe_agent_v0_exit_words_are_no_actions(action: str) -> None:
    document = copy.deepcopy(SWE_V1)
    document["trajectory"][-1] |= {"action": action, "response": "Exit due to something"}
    session, notes = imported(document)
    assert len(session.execution_trace) == 3
    assert notes["exit_turns_left_out"] == 1


def test_swe_agent_v0_state_is_of_the_moment_before() -> None:
    def step(action: str, open_file: str) -> dict[str, Any]:
        state = f'{{"open_file": "{open_file}", "working_dir": "/w"}}\n'
        return {"action": action, "observation": "", "response": "r", "thought": "t\n", "state": state}

    history = [{"role": "user", "content": "Go."}]
    session, _ = imported({"trajectory": [step("open a.py\n", "n/a"), step("submit\n", "/w/a.py")], "history": history})
    opened, submitted = session.execution_trace
    assert (opened.thought, opened.tool_args) == ("t", {"command": "open a.py"})
    assert (submitted.tool_called, submitted.tool_args) == ("submit", {})
    assert result(opened)["open_file"] == "/w/a.py"
    assert "open_file" not in result(submitted)


def test_mini_swe_agent_v2() -> None:
    session, notes = imported(MINI_V2)
    assert calls(session) == [
        ("bash", {"command": "ls"}),
        ("bash", {"command": "sleep 99"}),
        ("message", {"content": "No command here."}),
        ("bash", {"command": "echo SUBMIT"}),
    ]
    listing, slow, wrong, submit = session.execution_trace
    assert (listing.thought, slow.thought) == ("Two at once.", None)
    assert (result(listing)["exit_code"], result(listing)["stdout"]) == (0, "f.py\n")
    assert (result(slow)["exit_code"], result(slow)["status"]) == (None, "timeout")
    assert (wrong.mistake, result(wrong)["status"]) == (True, "format_error")
    assert (result(submit)["exit_code"], result(submit)["stdout"]) == (None, "diff")
    assert (session.exit_status, session.final_output) == ("Submitted", "")
    assert notes == {"system_prompts_left_out": 1}


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        ("<returncode>1</returncode>\n<output>\nboom\n</output>", (1, "boom\n", None, False)),
        ("<returncode>-1</returncode>\n<output>\n</output>", (None, "", "not_executed", False)),
        ("The last command <command>x</command> timed out and has been killed.", (None, None, "timeout", False)),
        (
            "<returncode>0</returncode>\n<warning>\nlong\n</warning><output_head>\nA\n</output_head>\n<elided_chars>\n"
            "9 characters elided\n</elided_chars>\n<output_tail>\nB\n</output_tail>",
            (0, "A\n\n[... 9 characters elided ...]\nB\n", None, True),
        ),
    ],
)
def test_mini_swe_agent_text_observations(observation: str, expected: tuple[Any, ...]) -> None:
    turn = "THOUGHT: look\n\n```bash\necho 1\n```"
    document = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": turn},
        {"role": "user", "content": observation},
    ]
    session, _ = imported(document, "mini-swe-agent")
    [step] = session.execution_trace
    found = result(step)
    assert (step.thought, step.tool_args) == ("THOUGHT: look", {"command": "echo 1"})
    stdout = observation if expected[1] is None else expected[1]
    assert (found["exit_code"], found["stdout"], found["status"], found["truncated"]) == (
        expected[0],
        stdout,
        *expected[2:],
    )


def test_openhands_events() -> None:
    session, notes = imported(OPENHANDS)
    assert session.session_id.startswith("acme__tool-12-")
    assert (session.repository, session.language, session.exit_status) == ("acme/tool", "c", "finish (partial)")
    assert session.workspace is not None
    assert session.workspace.model_dump()["commit"] == "b" * 40
    assert calls(session) == [
        ("execute_bash", {"command": "make"}),
        ("run", {"command": "top"}),
        ("message", {"content": "Which target?"}),
        ("edit", {"path": "a.c"}),
    ]
    make, top, reply, edit = session.execution_trace
    assert [step.thought for step in session.execution_trace] == ["Build.", "Hm.", None, "Edit."]
    assert (result(make)["exit_code"], result(make)["truncated"]) == (2, True)
    assert result(make)["working_dir"] == "/workspace"
    assert (result(top)["exit_code"], result(top)["status"]) == (None, "timeout")
    assert (result(reply)["stdout"], edit.execution_result) == ("All.", None)
    assert session.final_output == "Done."
    assert notes == {"results_without_call": 1, "system_prompts_left_out": 1}


def test_openhands_event_lists_envelopes_and_old_pairs_are_the_same() -> None:
    events = OPENHANDS["history"]
    bare = imported(events)[0]
    assert imported({"trajectory": events})[0] == bare
    pairs = [[events[1], {"id": 3, "source": "agent", "observation": "null", "content": ""}], events[4:6], events[6:]]
    assert imported({"history": pairs})[0] == bare
    assert bare.session_id.startswith("openhands-")


def test_openhands_parallel_calls_share_one_thought() -> None:
    both = [call("read", '{"p": 1}', "a"), call("read", '{"p": 2}', "b")]
    message = {"content": "Both.", "tool_calls": both}
    response = {"id": "same", "choices": [{"message": message}]}
    events: list[dict[str, Any]] = [{"id": 0, "source": "user", "action": "message", "args": {"content": "Go."}}]
    for i, tool in enumerate("ab", 1):
        metadata = {"tool_call_id": tool, "function_name": "read", "model_response": response}
        events.append({"id": i, "source": "agent", "action": "read", "args": {}, "tool_call_metadata": metadata})
    session, _ = imported(events)
    assert [(s.thought, s.tool_args) for s in session.execution_trace] == [("Both.", {"p": 1}), (None, {"p": 2})]


UNSUPPORTED = {
    "ShareGPT": {"conversations": [{"from": "human", "value": "Hi"}]},
    "glaive": {"system": "SYSTEM: x", "chat": "USER: hi"},
    "Hermes": chat({"role": "assistant", "content": "<tool_call>\n{'name': 'f'}\n</tool_call>"}),
    "<functioncall>": chat({"role": "assistant", "content": '<functioncall> {"name": "f"}'}),
    "Anthropic": chat({"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}),
    "OpenHands V1": [{"kind": "ActionEvent", "action": {}, "tool_name": "bash"}],
    "LangChain": {"messages": [{"type": "human", "data": {"content": "Hi"}}]},
    "Claude Code": {"type": "user", "sessionId": "s", "uuid": "u", "message": {}},
    "Codex": {"type": "session_meta", "payload": {}},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_known_but_unsupported_formats_are_named(name: str) -> None:
    with pytest.raises(RecordError, match="is not supported yet") as caught:
        detect(UNSUPPORTED[name])
    assert name in str(caught.value)
    assert caught.value.reason == "unsupported_format"


@pytest.mark.parametrize("document", [{}, {"a": 1}, 7, "text", None, [], {"role": "user", "content": "x"}])
def test_other_documents_are_not_recognised(document: object) -> None:
    with pytest.raises(RecordError, match="the format is not recognised"):
        detect(document)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "no_instruction"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "no_agent_turn"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "wrong_value"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "unknown_part"),
        (chat({"role": "assistant", "tool_calls": [{"id": "x"}]}), "missing_field"),
        (chat({"role": "assistant", "tool_calls": "nope"}), "wrong_type"),
    ],
)
def test_what_is_no_session_says_why(document: object, reason: str) -> None:
    with pytest.raises(RecordError) as caught:
        imported(document)
    assert caught.value.reason == reason
