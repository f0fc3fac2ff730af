"""The verb ``agentft tools`` (floor 5).

agentft tools                       # the built-in ones
agentft tools yamls/tools/sql.yaml  # and those of files of user tools, checked
agentft tools --markdown > docs/tools.md
"""

from __future__ import annotations

import argparse
import json

from agentft.config.load import InvalidConfigError
from agentft.config.tools import read_tools
from agentft.errors import EXIT_OK
from agentft.tools import BUILTIN_TOOLS
from agentft.tools.table import as_object, markdown, plain


def command(arguments: argparse.Namespace) -> int:
    """Print the table."""
    tools, problems = read_tools(arguments.files)
    if problems:
        raise InvalidConfigError(problems, " ".join(arguments.files))
    specs = (*BUILTIN_TOOLS, *(tool.spec for tool in tools))
    if arguments.json:
        print(json.dumps([as_object(spec) for spec in specs]))
    elif arguments.markdown:
        print(markdown(specs), end="")
    else:
        print("\n".join(plain(spec) for spec in specs))
    return EXIT_OK
