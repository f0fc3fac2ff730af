"""RASPBerry: it follows the failure record, it lowers what fails, it is differentiable, and off is off."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support_algorithms import RECORDED, Result, train

from agentft.algorithms.raspberry import FailureRecord, RASPBerry, drawn_anchors, new_outcomes, suppressed
from agentft.config.algorithms import RaspberryConfig
from agentft.feedback.judged import Judged
from agentft.feedback.reward import Outcome
from agentft.tools import TOOL_INDEX, ToolCall

TOOLS = ("pytest_run", "file_read", "file_edit")
ALWAYS = RaspberryConfig(enabled=True, window=4, p=1.0, alpha=0.5)


def judged(key: str, tool: str, credit: float | None, *, source: Any = "recorded", role: Any = "call") -> Judged:
    outcome = Outcome(reward=0.0, target=0.0, mask=1.0)
    return Judged(
        key=key, source=source, role=role, session_id="s", step=1, call=ToolCall(tool, {}), result=None,
        outcome=outcome, credit=credit,
    )  # fmt: skip


def test_the_rate_is_that_of_the_newest_window() -> None:
    record = FailureRecord(TOOLS, 4)
    assert record.rates().tolist() == [0, 0, 0]
    record.add([("file_edit", True), ("file_read", False), ("unheard_of", True)])
    assert record.rates().tolist() == [0, 0, 0.25], "one failure of one execution is not yet a rate of 1"
    record.add([("file_edit", True)] * 3)
    assert record.rates().tolist() == [0, 0, 1]
    record.add([("file_edit", False)] * 3)
    assert record.rates().tolist() == [0, 0, 0.25]


def test_only_credited_calls_of_training_count_in_the_order_of_their_keys() -> None:
    found = new_outcomes(
        [
            judged("recorded/1/s/2", "file_edit", -0.5),
            judged("recorded/1/s/1", "file_read", 1.0),
            judged("recorded/1/s/3", "pytest_run", None),  # found a failure: information, not fault
            judged("policy/1/s/1", "file_edit", 1.0, source="policy"),
            judged("policy/1/s/0", "file_edit", -0.5, source="policy", role="setup"),
            judged("probe/1/s/1", "file_edit", -0.5, source="probe"),
        ],
        -0.5,
    )
    assert found == [("file_edit", False), ("file_read", False), ("file_edit", True)]


def test_the_draw_hangs_on_session_and_place_not_on_the_row() -> None:
    batch = {"tool_at": torch.tensor([[r, c] for r in range(40) for c in range(50)]), "session_id": list("ab" * 20)}
    found = drawn_anchors(batch, 0.1, "17/raspberry/3")
    assert float(found.mean()) == pytest.approx(0.1, abs=0.05)
    assert torch.equal(found[:50], found[100:150]), "row 0 and row 2 hold one session"
    moved = {"tool_at": batch["tool_at"].flip(0), "session_id": batch["session_id"]}
    assert torch.equal(drawn_anchors(moved, 0.1, "17/raspberry/3").flip(0), found)
    assert not torch.equal(drawn_anchors(batch, 0.1, "17/raspberry/4"), found)
    assert drawn_anchors(batch, 1.0, "x").all()
    assert not drawn_anchors(batch, 0.0, "x").any()


def fit(counts: Sequence[int], rates: Sequence[float], alpha: float) -> torch.Tensor:
    """Fit free logits to calls of three tools, with the margin in the loss; return the log-probabilities."""
    logits = torch.zeros(3, requires_grad=True)
    targets = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    optimiser = torch.optim.LBFGS([logits], max_iter=100)

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        seen = suppressed(logits.expand(len(targets), 3), torch.ones(len(targets)), torch.tensor(rates), alpha)
        value = F.cross_entropy(seen, targets)
        value.backward()
        return value

    optimiser.step(loss)
    return logits.detach().log_softmax(-1)


def test_a_tool_that_fails_ends_lower_by_alpha_times_its_rate() -> None:
    plain, found = fit([2, 3, 5], [0, 0, 0], 0.5), fit([2, 3, 5], [0.0, 0.0, 0.8], 0.5)
    assert plain.exp().tolist() == pytest.approx([0.2, 0.3, 0.5], abs=1e-3)
    odds = (found[2] - found[0]) - (plain[2] - plain[0])
    assert float(odds) == pytest.approx(-0.5 * 0.8, abs=1e-3)
    assert float(found[1] - found[0]) == pytest.approx(float(plain[1] - plain[0]), abs=1e-3)
    same = fit([2, 3, 5], [0.6, 0.6, 0.6], 0.5)
    assert same.tolist() == pytest.approx(plain.tolist(), abs=1e-3), "tools that all fail alike change nothing"


def test_the_gradient_is_that_of_the_expected_failure_rate() -> None:
    """To first order in alpha, as the module's text says."""
    rates, logits, alpha = torch.tensor([0.0, 0.3, 0.9]), torch.randn(3, dtype=torch.float64), 1e-4
    logits.requires_grad_()
    target = torch.tensor([2])
    (plain,) = torch.autograd.grad(F.cross_entropy(logits[None], target), logits)
    (found,) = torch.autograd.grad(
        F.cross_entropy(suppressed(logits[None], torch.ones(1), rates, alpha), target), logits
    )
    chance = logits.detach().softmax(-1)
    expected = chance * (rates - (chance * rates).sum())
    torch.testing.assert_close((found - plain) / alpha, expected, atol=1e-3, rtol=1e-2)


def with_raspberry(config: RaspberryConfig) -> Any:
    def make(feedback: Any) -> Any:
        return [RASPBerry(config, feedback, tools=list(TOOL_INDEX), failed=-0.5, seed=17)], []

    return make


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Six batches: twelve sessions twice; a third of them hold an edit that failed."""
    folder = tmp_path_factory.mktemp("raspberry")
    make = with_raspberry(ALWAYS)
    return {
        "plain": train(folder / "plain", batches=6),
        "whole": train(folder / "whole", make, batches=6, save_every=3),
        "parts": train(folder / "parts", make, batches=6, microbatch=1),
        "never": train(folder / "never", with_raspberry(RaspberryConfig(enabled=True, p=0.0)), batches=6),
        "weak": train(folder / "weak", with_raspberry(RaspberryConfig(enabled=True, alpha=0.0, p=1.0)), batches=6),
        "resumed": train(folder / "resumed", make, batches=6, load=folder / "whole" / "checkpoints" / "ba3.pt"),
    }


def test_the_record_follows_what_failed(runs: dict[str, Result]) -> None:
    logged = runs["whole"].logged
    assert {name for name in logged if "failure_rate" in name} == {"raspberry/failure_rate/file_edit"}
    rates = logged["raspberry/failure_rate/file_edit"]
    assert all(0 < rate <= 1 for rate in rates)
    assert runs["whole"].curve[0] == runs["plain"].curve[0], "there is no record in the first batch"
    tools = [[batch["loss/train/tool"] for batch in runs[name].curve] for name in ("whole", "plain")]
    assert all(a != b for a, b in zip(*(curve[1:] for curve in tools), strict=True))
    assert all(a["loss/train/code"] > 0 for a in runs["whole"].curve)


def test_without_effect_every_loss_stays_bit_for_bit(runs: dict[str, Result]) -> None:
    for name in ("never", "weak"):
        assert runs[name].curve == runs["plain"].curve
        for key, tensor in runs["plain"].weights.items():
            assert torch.equal(runs[name].weights[key], tensor), key


def test_the_record_survives_a_resume(runs: dict[str, Result]) -> None:
    assert runs["resumed"].curve == runs["whole"].curve[3:]
    for key, tensor in runs["whole"].weights.items():
        assert torch.equal(runs["resumed"].weights[key], tensor), key


def test_the_losses_do_not_depend_on_the_cut(runs: dict[str, Result]) -> None:
    for got, expected in zip(runs["parts"].curve, runs["whole"].curve, strict=True):
        assert got == pytest.approx(expected, abs=1e-5)


def test_what_is_logged_is_what_the_head_says(tmp_path: Path) -> None:
    """The trace holds the tool head's own probabilities, not those with the margin."""
    from agentft.feedback.trace import read_traces

    strong = RaspberryConfig(enabled=True, window=1, p=1.0, alpha=50.0)
    train(tmp_path / "strong", with_raspberry(strong), batches=2, config=RECORDED)
    probs = [line.tool_probs["file_edit"] for line in read_traces(tmp_path / "strong") if line.tool_probs]
    assert probs
    assert max(probs) < 0.5
