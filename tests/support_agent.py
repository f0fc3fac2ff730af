"""A small world for tests of feedback and path accuracy: repair sessions, an in-process executor, a tiny agent.

``InProcessExecutor`` has real behaviour: files are edited, code is compiled and run, tests pass or fail by themselves.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from transformers import GlmConfig, GlmForCausalLM

from agentft.config.schema import FeedbackPositionsConfig, ModelConfig, TextConfig
from agentft.data.batch import collate
from agentft.data.shards import sample_of
from agentft.etai import INTENTS, InlineWorkspace, Session, TraceStep, Workspace
from agentft.models import rotary
from agentft.models.agent_model import AgentModel
from agentft.models.heads import AgentHeads
from agentft.sandbox.base import ExecResult, Verdict
from agentft.sandbox.grader import named_files
from agentft.sandbox.restore import restore
from agentft.text.render import Renderer, session_texts
from agentft.text.vocab import Vocab, train_tokenizer
from agentft.tools import TOOLS, ToolCall

TEXT = TextConfig(max_tokens=512, result_tokens=48)
POSITIONS = FeedbackPositionsConfig(enabled=True)


def run_call(files: dict[str, str], call: ToolCall) -> ExecResult:
    """Run one call on ``files`` in this process."""
    args, path = call.args, str(call.args.get("path", ""))
    if call.name == "file_read":
        if path not in files:
            return ExecResult(status="nonzero", exit_code=2, stderr=f"no file {path}")
        lines = files[path].splitlines()
        return ExecResult(status="ok", exit_code=0, stdout="\n".join(f"{n}\t{x}" for n, x in enumerate(lines, 1)))
    if call.name == "file_edit":
        if files.get(path, "").count(str(args["old"])) != 1:
            return ExecResult(status="nonzero", exit_code=1, stderr="`old` does not occur once")
        files[path] = files[path].replace(str(args["old"]), str(args["new"]))
        return ExecResult(status="ok", exit_code=0, stdout="edited")
    if call.name == "pytest_run":
        try:
            calc = ModuleType("calc")
            exec(compile(files["calc.py"], "calc.py", "exec"), vars(calc))
            space: dict[str, Any] = {"__builtins__": {**vars(builtins), "__import__": lambda *_: calc}}
            exec(compile(files["test_calc.py"], "test_calc.py", "exec"), space)
            space["test_calc"]()
        except Exception as error:
            return ExecResult(status="nonzero", exit_code=1, stdout=f"FAILED {type(error).__name__}: {error}")
        return ExecResult(status="ok", exit_code=0, stdout="1 passed")
    return ExecResult(status="nonzero", exit_code=2, stderr=f"{call.name} is not here")


def judge(before: dict[str, str], after: dict[str, str], verdict: ToolCall) -> ExecResult:
    """Run the verdict on the agent's own files and the session's own tests."""
    original = {path: text.encode() for path, text in before.items()}
    changed = {path: text.encode() for path, text in after.items() if before.get(path) != text}
    restored = restore(original, changed, named=named_files(verdict))
    result = run_call({path: content.decode() for path, content in restored.files.items()}, verdict)
    return replace(result, fields={"tampered": [one.as_dict() for one in restored.tampered]})


class InProcessExecutor:
    """Runs calls in threads of this process. ``break_at`` may raise or change results for chosen keys."""

    def __init__(self, break_at: Callable[[str], list[ExecResult] | None] | None = None) -> None:
        self._pool, self._break_at = ThreadPoolExecutor(2), break_at
        self._lock = threading.Lock()
        self.keys: list[str] = []
        self.closed = 0

    def submit(
        self, workspace: Workspace, calls: tuple[ToolCall, ...], *, key: str, verdict: Verdict | None = None
    ) -> Future[list[ExecResult]]:
        with self._lock:
            self.keys.append(key)
        return self._pool.submit(self._run, workspace, calls, key, verdict)

    def _run(
        self, workspace: Workspace, calls: tuple[ToolCall, ...], key: str, verdict: Verdict | None
    ) -> list[ExecResult]:
        broken = self._break_at(key) if self._break_at else None
        if broken is not None:
            return broken * (len(calls) + (verdict is not None))
        assert isinstance(workspace, InlineWorkspace)
        files = dict(workspace.files)
        results, found = [], dict(files)
        for number, call in enumerate(calls):
            if verdict is not None and number == verdict.agent_from:
                found = dict(files)
            results.append(run_call(files, call))
        return results if verdict is None else [*results, judge(found, files, verdict.call)]

    def stats(self) -> dict[str, Any]:
        return {"keys": len(self.keys)}

    def close(self) -> None:
        self.closed += 1
        self._pool.shutdown(wait=True, cancel_futures=True)


def repair_session(number: int, *, mistake: bool = False) -> Session:
    """Return a session that repairs ``a - b`` to ``a + b``; every result is what ``run_call`` gives."""
    value = number % 7 + 1
    start = {
        "calc.py": f"def add(a, b):\n    return a - b\n\nBASE = {number}\n",
        "test_calc.py": f"from calc import add\n\n\ndef test_calc():\n    assert add({value}, 2) == {value + 2}\n",
    }
    good = ToolCall("file_edit", {"path": "calc.py", "line": 2, "old": "a - b", "new": "a + b"})
    wrong = ToolCall("file_edit", {"path": "calc.py", "line": 2, "old": "a - b", "new": "a * b + 9"})
    undo = ToolCall("file_edit", {"path": "calc.py", "line": 2, "old": "a * b + 9", "new": "a - b"})
    test = ToolCall("pytest_run", {"targets": "test_calc.py"})
    read = ToolCall("file_read", {"path": "calc.py"})
    calls = [(test, False), (read, False)]
    calls += [(wrong, True), (test, False), (undo, False)] if mistake else []
    calls += [(good, False), (test, False)]
    files, trace = dict(start), []
    for step, (call, wrong_one) in enumerate(calls, 1):
        trace.append(
            TraceStep(
                step=step,
                mistake=wrong_one,
                tool_called=call.name,
                tool_args=dict(call.args),
                execution_result=run_call(files, call).to_record(),
            )
        )
    return Session(
        session_id=f"calc/{number}",
        user_instruction="test_calc fails, repair it",
        execution_trace=trace,
        final_output="add subtracts no more",
        intents=["fix_test_failure"],
        workspace=InlineWorkspace(files=start),
    )


def sessions(count: int) -> list[Session]:
    return [repair_session(number, mistake=number % 3 == 2) for number in range(count)]


def make_renderer(known: Sequence[Session]) -> Renderer:
    return Renderer(Vocab.of(train_tokenizer(session_texts(known, TEXT), 520)), TEXT, POSITIONS)


def make_model(renderer: Renderer, *, seed: int = 5, dropout: float = 0.0) -> AgentModel:
    torch.manual_seed(seed)
    config = GlmConfig(
        vocab_size=renderer.vocab.size, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, pad_token_id=None, eos_token_id=None,
        bos_token_id=None, attention_dropout=dropout,
    )  # fmt: skip
    backbone = GlmForCausalLM(config)
    rotary.install(backbone, POSITIONS.start, POSITIONS.rotary_base)
    heads = AgentHeads(48, len(INTENTS), len(TOOLS))
    return AgentModel(ModelConfig(preset="tiny-glm"), backbone, heads, tools=tuple(TOOLS), entropy_bonus=0.01)


def learn_by_heart(model: AgentModel, renderer: Renderer, known: Sequence[Session]) -> AgentModel:
    """Train ``model`` on whole sessions until it knows them."""
    batch = collate([sample_of(session, renderer.render(session)) for session in known])
    optimiser = torch.optim.AdamW(model.train().parameters(), lr=5e-3)
    for _ in range(300):
        loss = model.loss(model(batch), batch)["code"]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if float(loss.detach()) < 0.01:
            return model
    raise AssertionError(f"the tiny model did not learn its sessions: loss {float(loss.detach()):.3f}")


@dataclass(frozen=True)
class Coming:
    samples: list[dict[str, Any]]


class ListLoader:
    """Batches of fixed sessions, in order, epoch after epoch, with a look ahead."""

    def __init__(self, renderer: Renderer, known: Sequence[Session], batch_size: int) -> None:
        samples = [sample_of(session, renderer.render(session)) for session in known]
        self.groups = [samples[i : i + batch_size] for i in range(0, len(samples), batch_size)]
        self.batch_size, self._drawn = batch_size, 0

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for group in self.groups:
            self._drawn += 1
            yield collate(group)

    def upcoming(self, count: int) -> list[Coming]:
        return [Coming(self.groups[(self._drawn + i) % len(self.groups)]) for i in range(count)]


def lost(why: str = "the daemon is gone") -> list[ExecResult]:
    return [ExecResult(status="infra", exit_code=None, stderr=why)]
