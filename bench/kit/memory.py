"""Peak resident memory of this process (Linux), and a fresh process that measures one thing and says so in JSON.

reset_peak()
before = resident_mib()
work()
extra = peak_mib() - before

figures = in_fresh_process([sys.executable, "bench/vocab_head.py", "--one", "full logits"])
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")


class ChildError(Exception):
    """A measuring process ended without its figures; the text is the end of what it wrote."""


def reset_peak() -> None:
    """Let the peak start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Return the largest resident size since the start of the process or ``reset_peak``, in MiB."""
    return _field("VmHWM")


def resident_mib() -> float:
    """Return the resident size now, in MiB."""
    return _field("VmRSS")


def in_fresh_process(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 1800.0
) -> dict[str, Any]:
    """Run a program whose last line of output is a JSON object; return it.

    Raises:
        ChildError: It ended otherwise, or took longer than ``timeout_s``.
    """
    try:
        done = subprocess.run(list(argv), capture_output=True, text=True, env=env, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"no figures after {timeout_s:.0f} s") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines or not lines[-1].startswith("{"):
        raise ChildError((done.stderr.strip() or done.stdout.strip())[-800:])
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _field(name: str) -> float:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024
