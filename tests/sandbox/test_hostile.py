"""The conformance suite as tests: every hostile program and fault, on both engines; what is promised must hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sandbox_engines import BACKENDS, make_engine

from agentft.sandbox.conformance.check import Check, Stage
from agentft.sandbox.conformance.engines import open_subject
from agentft.sandbox.conformance.suite import CHECKS


@pytest.fixture(scope="module", params=BACKENDS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    make_engine(request.param).close()  # skips if there is none
    with open_subject(request.param, image="python", host=None) as subject:
        stage = Stage(subject)
        yield stage
        stage.close()


@pytest.mark.parametrize("one", CHECKS, ids=[one.name for one in CHECKS])
def test_hostile(stage: Stage, one: Check) -> None:
    outcome = stage.run(one)
    if outcome.verdict in ("not promised", "not run"):
        pytest.skip(f"{outcome.verdict}: {outcome.seen}")
    assert outcome.verdict == "held", f"must: {one.must} seen: {outcome.seen}"
