"""``pyproject.toml``, ``requirements.lock`` and ``environment.yml`` agree, and so does what is installed."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
LOCK_LINES = (REPO / "requirements.lock").read_text().splitlines()
LOCK = dict(line.split("==") for line in LOCK_LINES)


def test_the_lock_holds_bare_exact_versions() -> None:
    assert [line for line in LOCK_LINES if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[0-9][\w.+!]*", line)] == []
    assert len(LOCK) == len(LOCK_LINES)


def test_every_dependency_is_locked_at_an_allowed_version() -> None:
    project = PYPROJECT["project"]
    wanted = [Requirement(r) for r in project["dependencies"] + project["optional-dependencies"]["dev"]]
    wrong = [
        f"{requirement}: locked {LOCK.get(canonicalize_name(requirement.name))}"
        for requirement in wanted
        if not requirement.specifier.contains(LOCK.get(canonicalize_name(requirement.name), "0"), prereleases=True)
        or canonicalize_name(requirement.name) not in LOCK
    ]
    assert wrong == []


def test_conda_has_the_same_pins_and_python() -> None:
    entries = yaml.safe_load((REPO / "environment.yml").read_text())["dependencies"]
    (python,) = [e for e in entries if isinstance(e, str) and e.startswith("python=")]
    (pip,) = [e["pip"] for e in entries if isinstance(e, dict)]
    assert pip == LOCK_LINES
    assert PYPROJECT["project"]["requires-python"] == f">={python.partition('=')[2]},<3.12"


def test_what_is_installed_is_what_is_locked() -> None:
    installed = {canonicalize_name(d.metadata["Name"]): d.version for d in importlib.metadata.distributions()}
    assert {n: (v, installed.get(n)) for n, v in LOCK.items() if installed.get(n) != v} == {}


def test_no_file_names_a_package_index() -> None:
    for name in ("requirements.lock", "environment.yml", "Makefile", ".ci/run", "docker/venv.sh", "docker/engine.sh"):
        assert not re.search(r"https?://|--index-url|--extra-index", (REPO / name).read_text()), name
