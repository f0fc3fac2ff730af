"""Which tests touch which function (floor 3): one traced run of a package's suite in the sandbox, kept on disk.

``profile_package`` runs the suite once; ``Profile.tests_of`` then chooses few, cheap tests for a function.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentft.data.synthesis.fetch import cache_root
from agentft.data.synthesis.package import Package
from agentft.data.synthesis.source import Function
from agentft.errors import DataError, SandboxError
from agentft.files import whole_file
from agentft.sandbox.base import ExecRequest, Lease
from agentft.sandbox.execute import TOOL_ENV

TEST_LIMIT_S = 2.0
SUITE_LIMIT_S = 240.0
MAX_TESTS = 8
MAX_TEST_WORK = 400_000  # calls, about 0.12 s
MAX_FILE_WORK = 3_000_000  # calls, about 1 s
_SCRIPT = Path(__file__).with_name("inside_profile.py")
_PLAIN_ID = re.compile(r"[\w./:-]+")


@dataclass(frozen=True)
class ProfiledTest:
    """One test (parameters taken together): what it costs, whether it passes, the functions it enters.

    ``work`` counts the functions called, of Python and C: unlike ``seconds`` it is the same on every run, so that one
    seed chooses the same tests on any machine. ``repeatable``: no random numbers, no sleep, no threads.
    """

    node_id: str
    seconds: float
    work: int
    passed: bool
    repeatable: bool
    calls: tuple[str, ...]

    @property
    def file(self) -> str:
        """The test file."""
        return self.node_id.split("::", 1)[0]


@dataclass(frozen=True)
class Profile:
    """The tests of a package, in the order in which they ran."""

    tests: tuple[ProfiledTest, ...]

    def tests_of(self, function: Function) -> tuple[ProfiledTest, ...]:
        """Return at most ``MAX_TESTS`` cheap passing tests of one file that enter ``function``; its namesakes first."""
        usable = [t for t in self.tests if function.key in t.calls and self._is_usable(t)]
        if not usable:
            return ()
        name = function.name.strip("_").lower()
        ranked = sorted(usable, key=lambda t: (name not in t.node_id.lower(), len(t.calls), t.work, t.node_id))
        return tuple(t for t in ranked if t.file == ranked[0].file)[:MAX_TESTS]

    def unrelated(self, function: Function, file: str) -> tuple[ProfiledTest, ...]:
        """Return cheap passing tests of ``file`` that do not enter ``function``."""
        return tuple(t for t in self.tests if t.file == file and function.key not in t.calls and self._is_usable(t))

    def runs_whole(self, file: str) -> bool:
        """Whether a whole test file passes and is cheap."""
        rows = [t for t in self.tests if t.file == file]
        return (
            bool(rows) and all(t.passed and t.repeatable for t in rows) and sum(t.work for t in rows) <= MAX_FILE_WORK
        )

    @staticmethod
    def _is_usable(test: ProfiledTest) -> bool:
        return (
            test.passed
            and test.repeatable
            and test.work <= MAX_TEST_WORK
            and _PLAIN_ID.fullmatch(test.node_id) is not None
        )


def profile_package(package: Package, lease: Lease, image_digest: str, cache: Path | None = None) -> Profile:
    """Return the profile of ``package``, from the cache if this package was profiled with this image before.

    Raises:
        DataError: fewer than one test of the package passes in the sandbox.
        SandboxError: the sandbox failed.
    """
    key = hashlib.sha256(f"{package.sha256}\0{image_digest}\0{_SCRIPT.read_text()}".encode()).hexdigest()[:24]
    kept = (cache or cache_root()) / "profiles" / f"{package.name}-{package.version}-{key}.json"
    if kept.is_file():
        rows = json.loads(kept.read_text())
        return Profile(tuple(ProfiledTest(**{**row, "calls": tuple(row["calls"])}) for row in rows))
    profile = Profile(_merged(_run(package, lease)))
    if not any(test.passed for test in profile.tests):
        raise DataError(
            "no test of the package passes in the sandbox",
            where=f"{package.name}=={package.version}",
            got=f"{len(profile.tests)} tests collected",
            hint="the sandbox has no network and only pytest; choose a package without dependencies",
        )
    with whole_file(kept) as partial:
        partial.write_text(json.dumps([asdict(test) for test in profile.tests]))
    return profile


def _run(package: Package, lease: Lease) -> Mapping[str, dict[str, Any]]:
    script, output = "_profile.py", "_profile.json"
    lease.reset()
    files = {path: text.encode() for path, text in package.files.items()}
    lease.write_files({**files, script: _SCRIPT.read_bytes()})
    argv = ("python3", script, output, str(TEST_LIMIT_S), *package.tests)
    result = lease.exec(ExecRequest(argv=argv, env=TOOL_ENV, timeout_s=SUITE_LIMIT_S))
    if result.status == "infra":
        raise SandboxError("the suite could not be profiled", where=package.name, got=result.stderr)
    try:
        answer = json.loads(lease.read_file(output, max_bytes=20_000_000))
    except (OSError, ValueError) as error:
        tail = (result.stdout + result.stderr)[-300:]
        raise DataError("the suite did not finish", where=package.name, got=f"{result.status}: {tail}") from error
    names = answer["functions"]
    return {
        node_id: {**row, "calls": [names[index] for index in row.get("calls", ())]}
        for node_id, row in answer["tests"].items()
    }


def _merged(rows: Mapping[str, dict[str, Any]]) -> tuple[ProfiledTest, ...]:
    """Take the parameters of a test together: costs add up, all must pass and be repeatable."""
    merged: dict[str, ProfiledTest] = {}
    for node_id, row in rows.items():
        base = node_id.split("[", 1)[0]
        before = merged.get(base, ProfiledTest(base, 0.0, 0, True, True, ()))
        merged[base] = ProfiledTest(
            base,
            round(before.seconds + row.get("seconds", 0.0), 4),
            before.work + row.get("work", 0),
            before.passed and row["passed"],
            before.repeatable and row.get("repeatable", False),
            tuple(sorted({*before.calls, *row["calls"]})),
        )
    return tuple(merged.values())
