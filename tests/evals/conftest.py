"""An agent that knows four sessions by heart, trained once for all tests of this folder."""

from __future__ import annotations

import pytest
from support_agent import learn_by_heart, make_model, make_renderer
from support_known import KNOWN

from agentft.models.agent_model import AgentModel
from agentft.text.render import Renderer


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return make_renderer(KNOWN)


@pytest.fixture(scope="session")
def learned(renderer: Renderer) -> AgentModel:
    return learn_by_heart(make_model(renderer), renderer, KNOWN)
