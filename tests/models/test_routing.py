"""Tools at decoding: intents and workspace decide what is allowed, and generation obeys."""

from __future__ import annotations

import math

import pytest
import torch
from agent_samples import VOCAB, make_agent

from agentft.etai import INTENTS, IdeContext, InlineWorkspace
from agentft.models.routing import (
    INTENT_RULES,
    RAISED_BIAS,
    HeadTap,
    Route,
    ToolLogitsProcessor,
    ToolRouter,
    WorkspaceState,
)
from agentft.tools import TOOL_INDEX

TOOL_START, ARGS = 3, 4
NAMES = {name: [50 + row // 4, 70 + row % 4, *([90] if row % 3 == 0 else [])] for name, row in TOOL_INDEX.items()}
"""Names of two or three tokens; four tools share each first token."""


def processor(routes, **options) -> ToolLogitsProcessor:
    return ToolLogitsProcessor(NAMES, tool_start_id=TOOL_START, args_id=ARGS, routes=routes, **options)


def only(*tools: str) -> Route:
    return Route(allowed=frozenset(tools))


def read_name(ids: list[int]) -> str:
    """The name behind the first tool-start token; fails unless it is one, followed by the args token."""
    behind = ids[ids.index(TOOL_START) + 1 :]
    name = next(
        name for name, tokens in NAMES.items() if behind[: len(tokens)] == tokens and behind[len(tokens)] == ARGS
    )
    return name


def test_every_rule_is_of_a_known_intent_and_names_known_tools() -> None:
    assert set(INTENT_RULES) == set(INTENTS)
    for rule in INTENT_RULES.values():
        assert rule.hides | rule.raises <= set(TOOL_INDEX)


def test_a_test_failure_hides_shipping_and_raises_test_runs() -> None:
    route = ToolRouter().route(["fix_test_failure"])
    assert set(TOOL_INDEX) - route.allowed == {"npm_publish", "docker_build"}
    assert route.bias == {"pytest_run": RAISED_BIAS, "jest_run": RAISED_BIAS}


def test_a_tool_that_another_active_intent_needs_stays() -> None:
    both = ToolRouter().route({"fix_test_failure": 0.9, "release_package": 0.8, "fix_lint": 0.1})
    assert {"npm_publish", "docker_build"} <= both.allowed
    assert "lint_run" not in both.bias, "an intent below the threshold does nothing"
    assert "file_edit" in ToolRouter().route(["explore_code", "fix_test_failure"]).allowed


def test_no_active_intent_allows_everything() -> None:
    assert ToolRouter().route({"fix_lint": 0.2}).allowed == set(TOOL_INDEX)


def test_the_workspace_narrows_what_is_left() -> None:
    python_only = InlineWorkspace(files={"src/a.py": "", "tests/test_a.py": ""})
    clean = WorkspaceState.of(IdeContext(git_status=""), python_only)
    allowed = ToolRouter().route(["release_package"], clean).allowed
    assert {"npm_publish", "jest_run", "docker_build", "git_commit"}.isdisjoint(allowed)
    assert "pytest_run" in allowed
    dirty = WorkspaceState.of(IdeContext(git_status=" M web/package.json"))
    assert {"npm_publish", "git_commit"} <= ToolRouter().route(["release_package"], dirty).allowed
    javascript = WorkspaceState.of(IdeContext(), InlineWorkspace(files={"web/package.json": "", "Dockerfile": ""}))
    allowed = ToolRouter().route(["release_package"], javascript).allowed
    assert {"npm_publish", "jest_run", "docker_build", "git_commit"} <= allowed
    assert "pytest_run" not in allowed


@pytest.mark.parametrize("seed", range(4))
def test_generation_writes_only_allowed_names(seed: int) -> None:
    torch.manual_seed(seed)
    backbone = make_agent(seed=seed).backbone.eval()
    routes = [only("pytest_run", "file_read"), only("git_log"), Route(allowed=frozenset(TOOL_INDEX))]
    prompt = torch.randint(100, VOCAB, (3, 9))
    prompt[:, -1] = TOOL_START
    out = backbone.generate(
        prompt, max_new_tokens=8, do_sample=True, pad_token_id=0, logits_processor=[processor(routes)]
    )
    for row, route in zip(out.tolist(), routes, strict=True):
        assert read_name(row) in route.allowed


def test_outside_a_name_nothing_changes() -> None:
    process, scores = processor(only("pytest_run")), torch.randn(2, VOCAB)
    name = NAMES["pytest_run"]
    before_any_call = torch.randint(100, VOCAB, (2, 6))
    assert torch.equal(process(before_any_call, scores), scores)
    behind_the_name = torch.tensor([[100, TOOL_START, *name, ARGS], [101, TOOL_START, *name, ARGS]])
    assert torch.equal(process(behind_the_name, scores), scores)
    in_the_arguments = torch.cat((behind_the_name, torch.full((2, 1), name[0])), dim=1)
    assert torch.equal(process(in_the_arguments, scores), scores)


def test_without_bias_the_models_own_odds_are_kept() -> None:
    scores = torch.randn(1, VOCAB)
    got = processor(only("file_read", "git_status"))(torch.tensor([[100, TOOL_START]]), scores)[0]
    firsts = [NAMES["file_read"][0], NAMES["git_status"][0]]
    assert set(got.isfinite().nonzero()[:, 0].tolist()) == set(firsts)
    difference = (got[firsts[0]] - got[firsts[1]]).item()
    assert difference == pytest.approx((scores[0, firsts[0]] - scores[0, firsts[1]]).item(), abs=1e-5)


def probabilities(process: ToolLogitsProcessor, flat: torch.Tensor, prompt: list[int]) -> dict[str, float]:
    """Probability of each name under ``process`` and a model that finds every token equally likely."""
    found = {}
    for name, ids in NAMES.items():
        log_p, written = 0.0, list(prompt)
        for token in (*ids, ARGS):
            log_p += process(torch.tensor([written]), flat)[0].log_softmax(-1)[token].item()
            written.append(token)
        found[name] = math.exp(log_p)
    return found


def test_bias_multiplies_the_odds_of_whole_names() -> None:
    allowed = frozenset({"file_read", "file_write", "file_edit", "git_log"})
    route = Route(allowed=allowed, bias={"file_edit": math.log(3.0)})
    got = probabilities(processor(route), torch.zeros(1, VOCAB), [100, TOOL_START])
    assert sum(got.values()) == pytest.approx(1.0)
    assert {name for name, p in got.items() if p > 0} == allowed
    assert got["file_edit"] / got["file_write"] == pytest.approx(3.0, rel=1e-4)


def test_the_tool_heads_log_probabilities_join_in() -> None:
    agent = make_agent().eval()
    prompt = torch.randint(100, VOCAB, (1, 7))
    prompt[0, -1] = TOOL_START
    everything = Route(allowed=frozenset(TOOL_INDEX))
    with HeadTap(agent.backbone, agent.heads.tool) as tap, torch.no_grad():
        agent.backbone(input_ids=prompt)
        head = tap.tool_log_probs()[0].exp().tolist()
        got = probabilities(processor(everything, tap=tap), torch.zeros(1, VOCAB), prompt[0].tolist())
        for name, row in TOOL_INDEX.items():
            assert got[name] == pytest.approx(head[row], rel=1e-3), name
    with HeadTap(agent.backbone, agent.heads.tool) as tap:
        out = agent.backbone.generate(
            prompt, max_new_tokens=5, do_sample=False, pad_token_id=0, logits_processor=[processor(everything, tap=tap)]
        )
    assert read_name(out[0].tolist()) in TOOL_INDEX
