"""A traced step of the backbone in fake mode (floor 5): no weights, no memory, torch's own count of both.

``agentft plan --trace`` uses it beside the closed formulas. ``MemTracker`` of torch 2.7 follows every allocation of a
forward pass, a backward pass and a step of the optimiser, in float32, for one unpacked row without heads or chunks.
Mixtures of experts cannot be traced: which tokens an expert gets is known only with numbers.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from agentft.errors import ModelError
from agentft.report.plan_memory import Setup
from agentft.report.plan_models import ModelShape

GIB = 2.0**30


def trace_step(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """Return the peak of a second step in GiB, in all and of each kind that MemTracker knows.

    Raises:
        ModelError: The architecture has routed experts.
    """
    if shape.dense_layers < shape.layers:
        raise ModelError(
            "a mixture of experts cannot be traced without numbers",
            where="--trace",
            got=shape.config.model_type,
            hint="leave --trace away: the closed formulas know experts",
        )
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(shape.config, attn_implementation="sdpa", dtype=torch.float32)
        if setup.recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for step in range(2):
                _step(model, optimizer, shape, setup)
                if step == 0:
                    tracker.reset_mod_stats()
        peak = tracker.get_tracker_snapshot("peak")
    sizes = next(iter(peak.values()))
    return {str(getattr(kind, "value", kind)): size / GIB for kind, size in sizes.items() if size}


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, shape: ModelShape, setup: Setup) -> None:
    rows = max(1, setup.tokens // setup.longest)
    ids = torch.zeros((rows, setup.longest), dtype=torch.int64)
    hidden = model.get_submodule("model")(input_ids=ids, use_cache=False).last_hidden_state
    trained = hidden.reshape(-1, hidden.shape[-1])[: setup.trained]
    logits = model.get_submodule("lm_head")(trained)
    cross_entropy(logits, torch.zeros(setup.trained, dtype=torch.int64), reduction="sum").backward()
    optimizer.step()
    optimizer.zero_grad()
