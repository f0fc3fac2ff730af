"""A run's configuration, checked with all that can be known before anything heavy is imported (floor 5).

agentft validate yamls/agent/tiny-glm.yaml [key=value ...]
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from agentft.config.algorithm_checks import check_algorithms
from agentft.config.checks import Problem
from agentft.config.load import InvalidConfigError, load
from agentft.config.schema import RunConfig
from agentft.config.tools import read_tools, use_tools
from agentft.errors import EXIT_OK, EXIT_USAGE, ConfigError
from agentft.schedules import check_schedule


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a YAML for this process group (``WORLD_SIZE`` of the environment); its tools become those of the process.

    Raises:
        InvalidConfigError: with everything that is wrong.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    config = load(path, overrides, world_size=world_size, more_checks=_more_checks)
    use_tools(config.tools)
    return config


def validate(arguments: argparse.Namespace) -> int:
    """``agentft validate``: print what the run would be, or every error at once (exit code 2)."""
    try:
        config = load_run_config(arguments.config, arguments.overrides)
    except InvalidConfigError as errors:
        if not arguments.json:
            raise
        print(json.dumps({"ok": False, "errors": [_as_dict(problem) for problem in errors.problems]}, default=str))
        return EXIT_USAGE
    if arguments.json:
        print(json.dumps({"ok": True, "errors": []}))
    else:
        print(f"{arguments.config} is a valid {config.stage} run: {config.run_name}, {config.train.duration}")
    return EXIT_OK


def _more_checks(config: RunConfig) -> Iterator[Problem]:
    yield from _check_schedules(config)
    yield from check_algorithms(config)
    yield from _check_tools(config)


def _check_tools(config: RunConfig) -> Iterator[Problem]:
    tools, problems = read_tools(config.tools)
    for error in problems:
        what = f"{error.where}: {error.what}"
        yield Problem(keys=("tools",), what=what, got=error.got, expected=error.expected, hint=error.hint)
    apart = [tool.spec.name for tool in tools if tool.image is not None or tool.service is not None]
    if apart and config.feedback.backend == "local":
        what = f"{', '.join(apart)}: tools with containers of their own need Docker"
        yield Problem(keys=("tools", "feedback.backend"), what=what, got="local", expected="docker, replay or off")
    if apart and config.sandbox.hosts and config.feedback.backend == "docker":
        what = f"{', '.join(apart)}: tools with containers of their own run on this machine's engine only"
        yield Problem(keys=("tools", "sandbox.hosts"), what=what, got=config.sandbox.hosts, expected="no hosts")


def _check_schedules(config: RunConfig) -> Iterator[Problem]:
    for item in fields(config.loss):
        section = f"loss.{item.name}"
        for error in check_schedule(getattr(config.loss, item.name), section):
            key = (error.where or section).partition("[")[0]
            yield Problem(
                keys=(key, section),
                what=f"{key}: {error.what}",
                got=error.got,
                expected=error.expected,
                hint=error.hint,
            )


def _as_dict(problem: ConfigError) -> dict[str, object]:
    names = ("what", "where", "got", "expected", "hint")
    return {name: getattr(problem, name) for name in names}
