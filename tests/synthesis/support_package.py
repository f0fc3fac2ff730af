"""A small real package with tests, as a source distribution's files; used by tests that need no index."""

from __future__ import annotations

from agentft.data.synthesis.fetch import Sdist
from agentft.data.synthesis.package import Package, package_from_files

SHAPES = '''"""Sizes and text."""

from .limits import clamp


def area(width, height=1, *, scale=2):
    """Return the area, scaled."""
    if width < 0 or height < 0:
        raise ValueError("negative size")
    total = width * height
    total += 0
    return total * scale if scale > 1 else total


def window(items, start, stop):
    """Return items from start up to stop, clamped."""
    start = clamp(start, 0, len(items))
    return items[start:stop]


class Counter:
    """Counts words."""

    def __init__(self, words=()):
        self.seen = {}
        self.total = 0
        for word in words:
            self.add(word)

    def add(self, word, times=1):
        """Count a word; grüße are words too."""
        if not word:
            return
        key = "ä" + word.lower()
        self.seen[key] = self.seen.get(key, 0) + times
        self.total += times

    def known(self, word):
        """Whether the word was seen."""
        return "ä" + word.lower() in self.seen and self.total > 0
'''

LIMITS = '''"""Limits."""


def clamp(value, low, high):
    """Return value, but not below low or above high."""
    if value < low:
        return low
    return min(value, high)
'''

TESTS = """import pytest

from shapes.sizes import Counter, area, window


def test_area():
    assert area(2, 3) == 12
    assert area(2, 3, scale=1) == 6


def test_area_negative():
    with pytest.raises(ValueError):
        area(-1)


@pytest.mark.parametrize("start, expected", [(-4, [1, 2]), (1, [2])])
def test_window(start, expected):
    assert window([1, 2, 3], start, 2) == expected


def test_counter():
    counter = Counter(["a", "A", ""])
    assert counter.known("a")
    assert counter.total == 2
    assert not counter.known("b")


def test_other():
    assert True
"""

FILES: dict[str, str] = {
    "src/shapes/__init__.py": "",
    "src/shapes/sizes.py": SHAPES,
    "src/shapes/limits.py": LIMITS,
    "tests/test_sizes.py": TESTS,
    "tests/conftest.py": "",
    "setup.py": "raise SystemExit('never run this')",
    "docs/conf.py": "x = 1",
    "PKG-INFO": "Metadata-Version: 2.1\nName: shapes\nVersion: 1.0\nLicense-Expression: MIT\n\nText: not a field\n",
}


def small_package(tmp_path) -> Package:  # type: ignore[no-untyped-def]
    """Return the package."""
    sdist = Sdist(name="shapes", version="1.0", sha256="0" * 64, path=tmp_path / "shapes-1.0.tar.gz")
    return package_from_files(sdist, {path: text.encode() for path, text in FILES.items()})
