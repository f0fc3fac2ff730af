"""Errors of agentft (floor 0): one type per cause, one message form, one place that classifies.

A message answers five questions: what, where (file:line or config path), got, expected, what to do.
``boundary`` is the only place where a foreign exception becomes one of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_ENVIRONMENT, EXIT_GATE, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 130


class AgentFTError(Exception):
    """Base of every error that agentft raises on purpose.

    Args:
        what: One sentence that says what went wrong.
        where: ``file:line`` or the path of a config key.
        got: The offending value, as the user would recognise it.
        expected: What would have been accepted.
        hint: What to do now, often a command.
    """

    exit_code = EXIT_FAILED

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        got: object = None,
        expected: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.what, self.where, self.got, self.expected, self.hint = what, where, got, expected, hint
        super().__init__(self.render())

    def render(self) -> str:
        """Return the message, one labelled line per known part."""
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        for label, value in (("got", self.got), ("expected", self.expected), ("do", self.hint)):
            if value is not None:
                lines.append(f"  {label}: {_shorten(value)}")
        return "\n".join(lines)


class ConfigError(AgentFTError):
    """A YAML, an override or a command-line argument is wrong."""

    exit_code = EXIT_USAGE


class DataError(AgentFTError):
    """A record, a shard or an input file is wrong."""


class ModelError(AgentFTError):
    """A backbone, a head or an export cannot be built or loaded."""


class SandboxError(AgentFTError):
    """The sandbox itself failed: never the program that ran in it."""

    exit_code = EXIT_ENVIRONMENT


class RewardError(AgentFTError):
    """A reward cannot be computed, or too many executions were lost to trust it."""


class CheckpointError(AgentFTError):
    """A checkpoint is missing, damaged or does not fit the run."""


@contextmanager
def boundary(what: str, *, error: type[AgentFTError] = AgentFTError, hint: str | None = None) -> Iterator[None]:
    """Turn any foreign exception raised inside into ``error``; ours pass through unchanged.

    Raises:
        AgentFTError: ``error(what, got=<type and text of the cause>)``, chained to the cause.
    """
    try:
        yield
    except AgentFTError:
        raise
    except Exception as cause:
        raise error(what, got=f"{type(cause).__name__}: {cause}", hint=hint) from cause


def _shorten(value: object, limit: int = 400) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 40]} … ({len(text)} characters)"
