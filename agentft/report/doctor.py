"""``agentft doctor`` (floor 5): what this machine has for a run, and what to do about what it lacks.

Exit code 0 when nothing fails (warnings are allowed), 3 otherwise. Nothing is changed, nothing heavy is imported
except torch for the GPU row.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from agentft.errors import EXIT_ENVIRONMENT, EXIT_OK

State = Literal["ok", "warn", "fail"]
STYLES: dict[State, str] = {"ok": "green", "warn": "yellow", "fail": "red"}
LEAST_FREE_GIB, LEAST_MEMORY_GIB = 5.0, 4.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that was looked at: what was found, and what to do unless it is ``ok``."""

    name: str
    state: State
    found: str
    hint: str | None = None


def command(arguments: argparse.Namespace) -> int:
    """``agentft doctor``: print every row; exit code 3 if one fails."""
    rows = examine()
    failed = any(row.state == "fail" for row in rows)
    if arguments.json:
        print(json.dumps({"ok": not failed, "rows": [asdict(row) for row in rows]}))
    else:
        _print(rows)
    return EXIT_ENVIRONMENT if failed else EXIT_OK


def examine() -> list[Row]:
    """Look at everything. One broken check becomes a row that fails, never an exception."""
    checks: tuple[Callable[[], Row], ...] = (
        check_engine,
        check_image,
        check_bubblewrap,
        check_disk,
        check_memory,
        check_cpu,
        check_gpu,
        check_versions,
        check_object_store,
    )
    rows = [_guarded(check) for check in checks]
    states = {row.name: row.state for row in rows}
    if states["docker engine"] != "ok" and states["bubblewrap"] != "ok":
        hint = "install Docker Engine or bubblewrap: apt-get install docker.io bubblewrap"
        rows.append(Row(name="sandbox", state="fail", found="no backend can run tool calls", hint=hint))
    return rows


def _guarded(check: Callable[[], Row]) -> Row:
    try:
        return check()
    except Exception as error:  # a report of what is broken must not break
        name = check.__name__.removeprefix("check_").replace("_", " ")
        return Row(name=name, state="fail", found=f"{type(error).__name__}: {error}", hint="see the message")


def check_engine() -> Row:
    """Docker Engine: does one answer, and which."""
    import docker

    try:
        client = docker.from_env(timeout=5)
        version = client.version()
    except Exception as error:
        cause = str(error).splitlines()[0][:160]
        hint = "start dockerd (`make engine` does it as root), or train with feedback.backend=local"
        return Row(name="docker engine", state="warn", found=f"none answers: {cause}", hint=hint)
    client.close()
    return Row(name="docker engine", state="ok", found=f"{version['Version']} on {version['KernelVersion']}")


def check_image() -> Row:
    """The sandbox image `python`, where an engine answers."""
    import docker

    hint = "agentft sandbox build"
    try:
        client = docker.from_env(timeout=5)
        tags = [tag for image in client.api.images() for tag in image["RepoTags"] or () if tag.startswith("agentft")]
        client.close()
    except Exception:
        return Row(name="sandbox image", state="warn", found="not known: no engine answers", hint=hint)
    if not tags:
        return Row(name="sandbox image", state="warn", found="none is built", hint=hint)
    return Row(name="sandbox image", state="ok", found=", ".join(sorted(tags)))


def check_bubblewrap() -> Row:
    """The tool behind `backend: local`: installed, and allowed to make namespaces."""
    name, path = "bubblewrap", shutil.which("bwrap")
    if path is None:
        return Row(name=name, state="warn", found="not installed", hint="apt-get install bubblewrap")
    probe = [path, "--ro-bind", "/", "/", "--unshare-all", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        hint = "allow unprivileged user namespaces, or use feedback.backend=docker"
        return Row(name=name, state="warn", found=f"cannot isolate: {done.stderr.strip()[:160]}", hint=hint)
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    return Row(name=name, state="ok", found=version)


def check_disk() -> Row:
    """Free space where runs are written."""
    free_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    state: State = "ok" if free_gib >= LEAST_FREE_GIB else "warn"
    hint = None if state == "ok" else f"free at least {LEAST_FREE_GIB:.0f} GiB for checkpoints, shards and images"
    return Row(name="disk", state=state, found=f"{free_gib:.1f} GiB free in {Path.cwd()}", hint=hint)


def check_memory() -> Row:
    """Memory that programs may still take."""
    text = Path("/proc/meminfo").read_text()
    sizes = {name: int(kib) / 2**20 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", text)}
    state: State = "ok" if sizes["MemAvailable"] >= LEAST_MEMORY_GIB else "warn"
    hint = None if state == "ok" else f"{LEAST_MEMORY_GIB:.0f} GiB are comfortable; lower data.microbatch_size"
    found = f"{sizes['MemAvailable']:.1f} of {sizes['MemTotal']:.1f} GiB available"
    return Row(name="memory", state=state, found=found, hint=hint)


def check_cpu() -> Row:
    """Cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS")
    found = f"{cores} cores" + (f", OMP_NUM_THREADS={threads}" if threads else "")
    if threads and threads.isdigit() and int(threads) > cores:
        return Row(name="cpu", state="warn", found=found, hint=f"set OMP_NUM_THREADS to at most {cores}")
    return Row(name="cpu", state="ok", found=found)


def check_gpu() -> Row:
    """GPUs that torch can use; none is fine for the tiny models."""
    import torch

    if not torch.cuda.is_available():
        hint = "tiny models train on the CPU; a GPU is needed for real backbones"
        return Row(name="gpu", state="ok", found=f"none ({hint})")
    names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    found = ", ".join(f"{p.name} {p.total_memory / 2**30:.0f} GiB" for p in names)
    return Row(name="gpu", state="ok", found=found)


def check_versions() -> Row:
    """Installed versions beside the exact pins of requirements.lock (of the checkout that is in use)."""
    lock = Path(__file__).resolve().parents[2] / "requirements.lock"
    if not lock.is_file():
        return Row(name="versions", state="ok", found="not a checkout: no requirements.lock to compare with")
    pins = dict(line.split("==") for line in lock.read_text().split())
    installed = {_canonical(d.metadata["Name"]): d.version for d in importlib.metadata.distributions()}
    wrong = {name: installed.get(name, "absent") for name, pin in pins.items() if installed.get(name) != pin}
    if not wrong:
        return Row(name="versions", state="ok", found=f"all {len(pins)} packages as locked")
    shown = ", ".join(f"{name} {have} (locked {pins[name]})" for name, have in list(wrong.items())[:5])
    core = {"mosaicml", "mosaicml-streaming", "torch", "transformers"} & set(wrong)
    state: State = "fail" if core else "warn"
    return Row(name="versions", state=state, found=f"{len(wrong)} differ: {shown}", hint="make setup")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def check_object_store() -> Row:
    """The S3 store of the environment variables: address reachable, credentials accepted."""
    name, endpoint = "object store", os.environ.get("S3_ENDPOINT_URL")
    if not endpoint and not os.environ.get("AWS_ACCESS_KEY_ID"):
        return Row(name=name, state="ok", found="none configured; shards are read from a local folder")
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    patience = Config(connect_timeout=5, read_timeout=5, retries={"max_attempts": 1})
    where = endpoint or "AWS"
    try:
        buckets = boto3.client("s3", endpoint_url=endpoint, config=patience).list_buckets().get("Buckets", [])
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code == "AccessDenied":
            return Row(name=name, state="warn", found=f"{where}: these credentials may not list buckets")
        hint = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        return Row(name=name, state="fail", found=f"{where}: {code or error}", hint=hint)
    except BotoCoreError as error:
        hint = "check S3_ENDPOINT_URL and the network"
        return Row(name=name, state="fail", found=f"{where}: {str(error)[:160]}", hint=hint)
    return Row(name=name, state="ok", found=f"{where}: {len(buckets)} buckets")


def _print(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for row in rows:
        found = Text(row.found)
        if row.hint:
            found.append(f"\n→ {row.hint}", style="bold")
        table.add_row(Text(row.state, style=STYLES[row.state]), Text(row.name), found)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
