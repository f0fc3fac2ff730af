"""One engine per transport for the whole session, and clean containers on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sandbox_engines import BACKENDS, make_engine

from agentft.sandbox.base import ExecRequest, ExecResult
from agentft.sandbox.container import Container, Engine


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
