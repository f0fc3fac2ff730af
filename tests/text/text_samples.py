"""Sessions for the tests of text: strategies that try to break rendering, and one small vocabulary."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis import strategies as st

from agentft.etai import CursorPosition, ErrorLocation, ExecutionResult, IdeContext, Session, TraceStep
from agentft.text.vocab import SPECIAL_TOKENS, Vocab, train_tokenizer
from agentft.tools import BUILTIN_TOOLS, ToolCall, ToolSpec

PATHS = ("src/a.py", "./src/a.py", "src/b.py", "tests/test_a.py", "ünï/ç d.py", "src")
SOURCE = "def f(x):\n    if x == 10:\n        return 'a'\n\n\n    return  x + 2  # done\n"


@functools.cache
def small_vocab() -> Vocab:
    return Vocab.of(train_tokenizer([SOURCE, "exit 0 passed 3 failed 1", *PATHS] * 3, 480))


def texts(max_size: int = 40) -> st.SearchStrategy[str]:
    hostile = st.sampled_from(
        [
            *SPECIAL_TOKENS[:24],
            "<F0>",
            "<L07>",
            "\r\n",
            "\n\n    ",
            "\t",
            "src/a.py:3",
            "[... cut ...]",
            "é\u0301",
            "😀",
        ]
    )
    return st.lists(st.one_of(hostile, st.text(max_size=max_size)), max_size=4).map("".join)


def paths() -> st.SearchStrategy[str]:
    return st.one_of(st.sampled_from(PATHS), texts(8))


def values(kind: str) -> st.SearchStrategy[Any]:
    plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts(10))
    return {
        "string": texts(),
        "integer": st.one_of(st.integers(1, 40), st.integers()),
        "number": st.floats(allow_nan=False),
        "boolean": st.booleans(),
        "array": st.lists(plain, max_size=3),
        "object": st.dictionaries(texts(5), plain, max_size=3),
    }[kind]


@st.composite
def calls(draw: st.DrawFn, tools: tuple[ToolSpec, ...] = BUILTIN_TOOLS) -> ToolCall:
    spec = draw(st.sampled_from(tools))
    chosen = [p for p in spec.parameters if p.required or draw(st.booleans())]
    args = {p.name: draw(paths() if p.refers_to == "file" else values(p.type)) for p in draw(st.permutations(chosen))}
    return ToolCall(spec.name, args)


@st.composite
def results(draw: st.DrawFn, tool: str, path: object) -> ExecutionResult | None:
    if draw(st.integers(0, 7)) == 0:
        return None
    exit_code = draw(st.sampled_from([0, 0, 0, 1, 2, 137, None]))
    stdout = draw(texts())
    if tool == "file_read" and exit_code == 0:
        first = draw(st.integers(1, 30))
        lines = draw(st.lists(texts(12).map(lambda t: t.replace("\n", " ")), min_size=1, max_size=8))
        stdout = "".join(f"{number}: {line}\n" for number, line in enumerate(lines, first))
    if tool == "file_edit" and exit_code == 0 and draw(st.booleans()):
        line = draw(st.integers(1, 30))
        return ExecutionResult(exit_code=0, stdout=f"{path}: edited at line {line}\n", start_line=line)
    place = draw(st.one_of(st.none(), st.builds(ErrorLocation, file=paths(), line=st.integers(1, 30))))
    if place is not None:
        stdout += f"\n{place.file}:{place.line}: AssertionError at {place.file}:{place.line}\n"
    extra: dict[str, Any] = {"passed": draw(st.integers(0, 9)), "failed": 1} if draw(st.booleans()) else {}
    return ExecutionResult(
        exit_code=exit_code,
        stdout=stdout,
        stderr=draw(texts(10)),
        error_location=place,
        status=draw(st.sampled_from([None, "ok", "nonzero", "timeout", "infra"])),
        **extra,
    )


@st.composite
def sessions(draw: st.DrawFn, max_steps: int = 6) -> Session:
    steps = []
    for number in range(1, draw(st.integers(0, max_steps)) + 1):
        call = draw(calls())
        steps.append(
            TraceStep(
                step=number,
                thought=draw(st.one_of(st.none(), texts())),
                mistake=draw(st.integers(0, 3)) == 0,
                tool_called=call.name,
                tool_args=dict(call.args),
                execution_result=draw(results(call.name, call.args.get("path"))),
            )
        )
    cursor = st.builds(CursorPosition, file=paths(), line=st.integers(1, 50), column=st.integers(0, 9))
    context = IdeContext(
        open_files=draw(st.lists(paths(), max_size=20)),
        cursor_position=draw(st.one_of(st.none(), cursor)),
        git_status=draw(st.one_of(st.none(), texts())),
    )
    return Session(
        session_id="s",
        user_instruction=draw(texts()),
        ide_context=context,
        execution_trace=steps,
        final_output=draw(texts()),
    )
