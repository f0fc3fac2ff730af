"""Small hand-written documents of every format, each with the oddities that the real ones show."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from agentft.data.importers.detect import IMPORTERS, detect
from agentft.etai import Session, to_session


def imported(document: object, format_name: str | None = None) -> tuple[Session, Counter[str]]:
    """Import one document; returns the session and the notes that are not zero."""
    notes = Counter[str]()
    session = to_session(IMPORTERS[format_name or detect(document)](document, notes))
    return session, +notes


def call(name: str, arguments: object, call_id: str | None = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


OPENAI: dict[str, Any] = {
    "id": "chat-7",
    "messages": [
        {"role": "system", "content": "You are helpful."},
        {"role": "user", "content": [{"type": "text", "text": "Why does it fail?"}, {"type": "image_url"}]},
        {
            "role": "assistant",
            "content": "I look at both.",
            "reasoning_content": "Two files matter.",
            "tool_calls": [call("read", '{"path": "a.py"}', "c1"), call("read", {"path": "b.py"}, "c2")],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "B"},
        {"role": "tool", "tool_call_id": "c1", "content": "A"},
        {"role": "assistant", "content": "Shall I fix it?"},
        {"role": "user", "content": "Yes."},
        {"role": "assistant", "content": None, "tool_calls": [call("run", "{broken", "c3")]},
        {"role": "tool", "tool_call_id": "c3", "content": '{"exit_code": 2, "stdout": "out", "stderr": "err"}'},
        {"role": "assistant", "content": "It fails."},
    ],
    "tools": [{"type": "function"}],
}

SWE_V1: dict[str, Any] = {
    "environment": "main",
    "trajectory": [
        {
            "action": "find_file a.py",
            "observation": "Found\r\n/r/a.py",
            "response": "Looking.",
            "thought": "Looking.",
            "execution_time": 0.5,
            "state": {"open_file": "n/a", "working_dir": "/acme__tool"},
        },
        {
            "action": "",
            "observation": "Your output was not formatted correctly.",
            "response": "oops",
            "thought": "oops",
        },
        {"action": "ls", "observation": "a.py", "response": "List.", "thought": "", "state": {"open_file": "/r/a.py"}},
        {
            "action": "",
            "observation": "Exited",
            "response": "",
            "thought": "Exit due to cost limit",
            "state": {"open_file": "n/a"},
        },
    ],
    "history": [
        {"role": "system", "content": "SETTING"},
        {"role": "user", "content": "A demonstration", "is_demo": True},
        {"role": "user", "content": "Fix the bug.\n(Open file: n/a)\n(Current directory: /acme__tool)\nbash-$"},
        {
            "role": "assistant",
            "content": "Looking.",
            "action": "find_file a.py",
            "tool_calls": [call("find_file", '{"file_name": "a.py"}')],
            "thinking_blocks": [{"type": "thinking", "thinking": "Where is it?"}],
        },
        {"role": "tool", "content": "Found", "tool_call_ids": ["c1"]},
    ],
    "info": {"exit_status": "submitted (exit_cost)", "submission": "diff --git a/a.py b/a.py"},
    "replay_config": json.dumps(
        {
            "env": {"repo": {"github_url": "https://github.com/acme/tool", "base_commit": "a" * 40}},
            "problem_statement": {"id": "acme__tool-12", "text": "The problem"},
        }
    ),
}

MINI_V2: dict[str, Any] = {
    "info": {"exit_status": "Submitted", "mini_version": "2.0.0"},
    "messages": [
        {"role": "system", "content": "You are a bot."},
        {"role": "user", "content": "Solve it."},
        {
            "role": "assistant",
            "content": "Two at once.",
            "extra": {
                "actions": [{"command": "ls", "tool_call_id": "a"}, {"command": "sleep 99", "tool_call_id": "b"}]
            },
        },
        {"role": "tool", "tool_call_id": "a", "content": "…", "extra": {"raw_output": "f.py\n", "returncode": 0}},
        {
            "role": "tool",
            "tool_call_id": "b",
            "content": "…",
            "extra": {"raw_output": "", "returncode": -1, "exception_info": "Command timed out after 60s"},
        },
        {"role": "assistant", "content": "No command here."},
        {"role": "user", "content": "Please always provide EXACTLY ONE action."},
        {"role": "assistant", "content": "Done.", "extra": {"actions": [{"command": "echo SUBMIT"}]}},
        {"role": "exit", "content": "diff", "extra": {"exit_status": "Submitted", "submission": "diff"}},
    ],
    "trajectory_format": "mini-swe-agent-1.1",
}


def hands_call(event_id: int, action: str, args: dict[str, Any], tool: dict[str, Any], text: str) -> dict[str, Any]:
    """Return an OpenHands action with the model's response beside it."""
    message = {"role": "assistant", "content": text, "tool_calls": [tool]}
    metadata = {
        "function_name": tool["function"]["name"],
        "tool_call_id": tool["id"],
        "model_response": {"id": f"r{event_id}", "choices": [{"message": message}]},
    }
    return {"id": event_id, "source": "agent", "action": action, "args": args, "tool_call_metadata": metadata}


OPENHANDS: dict[str, Any] = {
    "instance_id": "acme__tool-12",
    "instance": {"repo": "acme/tool", "base_commit": "b" * 40, "language": "C"},
    "history": [
        {"id": 0, "source": "agent", "action": "system", "args": {"content": "You are OpenHands"}},
        {"id": 1, "source": "user", "action": "message", "args": {"content": "Fix it."}},
        {"id": 2, "source": "user", "action": "recall", "args": {"query": "Fix it."}},
        {"id": 4, "source": "environment", "cause": 2, "observation": "recall", "content": "x"},
        hands_call(
            5, "run", {"command": "make", "thought": "Build."}, call("execute_bash", '{"command": "make"}'), "Build."
        ),
        {
            "id": 9,
            "source": "agent",
            "cause": 5,
            "observation": "run",
            "content": "a\n[... Observation truncated due to length ...]\nb",
            "extras": {"metadata": {"exit_code": 2, "working_dir": "/workspace"}},
        },
        {"id": 10, "source": "agent", "action": "run", "args": {"command": "top", "thought": "Hm.", "hidden": False}},
        {
            "id": 11,
            "cause": 10,
            "observation": "run",
            "content": "",
            "extras": {"metadata": {"exit_code": -1, "suffix": "[The command timed out after 120 seconds.]"}},
        },
        {"id": 12, "source": "agent", "action": "message", "args": {"content": "Which target?"}},
        {"id": 13, "source": "user", "action": "message", "args": {"content": "All."}},
        {"id": 14, "source": "agent", "action": "edit", "args": {"path": "a.c", "thought": "Edit."}},
        {"id": 20, "source": "agent", "cause": 99, "observation": "edit", "content": "orphan"},
        {
            "id": 21,
            "source": "agent",
            "action": "finish",
            "args": {"final_thought": "Done.", "task_completed": "partial"},
        },
    ],
}

ETAI: dict[str, Any] = {"session_id": "e1", "user_instruction": "Do.", "final_output": "Done.", "source": "mine"}

ALL: dict[str, Any] = {
    "openai": OPENAI,
    "swe-agent": SWE_V1,
    "mini-swe-agent": MINI_V2,
    "openhands": OPENHANDS,
    "etai": ETAI,
}
