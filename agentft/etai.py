"""ETAI, the record of one coding session (floor 0): types, limits, and what each field means.

Execution-Trace Augmented Instruction: what the user asked, what the editor showed, every tool call
with what really happened when it ran, and the final answer. One JSON object a line.

Nullable means "the source does not know": an exit code is never invented.

    session = to_session(parse_json(line))     # one record checked; RecordError says in one message what is wrong

Reading and writing files of records is in ``agentft.etai_io``, which also lists what is repaired and what refused.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections import Counter
from typing import Annotated, Any, Final, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agentft.errors import DataError

SCHEMA_VERSION: Final = "1.0"

INTENTS: tuple[str, ...] = (
    "fix_test_failure",
    "debug_runtime_error",
    "implement_function",
    "refactor_function_signature",
    "rename_symbol",
    "add_type_annotation",
    "write_tests",
    "explore_code",
    "update_dependency",
    "fix_lint",
    "improve_performance",
    "release_package",
)
"""The intents a session may carry (several at once); the order is the order of the intent head's outputs."""

MAX_OUTPUT_BYTES = 64 * 1024
"""Longest stdout or stderr of a record; of what is longer the middle is cut."""

MAX_DEPTH = 100
"""Deepest nesting of a record's JSON."""

Split = Literal["train", "val", "test"]
Complexity = Literal["single_function", "multi_file"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CursorPosition(_Strict):
    """A place in a file: ``line`` counts from 1, ``column`` from 0, in characters."""

    file: str
    line: int = Field(ge=1)
    column: int = Field(default=0, ge=0)


class CursorTarget(CursorPosition):
    """Where the repair happened; ``placement`` says on which side of that line the caret should land."""

    placement: Literal["before", "after"] = "after"


class Viewport(_Strict):
    """What the editor window shows: offsets and sizes in CSS pixels, ``zoom`` as a factor."""

    scroll_top: float = Field(default=0.0, ge=0)
    zoom: float = Field(default=1.0, gt=0)
    line_height: float = Field(default=20.0, gt=0)
    char_width: float = Field(default=8.0, gt=0)


class IdeContext(_Strict):
    """The state of the editor when the user asked."""

    open_files: list[str] = []
    cursor_position: CursorPosition | None = None
    git_status: str | None = None
    viewport: Viewport | None = None
    last_commit_message: str | None = None


class ErrorLocation(_Strict):
    """The place that a failing run points at, inside the workspace."""

    file: str
    line: int = Field(ge=1)


class ExecutionResult(BaseModel):
    """What happened when the call ran. Tool-specific fields are kept as they come.

    ``combined`` marks sources that do not tell stdout from stderr (all of it is in ``stdout``).
    ``truncated``/``total_bytes`` say that the middle of the output was cut, and how long it was.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    duration_s: float | None = Field(default=None, ge=0)
    error_location: ErrorLocation | None = None
    status: str | None = None
    combined: bool = False
    truncated: bool = False
    total_bytes: int | None = Field(default=None, ge=0)


class TraceStep(_Strict):
    """One tool call and its result. ``mistake`` steps were executed and are shown, never imitated."""

    step: int = Field(ge=1)
    thought: str | None = None
    mistake: bool = False
    tool_called: str = Field(min_length=1)
    tool_args: dict[str, Any] = {}
    execution_result: ExecutionResult | None = None


class InlineWorkspace(_Strict):
    """The files before step 1, by path relative to the workspace root."""

    kind: Literal["files"] = "files"
    files: dict[str, str]


class GitWorkspace(_Strict):
    """A repository and the commit to start from."""

    kind: Literal["git"] = "git"
    url: str
    commit: str


class ImageWorkspace(_Strict):
    """A sandbox image that already holds the files."""

    kind: Literal["image"] = "image"
    image: str


Workspace = Annotated[InlineWorkspace | GitWorkspace | ImageWorkspace, Field(discriminator="kind")]


class Session(_Strict):
    """One coding session: the unit that is split, sharded, rendered, replayed and rewarded.

    ``exit_status`` is how the run ended in the source's own words (``submitted``, ``exit_cost``, ``LimitsExceeded``);
    null where the source does not say. It says nothing about whether the work was right.
    """

    schema_version: Literal["1.0"] = SCHEMA_VERSION
    session_id: str = Field(min_length=1)
    user_instruction: str
    ide_context: IdeContext = IdeContext()
    execution_trace: list[TraceStep] = []
    final_output: str = ""
    intents: list[Annotated[str, Field(json_schema_extra={"enum": list(INTENTS)})]] | None = None
    complexity: Complexity | None = None
    language: str | None = None
    licence: str | None = None
    cursor_target: CursorTarget | None = None
    workspace: Workspace | None = None
    source: str | None = None
    repository: str | None = None
    parent: str | None = None
    exit_status: str | None = None

    @field_validator("intents")
    @classmethod
    def _intents_are_known(cls, intents: list[str] | None) -> list[str] | None:
        unknown = [name for name in intents or () if name not in INTENTS]
        if unknown:
            raise ValueError(f"unknown {unknown}; known are {', '.join(INTENTS)}")
        return intents

    def split_key(self) -> str:
        """What the split is decided by: the repository where known, else the parent, else the id."""
        return self.repository or self.parent or self.session_id


def split_of(key: str) -> Split:
    """Assign 8:1:1 by a stable hash of ``key`` (the same on every machine and in every process)."""
    bucket = int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:8], "big") % 10
    return "train" if bucket < 8 else "val" if bucket == 8 else "test"


_SURROGATE = re.compile("[\ud800-\udfff]")


class RecordError(DataError):
    """One record is wrong. ``reason`` is a short code to count by, ``field`` the path of the value in the record."""

    def __init__(
        self,
        what: str,
        *,
        reason: str,
        field: str = "",
        got: object = None,
        expected: str | None = None,
        hint: str | None = None,
        where: str | None = None,
    ) -> None:
        self.problem, self.reason, self.field = what, reason, field
        super().__init__(f"{field}: {what}" if field else what, where=where, got=got, expected=expected, hint=hint)

    def at(self, where: str) -> RecordError:
        """Return the same error with the place it was found at (``file:line``)."""
        return RecordError(
            self.problem,
            reason=self.reason,
            field=self.field,
            got=self.got,
            expected=self.expected,
            hint=self.hint,
            where=where,
        )


def to_session(record: object, repairs: Counter[str] | None = None) -> Session:
    """Clean, cut and validate one decoded record; ``repairs`` counts what was changed.

    Raises:
        RecordError: with the first thing that is wrong.
    """
    counted = Counter[str]() if repairs is None else repairs
    if not isinstance(record, dict):
        raise RecordError(
            "a record is one JSON object a line", reason="not_object", got=_shown(record), expected="an object"
        )
    cleaned = cast("dict[str, Any]", clean(record, counted))
    steps = cleaned.get("execution_trace")
    for step in steps if isinstance(steps, list) else ():
        if isinstance(step, dict) and isinstance(step.get("execution_result"), dict):
            _cut_outputs(step["execution_result"], counted)
    try:
        session = Session.model_validate(cleaned, strict=True)
    except ValidationError as error:
        raise _explain(error) from None
    for index, step in enumerate(session.execution_trace):
        if step.step != index + 1:
            raise RecordError(
                "steps are out of order, or one is missing",
                reason="step_order",
                field=f"execution_trace[{index}].step",
                got=step.step,
                expected=f"{index + 1} (steps are numbered 1, 2, 3… in the order in which they ran)",
            )
    return session


def clean(value: object, repairs: Counter[str], depth: int = 0) -> object:
    """Return a copy of a JSON value whose text can be encoded as UTF-8 and holds no NUL.

    Raises:
        RecordError: for what JSON cannot hold (NaN, Infinity, other types) and nesting deeper than ``MAX_DEPTH``.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return _clean_text(value, repairs)
    if depth > MAX_DEPTH:
        raise RecordError("nested too deeply", reason="too_deep", expected=f"at most {MAX_DEPTH} levels")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RecordError("a number is not finite", reason="not_finite", got=value, expected="a JSON number")
        return value
    if isinstance(value, list | tuple):
        return [clean(item, repairs, depth + 1) for item in value]
    if isinstance(value, dict):
        copy = {_clean_text(str(key), repairs): clean(item, repairs, depth + 1) for key, item in value.items()}
        if len(copy) != len(value):
            raise RecordError("two keys of an object become the same", reason="duplicate_key", got=sorted(copy))
        return copy
    raise RecordError("a value is no JSON value", reason="wrong_value", got=type(value).__name__)


def _clean_text(text: str, repairs: Counter[str]) -> str:
    if "\x00" in text:
        repairs["nul"] += text.count("\x00")
        text = text.replace("\x00", "\ufffd")
    if not text.isascii():
        text, count = _SURROGATE.subn("\ufffd", text)
        repairs["surrogate"] += count
    return text


def _cut_outputs(result: dict[str, Any], repairs: Counter[str]) -> None:
    """Cut stdout and stderr of a decoded ``execution_result`` in place."""
    streams = {name: result[name].encode() for name in ("stdout", "stderr") if isinstance(result.get(name), str)}
    if all(len(data) <= MAX_OUTPUT_BYTES for data in streams.values()):
        return
    repairs["cut"] += 1
    if result.get("total_bytes") is None:
        result["total_bytes"] = sum(map(len, streams.values()))
    result["truncated"] = True
    for name, data in streams.items():
        if len(data) > MAX_OUTPUT_BYTES:
            half = (MAX_OUTPUT_BYTES - 80) // 2
            head, tail = data[:half].decode(errors="ignore"), data[-half:].decode(errors="ignore")
            removed = len(data) - len(head.encode()) - len(tail.encode())
            result[name] = f"{head}\n[... {removed} of {len(data)} bytes cut ...]\n{tail}"


def _explain(error: ValidationError) -> RecordError:
    """Turn pydantic's first complaint into one of ours; further ones are counted."""
    problems = error.errors(include_url=False)
    first, more = problems[0], len(problems) - 1
    path, kind, message = _path(first["loc"]), first["type"], first["msg"]
    suffix = f" (and {more} more)" if more else ""
    if kind == "missing":
        owner = first["input"]
        names = ", ".join(sorted(map(str, owner))) if isinstance(owner, dict) else ""
        return RecordError(
            f"required field is missing{suffix}",
            reason="missing_field",
            field=path,
            got=f"an object with {names}" if names else "an empty object",
            expected=f"`{path.rpartition('.')[2]}`",
        )
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(str(first["loc"][-1]), _field_names(), n=1)
        return RecordError(
            f"unknown field{suffix}",
            reason="unknown_field",
            field=path,
            got=_shown(first["input"]),
            expected="a field of the ETAI schema",
            hint=f"did you mean `{near[0]}`?" if near else "leave it out",
        )
    if path == "schema_version":
        return RecordError(
            f"unknown schema version{suffix}",
            reason="schema_version",
            field=path,
            got=_shown(first["input"]),
            expected=f"{SCHEMA_VERSION!r}",
            hint="read this file with the agentft release that wrote it",
        )
    expected = message.removeprefix("Input should be ").removeprefix("Value error, ")
    return RecordError(
        f"wrong value{suffix}", reason="wrong_value", field=path, got=_shown(first["input"]), expected=expected
    )


def _shown(value: object) -> object:
    return "null" if value is None else value


def _path(location: tuple[int | str, ...]) -> str:
    parts = [part for i, part in enumerate(location) if not (i == 1 and location[0] == "workspace" and part in _KINDS)]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")


_KINDS = ("files", "git", "image")


def _field_names() -> list[str]:
    models = [item for item in globals().values() if isinstance(item, type) and issubclass(item, BaseModel)]
    return sorted({name for model in models for name in model.model_fields})


_DECODER = json.JSONDecoder(strict=False, parse_constant=lambda name: _not_json(name))


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def parse_json(text: str) -> Any:
    """Decode JSON text; raw control characters inside strings are accepted, NaN and Infinity are not.

    Raises:
        RecordError: reason ``not_json`` (or ``too_deep``).
    """
    try:
        return _DECODER.decode(text.strip())
    except RecursionError:
        raise RecordError("nested too deeply", reason="too_deep", expected=f"at most {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise RecordError(
            f"not JSON: {error}", reason="not_json", got=text.strip()[:80], expected="one JSON value"
        ) from None
