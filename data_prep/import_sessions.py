"""Stage 1: sessions of other agents → one file of ETAI records.

    python data_prep/import_sessions.py trajectories/ logs.jsonl hf:owner/name:train -o sessions.jsonl

The same as ``agentft import``; the format of each document is detected. What is refused goes, with its reason, to
``sessions.rejected.jsonl``.
"""

from __future__ import annotations

import argparse
import sys

from agentft.data.importers.commands import import_paths, print_report
from agentft.errors import AgentFTError


def main() -> int:
    """Parse the command line, import, print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description="Import sessions of other agents.")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files, folders, parquet, or hf:owner/name[:split]")
    parser.add_argument("-o", "--output", required=True, help="file to write (.jsonl, .jsonl.gz, .jsonl.zst)")
    parser.add_argument("--format", default="auto", help="swe-agent, mini-swe-agent, openhands, openai, etai, or auto")
    parser.add_argument("--strict", action="store_true", help="stop at the first bad record")
    arguments = parser.parse_args()
    try:
        report = import_paths(arguments.paths, arguments.output, arguments.format, arguments.strict)
    except AgentFTError as error:
        print(f"import_sessions: {error}", file=sys.stderr)
        return error.exit_code
    print_report(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
