"""A package as the synthesiser sees it (floor 3): its Python files, its tests, and the smallest workspace for some.

Only ``.py`` files count: code that needs data files fails its tests before any defect and is then not used.
A ``src/`` folder is taken away (``src/x/a.py`` becomes ``x/a.py``), so that the tests import this copy whatever else
is installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.parser import Parser
from functools import cached_property
from pathlib import PurePosixPath

from agentft.data.synthesis.fetch import Sdist, fetch_sdist, read_archive
from agentft.data.synthesis.source import parse
from agentft.errors import DataError

_SKIPPED_FOLDERS = {"docs", "doc", "examples", "example", "benchmarks", "bench", "tools", "scripts", "requirements"}
_SKIPPED_MODULES = {"setup", "conftest", "noxfile", "tasks", "fabfile", "versioneer"}


@dataclass(frozen=True)
class Package:
    """A package ready for synthesis; paths are relative to the workspace root.

    Attributes:
        files: every Python file, as text.
        sources: the modules of the package itself.
        tests: the files that pytest collects.
    """

    name: str
    version: str
    sha256: str
    licence: str | None
    files: Mapping[str, str]
    sources: tuple[str, ...]
    tests: tuple[str, ...]

    @cached_property
    def modules(self) -> dict[str, str]:
        """Dotted module name → path, of every file."""
        return {_dotted(path): path for path in self.files}

    @cached_property
    def _imports(self) -> dict[str, list[str]]:
        """What is known so far of which file imports which."""
        return {}

    def workspace(self, paths: Iterable[str]) -> dict[str, str]:
        """Return ``paths`` with everything of the package that they import, and the ``conftest.py`` files above."""
        wanted: dict[str, None] = {}
        queue = list(paths)
        while queue:
            path = queue.pop()
            if path in wanted or path not in self.files:
                continue
            wanted[path] = None
            if path not in self._imports:
                self._imports[path] = self._imported(path)
            queue.extend(self._imports[path])
            for folder in PurePosixPath(path).parents:
                queue += [str(folder / "__init__.py"), str(folder / "conftest.py")]
        return {path: self.files[path] for path in sorted(wanted)}

    def _imported(self, path: str) -> list[str]:
        here = _dotted(path).split(".")
        is_package = PurePosixPath(path).name == "__init__.py"
        found: list[str] = []
        for node in ast.walk(parse(self.files[path])):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = here[: len(here) - node.level + (1 if is_package else 0)] if node.level else []
                prefix = ".".join([*base, *([node.module] if node.module else [])])
                names = [prefix, *(f"{prefix}.{alias.name}" for alias in node.names)]
            else:
                continue
            found += [self.modules[name] for name in names if name in self.modules]
            siblings = [str(PurePosixPath(path).with_name(f"{name}.py")) for name in names if "." not in name]
            found += [sibling for sibling in siblings if sibling in self.files]
        return found


def load_package(requirement: str) -> Package:
    """Fetch ``name==version`` and return it as a ``Package``; nothing of it is executed.

    Raises:
        DataError: it cannot be fetched, or has no Python package or no tests.
    """
    sdist = fetch_sdist(requirement)
    return package_from_files(sdist, read_archive(sdist.path))


def package_from_files(sdist: Sdist, raw: Mapping[str, bytes]) -> Package:
    """Return the package whose source distribution holds ``raw`` (path → content)."""
    files = _python_files(raw)
    tests = tuple(path for path in sorted(files) if _is_test(path))
    folders = {path.split("/", 1)[0] for path in files if path.count("/") == 1 and path.endswith("/__init__.py")}
    folders = {folder for folder in folders if folder not in _SKIPPED_FOLDERS and not folder.startswith("test")}
    sources = tuple(path for path in sorted(files) if _is_source(path, folders))
    where = f"{sdist.name}=={sdist.version}"
    if not sources:
        raise DataError("no Python package in the source distribution", where=where, expected="NAME/__init__.py")
    if not tests:
        raise DataError(
            "no tests in the source distribution",
            where=where,
            expected="test_*.py, *_test.py, or test.py beside the package",
        )
    return Package(
        name=sdist.name,
        version=sdist.version,
        sha256=sdist.sha256,
        licence=_licence(raw.get("PKG-INFO", b"")),
        files=files,
        sources=sources,
        tests=tests,
    )


def _python_files(raw: Mapping[str, bytes]) -> dict[str, str]:
    files: dict[str, str] = {}
    for path, content in raw.items():
        if not path.endswith(".py") or path.split("/", 1)[0] in _SKIPPED_FOLDERS or path == "setup.py":
            continue
        try:
            text = content.decode("utf-8")
            parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        if "\r" not in text and "\f" not in text and not text.startswith("\ufeff"):
            files[path.removeprefix("src/")] = text
    return files


def _is_test(path: str) -> bool:
    """Whether pytest collects this file by itself, or it is the one file of tests beside the package (`test.py`)."""
    name = PurePosixPath(path).name
    return name.startswith("test_") or name.endswith("_test.py") or path in ("test.py", "tests.py")


def _is_source(path: str, folders: set[str]) -> bool:
    parts = PurePosixPath(path).parts
    if _is_test(path) or any(part in ("tests", "test") for part in parts) or parts[-1] == "conftest.py":
        return False
    return parts[0] in folders if len(parts) > 1 else PurePosixPath(path).stem not in _SKIPPED_MODULES


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _licence(metadata: bytes) -> str | None:
    fields = Parser().parsestr(metadata.decode("utf-8", "replace"), headersonly=True)
    for value in (fields.get("License-Expression"), fields.get("License")):
        if value and value.strip().upper() != "UNKNOWN" and "\n" not in value.strip():
            return value.strip()
    classifiers = [value for value in fields.get_all("Classifier", []) if value.startswith("License ::")]
    return classifiers[0].rsplit(" :: ", 1)[-1] if classifiers else None
