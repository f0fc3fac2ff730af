"""Builds sandbox images (floor 2): ``docker/<name>/Dockerfile`` on a registry base, or on Debian from debootstrap.

``ensure_image("python")`` does nothing when the image is there and was made by the same recipe. Without a registry the
base is a Debian system made by debootstrap (root, about a minute). It stays in ``local.rootfs_folder()``, where the
local backend uses it too, and is made again only when its list of packages changes.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import requests
from docker.errors import APIError, DockerException, ImageNotFound

import docker
from agentft.errors import SandboxError, boundary
from agentft.sandbox.docker import connect, image_reference
from agentft.sandbox.local import rootfs_folder

Base = Literal["auto", "registry", "debootstrap"]
Report = Callable[[str], None]

REGISTRY_BASE = "python:3.11-slim"
DEBIAN_BASE = "agentft/base-debian"
DEBIAN_SUITE = "bookworm"
DEBIAN_PACKAGES = ("git", "grep", "findutils", "python3", "python3-pytest")
RECIPE_LABEL, BASE_LABEL = "agentft.recipe", "agentft.base"
MARKER = "etc/agentft-base"
UNUSED = ("usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache/apt", "var/lib/apt/lists")
REGISTRY_TIMEOUT_S = 10


def ensure_image(image: str, *, base: Base = "auto", force: bool = False, report: Report = lambda line: None) -> str:
    """Build the image if it is not there or out of date; return its digest.

    Args:
        image: name of a folder under ``docker/``.
        base: where the base system comes from; ``auto`` takes the registry if one answers within ten seconds.
        force: build although the image is up to date (the Debian base, once made, is kept).
        report: gets a line of progress at a time.

    Raises:
        SandboxError: no engine, no such Dockerfile, no base to be had, or the build failed (with its last lines).
    """
    client = connect()
    dockerfile, reference = _dockerfile(image), image_reference(image)
    recipe = _digest(dockerfile.read_text(), _base_recipe())
    with boundary("the sandbox image could not be built", error=SandboxError):
        if not force and _label(client, reference, RECIPE_LABEL) == recipe:
            report(f"{reference} is up to date")
            return str(client.inspect_image(reference)["Id"])
        from_registry = base == "registry" or (base == "auto" and _registry_answers(client, report))
        base_reference = _pull(client, report) if from_registry else _debian_base(client, report)
        report(f"building {reference} on {base_reference}")
        _build(client, dockerfile, reference, base_reference, recipe, network=from_registry)
        return str(client.inspect_image(reference)["Id"])


def ensure_rootfs(report: Report = lambda line: None) -> Path:
    """Make the Debian system with debootstrap if it is not there or its list of packages changed; return its folder.

    Raises:
        SandboxError: not root, debootstrap is missing, or it failed.
    """
    target = rootfs_folder()
    marker = target / MARKER
    if marker.exists() and marker.read_text().strip() == _base_recipe():
        return target
    program = shutil.which("debootstrap")
    if program is None or os.getuid() != 0:
        raise SandboxError(
            "no Debian system can be made here",
            got="debootstrap is not installed" if program is None else f"user id {os.getuid()}",
            expected="debootstrap, run as root",
            hint="apt-get install -y debootstrap, then `agentft sandbox build` as root",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix="rootfs-", dir=target.parent))
    try:
        partial.chmod(0o755)
        _debootstrap(program, partial, report)
        for folder in UNUSED:
            shutil.rmtree(partial / folder, ignore_errors=True)
        (partial / "workspace").mkdir()
        (partial / MARKER).write_text(_base_recipe() + "\n")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _debootstrap(program: str, folder: Path, report: Report) -> None:
    command = [program, "--variant=minbase", f"--include={','.join(DEBIAN_PACKAGES)}", DEBIAN_SUITE, str(folder)]
    last: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = [*last[-9:], line.rstrip()]
            report(f"debootstrap: {line.strip().removeprefix('I: ')}")
    if process.returncode != 0:
        raise SandboxError("debootstrap failed", got="\n".join(last), hint="check that the Debian mirror answers")


def _debian_base(client: docker.APIClient, report: Report) -> str:
    """Import the Debian system as an image, if this engine does not have it yet."""
    folder = ensure_rootfs(report)
    if _label(client, DEBIAN_BASE, BASE_LABEL) == _base_recipe():
        return DEBIAN_BASE
    report(f"importing {DEBIAN_BASE}")
    skipped = ("--exclude=./dev/*", "--exclude=./proc/*")
    command = ["tar", "--sort=name", "--numeric-owner", *skipped, "-cC", str(folder), "."]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as archive:
        client.import_image_from_stream(
            archive.stdout, repository=DEBIAN_BASE, tag="latest", changes=[f"LABEL {BASE_LABEL}={_base_recipe()}"]
        )
    if archive.returncode != 0 or _label(client, DEBIAN_BASE, BASE_LABEL) != _base_recipe():
        raise SandboxError(f"{DEBIAN_BASE} could not be imported", got=f"tar ended with {archive.returncode}")
    return DEBIAN_BASE


def _build(
    client: docker.APIClient, dockerfile: Path, reference: str, base: str, recipe: str, *, network: bool
) -> None:
    lines: list[str] = []
    events = client.build(
        fileobj=io.BytesIO(dockerfile.read_bytes()),
        tag=reference,
        buildargs={"BASE": base},
        labels={RECIPE_LABEL: recipe},
        network_mode=None if network else "none",
        rm=True,
        forcerm=True,
        decode=True,
    )
    for event in events:
        lines = [*lines[-19:], str(event.get("stream", "")).rstrip()]
        if "error" in event:
            raise SandboxError(f"the build of {reference} failed", got="\n".join([*lines, str(event["error"])]))


def _registry_answers(client: docker.APIClient, report: Report) -> bool:
    """Whether the base image is here already, or this engine can reach the registry that has it, decided quickly."""
    if _label(client, REGISTRY_BASE, "") is not None:
        return True
    report(f"looking for {REGISTRY_BASE} (at most {REGISTRY_TIMEOUT_S} s)")
    quick = docker.from_env(timeout=REGISTRY_TIMEOUT_S).api
    try:
        quick.inspect_distribution(REGISTRY_BASE)
    except (DockerException, requests.RequestException):
        return False
    finally:
        quick.close()
    return True


def _pull(client: docker.APIClient, report: Report) -> str:
    if _label(client, REGISTRY_BASE, "") is None:
        report(f"pulling {REGISTRY_BASE}")
        try:
            client.pull(*REGISTRY_BASE.split(":"))
        except APIError as cause:
            hint = "agentft sandbox build --base debootstrap"
            raise SandboxError(f"{REGISTRY_BASE} cannot be pulled", got=str(cause), hint=hint) from cause
    return REGISTRY_BASE


def _label(client: docker.APIClient, reference: str, label: str) -> str | None:
    """Return a label of an image ("" if the image has no such label); None if there is no such image."""
    try:
        found: dict[str, Any] = client.inspect_image(reference)
    except ImageNotFound:
        return None
    return str((found["Config"].get("Labels") or {}).get(label, ""))


def _dockerfile(image: str) -> Path:
    folder = Path(__file__).resolve().parents[2] / "docker"
    path = folder / image / "Dockerfile"
    if not path.is_file():
        known = ", ".join(sorted(entry.parent.name for entry in folder.glob("*/Dockerfile")))
        raise SandboxError("there is no Dockerfile for this image", got=image, expected=known or f"one in {folder}")
    return path


def _base_recipe() -> str:
    return _digest(DEBIAN_SUITE, *DEBIAN_PACKAGES)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
