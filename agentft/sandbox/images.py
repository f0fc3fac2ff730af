"""Builds sandbox images (floor 2): ``docker/<name>/Dockerfile`` on a registry base, or on Debian from debootstrap.

``ensure_image("python")`` does nothing when the image is there and was made by the same recipe. Without a registry the
base is a Debian system made by debootstrap (root, about a minute). Python's stays in ``local.rootfs_folder()``, where
the local backend uses it too, and is made again only when its list of packages changes; others are removed after the
import. A folder under ``docker/`` that ``RECIPES`` does not name is built on our Python image, without a network.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import requests
from docker.errors import APIError, DockerException, ImageNotFound

import docker
from agentft.errors import SandboxError, boundary
from agentft.sandbox.docker import RECIPE_LABEL, connect, image_reference
from agentft.sandbox.local import rootfs_folder

Base = Literal["auto", "registry", "debootstrap"]
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What an image stands on: ``registry`` names the base there, ``packages`` make the same one from Debian."""

    registry: str
    packages: tuple[str, ...]
    npm: bool = False  # packages of docker/<name>/package-lock.json go into the image


DEBIAN_SUITE = "bookworm"
TOOLS = ("git", "grep", "findutils")
RECIPES = {
    "python": Recipe(
        registry="python:3.11-slim", packages=(*TOOLS, "python3", "python3-pytest", "mypy", "flake8", "black")
    ),
    "node": Recipe(registry="node:20-slim", packages=(*TOOLS, "python3", "nodejs"), npm=True),
}
BASE_LABEL = "agentft.base"
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
    with _one_build_at_a_time():
        return _ensure_image(image, base, force, report)


def _ensure_image(image: str, base: Base, force: bool, report: Report) -> str:
    client = connect()
    folder, reference = _folder(image), image_reference(image)
    recipe = RECIPES.get(image)
    below = _ensure_image("python", base, False, report) if recipe is None else _base_recipe(recipe)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    version = _digest(below, *(f"{path.relative_to(folder)}:{path.read_bytes().decode('latin-1')}" for path in files))
    with boundary("the sandbox image could not be built", error=SandboxError):
        if not force and _label(client, reference, RECIPE_LABEL) == version:
            report(f"{reference} is up to date")
            return str(client.inspect_image(reference)["Id"])
        network = False
        if recipe is None:
            base_reference = image_reference("python")
        elif base == "registry" or (base == "auto" and _registry_answers(client, recipe.registry, report)):
            base_reference, network = _pull(client, recipe.registry, report), True
        else:
            base_reference = _debian_base(client, image, recipe, report)
        report(f"building {reference} on {base_reference}")
        _build(client, folder, reference, base_reference, version, network=network)
        return str(client.inspect_image(reference)["Id"])


def ensure_rootfs(report: Report = lambda line: None) -> Path:
    """Make Python's Debian system if it is not there or its list of packages changed; return its folder.

    Raises:
        SandboxError: not root, debootstrap is missing, or it failed.
    """
    with _one_build_at_a_time():
        return _ensure_rootfs(report)


def _ensure_rootfs(report: Report) -> Path:
    target, recipe = rootfs_folder(), _base_recipe(RECIPES["python"])
    marker = target / MARKER
    if marker.exists() and marker.read_text().strip() == recipe:
        return target
    partial = _make_rootfs(RECIPES["python"], report)
    try:
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


@contextlib.contextmanager
def _one_build_at_a_time() -> Iterator[None]:
    """Let processes that want the same image wait for the one that makes it."""
    rootfs_folder().parent.mkdir(parents=True, exist_ok=True)
    with (rootfs_folder().parent / "build.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_rootfs(recipe: Recipe, report: Report) -> Path:
    """Make a Debian system in a new folder beside ``rootfs_folder()``; the caller moves or removes it."""
    program = shutil.which("debootstrap")
    if program is None or os.getuid() != 0:
        raise SandboxError(
            "no Debian system can be made here",
            got="debootstrap is not installed" if program is None else f"user id {os.getuid()}",
            expected="debootstrap, run as root",
            hint="apt-get install -y debootstrap, then `agentft sandbox build` as root",
        )
    folder = Path(tempfile.mkdtemp(prefix="rootfs-", dir=rootfs_folder().parent))
    try:
        folder.chmod(0o755)
        _debootstrap(program, recipe, folder, report)
        for unused in UNUSED:
            shutil.rmtree(folder / unused, ignore_errors=True)
        (folder / "workspace").mkdir()
        (folder / MARKER).write_text(_base_recipe(recipe) + "\n")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _debootstrap(program: str, recipe: Recipe, folder: Path, report: Report) -> None:
    command = [program, "--variant=minbase", f"--include={','.join(recipe.packages)}", DEBIAN_SUITE, str(folder)]
    last: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = [*last[-9:], line.rstrip()]
            report(f"debootstrap: {line.strip().removeprefix('I: ')}")
    if process.returncode != 0:
        raise SandboxError("debootstrap failed", got="\n".join(last), hint="check that the Debian mirror answers")


def _debian_base(client: docker.APIClient, image: str, recipe: Recipe, report: Report) -> str:
    """Import the image's Debian system, if this engine does not have it yet; return its reference."""
    reference, version, kept = f"agentft/base-{image}", _base_recipe(recipe), image == "python"
    folder = _ensure_rootfs(report) if kept else None
    if _label(client, reference, BASE_LABEL) == version:
        return reference
    folder = folder or _make_rootfs(recipe, report)
    try:
        report(f"importing {reference}")
        skipped = ("--exclude=./dev/*", "--exclude=./proc/*")
        command = ["tar", "--sort=name", "--numeric-owner", *skipped, "-cC", str(folder), "."]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as archive:
            client.import_image_from_stream(
                archive.stdout, repository=reference, tag="latest", changes=[f"LABEL {BASE_LABEL}={version}"]
            )
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    if archive.returncode != 0 or _label(client, reference, BASE_LABEL) != version:
        raise SandboxError(f"{reference} could not be imported", got=f"tar ended with {archive.returncode}")
    return reference


def _build(client: docker.APIClient, folder: Path, reference: str, base: str, version: str, *, network: bool) -> None:
    with tempfile.TemporaryFile() as context:
        _pack(folder, context, npm=not network and (folder / "package-lock.json").exists())
        context.seek(0)
        events = client.build(
            fileobj=context,
            custom_context=True,
            tag=reference,
            buildargs={"BASE": base},
            labels={RECIPE_LABEL: version},
            network_mode=None if network else "none",
            rm=True,
            forcerm=True,
            decode=True,
        )
        lines: list[str] = []
        for event in events:
            lines = [*lines[-19:], str(event.get("stream", "")).rstrip()]
            if "error" in event:
                raise SandboxError(f"the build of {reference} failed", got="\n".join([*lines, str(event["error"])]))


def _pack(folder: Path, context: Any, *, npm: bool) -> None:
    """Write the build context: the folder's files and, with ``npm``, the packages of its lock.

    They are fetched here because the build has no network; nothing of them runs (``--ignore-scripts``).
    """
    with tempfile.TemporaryDirectory() as fetched, tarfile.open(fileobj=context, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, arcname=path.name, filter=lambda entry: None if "__pycache__" in entry.name else entry)
        if npm:
            for name in ("package.json", "package-lock.json"):
                shutil.copy(folder / name, fetched)
            _fetch_packages(Path(fetched))
            archive.add(Path(fetched) / "node_modules", arcname="node_modules")


def _fetch_packages(folder: Path) -> None:
    program = shutil.which("npm")
    if program is None:
        raise SandboxError(
            "the packages of the image cannot be fetched",
            got="npm is not installed",
            hint="apt-get install -y npm, or `--base registry` where an image registry answers",
        )
    command = [program, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SandboxError("npm could not fetch the packages of the image", got=done.stderr[-2000:])


def _registry_answers(client: docker.APIClient, image: str, report: Report) -> bool:
    """Whether the base image is here already, or this engine can reach the registry that has it, decided quickly."""
    if _label(client, image, "") is not None:
        return True
    report(f"looking for {image} (at most {REGISTRY_TIMEOUT_S} s)")
    quick = docker.from_env(timeout=REGISTRY_TIMEOUT_S).api
    try:
        quick.inspect_distribution(image)
    except (DockerException, requests.RequestException):
        return False
    finally:
        quick.close()
    return True


def _pull(client: docker.APIClient, image: str, report: Report) -> str:
    if _label(client, image, "") is None:
        report(f"pulling {image}")
        try:
            client.pull(*image.split(":"))
        except APIError as cause:
            hint = "agentft sandbox build --base debootstrap"
            raise SandboxError(f"{image} cannot be pulled", got=str(cause), hint=hint) from cause
    return image


def _label(client: docker.APIClient, reference: str, label: str) -> str | None:
    """Return a label of an image ("" if the image has no such label); None if there is no such image."""
    try:
        found: dict[str, Any] = client.inspect_image(reference)
    except ImageNotFound:
        return None
    return str((found["Config"].get("Labels") or {}).get(label, ""))


def _folder(image: str) -> Path:
    folder = Path(__file__).resolve().parents[2] / "docker"
    if not (folder / image / "Dockerfile").is_file():
        known = ", ".join(sorted(entry.parent.name for entry in folder.glob("*/Dockerfile")))
        raise SandboxError("there is no Dockerfile for this image", got=image, expected=known or f"one in {folder}")
    return folder / image


def _base_recipe(recipe: Recipe) -> str:
    return _digest(DEBIAN_SUITE, *recipe.packages)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
