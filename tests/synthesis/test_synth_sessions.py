"""Synthesis end to end: a real package, real executions in containers, replayed, repeated and resumed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support_package import FILES

from agentft.cli import main
from agentft.data.synthesis.defects import cap_of
from agentft.data.synthesis.fetch import Sdist
from agentft.data.synthesis.package import package_from_files
from agentft.data.synthesis.plan import MAX_STEPS
from agentft.data.synthesis.profile import profile_package
from agentft.data.synthesis.report import SynthReport
from agentft.data.synthesis.synthesize import Progress, SandboxSettings, sessions_of, synthesize
from agentft.etai import InlineWorkspace, Session
from agentft.sandbox.base import Limits, Sandbox
from agentft.sandbox.execute import run_tool
from agentft.sandbox.images import ensure_image
from agentft.sandbox.pool import open_sandbox
from agentft.tools import ToolCall
from agentft.tools.check import check_call

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PACKAGE = "inflection==0.5.1"
COUNT = 6


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SynthReport:
    ensure_image("python")
    return synthesize([PACKAGE], COUNT, tmp_path_factory.mktemp("synth") / "sessions.jsonl", seed=3)


@pytest.fixture(scope="module")
def sessions(made: SynthReport) -> list[Session]:
    return sessions_of(made.output)


@pytest.fixture(scope="module")
def sandbox(made: SynthReport) -> Iterator[Sandbox]:
    pool = open_sandbox("docker", "python", workers=1, limits=Limits(), run_name="test-synth")
    yield pool
    pool.close()


def without_durations(session: Session) -> dict[str, Any]:
    plain = session.model_dump()
    for step in plain["execution_trace"]:
        step["execution_result"].pop("duration_s")
    return plain


def test_the_sessions_are_complete_and_counted(made: SynthReport, sessions: list[Session]) -> None:
    assert made.kept == len(sessions) == COUNT
    assert made.tried == COUNT + sum(made.dropped.values()) + made.unused
    assert made.by_package == {"inflection": COUNT}
    assert max(made.by_kind.values()) <= cap_of(COUNT)
    assert sum(made.by_kind.values()) == sum(made.steps.values()) == COUNT
    written = json.loads(made.output.with_name("sessions.report.json").read_text())
    assert written["kept"] == COUNT
    assert not made.output.with_name("sessions.jsonl.partial.jsonl").exists()
    for session in sessions:
        assert session.repository == "inflection"
        assert session.source == f"synth:{PACKAGE}"
        assert session.licence == "MIT"
        assert session.language == "python"
        assert session.intents
        assert session.complexity in ("single_function", "multi_file")
        assert 1 <= len(session.execution_trace) <= MAX_STEPS
        assert all(check_call(ToolCall(s.tool_called, s.tool_args)) is None for s in session.execution_trace)


REPEATED = """import random, secrets, tempfile, threading, time, uuid
from shapes.sizes import area

def test_same(): assert area(2, 3) == 12
def test_random(): assert area(random.random()) < 9
def test_choice(): assert area(random.choice([1, 2]))
def test_own_generator(): assert area(random.Random().getrandbits(4)) >= 0
def test_secret(): assert area(len(secrets.token_hex(2)))
def test_uuid(): assert area(len(uuid.uuid4().hex))
def test_name(): assert area(len(tempfile.mktemp()))
def test_sleep(): time.sleep(0.001); assert area(1)
def test_thread(): t = threading.Thread(target=area, args=(1,)); t.start(); t.join()
"""


def test_a_profile_is_the_same_each_time_and_knows_the_tests_that_are_not(sandbox: Sandbox, tmp_path: Path) -> None:
    sdist = Sdist(name="shapes", version="1.0", sha256="0" * 64, path=tmp_path)
    files = {**FILES, "tests/test_repeated.py": REPEATED}
    package = package_from_files(sdist, {path: text.encode() for path, text in files.items()})
    profiles = []
    for run in ("a", "b"):
        with sandbox.lease() as lease:
            profiles.append(profile_package(package, lease, sandbox.image_digest, cache=tmp_path / run))
    first, second = ({test.node_id: replace(test, seconds=0) for test in p.tests if test.repeatable} for p in profiles)
    assert first == second
    repeatable = {node_id.split("::")[1] for node_id in first if "test_repeated" in node_id}
    assert repeatable == {"test_same"}
    assert len(first) == 6
    assert all(test.work > 100 and test.passed for test in first.values())


def test_every_result_comes_out_again_when_a_session_is_replayed(sessions: list[Session], sandbox: Sandbox) -> None:
    """The test that a session is about fails before its first step and passes after its last."""
    named = re.compile(r"[\w/]*test_\w+\.py::[\w:]+")
    with sandbox.lease() as lease:
        for session in sessions:
            assert isinstance(session.workspace, InlineWorkspace)
            lease.reset()
            lease.write_files({path: text.encode() for path, text in session.workspace.files.items()})
            said = named.search(session.final_output) or named.search(session.user_instruction)
            assert said is not None
            about = ToolCall("pytest_run", {"targets": said.group(0)})
            assert run_tool(lease, about).exit_code == 1
            for step in session.execution_trace:
                again = run_tool(lease, ToolCall(step.tool_called, step.tool_args)).to_record()
                recorded = step.execution_result
                assert recorded is not None
                assert again.model_dump(exclude={"duration_s"}) == recorded.model_dump(exclude={"duration_s"})
            assert run_tool(lease, about).exit_code == 0


def test_editor_state_and_target_point_into_the_workspace(sessions: list[Session]) -> None:
    for session in sessions:
        assert isinstance(session.workspace, InlineWorkspace)
        files, ide, target = session.workspace.files, session.ide_context, session.cursor_target
        assert target is not None
        assert ide.cursor_position is not None
        assert set(ide.open_files) <= set(files)
        assert ide.cursor_position.line <= len(files[ide.cursor_position.file].split("\n"))
        edits = [step for step in session.execution_trace if step.tool_called == "file_edit"]
        assert any(step.tool_args["path"] == target.file and not step.mistake for step in edits)
        assert any(abs(int(step.tool_args["line"]) - target.line) <= 1 for step in edits if not step.mistake)


def test_a_mistake_really_fails_and_is_followed_by_its_repair(sessions: list[Session]) -> None:
    for session in sessions:
        steps = session.execution_trace
        for at, step in enumerate(steps):
            if step.mistake:
                assert step.tool_called == "file_edit"
                run = next(later for later in steps[at:] if later.tool_called == "pytest_run")
                assert run.execution_result is not None
                assert run.execution_result.exit_code == 1
                assert any(later.tool_called == "file_edit" for later in steps[run.step :])


def test_a_stopped_synthesis_goes_on_and_gives_the_same_sessions(
    made: SynthReport, sessions: list[Session], tmp_path: Path
) -> None:
    class StopError(Exception):
        pass

    def stop(state: Progress) -> None:
        if state.kept == 2:
            raise StopError

    output = tmp_path / "again.jsonl"
    with pytest.raises(StopError):
        synthesize([PACKAGE], COUNT, output, seed=3, progress=stop)
    assert not output.exists()
    states: list[Progress] = []
    resumed = synthesize([PACKAGE], COUNT, output, seed=3, progress=states.append)
    assert resumed.resumed >= 2
    assert [without_durations(s) for s in sessions_of(output)] == [without_durations(s) for s in sessions]
    assert (resumed.tried, resumed.dropped, resumed.by_kind) == (made.tried, made.dropped, made.by_kind)


def test_a_finished_output_is_not_made_again(made: SynthReport, capsys: pytest.CaptureFixture[str]) -> None:
    before = made.output.read_bytes()
    assert synthesize([PACKAGE], COUNT, made.output, seed=3, sandbox=SandboxSettings()).reused
    arguments = ["synth", "--package", PACKAGE, "-n", str(COUNT), "-o", str(made.output), "--seed", "3", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["reused"] is True
    assert made.output.read_bytes() == before
