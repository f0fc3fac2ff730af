"""The Fisher diagonal against a brute-force loop, its file, and that it belongs to one set of weights only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from support_two_tasks import task, tiny_agent

from agentft.errors import ModelError
from agentft.evals.fisher import row_of
from agentft.models.export import export, save_model
from agentft.models.fisher import (
    Fisher,
    FisherRow,
    check_belongs,
    diagonal_fisher,
    load_fisher,
    save_fisher,
    weights_digest,
)

ROWS = [row_of(sample) for sample in task(0, 3)[:6]]
LONG = FisherRow(
    input_ids=torch.tensor([0, 5, 9, 7, 3]),
    position_ids=torch.arange(5),
    targets=torch.tensor([True, False, True, True, True]),
)


def gradient_of_row(backbone: torch.nn.Module, row: FisherRow, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of log p(targets) by plain transformers: its own mask, its own logits, its own loss."""
    backbone.zero_grad()
    logits = backbone(input_ids=row.input_ids[None], position_ids=row.position_ids[None]).logits[0, :-1]
    at = row.targets[1:]
    (-F.cross_entropy(logits[at], targets, reduction="sum")).backward()
    return {name: weight.grad.clone() for name, weight in backbone.named_parameters()}


@pytest.mark.parametrize("rows", [ROWS, [*ROWS, LONG]], ids=["one target", "several targets"])
def test_the_empirical_diagonal_is_the_mean_of_squares_of_single_samples(rows: list[FisherRow]) -> None:
    backbone = tiny_agent(3).backbone.eval()
    found, samples, tokens = diagonal_fisher(backbone, rows, kind="empirical")
    assert (samples, tokens) == (len(rows), sum(int(row.targets[1:].sum()) for row in rows))
    singles = [gradient_of_row(backbone, row, row.input_ids[1:][row.targets[1:]]) for row in rows]
    for name, diagonal in found.items():
        expected = sum(gradient[name] ** 2 for gradient in singles) / tokens
        torch.testing.assert_close(diagonal, expected, atol=1e-9, rtol=2e-4)
        squared_mean = (sum(gradient[name] for gradient in singles) / len(singles)) ** 2
        assert diagonal.sum() > 1.5 * squared_mean.sum(), "the square of a mean is something else"


def test_the_true_diagonal_is_the_expectation_over_the_models_own_answers() -> None:
    """Over one target, the draws average to Σ_y p(y)·(∂ log p(y))², which can be added up for all y."""
    backbone, row = tiny_agent(3).backbone.eval(), ROWS[0]
    logits = backbone(input_ids=row.input_ids[None], position_ids=row.position_ids[None]).logits[0, 1]
    chances = logits.softmax(-1).detach()
    expected: dict[str, torch.Tensor] = {}
    for answer, chance in enumerate(chances):
        for name, gradient in gradient_of_row(backbone, row, torch.tensor([answer])).items():
            expected[name] = expected.get(name, 0) + chance * gradient**2
    found, _, _ = diagonal_fisher(backbone, [row] * 1200, kind="true", seed=5)
    name = "lm_head.weight"
    assert float(found[name].sum() / expected[name].sum()) == pytest.approx(1, rel=0.1)
    assert torch.corrcoef(torch.stack((found[name].flatten(), expected[name].flatten())))[0, 1] > 0.97
    again, _, _ = diagonal_fisher(backbone, [row] * 3, kind="true", seed=5)
    other, _, _ = diagonal_fisher(backbone, [row] * 3, kind="true", seed=5)
    assert torch.equal(again[name], other[name])


def test_without_a_target_there_is_nothing_to_measure() -> None:
    backbone = tiny_agent(3).backbone
    nothing = FisherRow(
        input_ids=torch.tensor([1, 2]), position_ids=torch.arange(2), targets=torch.tensor([True, False])
    )
    with pytest.raises(ModelError, match="no sample has a target"):
        diagonal_fisher(backbone, [nothing], kind="empirical")


def test_the_file_keeps_everything_and_belongs_to_its_weights(tmp_path: Path) -> None:
    model = tiny_agent(3)
    save_model(model, tmp_path / "run" / "model")
    diagonal, samples, tokens = diagonal_fisher(model.backbone, ROWS, kind="true")
    digest = weights_digest(tmp_path / "run" / "model")
    fisher = Fisher(
        diagonal=diagonal, kind="true", samples=samples, tokens=tokens, weights=digest, data="earlier/train"
    )
    save_fisher(fisher, tmp_path / "fisher.safetensors")
    read = load_fisher(tmp_path / "fisher.safetensors")
    assert (read.kind, read.samples, read.tokens, read.weights, read.data) == (
        "true", samples, tokens, digest, "earlier/train",
    )  # fmt: skip
    assert all(torch.equal(read.diagonal[name], tensor) for name, tensor in diagonal.items())
    check_belongs(read, tmp_path / "run" / "model", where="here")
    export(tmp_path / "run", tmp_path / "plain")
    check_belongs(read, tmp_path / "plain", where="here")
    weights = load_file(tmp_path / "plain" / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="other weights") as caught:
        check_belongs(read, tmp_path / "plain", where="forgetting.ewc.fisher")
    assert "agentft fisher" in str(caught.value)


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no Fisher information"):
        load_fisher(tmp_path / "none")
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(ModelError, match="this is no Fisher information"):
        load_fisher(tmp_path / "other")
    (tmp_path / "torn").write_bytes((tmp_path / "other").read_bytes()[:20])
    with pytest.raises(ModelError, match="cannot be read"):
        load_fisher(tmp_path / "torn")
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(ModelError, match="no weights here"):
        weights_digest(tmp_path)
