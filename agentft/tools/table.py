"""Every tool in one table (floor 0): as text, as JSON, or as docs/tools.md. ``agentft tools`` shows it."""

from __future__ import annotations

from collections.abc import Iterable

from agentft.tools.spec import ToolSpec

COLUMNS = ("tool", "what it does", "arguments", "repeats", "runs code", "result fields", "needs")
DOCUMENT = """# The built-in tools

Row n of this table is row n of the tool head. Made by `agentft tools --markdown`; a test keeps it equal to the code.

- **repeats**: the same call on the same files gives the same result byte for byte, so it may be cached.
- **runs code**: its outcome depends on what the program does; the reward head predicts these.
- **result fields** stand beside `exit_code`, `status`, `stdout`, `stderr`, `duration_s`, `timed_out`, `truncated`.
- **needs**: a program of the image; the first one that is there does the work. Without any: exit code 127.
- `failures` holds {test, message, file, line} of the first 20 failed tests, `error_location` {file, line}.

"""


def markdown(specs: Iterable[ToolSpec]) -> str:
    """Return docs/tools.md."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in _row(spec)) + " |" for spec in specs]
    return DOCUMENT + "\n".join(lines) + "\n"


def as_object(spec: ToolSpec) -> dict[str, object]:
    """Return the row as a JSON object, with the arguments as JSON Schema."""
    return {
        "name": spec.name,
        "description": spec.description,
        "parameters": spec.json_schema(),
        "deterministic": spec.deterministic,
        "runs_code": spec.runs_code,
        "fields": list(spec.fields),
        "needs": list(spec.needs),
    }


def _row(spec: ToolSpec) -> list[str]:
    arguments = ", ".join(
        f"`{p.name}` ({p.type}{'' if p.required else ', optional'}): {p.description}" for p in spec.parameters
    )
    return [
        f"`{spec.name}`",
        spec.description,
        arguments or "none",
        "yes" if spec.deterministic else "no",
        "yes" if spec.runs_code else "no",
        ", ".join(spec.fields),
        " or ".join(spec.needs),
    ]


def plain(spec: ToolSpec) -> str:
    """Return a few lines for the terminal."""
    facts = ["repeats" if spec.deterministic else "does not repeat", *(["runs code"] if spec.runs_code else [])]
    facts += [f"needs {' or '.join(spec.needs)}"] if spec.needs else []
    result = f"result: {', '.join(spec.fields)}" if spec.fields else "result: the output alone"
    return f"{spec.usage()}\n    {spec.description}\n    {', '.join(facts)}\n    {result}"
