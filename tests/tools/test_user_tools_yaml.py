"""Tools of the user from YAML: what is read, what is refused, and the one table of tools of a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentft.cli import main
from agentft.config.load import InvalidConfigError
from agentft.config.tools import read_tools, use_tools
from agentft.tools import BUILTIN_TOOLS, TOOL_INDEX, TOOLS, USER_TOOLS, ToolCall
from agentft.tools.check import check_call
from agentft.tools.user import specs, use, user_specs
from agentft.train.check import load_run_config

REPO = Path(__file__).resolve().parents[2]
SHIPPED = [str(REPO / "yamls" / "tools" / name) for name in ("sql.yaml", "tracker.yaml")]


@pytest.fixture(autouse=True)
def only_built_in() -> Iterator[None]:
    yield
    use(())


def problems_of(text: str, tmp_path: Path) -> list[str]:
    (tmp_path / "t.yaml").write_text(text)
    (tmp_path / "code.py").write_text("def run(x):\n    return x\n")
    (tmp_path / "broken.py").write_text("def run(:\n")
    return [error.render() for error in read_tools([str(tmp_path / "t.yaml")])[1]]


def test_the_shipped_ones() -> None:
    tools, problems = read_tools(SHIPPED)
    assert problems == []
    sql, tracker = tools
    assert (sql.spec.name, sql.image, sql.spec.fields) == ("sql_query", "sql", ("rows", "columns", "more"))
    assert sql.spec.json_schema()["required"] == ["query"]
    assert tracker.service is not None
    assert (tracker.service.port, tracker.function) == (8000, "request")
    assert "def request" in tracker.source


def test_a_process_works_with_one_table() -> None:
    use_tools(SHIPPED)
    assert [spec.name for spec in specs()] == [*(spec.name for spec in BUILTIN_TOOLS), "sql_query", "tracker"]
    assert (TOOL_INDEX["sql_query"], TOOL_INDEX["tracker"], len(TOOLS)) == (18, 19, 20)
    assert set(user_specs()) == {"sql_query", "tracker"}
    assert check_call(ToolCall("sql_query", {"query": "SELECT 1"})) is None
    assert check_call(ToolCall("sql_query", {})) == (
        "sql_query needs the argument 'query'; usage: sql_query(query: string)"
    )
    use_tools(SHIPPED[1:])
    assert (TOOL_INDEX["tracker"], list(USER_TOOLS)) == (18, ["tracker"])
    use(())
    assert tuple(TOOLS.values()) == BUILTIN_TOOLS


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "a tool is a mapping of keys"),
        ("name: [", "the file of tools is not YAML"),
        ("name: a_tool\ndescription: d\ncommnad: [x]\ncommand: [x]", "did you mean command?"),
        ("name: a_tool\ncommand: [x]", "description is missing"),
        ("name: A Tool\ndescription: d\ncommand: [x]", "not a name of a tool"),
        ("name: file_read\ndescription: d\ncommand: [x]", "not that of a built-in tool"),
        ("name: a_tool\ndescription: d", "either `command` or `python`"),
        ("name: a_tool\ndescription: d\ncommand: [x]\npython: code.py:run", "either `command` or `python`"),
        ("name: a_tool\ndescription: d\ncommand: x y", "command has the wrong type"),
        ("name: a_tool\ndescription: d\ncommand: []", "command is empty"),
        ("name: a_tool\ndescription: d\ncommand: [x, 3]", "put numbers in quotes"),
        ("name: a_tool\ndescription: d\ncommand: [x]\ntimeout_s: 0", "timeout_s is out of range"),
        ("name: a_tool\ndescription: d\ncommand: [x]\ntimeout_s: true", "timeout_s has the wrong type"),
        ("name: a_tool\ndescription: d\ncommand: [x]\nfields: [stdout]", "part of every result"),
        ("name: a_tool\ndescription: d\npython: code.py:rum", "has no function rum"),
        ("name: a_tool\ndescription: d\npython: gone.py:run", "cannot be read"),
        ("name: a_tool\ndescription: d\npython: broken.py:run", "cannot be read"),
        (
            "name: a_tool\ndescription: d\ncommand: [x]\nimage: sql\nservice: {image: api, command: [x], port: 1}",
            "has no network",
        ),
        ("name: a_tool\ndescription: d\ncommand: [x]\nservice: {image: api, comand: [x], port: 1}", "did you mean com"),
        ("name: a_tool\ndescription: d\ncommand: [x]\nservice: {image: api, command: [x], port: 0}", "1 to 65535"),
        (
            "name: a_tool\ndescription: d\ncommand: [x]\nparameters: {properties: {a: {type: text}}}",
            "parameters.properties.a.type is unknown",
        ),
        (
            "name: a_tool\ndescription: d\ncommand: [x]\nparameters: {properties: {a: {type: string, enum: [b]}}}",
            "parameters.properties.a.enum has no effect",
        ),
        ("name: a_tool\ndescription: d\ncommand: [x]\nparameters: {required: [a]}", "which is no property"),
        ("name: a_tool\ndescription: d\ncommand: [x]\nparameters: {anyOf: []}", "parameters.anyOf has no effect"),
    ],
)
def test_what_is_wrong_is_said(text: str, reason: str, tmp_path: Path) -> None:
    found = problems_of(text, tmp_path)
    assert any(reason in problem for problem in found), found
    assert all(str(tmp_path / "t.yaml") in problem for problem in found)


def test_all_errors_of_all_files_at_once_with_their_lines(tmp_path: Path) -> None:
    text = "tools:\n  - {name: one, command: [x]}\n  - name: two\n    description: d\n    comand: [x]\n"
    found = problems_of(text, tmp_path)
    assert [problem.partition(": ")[0].rpartition(":")[2] for problem in found] == ["2", "3", "3"]
    same = "tools:\n- &a {name: one, description: d, command: [x]}\n- *a\n"
    assert "this name is taken" in problems_of(same, tmp_path)[0]
    with pytest.raises(InvalidConfigError, match="2 errors"):
        use_tools([str(tmp_path / "gone.yaml"), str(tmp_path)])
    assert USER_TOOLS == {}


def test_a_run_names_its_tools_and_validation_checks_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(REPO / "yamls" / "agent" / "tiny-glm.yaml")
    tools = f"tools=[{', '.join(SHIPPED)}]"
    assert main(["validate", run, tools]) == 0
    config = load_run_config(run, [tools])
    assert config.tools == SHIPPED
    assert list(USER_TOOLS) == ["sql_query", "tracker"]
    capsys.readouterr()
    assert main(["validate", run, tools, "feedback.backend=local"]) == 2
    assert "sql_query, tracker: tools with containers of their own need Docker" in capsys.readouterr().err
    (tmp_path / "bad.yaml").write_text("name: one\ncomand: [x]\n")
    assert main(["validate", run, f"tools=[{tmp_path / 'bad.yaml'}]"]) == 2
    assert "did you mean command?" in capsys.readouterr().err


def test_the_verb_shows_them_and_refuses_broken_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tools", *SHIPPED]) == 0
    assert "sql_query(query: string)" in capsys.readouterr().out
    (tmp_path / "bad.yaml").write_text("name: one\n")
    assert main(["tools", str(tmp_path / "bad.yaml")]) == 2
    assert "description is missing" in capsys.readouterr().err
