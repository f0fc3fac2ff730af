"""Special ids of pretraining (floor 3): what opens and ends a document, marks of fill-in-the-middle and of masking.

A model's own marks are used where its tokenizer has them; the rest comes from the free ones of the reserved block:
``<|reserved_112|>`` prefix, 113 suffix, 114 middle, 115 mask, 116 separator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentft.text.vocab import FILE_HANDLES, LINE_HANDLES, Vocab

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIM_TOKENS: tuple[tuple[str, str, str], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SmolLM2
)
"""(prefix, suffix, middle) of the families that were trained with them."""

RESERVED = {
    name: f"<|reserved_{FILE_HANDLES + LINE_HANDLES + place}|>"
    for place, name in enumerate(("prefix", "suffix", "middle", "mask", "sep"))
}
"""What stands for a mark where the tokenizer has none of its own."""

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Ids. ``opening`` is what the model's tokenizer puts before every text (GLM: ``[gMASK]<sop>``; often nothing)."""

    opening: tuple[int, ...]
    end: int
    prefix: int
    suffix: int
    middle: int
    mask: int
    sep: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, vocab: Vocab) -> Marks:
        """Return the marks of a tokenizer that has our special tokens.

        The end of a document is ``<|endoftext|>`` where there is one (a chat model's ``eos_token`` ends a turn), else
        the tokenizer's ``eos_token``, else ours.
        """
        known = tokenizer.get_vocab()
        family = next((family for family in FIM_TOKENS if all(token in known for token in family)), None)
        own = dict(zip(("prefix", "suffix", "middle"), family, strict=True)) if family else {}
        ids = {name: known[own.get(name, reserved)] for name, reserved in RESERVED.items()}
        end = known.get(END_OF_TEXT, tokenizer.eos_token_id)
        end = vocab.eot if end is None else int(end)
        opening = [int(i) for i in tokenizer("").input_ids]
        while opening and opening[-1] in (end, tokenizer.eos_token_id):
            opening.pop()
        return cls(opening=tuple(opening), end=end, **ids)

    @property
    def forbidden(self) -> frozenset[int]:
        """Ids that a document's own text must not have, because they would read as marks."""
        return frozenset((self.end, self.prefix, self.suffix, self.middle, self.mask, self.sep))
