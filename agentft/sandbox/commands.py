"""The verbs ``agentft sandbox build|run|check|clean`` (floor 2): parsed arguments in, an exit code out."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from agentft.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_OK, ConfigError, SandboxError
from agentft.sandbox.base import ExecRequest, ExecResult, Limits
from agentft.sandbox.pool import open_sandbox


def build(arguments: argparse.Namespace) -> int:
    """Build an image; says on stderr what it is doing."""
    from agentft.sandbox.images import ensure_image

    started = time.monotonic()
    with _Progress() as progress:
        digest = ensure_image(arguments.image, base=arguments.base, force=arguments.force, report=progress.report)
    seconds = round(time.monotonic() - started, 1)
    if arguments.json:
        print(json.dumps({"image": arguments.image, "digest": digest, "seconds": seconds}))
    else:
        print(f"{arguments.image}: {digest} ({seconds} s)")
    return EXIT_OK


def run(arguments: argparse.Namespace) -> int:
    """Run one command in a fresh sandbox. Exit code 0 if it ended with 0, 3 if the sandbox failed, else 1."""
    limits = Limits(timeout_s=arguments.timeout)
    files = read_folder(Path(arguments.dir), limits.workspace_mib << 20) if arguments.dir else {}
    sandbox = open_sandbox(arguments.backend, arguments.image, workers=1, limits=limits, run_name="sandbox-run")
    try:
        with sandbox.lease() as lease:
            lease.write_files(files)
            result = lease.exec(ExecRequest(argv=tuple(arguments.command)))
    except OSError as error:
        raise SandboxError("the files could not be written to the sandbox", got=str(error)) from error
    finally:
        sandbox.close()
    if arguments.json:
        print(json.dumps(result_object(result)))
    else:
        sys.stdout.write(result.stdout)
        sys.stderr.write(result.stderr)
        if result.status != "ok":
            print(f"agentft: {result.status}, exit code {result.exit_code}", file=sys.stderr)
    return {"ok": EXIT_OK, "infra": EXIT_ENVIRONMENT}.get(result.status, EXIT_FAILED)


def check(arguments: argparse.Namespace) -> int:
    """Run the conformance suite on an engine. Exit code 0 if everything that this engine promises held."""
    from agentft.sandbox.conformance import suite
    from agentft.sandbox.conformance.engines import open_subject

    if arguments.host and arguments.backend == "local":
        raise ConfigError("the local backend has no host", where="--host", got=arguments.host)
    checks = suite.select(arguments.only)
    with (
        open_subject(arguments.backend, image=arguments.image, host=arguments.host) as subject,
        _Progress() as progress,
    ):
        outcomes = suite.run_suite(
            subject, checks, lambda done: progress.report(f"{done.check.group} {done.check.name}: {done.verdict}")
        )
    of = arguments.image if arguments.backend == "docker" else "this machine"
    suite.print_table(outcomes, title=f"{subject.name}, {of}")
    if arguments.json:
        found = suite.outcomes_object(outcomes, engine=subject.name, image=of)
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")
    return EXIT_OK if suite.all_held(outcomes) else EXIT_FAILED


def clean(arguments: argparse.Namespace) -> int:
    """Remove containers whose owner is gone; with ``--all`` every sandbox container of this engine.

    With ``--cache FOLDER`` remove the results that are kept there (a run's folder, or one that runs share) instead.
    """
    if arguments.cache:
        return _clear_cache(Path(arguments.cache), arguments.json)
    from agentft.sandbox.docker import connect, list_containers, remove_leftovers

    client = connect()
    if arguments.all and not arguments.yes:
        count = len(list_containers(client))
        if not sys.stdin.isatty():
            raise ConfigError("--all also ends runs that are alive", got="no terminal to ask on", hint="add --yes")
        if input(f"Remove all {count} sandbox containers, also of running jobs? [y/N] ").strip().lower() != "y":
            return EXIT_FAILED
    removed = remove_leftovers(client, everything=arguments.all)
    left = len(list_containers(client))
    print(json.dumps({"removed": removed, "left": left}) if arguments.json else f"{len(removed)} removed, {left} left")
    return EXIT_OK


def _clear_cache(folder: Path, as_json: bool) -> int:
    from agentft.sandbox.cache_disk import clear

    folder = folder / "cache" if (folder / "cache").is_dir() else folder
    if not folder.is_dir():
        raise ConfigError(
            "no results are kept here", where="--cache", got=str(folder),
            expected="a run's folder, or the one that sandbox.cache.folder names",
        )  # fmt: skip
    freed = clear(folder)
    print(
        json.dumps({"cleared": str(folder), "bytes": freed}) if as_json else f"{folder}: {freed / 2**20:.1f} MiB freed"
    )
    return EXIT_OK


def result_object(result: ExecResult) -> dict[str, Any]:
    """Return the result as the JSON object that ``run --json`` prints: the record's fields and ``timed_out``."""
    return {**result.to_record().model_dump(exclude_none=False), "timed_out": result.timed_out}


def read_folder(folder: Path, max_bytes: int) -> dict[str, bytes]:
    """Return the regular files under ``folder`` by relative path, without ``.git``; links are not followed.

    Raises:
        ConfigError: there is no such folder, or it holds more than ``max_bytes``.
    """
    if not folder.is_dir():
        raise ConfigError("there is no such folder", where="--dir", got=str(folder))
    files: dict[str, bytes] = {}
    total = 0
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in (".git", "__pycache__"))
        for path in (Path(parent, name) for name in sorted(names)):
            if path.is_symlink() or not path.is_file():
                continue
            total += path.stat().st_size
            if total > max_bytes:
                raise ConfigError(
                    "the folder is too large for a workspace", where="--dir", expected=f"at most {max_bytes} bytes"
                )
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


class _Progress:
    """Progress on stderr: one line that changes on a terminal, one line a stage elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status = self._console.status("starting")
        self._stages: set[str] = set()

    def __enter__(self) -> _Progress:
        self._status.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._status.stop()

    def report(self, line: str) -> None:
        """Show a line; where nothing can be overwritten, only lines that begin a new stage."""
        stage = " ".join(line.split()[:2])
        if self._console.is_terminal:
            self._status.update(line)
        elif stage not in self._stages:
            self._stages.add(stage)
            self._console.print(line, markup=False, highlight=False)
