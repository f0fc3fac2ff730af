"""One engine per transport for the whole session; Docker is skipped without an engine, except under CI."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from agentft.errors import SandboxError
from agentft.sandbox.base import ExecRequest, ExecResult, Limits
from agentft.sandbox.container import Container, Engine

LIMITS = Limits(timeout_s=10, memory_mib=256, pids=64, workspace_mib=16, tmp_mib=16, shm_mib=4, file_mib=8)
BACKENDS = [pytest.param("docker", marks=pytest.mark.engine), "local"]


def make_engine(backend: str, limits: Limits = LIMITS, run_name: str = "tests") -> Engine:
    """Return an engine, or skip with the reason (fail where CI promises one)."""
    try:
        if backend == "docker":
            from agentft.sandbox.docker import DockerEngine
            from agentft.sandbox.images import ensure_image

            ensure_image("python")
            return DockerEngine(image="python", limits=limits, run_name=run_name)
        from agentft.sandbox.local import LocalEngine

        return LocalEngine(limits=limits)
    except SandboxError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"{backend}: {error.what}")


@pytest.fixture(scope="session", params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    found = make_engine(request.param)
    yield found
    found.close()


@pytest.fixture(scope="module")
def shared(engine: Engine) -> Iterator[list[Container]]:
    """Hold at most one container, replaced by ``box`` when a test used it up."""
    held: list[Container] = []
    yield held
    for container in held:
        container.close()


@pytest.fixture
def box(engine: Engine, shared: list[Container]) -> Container:
    """A clean container."""
    if shared and shared[0].reusable:
        shared[0].reset()
    if shared and not shared[0].reusable:
        shared.pop().close()
    if not shared:
        shared.append(engine.start())
    return shared[0]


@pytest.fixture
def sh(box: Container) -> Callable[..., ExecResult]:
    """Run a shell command in ``box``."""

    def run(command: str, *, timeout_s: float = 5.0, stdin: bytes = b"") -> ExecResult:
        return box.exec(ExecRequest(argv=("bash", "-c", command), timeout_s=timeout_s, stdin=stdin))

    return run
