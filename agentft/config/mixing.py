"""``data.packing`` and ``data.mix`` (floor 1): what cannot be packed, and a mix that no global batch can hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from agentft.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class MixPartsConfig:
    """Shares of a global batch, as whole numbers: 3 and 1 are three quarters and a quarter."""

    single_function: int = 3  # sessions whose repair is in one function
    multi_file: int = 1  # sessions whose repair touches several files


@dataclass(frozen=True, kw_only=True)
class MixConfig:
    """What every global batch is made of."""

    by: Literal["complexity"] = "complexity"  # field of the record that tells the parts
    parts: MixPartsConfig = field(default_factory=MixPartsConfig)  # shares of a global batch


def quotas(parts: MixPartsConfig, batch_size: int) -> dict[str, int] | None:
    """Return the rows of each part in a global batch; None where they are not whole numbers."""
    shares = asdict(parts)
    total = sum(shares.values())
    if total < 1 or batch_size % total:
        return None
    return {name: share * batch_size // total for name, share in shares.items()}


def problems(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield the parts of a ``checks.Problem`` for what cannot be done or has no effect."""
    data, longest = config.data, config.text.max_tokens
    if data.pack_tokens is not None and data.packing != "pack":
        yield {
            "keys": ("data.pack_tokens", "data.packing"),
            "what": "data.pack_tokens has no effect",
            "got": f"data.packing={data.packing}",
            "hint": "set data.packing=pack or leave data.pack_tokens null",
        }
    elif data.pack_tokens is not None and data.pack_tokens < longest:
        yield {
            "keys": ("data.pack_tokens", "text.max_tokens"),
            "what": "the longest session does not fit into one forward pass",
            "got": f"pack_tokens={data.pack_tokens}, text.max_tokens={longest}",
            "expected": f"data.pack_tokens at least {longest}",
        }
    if config.model.attention == "flash_attention_2":
        yield from _flash_problems(config)
    if data.mix is not None:
        yield from _mix_problems(config, data.mix)


def _flash_problems(config: RunConfig) -> Iterator[dict[str, Any]]:
    wrong = {
        "data.packing": (config.data.packing, config.data.packing == "pack", "pack"),
        "train.device": (config.train.device, config.train.device != "cpu", "gpu or auto"),
        "train.precision": (config.train.precision, config.train.precision == "amp_bf16", "amp_bf16"),
    }
    for key, (got, right, expected) in wrong.items():
        if not right:
            yield {
                "keys": ("model.attention", key),
                "what": "flash_attention_2 computes packed rows in half precision on a GPU, and nothing else",
                "got": f"{key}={got}",
                "expected": f"{key}={expected}",
                "hint": "or set model.attention=sdpa",
            }


def _mix_problems(config: RunConfig, mix: MixConfig) -> Iterator[dict[str, Any]]:
    shares, batch = asdict(mix.parts), config.data.batch_size
    named = ", ".join(f"{name}={share}" for name, share in shares.items())
    if min(shares.values()) < 0 or not sum(shares.values()):
        yield {
            "keys": ("data.mix.parts", "data.mix"),
            "what": "shares of a batch are 0 or more, and one of them is above 0",
            "got": named,
        }
    elif batch >= 1 and quotas(mix.parts, batch) is None:
        total = sum(shares.values())
        yield {
            "keys": ("data.batch_size", "data.mix.parts"),
            "what": "a global batch cannot hold this mix in whole sessions",
            "got": f"batch_size={batch}, parts {named}",
            "expected": f"data.batch_size a multiple of {total}",
            "hint": f"set data.batch_size={max(1, round(batch / total)) * total}",
        }
    if config.forgetting.replay.share:
        yield {
            "keys": ("data.mix", "forgetting.replay.share"),
            "what": "replayed rows take the place of others, so that no mix can be held",
            "got": f"forgetting.replay.share={config.forgetting.replay.share:g}",
            "hint": "leave data.mix null, or mix earlier rows in with forgetting.lm_share",
        }
