"""Saving, loading and exporting an agent (floor 3): safetensors and JSON only, never a pickle.

``save_model`` writes ``runs/<name>/model`` when a run ends; ``load_model`` reads it back. ``export`` makes a plain
Hugging Face folder of it, which loads where agentft is not installed, with the heads and a small loader beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedModel

from agentft import losses
from agentft.config.schema import FeedbackPositionsConfig, LoraConfig, ModelConfig
from agentft.errors import EXIT_OK, ModelError
from agentft.etai import INTENTS
from agentft.files import whole_file
from agentft.models import adapters, loader, rotary
from agentft.models import backbone as backbone_module
from agentft.models import heads as heads_module
from agentft.models.agent_model import AgentModel
from agentft.models.backbone import ALIGNMENT, build_backbone
from agentft.models.heads import AgentHeads

ANCHOR_TOKENS = ("<|trace_start|>", "<|tool_start|>", "<|args|>", "<|result|>", "<|result_end|>", "<|output|>")
"""Tokens whose ids an export names, because heads and positions hang on them."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def save_model(model: AgentModel, folder: Path, *, tokenizer: Path | None = None) -> None:
    """Write an agent to ``folder``: config.json, model.safetensors, heads.safetensors, agent.json.

    Of an adapted backbone only what was trained is written, adapters.safetensors; agent.json names the checkpoint that
    it belongs to.

    Args:
        model: The agent, without a data-parallel wrapper.
        folder: Created if missing; files of an earlier save are replaced.
        tokenizer: Folder whose tokenizer files are copied beside the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    adapted = adapters.is_adapted(model.backbone)
    if adapted:
        adapters.save_adapters(model.backbone, folder)
    else:
        model.backbone.save_pretrained(folder, safe_serialization=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.heads.state_dict().items()}
    save_file(tensors, folder / "heads.safetensors", metadata={"format": "pt"})
    about = {
        "format": 1,
        "model": dataclasses.asdict(model.config),
        "hidden_size": model.backbone.config.get_text_config().hidden_size,
        "tools": list(model.tools),
        "intents": list(model.intents),
        "entropy_bonus": model.entropy_bonus,
        "base": _base_of(model) if adapted else None,
    }
    _write_json(folder / "agent.json", about)
    if tokenizer is not None:
        for name in _TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, folder / name)


def load_model(folder: Path) -> AgentModel:
    """Return the agent that ``save_model`` wrote, in evaluation mode.

    Raises:
        ModelError: The folder is not one, or was written for other intents; or the checkpoint that its adapters
            belong to is not there or has changed.
    """
    return _load(folder, exact=False)


def _load(folder: Path, *, exact: bool) -> AgentModel:
    """``exact`` loads frozen weights in float32, however they were kept in training."""
    about = _read_about(folder)
    if tuple(about["intents"]) != INTENTS:
        raise ModelError("written for other intents", where=str(folder), got=about["intents"], expected=str(INTENTS))
    fields = dict(about["model"])
    feedback = FeedbackPositionsConfig(**fields["feedback_positions"])
    lora = LoraConfig(**fields["lora"]) if fields.get("lora") else None
    config = ModelConfig(**fields | {"feedback_positions": feedback, "lora": lora})
    if about.get("base"):
        backbone = _adapted_backbone(folder, config, about["base"], exact)
    else:
        from_here = dataclasses.replace(config, preset=None, path=str(folder.resolve()), lora=None)
        backbone = build_backbone(from_here, vocab_size=0, seed=0)
    heads = AgentHeads(about["hidden_size"], len(INTENTS), len(about["tools"]))
    heads.load_state_dict(load_file(folder / "heads.safetensors"))
    model = AgentModel(config, backbone, heads, tools=about["tools"], entropy_bonus=about["entropy_bonus"])
    return model.eval()


def _base_of(model: AgentModel) -> dict[str, Any]:
    """Return what is needed to build the adapted backbone again: the checkpoint, and what was added to it."""
    path = Path(str(model.config.path)).expanduser()
    return {
        "path": str(path.resolve()) if path.is_dir() else str(model.config.path),
        "fingerprint": adapters.fingerprint(path) if path.is_dir() else None,
        "vocab_size": model.backbone.config.get_text_config().vocab_size,
        "new_rows": adapters.new_rows(model.backbone),
    }


def _adapted_backbone(folder: Path, config: ModelConfig, base: dict[str, Any], exact: bool) -> PreTrainedModel:
    path = Path(base["path"])
    where = str(folder / "agent.json")
    if base["fingerprint"] and not path.is_dir():
        hint = "put it back, or write its new place into base.path of this file"
        raise ModelError("the checkpoint of these adapters is not there", where=where, got=base["path"], hint=hint)
    if base["fingerprint"] and adapters.fingerprint(path) != base["fingerprint"]:
        hint = "give base.path of this file the folder that was trained on"
        raise ModelError("the checkpoint of these adapters has changed", where=where, got=base["path"], hint=hint)
    config = dataclasses.replace(config, path=base["path"])
    if exact and config.lora is not None:
        config = dataclasses.replace(config, quantize="none", lora=dataclasses.replace(config.lora, frozen="fp32"))
    backbone = build_backbone(config, base["vocab_size"], seed=0, new_token_ids=base["new_rows"])
    adapters.load_adapters(backbone, folder)
    return backbone


def export(run: Path, output: Path) -> dict[str, Any]:
    """Write a run's agent to ``output`` as a plain Hugging Face model with its heads; return what was written.

    Adapters are added to the weights, in float32.

    Raises:
        ModelError: The run has no saved model, or ``output`` is not empty.
    """
    source = run if (run / "agent.json").is_file() else run / "model"
    about = _read_about(source)
    if output.exists() and any(output.iterdir()):
        raise ModelError("the output folder is not empty", where=str(output), hint="choose another folder")
    model = _load(source, exact=True)
    if adapters.is_adapted(model.backbone):
        adapters.merge(model.backbone)
    output.mkdir(parents=True, exist_ok=True)
    model.backbone.save_pretrained(output, safe_serialization=True)
    _name_native(output / "config.json")
    for weights in output.glob("*.safetensors"):
        align_weights(weights)
    for name in (*_TOKENIZER_FILES, "heads.safetensors"):
        if (source / name).is_file():
            shutil.copyfile(source / name, output / name)
    described = {
        "format": 1,
        "hidden_size": about["hidden_size"],
        "intents": about["intents"],
        "tools": about["tools"],
        "feedback_positions": about["model"]["feedback_positions"],
        "cursor": "x px and y px from the top left corner of the editor window, logit of `after`",
        "tokens": _anchor_ids(source),
    }
    _write_json(output / "heads.json", described)
    (output / "load_heads.py").write_text(_loader_source(), encoding="utf-8")
    return {
        "output": str(output),
        "architecture": json.loads((output / "config.json").read_text(encoding="utf-8"))["architectures"][0],
        "size_bytes": sum(path.stat().st_size for path in output.iterdir()),
        "files": sorted(path.name for path in output.iterdir()),
    }


def command(arguments: argparse.Namespace) -> int:
    """Run ``agentft export RUN -o DIR``."""
    written = export(Path(arguments.run), Path(arguments.output))
    if arguments.json:
        print(json.dumps(written))
    else:
        print(f"{written['architecture']} written to {written['output']} ({written['size_bytes'] / 1e6:.1f} MB)")
        print(f"  load it:   AutoModelForCausalLM.from_pretrained({written['output']!r})")
        print("  its heads: load_heads.py beside it, load_agent(folder)")
    return EXIT_OK


def align_weights(path: Path) -> None:
    """Pad the header of a safetensors file so that its data begins at a multiple of 64 bytes.

    Readers map the file into memory, and matrix kernels round differently for operands that are not aligned: without
    this, equal weights give logits that differ in the last bit (measured: 4e-7).
    """
    with path.open("rb") as source:
        size = int.from_bytes(source.read(8), "little")
        if (8 + size) % ALIGNMENT == 0:
            return
        header = source.read(size)
        header += b" " * (-(8 + size) % ALIGNMENT)
        with whole_file(path) as partial, partial.open("wb") as target:
            target.write(len(header).to_bytes(8, "little") + header)
            shutil.copyfileobj(source, target, 1 << 24)


def _read_about(folder: Path) -> dict[str, Any]:
    path = folder / "agent.json"
    if not path.is_file():
        raise ModelError(
            "no saved agent", where=str(path), hint="train first: composer train.py yamls/agent/tiny-glm.yaml"
        )
    return json.loads(path.read_text(encoding="utf-8"))


def _name_native(path: Path) -> None:
    """Write Kimi K2 under the name of the code that runs it, which every reader of the format knows."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if config["model_type"] == "kimi_k2":
        config |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
        _write_json(path, config)


def _anchor_ids(folder: Path) -> dict[str, int]:
    if not (folder / "tokenizer.json").is_file():
        return {}
    known = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).get_vocab()
    return {name: known[name] for name in ANCHOR_TOKENS if name in known}


def _loader_source() -> str:
    parts = [
        '"""Heads of an exported agent. Needs torch, transformers and safetensors, nothing else.\n\n'
        'Use: backbone, heads, about = load_agent("this folder"); read_heads(backbone, heads, about, ids)\n"""',
        "from __future__ import annotations",
        "import json\nfrom collections.abc import Mapping\nfrom pathlib import Path\nfrom typing import Any",
        "import torch\nfrom safetensors.torch import load_file\nfrom torch import Tensor, nn\n"
        "from transformers import AutoModelForCausalLM, PreTrainedModel",
        f"CELLS_PER_UNIT = {losses.CELLS_PER_UNIT}",
    ]
    objects = (
        losses.cell_px,
        rotary.FeedbackRotary,
        rotary.install,
        heads_module._mlp,
        heads_module._as_weights,
        heads_module.IntentHead,
        heads_module.ToolHead,
        heads_module.CursorHead,
        heads_module.RewardHead,
        AgentHeads,
        backbone_module._layer_kinds,
        backbone_module.layer_masks,
        backbone_module.decoder_of,
        loader.load_agent,
        loader.positions,
        loader.read_heads,
    )
    return "\n\n".join(parts) + "\n\n\n" + "\n\n".join(inspect.getsource(item) for item in objects)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
