"""What a run needs from this machine, looked at in a second before anything heavy is imported (floor 5).

``preflight(config)`` raises one error with everything that is missing: shards, trace to replay, sandbox, disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from agentft.config.hosts import RAY_AUTO
from agentft.config.schema import RunConfig
from agentft.errors import AgentFTError, ConfigError, DataError, SandboxError
from agentft.train.disk import estimate, require_room
from agentft.train.resume import check_same

CONNECT_TIMEOUT_S = 10.0


class PreflightError(AgentFTError):
    """Everything that is missing. ``problems`` holds each; the exit code is 3 if one is about the environment."""

    def __init__(self, problems: list[AgentFTError]) -> None:
        self.problems = problems
        self.exit_code = max(problem.exit_code for problem in problems)
        super().__init__("the run cannot start")

    def render(self) -> str:
        """Return every problem, one block each."""
        return "\n".join([f"{self.what}:", *(problem.render() for problem in self.problems)])


def preflight(config: RunConfig) -> None:
    """Look at everything that a run needs.

    Raises:
        PreflightError: with everything that is missing.
    """
    problems: list[AgentFTError] = []
    for look in (_run_folder, _shards, _earlier, _replay, _sandbox, _ray, _disk):
        try:
            look(config)
        except AgentFTError as error:
            problems.append(error)
    if problems:
        raise PreflightError(problems)


def run_folder(config: RunConfig) -> Path:
    """Return ``runs_dir/run_name``."""
    return Path(config.runs_dir) / config.run_name


def _run_folder(config: RunConfig) -> None:
    folder = run_folder(config)
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            "the folder of the run holds something else", where=str(folder), hint="choose another run_name"
        )
    if config.train.checkpoints.autoresume:
        check_same(config, folder)
        return
    if not config.overwrite:
        raise ConfigError(
            "there is a run of this name already",
            where=str(folder),
            hint="choose another run_name; train.checkpoints.autoresume=true goes on with that run, "
            "overwrite=true removes it first",
        )
    if config.feedback.replay_from and Path(config.feedback.replay_from).resolve().is_relative_to(folder.resolve()):
        raise ConfigError("a run cannot overwrite the run that it replays", where=str(folder), hint="change run_name")


def _shards(config: RunConfig) -> None:
    if config.data.remote is None and not (Path(config.data.shards) / "meta.json").is_file():
        raise DataError(
            "no shards here",
            where=str(Path(config.data.shards) / "meta.json"),
            expected="a folder that `agentft shards write` has finished",
            hint=f"agentft shards write SESSIONS.jsonl -o {config.data.shards}, or run `make demo` first",
        )


def _earlier(config: RunConfig) -> None:
    section = config.forgetting
    wanted = {"forgetting.lm_shards": section.lm_shards, "forgetting.replay.shards": section.replay.shards}
    for key, folder in wanted.items():
        if folder is not None and not (Path(folder) / "meta.json").is_file():
            expected = "a folder with meta.json"
            raise DataError("no shards of an earlier stage here", where=key, got=folder, expected=expected)
    if section.ewc.fisher is not None and not Path(section.ewc.fisher).expanduser().is_file():
        hint = "agentft fisher RUN --shards FOLDER -o FILE"
        raise DataError("no such file", where="forgetting.ewc.fisher", got=section.ewc.fisher, hint=hint)


def _replay(config: RunConfig) -> None:
    if config.feedback.backend == "replay" and not Path(str(config.feedback.replay_from)).exists():
        raise ConfigError("no run to replay", where="feedback.replay_from", got=config.feedback.replay_from)


def _sandbox(config: RunConfig) -> None:
    checks: dict[str, Callable[[RunConfig], None]] = {"docker": _docker, "local": _local}
    if config.feedback.backend in checks:
        checks[config.feedback.backend](config)


def _docker(config: RunConfig) -> None:
    """Look at every host: one must be there, and those that are must have the image."""
    from docker.errors import NotFound

    from agentft.sandbox.base import HostAwayError
    from agentft.sandbox.docker import connect, image_reference

    image, away = config.sandbox.image, []
    hosts: list[str | None] = [*config.sandbox.hosts] or [None]
    for host in hosts:
        if host == RAY_AUTO:
            continue
        try:
            client = connect(host, config.sandbox.tls, timeout_s=CONNECT_TIMEOUT_S)
        except HostAwayError as error:
            away.append(error)
            continue
        try:
            client.inspect_image(image_reference(image))
        except NotFound:
            raise SandboxError(
                "the sandbox image is not there" + (f" on {host}" if host else ""),
                where="sandbox.image",
                got=image,
                hint=f"docker save {image_reference(image)} | docker --host {host} load"
                if host
                else f"agentft sandbox build {image}",
            ) from None
        finally:
            client.close()
    if len(away) == len(hosts):
        raise away[0]


def _ray(config: RunConfig) -> None:
    if RAY_AUTO in config.sandbox.hosts and find_spec("ray") is None:
        raise SandboxError("Ray is not installed", where="sandbox.hosts", got=RAY_AUTO, hint="pip install agentft[ray]")


def _local(config: RunConfig) -> None:
    if shutil.which("bwrap") is None:
        raise SandboxError("bubblewrap is not installed", expected="`bwrap` on PATH", hint="apt-get install bubblewrap")


def _disk(config: RunConfig) -> None:
    require_room(config, run_folder(config), *estimate(config))
