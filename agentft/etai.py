"""ETAI, the record of one coding session (floor 0): types, limits, and what each field means.

Execution-Trace Augmented Instruction: what the user asked, what the editor showed, every tool call
with what really happened when it ran, and the final answer. One JSON object a line.

Reading and writing files of records is in ``agentft.etai_io``.
Nullable means "the source does not know": an exit code is never invented.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION = "1.0"

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
    """One coding session: the unit that is split, sharded, rendered, replayed and rewarded."""

    schema_version: Literal["1.0"] = SCHEMA_VERSION
    session_id: str = Field(min_length=1)
    user_instruction: str
    ide_context: IdeContext = IdeContext()
    execution_trace: list[TraceStep] = []
    final_output: str = ""
    intents: list[str] | None = None
    complexity: Complexity | None = None
    language: str | None = None
    licence: str | None = None
    cursor_target: CursorTarget | None = None
    workspace: Workspace | None = None
    source: str | None = None
    repository: str | None = None
    parent: str | None = None

    @model_validator(mode="after")
    def _intents_are_known(self) -> Session:
        unknown = [name for name in self.intents or () if name not in INTENTS]
        if unknown:
            raise ValueError(f"intents: unknown {unknown}; known are {', '.join(INTENTS)}")
        return self

    def split_key(self) -> str:
        """What the split is decided by: the repository where known, else the parent, else the id."""
        return self.repository or self.parent or self.session_id


def split_of(key: str) -> Split:
    """Assign 8:1:1 by a stable hash of ``key`` (the same on every machine and in every process)."""
    bucket = int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:8], "big") % 10
    return "train" if bucket < 8 else "val" if bucket == 8 else "test"
