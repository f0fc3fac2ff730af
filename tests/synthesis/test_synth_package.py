"""Packages, journals, windows and wording: what needs no sandbox."""

from __future__ import annotations

import json
import random
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_package import FILES, small_package

from agentft.data.synthesis.editor import editor_state
from agentft.data.synthesis.fetch import Sdist
from agentft.data.synthesis.journal import Journal
from agentft.data.synthesis.package import package_from_files
from agentft.data.synthesis.plan import WEIGHTS, trace_text
from agentft.data.synthesis.profile import Profile, ProfiledTest
from agentft.data.synthesis.report import SynthReport, load_report
from agentft.data.synthesis.source import Source
from agentft.data.synthesis.synthesize import synthesize
from agentft.data.synthesis.wording import INSTRUCTIONS, SYMPTOMS, WISHES, instruction
from agentft.errors import ConfigError, DataError


def test_a_src_layout_is_found_and_flattened(tmp_path: Path) -> None:
    package = small_package(tmp_path)
    assert package.sources == ("shapes/__init__.py", "shapes/limits.py", "shapes/sizes.py")
    assert package.tests == ("tests/test_sizes.py",)
    assert package.licence == "MIT"
    assert "setup.py" not in package.files
    assert "docs/conf.py" not in package.files


def test_a_workspace_holds_what_is_imported_and_no_more(tmp_path: Path) -> None:
    package = small_package(tmp_path)
    assert set(package.workspace(["shapes/limits.py"])) == {"shapes/__init__.py", "shapes/limits.py"}
    assert set(package.workspace(["tests/test_sizes.py"])) == {
        "shapes/__init__.py",
        "shapes/limits.py",
        "shapes/sizes.py",
        "tests/conftest.py",
        "tests/test_sizes.py",
    }


def test_packages_without_code_or_tests_are_refused(tmp_path: Path) -> None:
    sdist = Sdist(name="x", version="1", sha256="0", path=tmp_path)
    with pytest.raises(DataError, match="no tests"):
        package_from_files(sdist, {"x/__init__.py": b""})
    with pytest.raises(DataError, match="no Python package"):
        package_from_files(sdist, {"tests/test_x.py": b""})
    single = package_from_files(sdist, {"x.py": b"y = 1\n", "test_x.py": b"import x\n", "bad.py": b"def"})
    assert single.sources == ("x.py",)
    assert set(single.workspace(["test_x.py"])) == {"test_x.py", "x.py"}


@pytest.mark.parametrize("name", ["test.py", "tests.py", "x_test.py", "tests/test_x.py"])
def test_the_names_that_files_of_tests_have(tmp_path: Path, name: str) -> None:
    sdist = Sdist(name="x", version="1", sha256="0", path=tmp_path)
    files = {"x/__init__.py": b"", "x/test.py": b"def helper(): pass\n", name: b"def test_it(): pass\n"}
    package = package_from_files(sdist, files)
    assert package.tests == (name,)
    assert package.sources == ("x/__init__.py", "x/test.py"), "a module of the package is no file of tests"


def profiled(node_id: str, calls: tuple[str, ...] = ("a.py:1",), **other: Any) -> ProfiledTest:
    return replace(ProfiledTest(node_id, 0.01, 100, True, True, calls), **other)


def test_few_cheap_passing_tests_of_one_file_are_chosen() -> None:
    function = Source("a.py", "def clamp(x):\n    return x\n").functions[0]
    rows = [profiled(f"t/test_a.py::test_{n}") for n in range(20)]
    rows += [
        profiled("t/test_b.py::test_clamp"),
        profiled("t/test_b.py::test_clamp_slow", work=3_000_000),
        profiled("t/test_b.py::test_clamp_broken", passed=False),
        profiled("t/test_b.py::test_clamp_random", repeatable=False),
        profiled("t/test_b.py::test_free", calls=()),
    ]
    profile = Profile(tuple(rows))
    assert [t.node_id for t in profile.tests_of(function)] == ["t/test_b.py::test_clamp"]
    assert len(Profile(tuple(rows[:20])).tests_of(function)) == 8
    assert [t.node_id for t in profile.unrelated(function, "t/test_b.py")] == ["t/test_b.py::test_free"]
    assert profile.runs_whole("t/test_a.py")
    assert not profile.runs_whole("t/test_b.py")
    assert not Profile((*rows[:20], profiled("t/test_a.py::test_random", repeatable=False))).runs_whole("t/test_a.py")


@given(st.lists(st.floats(0, 2), min_size=12, max_size=12))
def test_the_choice_of_tests_does_not_depend_on_how_long_they_took(seconds: list[float]) -> None:
    function = Source("a.py", "def clamp(x):\n    return x\n").functions[0]
    rows = [profiled(f"t/test_a.py::test_{n}", work=(n * 7 % 12) * 50_000) for n in range(12)]
    timed = [replace(row, seconds=s) for row, s in zip(rows, seconds, strict=True)]
    assert [t.node_id for t in Profile(tuple(timed)).tests_of(function)] == [
        t.node_id for t in Profile(tuple(rows)).tests_of(function)
    ]
    assert Profile(tuple(timed)).runs_whole("t/test_a.py") == Profile(tuple(rows)).runs_whole("t/test_a.py")


def test_a_journal_goes_on_after_a_torn_line_and_forgets_another_request(tmp_path: Path) -> None:
    path = tmp_path / "o.partial.jsonl"
    journal = Journal(path, "r1")
    journal.put("a", [1])
    journal.put("b", {"x": None})
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"key": "c", "ans')
    again = Journal(path, "r1")
    assert (again.get("a"), again.get("b"), "c" in again, len(again)) == ([1], {"x": None}, False, 2)
    again.put("c", 3)
    again.close()
    assert [json.loads(line).get("key") for line in path.read_text().splitlines()] == [None, "a", "b", "c"]
    other = Journal(path, "r2")
    assert len(other) == 0
    other.close(remove=True)
    assert not path.exists()


def test_the_editor_state_is_consistent() -> None:
    files = {"p/a.py": FILES["src/shapes/sizes.py"], "t/test_a.py": FILES["tests/test_sizes.py"], "p/__init__.py": ""}
    near = 0
    for seed in range(200):
        state = editor_state(random.Random(seed), files, ("p/a.py", 11), "area", list(files), at_cursor=False)
        cursor, view = state.cursor_position, state.viewport
        assert cursor is not None
        assert view is not None
        assert set(state.open_files) <= set(files)
        assert cursor.file in state.open_files
        lines = files[cursor.file].split("\n")
        assert 1 <= cursor.line <= len(lines)
        assert cursor.column <= len(lines[cursor.line - 1])
        assert (
            0 <= (cursor.line - 1) * view.line_height * view.zoom - view.scroll_top <= 25 * view.line_height * view.zoom
        )
        assert (state.git_status == " M p/a.py") == (state.last_commit_message is None)
        near += cursor.file == "p/a.py" and abs(cursor.line - 11) <= 3
    assert 40 < near < 160
    at = editor_state(random.Random(1), files, ("p/a.py", 11), "area", list(files), at_cursor=True)
    assert at.open_files[0] == "p/a.py"


def test_every_situation_has_six_wordings_and_they_reveal_the_intent() -> None:
    spoken = {name: INSTRUCTIONS["run" if name == "confirm" else name] for name in WEIGHTS}
    for templates in (*spoken.values(), *SYMPTOMS.values(), *WISHES.values()):
        assert len(set(templates)) >= 6
    facts = dict.fromkeys(
        ("test", "error", "name", "file", "line", "old", "new", "trace", "caller", "neighbour", "testfile"), "x::y"
    )
    for opening in INSTRUCTIONS:
        for intent in SYMPTOMS:
            text = instruction(random.Random(1), opening, intent, ["confirm"], ["recheck"], facts)
            assert "{" not in text
            assert not any(field in text for _, field, _, _ in string.Formatter().parse(text) if field)


def test_a_pasted_trace_is_the_first_failure_only() -> None:
    stdout = (
        "F [100%]\n=== FAILURES ===\n___ test_a ___\na.py:3: in test_a\n    f()\nE   ValueError: 1\n___ test_b ___\nb\n"
    )
    assert trace_text(stdout) == "a.py:3: in test_a\n    f()\nE   ValueError: 1"


def test_a_finished_report_is_found_only_for_its_request(tmp_path: Path) -> None:
    output = tmp_path / "s.jsonl"
    output.write_text("")
    SynthReport(output, "r1", tried=3, kept=2).write()
    found = load_report(output, "r1")
    assert found is not None
    assert (found.tried, found.kept, found.reused) == (3, 2, True)
    assert load_report(output, "r2") is None
    (tmp_path / "s.report.json").write_text("{")
    assert load_report(output, "r1") is None


def test_nothing_to_do_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        synthesize([], 5, tmp_path / "s.jsonl")
    with pytest.raises(ConfigError):
        synthesize(["a==1"], 0, tmp_path / "s.jsonl")
