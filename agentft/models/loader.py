"""What an exported folder needs to read its heads (floor 3).

``export`` writes these functions, with the heads and the rotary module, into ``load_heads.py``: they import nothing of
this package there, so an export can be used where agentft is not installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentft.models.backbone import decoder_of, layer_masks
from agentft.models.heads import AgentHeads
from agentft.models.rotary import install


def load_agent(folder: str | Path = ".") -> tuple[PreTrainedModel, AgentHeads, dict[str, Any]]:
    """Return backbone, heads and ``heads.json`` of an exported folder; feedback positions are installed if on."""
    about = json.loads((Path(folder) / "heads.json").read_text(encoding="utf-8"))
    backbone = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, dtype=torch.float32)
    feedback = about["feedback_positions"]
    if feedback["enabled"]:
        install(backbone, feedback["start"], feedback["rotary_base"])
    heads = AgentHeads(about["hidden_size"], len(about["intents"]), len(about["tools"]))
    heads.load_state_dict(load_file(Path(folder) / "heads.safetensors"))
    return backbone.eval(), heads.eval(), about


def positions(input_ids: Tensor, about: dict[str, Any]) -> Tensor:
    """Return the position ids [T] of one sequence [T]: result tokens count in the feedback range, if that is on."""
    feedback, tokens = about["feedback_positions"], about["tokens"]
    place, plain, own, inside = [], 0, int(feedback["start"]), False
    for token in input_ids.tolist():
        inside = inside or token == tokens["<|result|>"]
        if inside and feedback["enabled"]:
            place.append(own)
            own += 1
        else:
            place.append(plain)
            plain += 1
        inside = inside and token != tokens["<|result_end|>"]
    return torch.tensor(place, dtype=torch.int64)


@torch.no_grad()
def read_heads(
    backbone: PreTrainedModel, heads: AgentHeads, about: dict[str, Any], input_ids: Tensor
) -> dict[str, Any]:
    """Return what the heads say about one sequence of ids [T].

    Returns:
        ``intent`` (name → probability at each trace start), ``tool`` (name → probability at each tool start) and
        ``outcome`` (probability of passing at each result start); lists, in order of appearance.
    """
    length = len(input_ids)
    mask = torch.full((length, length), torch.finfo(backbone.dtype).min, dtype=backbone.dtype).triu(1)[None, None]
    hidden = decoder_of(backbone)(
        input_ids=input_ids[None],
        attention_mask=layer_masks(backbone, mask),
        position_ids=positions(input_ids, about)[None],
        use_cache=False,
    ).last_hidden_state[0]
    at = {name: (input_ids == token).nonzero()[:, 0] for name, token in about["tokens"].items()}
    intent = heads.intent(hidden[at["<|trace_start|>"]]).sigmoid().tolist()
    tool = heads.tool(hidden[at["<|tool_start|>"]]).softmax(-1).tolist()
    outcome = heads.reward(hidden[at["<|result|>"]]).sigmoid().tolist()
    return {
        "intent": [dict(zip(about["intents"], row, strict=True)) for row in intent],
        "tool": [dict(zip(about["tools"], row, strict=True)) for row in tool],
        "outcome": outcome,
    }
