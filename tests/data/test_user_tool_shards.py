"""Sessions with a tool of the user: its row of the tool head, its place in meta.json, and runs that do not know it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agentft import etai_io
from agentft.config.load import load
from agentft.config.schema import ModelConfig, RunConfig
from agentft.config.tools import use_tools
from agentft.data.batch import collate
from agentft.data.meta import TOKENIZER_NAME
from agentft.data.read import read_samples
from agentft.data.shards import ShardReport, write_shards
from agentft.errors import DataError, SandboxError
from agentft.etai import ExecutionResult, InlineWorkspace, Session, TraceStep
from agentft.models.agent_model import build_agent_model
from agentft.models.routing import ToolRouter
from agentft.sandbox.calls import session_calls
from agentft.sandbox.images import ensure_image
from agentft.text.vocab import load_tokenizer
from agentft.tools import TOOL_INDEX
from agentft.tools.user import use
from agentft.train.build import build_executor, build_renderer

REPO = Path(__file__).resolve().parents[2]
TOOL = """\
name: sql_query
description: Ask the database.
parameters:
  properties: {query: {type: string, description: one SELECT}}
  required: [query]
command: [python3, /srv/query.py]
"""


@pytest.fixture
def tools_file(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "sql.yaml").write_text(TOOL)
    yield tmp_path / "sql.yaml"
    use(())


def session() -> Session:
    asked = {"query": "SELECT count(*) FROM orders"}
    result = ExecutionResult(exit_code=0, stdout="count(*)\n120\n")
    steps = [
        TraceStep(step=1, tool_called="sql_query", tool_args=asked, execution_result=result),
        TraceStep(step=2, tool_called="git_status", tool_args={}, execution_result=ExecutionResult(exit_code=0)),
    ]
    return Session.model_validate(
        {
            "session_id": "shop-1",
            "user_instruction": "How many orders are there?",
            "execution_trace": [step.model_dump(exclude_none=True) for step in steps],
            "final_output": "120 orders.",
            "workspace": InlineWorkspace(files={"a.txt": "a"}).model_dump(),
        }
    )


def config_of(folder: Path, tools: list[Path]) -> RunConfig:
    overrides = [f"data.shards={folder}", f"tools=[{', '.join(map(str, tools))}]"]
    return load(REPO / "yamls" / "agent" / "tiny-glm.yaml", overrides)


def written(tmp_path: Path, config: RunConfig) -> ShardReport:
    etai_io.write(tmp_path / "sessions.jsonl", [session()])
    return write_shards(
        [tmp_path / "sessions.jsonl"],
        tmp_path / "shards",
        text=config.text,
        positions=config.model.feedback_positions,
        tokenizer="train",
        vocab_size=600,
    )


def test_a_tool_of_the_user_is_a_row_of_the_tool_head(tools_file: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path / "shards", [tools_file])
    use_tools(config.tools)
    report = written(tmp_path, config)
    assert report.meta.tools == list(TOOL_INDEX)
    assert len(report.meta.tools) == 19
    assert list(report.meta.user_tools) == ["sql_query"]
    split = next(iter(report.meta.splits))
    samples = list(read_samples(tmp_path / "shards", split))
    batch = collate(samples)
    assert batch["tool_target"].tolist() == [18, TOOL_INDEX["git_status"]]

    renderer = build_renderer(config, load_tokenizer(tmp_path / "shards" / TOKENIZER_NAME), report.meta)
    assert renderer.rows["sql_query"] == 18
    calls = session_calls(session())
    assert calls is not None
    assert calls.calls[0].args == {"query": "SELECT count(*) FROM orders"}
    assert "sql_query" in ToolRouter().route(["fix_test_failure"]).allowed

    model = build_agent_model(
        ModelConfig(preset="tiny-glm"), vocab_size=report.meta.vocab_size, tools=list(TOOL_INDEX), seed=1
    )
    with torch.no_grad():
        said = model.heads(torch.zeros(*batch["input_ids"].shape, 1).expand(-1, -1, _width(model)), batch)
    assert said["tool"].shape == (2, 19)


def _width(model: torch.nn.Module) -> int:
    return int(model.heads.intent.mlp[0].in_features)  # type: ignore[union-attr,index]


@pytest.mark.engine
def test_the_executor_of_a_run_executes_the_tool(tmp_path: Path) -> None:
    try:
        ensure_image("sql")
    except SandboxError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"docker: {error.what}")
    config = config_of(tmp_path / "shards", [REPO / "yamls" / "tools" / "sql.yaml"])
    use_tools(config.tools)
    calls = session_calls(session())
    assert calls is not None
    executor = build_executor(config, tmp_path)
    try:
        results = executor.submit(calls.workspace, calls.calls, key="recorded/0/shop-1/2").result(120)
    finally:
        executor.close()
        use(())
    assert [result.exit_code for result in results] == [0, 128]
    assert results[0].stdout == "count(*)\n120\n"
    assert dict(results[0].fields) == {"rows": 1, "columns": ["count(*)"], "more": False}


def test_a_run_without_the_tool_or_with_another_form_of_it_refuses_the_shards(tools_file: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path / "shards", [tools_file])
    use_tools(config.tools)
    report = written(tmp_path, config)
    tokenizer = load_tokenizer(tmp_path / "shards" / TOKENIZER_NAME)
    use(())
    with pytest.raises(DataError, match=r"user_tools = {'sql_query': '.*'} in the shards"):
        build_renderer(config, tokenizer, report.meta)
    tools_file.write_text(TOOL.replace("query: {type: string", "query: {type: object"))
    use_tools(config.tools)
    with pytest.raises(DataError, match=r"user_tools"):
        build_renderer(config, tokenizer, report.meta)
    tools_file.write_text(TOOL)
    use_tools(config.tools)
    build_renderer(config, tokenizer, report.meta)
