"""Kimi K2 without remote code (floor 3): its configuration is DeepSeek-V3's under another name.

Transformers does not know ``model_type: kimi_k2``; its checkpoints point at Python files of their own. ``register``
maps the name to the native DeepSeek-V3 code instead. Exports are written as DeepSeek-V3, which every reader knows.
"""

from __future__ import annotations

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)


class KimiK2Config(DeepseekV3Config):
    """DeepSeek-V3's configuration under Kimi's name."""

    model_type = "kimi_k2"


class KimiK2ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V3's code under Kimi's name."""

    config_class = KimiK2Config
    config: KimiK2Config


def register() -> None:
    """Make the Auto classes of this process load ``kimi_k2``. Idempotent."""
    AutoConfig.register("kimi_k2", KimiK2Config, exist_ok=True)
    AutoModelForCausalLM.register(KimiK2Config, KimiK2ForCausalLM, exist_ok=True)
