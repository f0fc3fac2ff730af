"""The house stays a house: imports go down only, files and functions stay short, the command line stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "agentft"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 70

FLOORS: dict[str, int] = {
    # the longest prefix of a module's name decides; design.md explains each
    "agentft": 0,
    "agentft.errors": 0,
    "agentft.files": 0,
    "agentft.etai": 0,
    "agentft.etai_io": 0,
    "agentft.tools": 0,
    "agentft.config": 1,
    "agentft.text": 2,
    "agentft.sandbox": 2,
    "agentft.losses": 2,
    "agentft.schedules": 2,
    "agentft.data": 3,
    "agentft.models": 3,
    "agentft.feedback": 4,
    "agentft.algorithms": 4,
    "agentft.rl": 4,
    "agentft.evals": 4,
    "agentft.report": 5,
    "agentft.train": 5,
    "agentft.cli": 6,
}
SAME_FLOOR = {
    # pairs on one floor that build on each other, in one direction
    ("agentft.etai", "agentft.errors"),
    ("agentft.etai_io", "agentft.errors"),
    ("agentft.etai_io", "agentft.etai"),
    ("agentft.etai_io", "agentft.files"),
    ("agentft.algorithms", "agentft.feedback"),
    ("agentft.train", "agentft.report"),
}
FILES = sorted(PACKAGE.rglob("*.py"))
SHORT_FILES = [p for d in ("agentft", "tests", "data_prep", "bench") for p in sorted((REPO / d).rglob("*.py"))]
SHORT_FILES += [REPO / "train.py"]


def _module(path: Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _prefix(module: str) -> str:
    while module not in FLOORS:
        module, _, last = module.rpartition(".")
        assert last, "no floor"
    return module


def _imports(path: Path) -> set[str]:
    """Every agentft module that a file names in an import, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == "agentft")
    return {name for name in found if name.partition(".")[0] == "agentft"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: _module(p))
def test_imports_only_go_down(path: Path) -> None:
    own = _prefix(_module(path))
    upward = [
        name
        for name in _imports(path)
        if (target := _prefix(name)) != own
        and FLOORS[target] >= FLOORS[own]
        and target != "agentft"
        and (own, target) not in SAME_FLOOR
    ]
    assert upward == [], f"{_module(path)} (floor {FLOORS[own]}) imports {upward}"


def test_every_top_level_module_has_a_floor() -> None:
    names = {f"agentft.{p.stem}" for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert names - set(FLOORS) - {"agentft.__init__"} == set()


def test_files_and_functions_stay_short() -> None:
    long = []
    for path in SHORT_FILES:
        source = path.read_text()
        lines = len(source.splitlines())
        if lines > MAX_FILE_LINES:
            long.append(f"{path.relative_to(REPO)}: {lines} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                size = node.end_lineno - node.lineno + 1
                if size > MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(REPO)}:{node.lineno}: {node.name} has {size} lines")
    assert long == []


def test_every_module_opens_with_what_it_is() -> None:
    assert [_module(p) for p in FILES if not ast.get_docstring(ast.parse(p.read_text()))] == []


def test_the_command_line_starts_light() -> None:
    heavy = ("torch", "numpy", "omegaconf", "pydantic", "composer", "streaming", "docker", "rich")
    code = f"import sys, agentft.cli as c; c.build_parser().format_help(); print(set({heavy}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_verb_names_a_function_that_exists() -> None:
    targets = set()
    for node in ast.walk(ast.parse((PACKAGE / "cli.py").read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("agentft."):
            module, colon, function = node.value.partition(":")
            if colon:
                targets.add((module, function))
    assert len(targets) >= 15
    missing = []
    for module, function in sorted(targets):
        path = REPO / Path(*module.split(".")).with_suffix(".py")
        names = (
            {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}
            if path.exists()
            else set()
        )
        if function not in names:
            missing.append(f"{module}:{function}")
    assert missing == []


@pytest.mark.parametrize("path", SHORT_FILES, ids=lambda path: str(path.relative_to(REPO)))
def test_listings_of_an_engine_do_not_race_with_removals(path: Path) -> None:
    """Docker's SDK inspects every container or image that it lists, and fails when one of them goes meanwhile."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "list":
            owner = ast.unparse(node.func.value)
            assert not owner.endswith(".images"), f"{path}:{node.lineno}: use client.api.images()"
            if owner.endswith(".containers"):
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert given.get("sparse") == "True", f"{path}:{node.lineno}: containers.list needs sparse=True"
