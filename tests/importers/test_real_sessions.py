"""Every real session file of the four formats imports; counts and hand-read fields are as the sources show them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentft.data.importers.commands import import_paths, print_report
from agentft.etai import Session
from agentft.etai_io import read

SESSIONS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "sessions"
pytestmark = pytest.mark.skipif(not SESSIONS.is_dir(), reason=f"real session files are not at {SESSIONS}")

# file: format, records, steps, steps without an exit code, steps without any result
COUNTS = {
    "messages_content-parts_reason_tool_use_first10.jsonl": ("openai", 10, 18, 18, 6),
    "mini-swe-agent_local.traj.json": ("mini-swe-agent", 1, 2, 1, 0),
    "openhands_v0_basic.json": ("openhands", 1, 1, 1, 0),
    "openhands_v0_eval_output_ponyc-4595.jsonl": ("openhands", 1, 22, 9, 0),
    "openhands_v0_wrong_initial_state.json": ("openhands", 1, 3, 2, 0),
    "swe-agent_history-only_function_calling_simple.traj": ("swe-agent", 1, 5, 5, 0),
    "swe-agent_v0_state-string_humanevalfix-python-0.traj": ("swe-agent", 1, 5, 5, 0),
    "swe-agent_v1_toolcalls_6e44b9.traj": ("swe-agent", 1, 5, 5, 0),
}
UNSUPPORTED = {"glaive_v2_raw_1.jsonl": ("glaive", 1), "sharegpt_tools_glaive_first40.json": ("ShareGPT", 40)}


def imported(name: str, folder: Path) -> list[Session]:
    import_paths([str(SESSIONS / name)], folder / "out.jsonl", strict=True)
    return list(read(folder / "out.jsonl", strict=True))


def result(session: Session, step: int) -> dict[str, Any]:
    found = session.execution_trace[step - 1].execution_result
    assert found is not None
    return found.model_dump()


def test_the_whole_folder_counts_and_says_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = import_paths([str(SESSIONS)], tmp_path / "out.jsonl")
    print_report(report)
    with capsys.disabled():
        print("\n" + capsys.readouterr().out)
    counted = {Path(f.file).name: (f.records, f.steps, f.null_exit_codes) for f in report.files if f.records}
    assert counted == {name: numbers[1:4] for name, numbers in COUNTS.items()}
    refused = {Path(f.file).name: f.rejected for f in report.files if f.rejected}
    assert refused == {name: count for name, (_, count) in UNSUPPORTED.items()}
    assert [report.total(n) for n in ("records", "steps", "null_exit_codes", "rejected")] == [17, 61, 46, 41]
    assert dict(report.by_reason) == {"unsupported_format": 41}
    assert +report.notes == Counter(
        {"final_reasoning_left_out": 8, "system_prompts_left_out": 12, "tool_lists_left_out": 10}
    ), "7 final answers with reasoning and one finish; 10 + 1 + 1 system prompts"
    assert report.repaired.total() == 0
    sessions = list(read(tmp_path / "out.jsonl", strict=True))
    assert len({s.session_id for s in sessions}) == 17


@pytest.mark.parametrize("name", COUNTS)
def test_each_file_alone_gives_the_same_counts(name: str, tmp_path: Path) -> None:
    format_name, records, steps, nulls, missing = COUNTS[name]
    sessions = imported(name, tmp_path)
    results = [step.execution_result for session in sessions for step in session.execution_trace]
    assert {session.source for session in sessions} == {format_name}
    assert (len(sessions), len(results)) == (records, steps)
    assert sum(r is None or r.exit_code is None for r in results) == nulls
    assert sum(r is None for r in results) == missing


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_formats_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no session could be imported") as caught:
        import_paths([str(SESSIONS / name)], tmp_path / "out.jsonl")
    assert f"format {UNSUPPORTED[name][0]}" in str(caught.value)
    assert "is not supported yet" in str(caught.value)
    assert not (tmp_path / "out.jsonl").exists()


def test_golden_swe_agent_history_only(tmp_path: Path) -> None:
    [session] = imported("swe-agent_history-only_function_calling_simple.traj", tmp_path)
    assert session.user_instruction.startswith("We're currently solving the following issue within our repository.")
    assert [step.tool_called for step in session.execution_trace] == ["find_file", "open", "edit", "bash", "submit"]
    find, _, edit, run, _ = session.execution_trace
    assert find.tool_args == {"file_name": "missing_colon.py"}
    assert (find.thought or "").startswith("The `SyntaxError` in `missing_colon.py` is likely due to")
    expected = "/SWE-agent__test-repo/tests/missing_colon.py"
    assert (
        result(session, 1)["stdout"]
        == f'Found 1 matches for "missing_colon.py" in /SWE-agent__test-repo:\r\n{expected}'
    )
    assert (result(session, 1)["open_file"], result(session, 1)["working_dir"]) == (None, "/SWE-agent__test-repo")
    assert edit.tool_args["replace"] == "def division(a: float, b: float) -> float:"
    assert run.tool_args == {"command": "python tests/missing_colon.py"}
    assert (result(session, 4)["stdout"], result(session, 4)["exit_code"]) == ("8.2", None)
    assert result(session, 4)["open_file"] == expected
    assert result(session, 5)["stdout"].startswith("\r\ndiff --git a/tests/missing_colon.py")
    assert (session.exit_status, session.final_output, session.repository) == (None, "", "SWE-agent/test-repo")


def test_golden_swe_agent_v0(tmp_path: Path) -> None:
    [session] = imported("swe-agent_v0_state-string_humanevalfix-python-0.traj", tmp_path)
    assert "I have a function that has a bug and needs to be fixed, can you help?" in session.user_instruction
    assert [step.tool_called for step in session.execution_trace] == ["bash", "bash", "bash", "bash", "submit"]
    listing, opened, edit, run, _ = session.execution_trace
    assert (listing.tool_args, result(session, 1)["stdout"]) == ({"command": "ls -a"}, ".\n..\n.git\nmain.py\n")
    assert (opened.thought or "").startswith("It looks like there is a main.py file.")
    assert result(session, 1)["open_file"] is None
    assert result(session, 2)["open_file"] == "/swe-bench__humanevalfix-python/main.py"
    assert edit.tool_args["command"] == "edit 15:15\n                distance = abs(elem - elem2)\nend_of_edit"
    assert (run.tool_args, result(session, 4)["stdout"]) == ({"command": "python main.py"}, "")
    assert result(session, 4)["exit_code"] is None, "no output is no proof of success"
    assert session.exit_status == "submitted"


def test_golden_swe_agent_v1(tmp_path: Path) -> None:
    [session] = imported("swe-agent_v1_toolcalls_6e44b9.traj", tmp_path)
    assert session.session_id.startswith("SWE-agent__test-repo-i1-")
    assert [step.tool_called for step in session.execution_trace] == ["find_file", "open", "edit", "bash", "submit"]
    edit = session.execution_trace[2]
    assert edit.tool_args["replace-all"] is False
    assert (edit.thought or "").startswith(
        "The syntax error in the `missing_colon.py` file is due to the missing colon"
    )
    assert result(session, 3)["stdout"].startswith("Replaced 1 occurrences. Please review the changes")
    assert result(session, 3)["duration_s"] == pytest.approx(0.49357870799)
    assert (result(session, 4)["stdout"], result(session, 4)["exit_code"]) == ("8.2", None)
    assert (session.exit_status, session.repository) == ("submitted", "SWE-agent/test-repo")
    assert session.workspace is None, "HEAD does not pin the files"


def test_golden_mini_swe_agent(tmp_path: Path) -> None:
    [session] = imported("mini-swe-agent_local.traj.json", tmp_path)
    assert session.user_instruction.startswith("Please solve this issue: Blah blah blah")
    first, last = session.execution_trace
    assert (first.thought, first.tool_called) == ("Here be some dummy command:", "bash")
    assert first.tool_args == {"command": "echo 'hello world'"}
    assert (result(session, 1)["exit_code"], result(session, 1)["stdout"]) == (0, "hello world\n")
    assert last.tool_args == {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}
    assert (result(session, 2)["exit_code"], result(session, 2)["stdout"]) == (None, "")


def test_golden_openhands_basic(tmp_path: Path) -> None:
    [session] = imported("openhands_v0_basic.json", tmp_path)
    assert session.user_instruction.startswith("Please create a simple 2048 game. No need to run it.")
    [step] = session.execution_trace
    assert step.tool_called == "str_replace_editor"
    assert (step.tool_args["command"], step.tool_args["path"]) == ("create", "/workspace/game_2048.py")
    assert step.tool_args["file_text"].startswith("import random\nimport keyboard\n")
    assert (step.thought or "").startswith("I'll help you create a simple 2048 game in Python.")
    assert result(session, 1)["stdout"].startswith("--- /workspace/game_2048.py\n+++ /workspace/game_2048.py\n@@ -0,0")
    assert session.final_output.startswith("I've created a simple implementation of the 2048 game")
    assert session.exit_status == "finish"


def test_golden_openhands_wrong_initial_state(tmp_path: Path) -> None:
    [session] = imported("openhands_v0_wrong_initial_state.json", tmp_path)
    assert session.user_instruction == "Please rename game_2048.py to 2048.py"
    view, move, again = session.execution_trace
    assert (view.tool_called, view.tool_args) == ("str_replace_editor", {"command": "view", "path": "/workspace"})
    assert result(session, 1)["stdout"].endswith("\n/workspace/\n/workspace/game_2048.py")
    assert move.tool_args == {"command": "mv /workspace/game_2048.py /workspace/2048.py", "is_input": "false"}
    assert (result(session, 2)["exit_code"], result(session, 2)["stdout"]) == (0, "")
    assert result(session, 2)["working_dir"] == "/workspace"
    assert again.thought == "Let me verify that the file was renamed successfully:"
    assert result(session, 3)["stdout"].endswith("/workspace/2048.py")


def test_golden_openhands_eval_row(tmp_path: Path) -> None:
    [session] = imported("openhands_v0_eval_output_ponyc-4595.jsonl", tmp_path)
    assert session.session_id.startswith("ponylang__ponyc-4595-")
    assert session.user_instruction.startswith("<uploaded_files>\n/workspace/ponylang__ponyc__0.1\n")
    tools = Counter(step.tool_called for step in session.execution_trace)
    assert tools == {"execute_bash": 13, "str_replace_editor": 8, "think": 1}
    codes = [(i, code) for i in range(1, 23) if (code := result(session, i)["exit_code"]) not in (0, None)]
    assert codes == [(16, 127), (17, 2), (18, 2), (19, 127), (21, 127)]
    assert result(session, 16)["stdout"] == "bash: ponyc: command not found"
    assert result(session, 6)["stdout"] == "29:DECL(pattern);"
    assert [i for i in range(1, 23) if result(session, i)["truncated"]] == [5, 7, 9]
    think = session.execution_trace[21]
    assert list(think.tool_args) == ["thought"]
    assert think.tool_args["thought"].startswith("Re-read the problem description")
    assert session.final_output.startswith("The issue with the `ponyc` compiler segfaulting")
    assert (session.exit_status, session.repository) == ("finish (partial)", "ponylang/ponyc")
    assert session.workspace is not None
    assert session.workspace.model_dump()["commit"] == "f8a2feebba3aea298bde89d445ad35ca48602ca7"


def test_golden_content_parts(tmp_path: Path) -> None:
    sessions = imported("messages_content-parts_reason_tool_use_first10.jsonl", tmp_path)
    plain, films, circles = sessions[:3]
    assert plain.user_instruction == "What are the schools near latitude 40 and longitude -75?"
    assert plain.execution_trace == []
    assert plain.final_output.startswith("I'm sorry, but the available tools don't seem to have a function")
    first, reply, second = films.execution_trace
    assert (first.tool_called, first.tool_args) == ("get_movie_details", {"title": "Inception"})
    assert (first.thought or "").startswith("Alright, the user wants information about the movi")
    assert result(films, 1)["stdout"].startswith('[{"title": "Inception", "director": "Christopher Nolan"')
    assert reply.tool_called == "message"
    assert reply.tool_args["content"].startswith('Here are the key details about the movie "Inception"')
    assert result(films, 2)["stdout"] == 'What about "The Dark Knight"?'
    assert second.tool_args == {"title": "The Dark Knight"}
    assert [step.tool_args.get("radius") for step in circles.execution_trace] == [1.5, 3, None, 2.5, 4, 5.5]
    assert result(circles, 2)["stdout"] == "{'area': 28.2743, 'radius': 3, 'unit':'square meters'}"
    assert result(circles, 6)["stdout"].startswith("{'area': 95.0332")
    assert [step.execution_result for step in sessions[7].execution_trace] == [None, None]
