"""Which defects do real tests catch (floor 3): many at a time, in one sandbox call, before any session is written.

The verdict decides only what is tried; every result inside a session comes from a run of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentft.data.synthesis.defects import Defect
from agentft.data.synthesis.package import Package
from agentft.errors import SandboxError
from agentft.sandbox.base import ExecRequest, Lease
from agentft.sandbox.execute import TOOL_ENV

JOB_LIMIT_S = 3.0
_SCRIPT = Path(__file__).with_name("inside_screen.py")


@dataclass(frozen=True)
class Verdict:
    """What the chosen tests say of one defect: pytest's exit code (None: out of time) and each test's outcome."""

    exit_code: int | None
    failing: tuple[str, ...] = ()
    passing: tuple[str, ...] = ()
    errors: Mapping[str, str] | None = None

    @property
    def caught(self) -> bool:
        """Whether tests that passed before now fail, cleanly."""
        return self.exit_code == 1 and bool(self.failing)

    @property
    def reason(self) -> str:
        """Why the defect is of no use (empty if it is)."""
        if self.caught:
            return ""
        return {None: "tests ran out of time", 0: "not caught by tests"}.get(
            self.exit_code, "import or collection broke"
        )


def screen(package: Package, jobs: Sequence[tuple[Defect, Sequence[str]]], lease: Lease) -> list[Verdict]:
    """Run each defect's tests against the package with the defect in it; one verdict per job, in order.

    Raises:
        SandboxError: the sandbox failed.
    """
    lease.reset()
    script, output = "_screen.py", "_screen.json"
    files = {path: text.encode() for path, text in package.files.items()}
    lease.write_files({**files, script: _SCRIPT.read_bytes()})
    request = {
        "limit_s": JOB_LIMIT_S,
        "jobs": [{"path": d.path, "text": d.broken.text, "tests": list(tests)} for d, tests in jobs],
    }
    limit_s = 10.0 + JOB_LIMIT_S * len(jobs)
    argv = ("python3", script, output)
    result = lease.exec(ExecRequest(argv=argv, env=TOOL_ENV, stdin=json.dumps(request).encode(), timeout_s=limit_s))
    if result.status == "infra":
        raise SandboxError("defects could not be screened", where=package.name, got=result.stderr)
    try:
        answers = json.loads(lease.read_file(output, max_bytes=20_000_000))
    except (OSError, ValueError):
        return [Verdict(None)] * len(jobs)  # a mutant broke out of its process: none of this batch is used
    return [_verdict(answer) for answer in answers]


def _verdict(answer: Mapping[str, object]) -> Verdict:
    outcomes, errors = answer["outcomes"], answer["errors"]
    assert isinstance(outcomes, dict)
    assert isinstance(errors, dict)
    worst: dict[str, str] = {}
    for node_id, outcome in outcomes.items():
        base = node_id.split("[", 1)[0]
        worst[base] = "failed" if "failed" in (worst.get(base), outcome) else outcome
    code = answer["exit_code"]
    return Verdict(
        exit_code=code if isinstance(code, int) else None,
        failing=tuple(sorted(base for base, outcome in worst.items() if outcome == "failed")),
        passing=tuple(sorted(base for base, outcome in worst.items() if outcome == "passed")),
        errors={node_id.split("[", 1)[0]: text for node_id, text in errors.items()},
    )
