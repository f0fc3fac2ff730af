"""The verb ``agentft sandbox tool`` (floor 2): one call of a tool, built in or the user's, as the agent makes it.

agentft sandbox tool file_list --dir src
agentft sandbox tool sql_query '{"query": "SELECT 1"}' --tools yamls/tools/sql.yaml
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from agentft.config.tools import use_tools
from agentft.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_OK, ConfigError
from agentft.sandbox.base import Limits
from agentft.sandbox.commands import read_folder, result_object
from agentft.sandbox.execute import run_tool
from agentft.sandbox.pool import open_sandbox
from agentft.sandbox.services import open_with_tools
from agentft.tools import USER_TOOLS, ToolCall


def command(arguments: argparse.Namespace) -> int:
    """Run the call and print its result. Exit code 0 if it ended well, 3 if the sandbox failed, else 1."""
    use_tools(arguments.tools)
    try:
        args = json.loads(arguments.arguments)
    except ValueError as error:
        raise ConfigError("the arguments are not JSON", got=str(error), expected="a JSON object") from error
    if not isinstance(args, dict):
        raise ConfigError("the arguments are not a JSON object", got=args)
    limits = Limits()
    files = read_folder(Path(arguments.dir), limits.workspace_mib << 20) if arguments.dir else {}
    wanted = USER_TOOLS.get(arguments.name)  # others need not be started for this call
    sandbox = open_with_tools(
        open_sandbox,
        [] if wanted is None else [wanted],
        backend=arguments.backend,
        image=arguments.image,
        workers=1,
        limits=limits,
        run_name="sandbox-tool",
    )
    try:
        with sandbox.lease() as lease:
            lease.write_files(files)
            result = run_tool(lease, ToolCall(arguments.name, args))
    finally:
        sandbox.close()
    if arguments.json:
        print(json.dumps(result_object(result)))
    else:
        sys.stdout.write(result.stdout)
        sys.stderr.write(result.stderr)
        print(
            f"agentft: {result.status}, exit code {result.exit_code}, {json.dumps(dict(result.fields))}",
            file=sys.stderr,
        )
    return {"ok": EXIT_OK, "infra": EXIT_ENVIRONMENT}.get(result.status, EXIT_FAILED)
