"""A reader that stops reading (`agentft tools | head`) is no failure of ours."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("words", [("tools",), ("tools", "--json")], ids=" ".join)
def test_a_reader_that_has_gone_is_no_error(words: tuple[str, ...]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "agentft.cli", *words]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_is_one() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "agentft.cli", "tools"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "No space left" in done.stderr
