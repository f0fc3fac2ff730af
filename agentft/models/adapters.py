"""Adapters (floor 3): low-rank matrices beside frozen weights (LoRA), rows for new tokens, 4-bit weights (QLoRA).

    attach(backbone, config.lora, new_rows, seed)  # freezes the backbone, adds what is trained; its class stays
    save_adapters(backbone, folder)                # adapters.safetensors: the trained tensors, by name
    merge(backbone)                                # adds everything to the weights: a plain model again

LoRA is peft's (Hu et al. 2021, arXiv:2106.09685; QLoRA: Dettmers et al. 2023, arXiv:2305.14314). The rows of special
tokens that the checkpoint has never seen are ours: peft's trainable tokens copy the whole embedding table in every
forward pass and make a gradient of its size, for input and output; ours cost what the rows cost.

``backbone.build_backbone`` attaches, ``export.save_model`` and ``load_model`` save and load, ``agentft export`` merges.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from agentft.config.schema import LoraConfig
from agentft.errors import ConfigError, ModelError

ADAPTERS_FILE = "adapters.safetensors"

LINEAR_LAYERS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
)
"""Linear layers that get an adapter unless the configuration names others: attention (of DeepSeek-V3 and Kimi in its
low-rank parts) and feed-forward (fused in GLM), shared experts included."""

_ROUTED = r"(?:.*\.)?experts\.\d+\."
"""Routed experts never get one: few tokens reach each, and there are thousands of layers."""

_SAMPLED_BYTES = 1 << 20


def attach(backbone: PreTrainedModel, config: LoraConfig, new_rows: Sequence[int], seed: int) -> None:
    """Freeze ``backbone`` and add what is trained, in place: adapters, and the rows of new tokens (if they are wanted).

    Args:
        backbone: Its class and the names of its own modules stay; adapted layers become peft's ``LoraLayer``.
        config: The section `model.lora`.
        new_rows: Rows of the embedding tables that the checkpoint has never seen.
        seed: Seed of the adapters' random halves; the global random state is left alone.

    Raises:
        ModelError: A name in ``targets`` fits no layer, or none of ``LINEAR_LAYERS`` does.
    """
    backbone.requires_grad_(False)
    linear = [name for name, module in backbone.named_modules() if isinstance(module, nn.Linear)]
    pattern = target_pattern(linear, config.targets)
    wanted = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # only ever divided by r
        lora_dropout=config.dropout,
        target_modules=pattern,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(wanted, backbone)
    if new_rows:
        _add_rows(backbone, sorted(new_rows), config.train_embeddings)
    for parameter in _added(backbone).values():
        parameter.data = parameter.data.float()


def adapted_layers(backbone: nn.Module) -> list[str]:
    """Return the names of the layers that have an adapter, in the order of the model."""
    return [name for name, module in backbone.named_modules() if isinstance(module, LoraLayer)]


def new_rows(backbone: PreTrainedModel) -> list[int]:
    """Return the rows of tokens that an adapted backbone's checkpoint has never seen."""
    table = backbone.get_input_embeddings()
    return table.index.tolist() if isinstance(table, RowsIn) else []


def is_adapted(backbone: nn.Module) -> bool:
    """Whether ``attach`` was here."""
    return any(isinstance(module, LoraLayer) for module in backbone.modules())


def save_adapters(backbone: nn.Module, folder: Path) -> None:
    """Write what ``attach`` added to a backbone into ``folder``: tensors by name, float32."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _added(backbone).items()}
    save_file(tensors, folder / ADAPTERS_FILE, metadata={"format": "pt"})


@torch.no_grad()
def load_adapters(backbone: nn.Module, folder: Path) -> None:
    """Fill an adapted backbone from what ``save_adapters`` wrote.

    Raises:
        ModelError: The file is missing, or its tensors are not those of this backbone.
    """
    path = folder / ADAPTERS_FILE
    if not path.is_file():
        raise ModelError("the adapters are missing", where=str(path), hint="save the model again, or train again")
    stored, wanted = load_file(path), _added(backbone)
    shapes = [{name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (stored, wanted)]
    if shapes[0] != shapes[1]:
        differing = sorted(set(shapes[0].items()) ^ set(shapes[1].items()))
        raise ModelError("the adapters are those of another model", where=str(path), got=f"{differing[:3]}")
    for name, tensor in wanted.items():
        tensor.copy_(stored[name])


@torch.no_grad()
def merge(backbone: PreTrainedModel) -> None:
    """Add adapters and rows to the weights, in place; what is left is the plain model that was adapted.

    In float32 the logits move by rounding only (1e-5 of their size); frozen weights in another precision are
    rounded once more, which is why exports load them in float32 first.
    """
    for name, module in list(backbone.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge(safe_merge=True)
            backbone.set_submodule(name, module.get_base_layer())
    table = backbone.get_input_embeddings()
    head = backbone.get_output_embeddings()
    for wrapped, put in ((table, backbone.set_input_embeddings), (head, backbone.set_output_embeddings)):
        if isinstance(wrapped, RowsIn | RowsOut):
            weight = wrapped.base_layer.weight
            weight[wrapped.index] = wrapped.rows.to(weight.dtype)
            put(wrapped.base_layer)
    backbone.requires_grad_(True)
    if hasattr(backbone, "peft_config"):
        del backbone.peft_config


def keep_trained_only(model: nn.Module) -> None:
    """Make ``model.state_dict()`` hold the trained tensors only, and ``load_state_dict`` take such a one.

    Checkpoints of a run then hold adapters and heads, not the frozen weights, which come from the checkpoint on disk.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def drop(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in [n for n in state if n.startswith(prefix) and n.removeprefix(prefix) not in trained]:
            del state[name]

    def forgive(module: nn.Module, incompatible: Any) -> None:
        incompatible.missing_keys[:] = [n for n in incompatible.missing_keys if n.removeprefix("module.") in trained]

    model.register_state_dict_post_hook(drop)
    model.register_load_state_dict_post_hook(forgive)


def quantization(kind: str) -> BitsAndBytesConfig:
    """Return how frozen weights are quantised while they are loaded: 4-bit NormalFloat with double quantisation.

    Raises:
        ConfigError: There is no GPU, or bitsandbytes is not installed.
    """
    where = "model.quantize"
    if not torch.cuda.is_available():
        raise ConfigError("quantised weights need a GPU", where=where, got=kind, hint="set model.quantize=none")
    if find_spec("bitsandbytes") is None:
        raise ConfigError("bitsandbytes is not installed", where=where, got=kind, hint="pip install bitsandbytes")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def fingerprint(folder: Path) -> str:
    """Return a sha256 that tells checkpoints in folders apart: configuration, and both ends of each weights file.

    The first and the last MiB of a safetensors file hold names and shapes of all tensors and the values of some:
    enough to notice a checkpoint that was trained on, at a thousandth of the time of reading all of it.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{path.name}:{size}".encode() + file.read(_SAMPLED_BYTES))
            file.seek(max(size - _SAMPLED_BYTES, 0))
            digest.update(file.read())
    return digest.hexdigest()


class RowsIn(nn.Module):
    """An embedding table whose rows ``index`` are trained and whose other rows are frozen.

    Args:
        table: The frozen table [V, H].
        index: [n] int64, the trained rows.
    """

    index: Tensor
    place: Tensor

    def __init__(self, table: nn.Embedding, index: Tensor) -> None:
        super().__init__()
        self.base_layer = table
        self.rows = nn.Parameter(table.weight.detach()[index])
        place = torch.full((table.num_embeddings,), -1, device=index.device)
        place[index] = torch.arange(len(index), device=index.device)
        self.register_buffer("index", index, persistent=False)
        self.register_buffer("place", place, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The frozen table, for its dtype and device; its rows ``index`` are as they were before training."""
        return self.base_layer.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return embeddings [..., H] of ids [...]; a table that scales its output (Gemma) scales ours too."""
        plain = self.base_layer(input_ids)
        place = self.place[input_ids]
        own = F.embedding(place.clamp_min(0), self.rows) * getattr(self.base_layer, "embed_scale", 1.0)
        return torch.where((place >= 0)[..., None], own.to(plain.dtype), plain)


class RowsOut(nn.Module):
    """A vocabulary head whose rows ``index`` are trained and whose other rows are frozen.

    Args:
        head: The frozen head [V, H].
        index: [n] int64, the trained rows.
        tied: The input side, if both share one table: its rows are used.
    """

    index: Tensor

    def __init__(self, head: nn.Linear, index: Tensor, tied: RowsIn | None) -> None:
        super().__init__()
        self.base_layer = head
        self._tied = (tied,)  # in a tuple: its rows are registered once, on the input side
        self.register_buffer("index", index, persistent=False)
        if tied is None:
            self.own_rows = nn.Parameter(head.weight.detach()[index])

    @property
    def rows(self) -> nn.Parameter:
        """The trained rows [n, H]."""
        tied = self._tied[0]
        return self.own_rows if tied is None else tied.rows

    @property
    def weight(self) -> Tensor:
        """The frozen matrix, for its dtype and device; its rows ``index`` are as they were before training."""
        return self.base_layer.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden states [..., H]."""
        plain = self.base_layer(hidden)
        bias = None if self.base_layer.bias is None else self.base_layer.bias[self.index]
        own = F.linear(hidden.to(self.rows.dtype), self.rows, bias)
        return plain.index_copy(-1, self.index, own.to(plain.dtype))


def _add_rows(backbone: PreTrainedModel, new_rows: list[int], train: bool) -> None:
    table, head = backbone.get_input_embeddings(), backbone.get_output_embeddings()
    if not isinstance(table, nn.Embedding) or not isinstance(head, nn.Linear):
        raise ModelError(
            "adapters need an Embedding and a Linear layer as the two ends of the model",
            where="model.lora",
            got=f"{type(table).__name__}, {type(head).__name__}",
            hint="set model.lora=null",
        )
    index = torch.tensor(new_rows, device=table.weight.device)
    tied = table.weight is head.weight
    rows_in = RowsIn(table, index)
    backbone.set_input_embeddings(rows_in)
    rows_out = RowsOut(head, index, rows_in if tied else None)
    backbone.set_output_embeddings(rows_out)
    for ends in (rows_in, rows_out):
        ends.rows.requires_grad_(train)


def _added(backbone: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of adapters and new rows by name, each once."""
    own = re.compile(r"(.*\.)?(lora_[AB]\.\w+\.weight|rows|own_rows)")
    return {name: parameter for name, parameter in backbone.named_parameters() if own.fullmatch(name)}


def target_pattern(linear: Sequence[str], targets: Sequence[str]) -> str:
    """Return the regular expression of the layers that get an adapter, out of the names of all ``linear`` layers.

    Raises:
        ModelError: A name in ``targets`` fits no layer, or none of ``LINEAR_LAYERS`` does.
    """
    fits = {target: rf"(?!{_ROUTED})(?:.*\.)?{re.escape(target)}" for target in targets or LINEAR_LAYERS}
    found = [target for target, regex in fits.items() if any(re.fullmatch(regex, name) for name in linear)]
    missing = [target for target in targets if target not in found]
    if missing or not found:
        kinds = sorted({name.rpartition(".")[2] for name in linear if not re.match(_ROUTED, name)})
        raise ModelError(
            "no linear layer of the backbone has this name",
            where="model.lora.targets",
            got=", ".join(missing) or "[], which stands for " + ", ".join(LINEAR_LAYERS),
            expected="names among " + ", ".join(kinds),
        )
    return "|".join(fits[target] for target in found)
