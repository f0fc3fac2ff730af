"""The diagonal Fisher information of a backbone (floor 3): how much earlier data depends on each weight.

F_i = (1/T)·Σ_n (∂ log p(targets of sample n) / ∂w_i)², T the number of target tokens of all samples: Kirkpatrick et al.
2017 ("Overcoming catastrophic forgetting in neural networks", PNAS 114(13)), from the gradient of every sample by
itself; the square of a batch's mean gradient would be another, far smaller thing. A sample is one row. Divided by
tokens, so that w − w* of any size raises the earlier data's loss a token by about ½·Σ F_i·(w_i − w*_i)².

Two kinds, after Kunstner et al. 2019 ("Limitations of the empirical Fisher approximation"): ``true`` draws each target
from the model's own prediction (one draw a token), which makes F the expected curvature; ``empirical`` takes the
recorded targets, which is cheaper by nothing and near it only where the model fits the data.

The file (safetensors) holds F by name of the weight, and in its metadata what it was measured on and a digest of the
weights it was measured at: it belongs to those weights and to no others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from agentft.errors import ModelError
from agentft.files import whole_file
from agentft.models.backbone import hidden_states, vocabulary_logits

Kind = Literal["true", "empirical"]
FORMAT = "agentft-fisher/1"


@dataclass(frozen=True, kw_only=True)
class FisherRow:
    """One sample. ``input_ids``, ``position_ids`` [T] int64; ``targets`` [T] bool, the first token is never one."""

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor


@dataclass(frozen=True, kw_only=True)
class Fisher:
    """A measured diagonal (name → float32 of the weight's shape) at the weights with the digest ``weights``."""

    diagonal: dict[str, Tensor]
    kind: Kind
    samples: int
    tokens: int
    weights: str
    data: str


def diagonal_fisher(
    backbone: PreTrainedModel, rows: Iterable[FisherRow], *, kind: Kind, seed: int = 0
) -> tuple[dict[str, Tensor], int, int]:
    """Return the diagonal by weight name (float32, on the backbone's device), the samples and the tokens it took.

    Only weights that require a gradient are measured. The backbone is left in its mode, without gradients.

    Args:
        backbone: A causal LM.
        rows: Samples; one without a target is left out.
        kind: Where targets come from: see the module.
        seed: Of the draws of ``true``.

    Raises:
        ModelError: No row has a target.
    """
    weights = {name: weight for name, weight in backbone.named_parameters() if weight.requires_grad}
    squares = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in weights.items()}
    generator = torch.Generator().manual_seed(seed)
    samples = tokens = 0
    was_training = backbone.training
    backbone.eval()
    try:
        for row in rows:
            count = int(row.targets[1:].sum())
            if not count:
                continue
            log_likelihood = _log_likelihood(backbone, row, generator if kind == "true" else None)
            found = torch.autograd.grad(log_likelihood, list(weights.values()), allow_unused=True)
            for total, gradient in zip(squares.values(), found, strict=True):
                if gradient is not None:
                    total.addcmul_(gradient.float(), gradient.float())
            samples, tokens = samples + 1, tokens + count
    finally:
        backbone.train(was_training)
    if not tokens:
        raise ModelError("no sample has a target to measure on", got=f"{samples} samples")
    for total in squares.values():
        total.div_(tokens)
    return squares, samples, tokens


def _log_likelihood(backbone: PreTrainedModel, row: FisherRow, generator: torch.Generator | None) -> Tensor:
    """Return Σ log p of the row's targets []: recorded ones, or drawn ones where there is a generator."""
    device = backbone.device
    hidden = hidden_states(backbone, row.input_ids[None].to(device), row.position_ids[None].to(device))[0]
    at = row.targets[1:].nonzero()[:, 0]
    log_chances = torch.log_softmax(vocabulary_logits(backbone, hidden[at.to(device)]).float(), dim=-1)
    if generator is None:
        targets = row.input_ids[at + 1]
    else:
        targets = torch.multinomial(log_chances.detach().exp().cpu(), 1, generator=generator)[:, 0]
    return log_chances.gather(1, targets[:, None].to(device)).sum()


def weights_digest(folder: Path) -> str:
    """Return a digest of the weights in a model folder: of every tensor's name, type, shape and content.

    Raises:
        ModelError: There are no safetensors weights.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ModelError("no weights here", where=str(folder), expected="model.safetensors, or its parts")
    where: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            where |= dict.fromkeys(tensors.keys(), file)
    digest = hashlib.sha256()
    for name, file in sorted(where.items()):
        with safe_open(file, framework="pt") as tensors:
            tensor = tensors.get_tensor(name)
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def save_fisher(fisher: Fisher, path: Path) -> None:
    """Write a measured diagonal; the file appears whole or not at all."""
    about = {name: str(getattr(fisher, name)) for name in ("kind", "samples", "tokens", "weights", "data")}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in fisher.diagonal.items()}
    with whole_file(path) as partial:
        save_file(tensors, partial, metadata={"format": FORMAT, **about})


def load_fisher(path: Path) -> Fisher:
    """Read a diagonal.

    Raises:
        ModelError: The file is missing, damaged, or something else.
    """
    hint = "measure it: agentft fisher RUN --shards FOLDER -o FILE"
    if not path.is_file():
        raise ModelError("no Fisher information here", where=str(path), hint=hint)
    try:
        with safe_open(path, framework="pt") as tensors:
            about: dict[str, Any] = tensors.metadata() or {}
            diagonal = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as cause:
        raise ModelError("the file cannot be read", where=str(path), got=cause, hint=hint) from cause
    if about.get("format") != FORMAT or about.get("kind") not in get_args(Kind):
        raise ModelError("this is no Fisher information", where=str(path), got=about.get("format"), hint=hint)
    return Fisher(
        diagonal=diagonal,
        kind=about["kind"],
        samples=int(about["samples"]),
        tokens=int(about["tokens"]),
        weights=about["weights"],
        data=about["data"],
    )


def check_belongs(fisher: Fisher, model: Path, *, where: str) -> None:
    """Refuse Fisher information that was measured at other weights than those in ``model``.

    Raises:
        ModelError: It was; or ``model`` is no local folder with weights.
    """
    found = weights_digest(model)
    if found != fisher.weights:
        raise ModelError(
            "this Fisher information was measured at other weights",
            where=where,
            got=f"weights {fisher.weights[:12]}…, measured on {fisher.data}",
            expected=f"weights {found[:12]}… of {model}",
            hint="measure it for these weights: agentft fisher RUN --shards FOLDER -o FILE",
        )
