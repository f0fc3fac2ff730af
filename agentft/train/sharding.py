"""FSDP2 (floor 5): weights, gradients and optimiser state shared out over the processes (``train.distributed``).

Each decoder layer is one unit: gathered when it runs, freed behind it. Everything else (embeddings, last norm,
vocabulary head, our heads) belongs to the model as a whole, which therefore is entered through its ``forward`` only.

Composer wraps a model's children and would never see the vocabulary head run, because the backbone is entered through
its decoder: so the model is shared out here, before its optimiser is made, and Composer is told to leave it alone.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from composer import Trainer
from composer.core import Precision
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from agentft.config.distributed import FsdpConfig
from agentft.models.agent_model import AgentModel
from agentft.models.backbone import layers_of


def share_out(model: AgentModel, config: FsdpConfig, *, on_gpu: bool, precision: Precision) -> dict[str, Any]:
    """Share ``model`` out over all processes, in place; return the options that Composer's trainer then needs.

    With ``amp_bf16`` weights are gathered in bfloat16 and gradients are summed in float32.
    """
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": config.reshard_after_forward}
    if on_gpu and precision == Precision.AMP_BF16:
        # inputs stay as they are: cursor targets are pixels, and bfloat16 has three digits
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in layers_of(model.backbone):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if not on_gpu:
        _average_over_processes(model)
    register_fsdp_forward_method(model, "eval_forward")
    for child in model.children():
        child._fsdp_wrap = False  # type: ignore[assignment]
    return {"parallelism_config": {"fsdp": FSDP2Config(state_dict_type="full")}}


def _average_over_processes(model: AgentModel) -> None:
    """Divide gradients by the number of processes: gloo is asked for their mean and silently gives their sum."""

    def divide(summed: torch.Tensor) -> None:
        summed.div_(dist.get_world_size())

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(divide)


def whole_weights(model: AgentModel) -> dict[str, torch.Tensor]:
    """Return the whole weights on the first rank, nothing on the others. A collective call."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, torch.Tensor], get_model_state_dict(model, options=options))


class OneReduction(Trainer):
    """Reduces gradients once a batch, after its last microbatch (``gradients: whole``), as DDP does."""

    def _train_microbatch(
        self, use_grad_scaling: bool, current_batch_size: int | float, is_final_microbatch: bool
    ) -> dict[str, torch.Tensor]:
        cast(FSDPModule, self.state.model).set_requires_gradient_sync(is_final_microbatch)
        return super()._train_microbatch(use_grad_scaling, current_batch_size, is_final_microbatch)
