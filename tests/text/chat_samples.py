"""Tokenizers, chat templates and conversations for the tests of chat rendering.

``BAD`` holds small templates written for these tests, each with one habit that trips up naive masks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerFast

from agentft.config.schema import FeedbackPositionsConfig, TextConfig
from agentft.text.chat import ChatRenderer, Conversation
from agentft.text.chat_template import CHATML_TOKENS, Message, assistant, call_of, prepare, user
from agentft.text.rendered import Rendered
from agentft.text.vocab import train_tokenizer

TEXT = TextConfig(template="chat", handles=False, max_tokens=2048)
POSITIONS = FeedbackPositionsConfig(enabled=False)
MARKS = ("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|end|>", "<|final|>")

LEARNT = [
    "the user asks, the assistant answers: 12 + 30 = 42\n",
    '{"name": "add", "arguments": {"a": 1}}',
    "one\n\ntwo\n\nthree\n\n",
]

PLAIN = """{%- for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content }}
{%- for c in m.tool_calls or [] %}{{ ' call ' ~ c.function.name ~ ' ' ~ (c.function.arguments | tojson) }}{% endfor %}
{{- '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

BAD = {
    # thinking is shown in the last turn only
    "strips_thinking": PLAIN.replace(
        "m.content",
        "(m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1])",
    ),
    # nothing ends a turn but the mark of the next role
    "ends_with_next_role": PLAIN.replace("{{- '<|end|>' }}", ""),
    # two turns of one role become one
    "merges_roles": PLAIN.replace(
        "{{ '<|' ~ m.role ~ '|>' ~ m.content }}",
        "{% if loop.first or messages[loop.index0 - 1].role != m.role %}{{ '<|' ~ m.role ~ '|>' }}"
        "{% else %}{{ '\\n' }}{% endif %}{{ m.content }}",
    ).replace(
        "{{- '<|end|>' }}", "{% if loop.last or messages[loop.index0 + 1].role != m.role %}{{ '<|end|>' }}{% endif %}"
    ),
    # arguments must be JSON text
    "wants_text": PLAIN.replace("(c.function.arguments | tojson)", "'' + c.function.arguments"),
    # arguments must be an object, each shown by itself
    "wants_object": PLAIN.replace(
        "' ' ~ (c.function.arguments | tojson) }}",
        "'' }}{% for k, v in c.function.arguments.items() %}{{ ' ' ~ k ~ '=' ~ v }}{% endfor %}",
    ),
    # a system prompt where the conversation has none
    "injects_system": "{% if messages[0].role != 'system' %}{{ '<|system|>You are a parrot.<|end|>' }}{% endif %}"
    + PLAIN,
    # results of tools are turns of the user
    "tools_as_user": PLAIN.replace("m.role ~ '|>'", "(m.role if m.role != 'tool' else 'user') ~ '|>'"),
    # what is said is stripped
    "strips_whitespace": PLAIN.replace("m.content", "(m.content | trim)"),
    # the last turn ends with a token of its own
    "other_last_end": PLAIN.replace(
        "{{- '<|end|>' }}", "{{- '<|final|>' if loop.last and m.role == 'assistant' else '<|end|>' }}"
    ),
    # nothing of calls or results is shown
    "knows_no_tools": PLAIN.replace("{%- for c in m.tool_calls or [] %}", "{%- for c in [] %}"),
    # the prompt opens a thought that is not there later
    "prompt_thinks": PLAIN.replace("{{ '<|assistant|>' }}", "{{ '<|assistant|><think>' }}"),
    # the prompt is longer than what the history shows
    "no_end_at_all": "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
    # roles must alternate
    "refuses_two_users": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + PLAIN,
}


@functools.cache
def _trained() -> str:
    return str(train_tokenizer(LEARNT * 5, 520).backend_tokenizer.to_str())


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    """A small tokenizer with the marks of the templates here."""
    from tokenizers import Tokenizer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), eos_token="<|eot|>", pad_token="<|pad|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, *CHATML_TOKENS]})
    tokenizer.chat_template = template
    return tokenizer


def renderer_with(name: str, text: TextConfig = TEXT, positions: FeedbackPositionsConfig = POSITIONS) -> ChatRenderer:
    """A renderer with a template of ``BAD``, ``plain``, or one of agentft's own."""
    own = name if name in ("chatml", "functioncall") else "chat"
    tokenizer = tokenizer_with(None if own != "chat" else BAD.get(name, PLAIN))
    prepare(tokenizer, own)  # type: ignore[arg-type]
    return ChatRenderer(tokenizer, text, positions)


def chat(*messages: Message, tools: tuple[Message, ...] = (), name: str = "chat") -> Conversation:
    return Conversation(session_id=name, messages=messages, tools=tools)


def result(content: str, number: int = 1) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": f"call_{number}", "name": "add"}


TWO_TURNS = chat(user("hi"), assistant("hello there"), user("and now?"), assistant("see you"))
WITH_CALL = chat(
    user("1 + 2?"), assistant("", [call_of("add", {"a": 1, "b": "x y"})]), result("3"), assistant("It is 3.")
)


def spans(renderer: ChatRenderer, rendered: Rendered) -> list[str]:
    """Decoded runs of trained tokens."""
    ids, mask = rendered.input_ids.tolist(), rendered.loss_mask.tolist()
    runs = [list(run) for trained, run in groupby(range(len(ids)), key=lambda at: mask[at]) if trained]
    return [renderer.template.tokenizer.decode([ids[at] for at in run]) for run in runs]


def applied(renderer: ChatRenderer, conversation: Conversation, **options: Any) -> list[int]:
    """Ids of the tokenizer's own ``apply_chat_template``."""
    template = renderer.template
    messages = [template._shown(message) for message in conversation.messages]
    return list(template.tokenizer.apply_chat_template(messages, tools=list(conversation.tools) or None, **options))


def parts(renderer: ChatRenderer, conversation: Conversation) -> Iterator[Rendered]:
    for _, rendered in renderer.parts(conversation):
        yield rendered
