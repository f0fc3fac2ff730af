"""Stage 1: packages with tests → repair sessions whose every result was really executed.

    python data_prep/synthesize.py --package toolz==1.2.0 --package boltons==26.2.0 -n 150 -o sessions.jsonl

The same as ``agentft synth``. The packages' code runs in the sandbox only; a killed run goes on when called again.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from agentft.data.synthesis.commands import print_report, shown
from agentft.data.synthesis.synthesize import SandboxSettings, synthesize
from agentft.errors import AgentFTError


def main() -> int:
    """Parse the command line, synthesise, print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make repair sessions from packages.")
    parser.add_argument("--package", action="append", required=True, metavar="NAME==VERSION", help="repeat for several")
    parser.add_argument("-n", "--sessions", type=int, default=150, help="sessions to keep, over all packages")
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--backend", choices=("docker", "local"), default="docker")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=17)
    arguments = parser.parse_args()
    settings = SandboxSettings(backend=arguments.backend, workers=arguments.workers)
    started = time.monotonic()
    try:
        with shown() as progress:
            report = synthesize(
                arguments.package,
                arguments.sessions,
                Path(arguments.output),
                sandbox=settings,
                seed=arguments.seed,
                progress=progress,
            )
    except AgentFTError as error:
        print(f"synthesize: {error}", file=sys.stderr)
        return error.exit_code
    print_report(report, time.monotonic() - started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
