"""A tokenizer's own chat template, and what must be known of it to train on it (floor 2).

    template = ChatTemplate(tokenizer)        # learns by rendering small probes; nothing is guessed from names
    text = template.text(messages, tools)     # exactly apply_chat_template(…, tokenize=False)
    template.end                              # how a turn of the assistant ends

``prepare(tokenizer, "chat")`` makes a tokenizer ready: two templates of ours (``chatml``, ``functioncall``) are set as
its chat template; a template that writes a system prompt of its own where the conversation has none is wrapped so that
it does not. The tokenizer that is saved beside the shards, and later beside the model, then renders as was trained.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from agentft.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Arguments = Literal["object", "text"]

CHAT_TEMPLATE_VERSION = 1
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<|tool|>", "<|/tool|>")

CHATML = """\
{%- if tools %}{{ '<|im_start|>tools\\n' ~ (tools | tojson) ~ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<|tool|>{"name": ' ~ (call.function.name | tojson) ~ ', "arguments": ' }}
{{- (call.function.arguments | tojson) ~ '}<|/tool|>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""ChatML; a call stands between ``<|tool|>`` and ``<|/tool|>``, a result is a turn of the role ``tool``."""

FUNCTIONCALL = """\
{%- if tools %}{{ 'FUNCTIONS: ' ~ (tools | tojson) ~ '\\n\\n\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- 'ASSISTANT:' ~ (' ' ~ message.content if message.content else '') }}
{%- for call in message.tool_calls or [] %}
{{- ' <functioncall> {"name": ' ~ (call.function.name | tojson) ~ ', "arguments": ' }}
{{- (call.function.arguments | tojson) ~ '}' }}
{%- endfor %}
{{- ' ' ~ eos_token ~ '\\n\\n\\n' }}
{%- else %}
{{- {'system': 'SYSTEM', 'user': 'USER', 'tool': 'FUNCTION RESPONSE'}[message.role] }}
{{- ': ' ~ message.content ~ '\\n\\n\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
"""Plain text in the manner of glaive-function-calling, with arguments as JSON; turns end with the tokenizer's EOS."""

_SHOWN = ("role", "content", "name", "tool_call_id")
_USER, _ASSISTANT, _SYSTEM, _NAME = "agentftuser", "agentftanswer", "agentftsystem", "agentft_tool"
_KEY, _VALUE = "agentft_key", "agentft 'value\""
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "-", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class End:
    """How a turn of the assistant ends.

    ``own`` is the special token that closes it. Where it is empty the turn has none, and the mark of the next role ends
    it: ``before_user`` and ``before_tool`` are those marks (−1: the template shows no results of tools).
    """

    own: str = ""
    before_user: int = -1
    before_tool: int = -1


class ChatTemplate:
    """A fast tokenizer and its chat template. Holds no state between calls."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError("tokenizer has no fast form", got=type(tokenizer).__name__, expected="tokenizer.json")
        if not isinstance(tokenizer.chat_template, str):
            got = "none" if tokenizer.chat_template is None else f"several: {', '.join(tokenizer.chat_template)}"
            raise ConfigError(
                "the tokenizer has not one chat template",
                where="text.template",
                got=got,
                expected="a tokenizer with chat_template.jinja or chat_template in tokenizer_config.json",
                hint="set text.template to chatml or functioncall, or save the tokenizer with the template that counts",
            )
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special: dict[str, int] = {token.content: row for row, token in added.items() if token.special}
        longest_first = sorted(self.special, key=len, reverse=True)
        self.special_text = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.end, self.arguments = End(), self._learn_arguments()
        self.end = self._learn_end()

    def text(self, messages: Sequence[Message], tools: Sequence[Message] | None = None, *, prompt: bool = False) -> str:
        """Return the rendered text; ``prompt`` adds what the template writes before the assistant's turn.

        Raises:
            DataError: the template refuses; names the first message that it refuses.
        """
        try:
            return self._render(messages, tools, prompt)
        except Exception as error:
            for upto in range(1, len(messages) + 1):
                try:
                    self._render(messages[:upto], tools, False)
                except Exception as first:
                    where = f"messages[{upto - 1}] ({messages[upto - 1].get('role')})"
                    raise DataError("the chat template refuses a turn", where=where, got=_cause(first)) from first
            raise DataError("the chat template refuses the conversation", got=_cause(error)) from error

    def encode(self, text: str) -> tuple[list[int], npt.NDArray[np.int64]]:
        """Return the ids that ``apply_chat_template`` gives for this text, and where each begins in it, [T] int64."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = np.array([start for start, _ in encoded["offset_mapping"]], np.int64)
        return list(encoded["input_ids"]), np.maximum.accumulate(starts) if len(starts) else starts

    def own_end(self, text: str) -> int | None:
        """Return where the special token ends that closes the turn ``text``, or None.

        Only whitespace and special tokens may stand behind it (some templates write EOS after the last turn).
        """
        closing: list[re.Match[str]] = []
        for found in self.special_text.finditer(text):
            closing = closing if closing and not text[closing[-1].end() : found.start()].strip() else []
            closing.append(found)
        if not closing or text[closing[-1].end() :].strip():
            return None
        return next((found.end() for found in reversed(closing) if found[0] == self.end.own), closing[-1].end())

    def _render(self, messages: Sequence[Message], tools: Sequence[Message] | None, prompt: bool) -> str:
        shown = [self._shown(message) for message in messages]
        rendered = self.tokenizer.apply_chat_template(
            shown, tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=prompt
        )
        return cast(str, rendered)

    def _shown(self, message: Message) -> Message:
        """Return a message as the template wants it: arguments as an object or as JSON text, only keys of its own."""
        shown: Message = {key: message[key] for key in _SHOWN if key in message}
        if message.get("reasoning_content"):
            shown["reasoning_content"] = message["reasoning_content"]
        if message.get("tool_calls"):
            shown["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": self._argument(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
        return shown

    def _argument(self, arguments: Mapping[str, Any]) -> Any:
        return json.dumps(arguments, ensure_ascii=False) if self.arguments == "text" else dict(arguments)

    def _learn_arguments(self) -> Arguments:
        """Find out whether the template wants a call's arguments as an object or as JSON text."""
        given = {_KEY: _VALUE}
        messages = [user(_USER), assistant("", [call_of(_NAME, given)])]
        shown: dict[str, str | None] = {}
        kinds: tuple[Arguments, ...] = ("object", "text")
        for self.arguments in kinds:
            try:
                shown[self.arguments] = self._render(messages, None, False)
            except Exception:
                shown[self.arguments] = None
        as_object, as_text = shown["object"], shown["text"]
        if as_object is None or str(given) in as_object:
            return "text" if as_text is not None and json.dumps(given) in as_text else "object"
        return "object"

    def _learn_end(self) -> End:
        spoken = [user(_USER), assistant(_ASSISTANT), user(_USER)]
        alone, followed = (self.text(spoken[:upto]).rpartition(_ASSISTANT) for upto in (2, 3))
        if not alone[1] or not followed[1]:
            raise ConfigError(
                "the chat template does not show what the assistant says", where="text.template", got=alone[2][:200]
            )
        tokens, others = (self.special_text.findall(text[2]) for text in (alone, followed))
        shared = [mine for mine, other in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=False))]
        if tokens and self.own_end(alone[2]) is not None:
            return End(own=(shared or tokens)[-1])
        before_user = self._mark(followed[2])
        if alone[2].strip() or before_user < 0:
            raise ConfigError(
                "the chat template closes a turn of the assistant with no special token",
                where="text.template",
                got=followed[2] or alone[2],
                expected="a special token, or the next role's mark as one",
                hint="set text.template to chatml or functioncall",
            )
        try:
            result = {"role": "tool", "content": _USER, "tool_call_id": "call_1", "name": _NAME}
            messages = [user(_USER), assistant("", [call_of(_NAME, {_KEY: _VALUE})]), result]
            answered, call = self.text(messages), self.text(messages[:2])
            before_tool = self._mark(answered.removeprefix(call)) if answered.startswith(call) else -1
        except DataError:
            before_tool = -1
        return End(before_user=before_user, before_tool=before_tool)

    def _mark(self, text: str) -> int:
        found = self.special_text.match(text)
        return self.special[found[0]] if found else -1


def user(content: str) -> Message:
    """Return a message of the user."""
    return {"role": "user", "content": content}


def assistant(content: str, calls: Sequence[Message] = ()) -> Message:
    """Return a message of the assistant."""
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}


def call_of(name: str, arguments: Mapping[str, Any], number: int = 1) -> Message:
    """Return one entry of ``tool_calls``; arguments are an object."""
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def prepare(tokenizer: PreTrainedTokenizerBase, template: Literal["chat", "chatml", "functioncall"]) -> None:
    """Give ``tokenizer`` the chat template that ``text.template`` names, with no system prompt of the template's own.

    Raises:
        ConfigError: ``chat`` and it has no template, or one whose own system prompt cannot be left out.
    """
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if template == "chatml":
        kept = list(tokenizer.additional_special_tokens)
        wanted = kept + [token for token in CHATML_TOKENS if token not in kept]
        tokenizer.add_special_tokens({"additional_special_tokens": wanted})
        tokenizer.chat_template, tokenizer.eos_token = CHATML, "<|im_end|>"  # servers stop at EOS
    elif template == "functioncall":
        if tokenizer.eos_token is None:
            raise ConfigError("the tokenizer names no EOS token", where="text.template", got="functioncall")
        tokenizer.chat_template = FUNCTIONCALL
    else:
        _leave_out_system_prompt(tokenizer)


def template_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a sha256 of the chat template, None where there is none."""
    template = tokenizer.chat_template
    return None if template is None else hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()


def _leave_out_system_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    """Wrap a template that writes a system prompt where the conversation has none, so that it writes none.

    Without tools the text from the first turn of the user on is kept (after BOS); with tools, whose list often stands
    inside the system prompt, the conversation is rendered with an empty one.
    """
    template = ChatTemplate(tokenizer)
    mark, before = _user_mark(template)
    bos = tokenizer.bos_token if tokenizer.bos_token and before.startswith(tokenizer.bos_token) else ""
    if not template.special_text.sub("", before).strip():
        return
    original = cast(str, tokenizer.chat_template)
    steps = "agentft_text" if not bos else f"{json.dumps(bos, ensure_ascii=False)} ~ agentft_text"
    empty = "{%- if tools and messages[0].role != 'system' %}{% set messages = [{'role': 'system', 'content': ''}]"
    wrapped = (
        (f"{empty} + messages %}}{{% endif -%}}\n" if _differs_with_tools(template) else "")
        + "{%- set agentft_text %}"
        + original.removesuffix("\n")
        + "{% endset -%}\n{%- if messages[0].role == 'user' and not tools -%}\n{{- "
        + steps
        + f"[agentft_text.find({json.dumps(mark, ensure_ascii=False)}):] -}}}}\n"
        + "{%- else -%}\n{{- agentft_text -}}\n{%- endif -%}"
    )
    spoken = [user(_USER), assistant(_ASSISTANT), user(_USER)]
    with_system = [{"role": "system", "content": _SYSTEM}, *spoken]
    known, bare = _text_or_none(template, with_system), template.text(spoken)
    tokenizer.chat_template = wrapped
    now = ChatTemplate(tokenizer)
    if _text_or_none(now, with_system) != known or now.text(spoken) != bos + bare[bare.index(mark) :]:
        tokenizer.chat_template = original
        raise _injects(before)


def _user_mark(template: ChatTemplate) -> tuple[str, str]:
    """Return what opens a turn of the user, and what the template writes before the first one."""
    first = template.text([user(_USER)]).partition(_USER)[0]
    closed = template.text([user(_USER), assistant(_ASSISTANT)]).rpartition(_ASSISTANT)[2]
    between = template.text([user(_USER), assistant(_ASSISTANT), user(_USER)]).partition(_ASSISTANT)[2]
    mark = between.partition(_USER)[0].removeprefix(closed)
    if mark and first.endswith(mark):
        return mark, first[: -len(mark)]
    if template.special_text.sub("", first).strip() and not first.startswith(mark):
        raise _injects(first)
    return first, ""


def _differs_with_tools(template: ChatTemplate) -> bool:
    """Whether, with tools, an empty system prompt changes what the template writes."""
    empty = _text_or_none(template, [{"role": "system", "content": ""}, user(_USER)], [_PROBE_TOOL])
    return empty is not None and empty != _text_or_none(template, [user(_USER)], [_PROBE_TOOL])


def _text_or_none(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Message] | None = None
) -> str | None:
    try:
        return template.text(messages, tools)
    except DataError:
        return None


def _injects(what: str) -> ConfigError:
    return ConfigError(
        "the chat template writes a system prompt of its own, and it cannot be left out exactly",
        where="text.template",
        got=what,
        hint="save the tokenizer with a chat template that writes none, or set text.template to chatml",
    )


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
