"""Only well-formed turns (floor 3): a ``LogitsProcessor`` that holds sampling to the grammar of a call.

    grammar = TurnGrammar(vocab, renderer.specs, [draft.handles for draft in drafts])
    sample_turns(backbone, prompts, processor=grammar, ...)

A turn is ``<|step|>`` thought, tool-start, the name of a tool, args, its arguments (each once, required ones before the
end, typed by its ``ToolSpec``) and tool-end, or the final answer; see docs/design.md, "Token layout". What a row may
write next follows from its ids behind the last result. Handles are offered only where they stand for something that the
context has shown. What the grammar does not decide (thought, text, which tool, which argument first) stays the model's
choice, up to a longest text, so that no turn runs on for ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor
from transformers import LogitsProcessor

from agentft.text.handles import Handles
from agentft.text.vocab import Vocab
from agentft.tools import Parameter, ToolSpec

LONGEST_TEXT = 52
"""Four texts of that length, names and marks fit the turns that are sampled (256 tokens)."""
LONGEST_INTEGER = 9


class TurnGrammar(LogitsProcessor):
    """Forbids every token that cannot continue a well-formed turn.

    Args:
        vocab: The tokenizer's vocabulary.
        tools: Name → specification of the tools that may be called.
        handles: What each row's context has shown, one a row.
        longest_text: Most tokens of a thought, of an argument's value and of the answer. Values of other types than
            string and integer are not bounded: they end when they are JSON.
    """

    def __init__(
        self,
        vocab: Vocab,
        tools: Mapping[str, ToolSpec],
        handles: Sequence[Handles],
        *,
        longest_text: int = LONGEST_TEXT,
    ) -> None:
        self.vocab, self.tools, self.handles, self.longest_text = vocab, dict(tools), handles, longest_text
        self.names = {name: tuple(vocab.encode(name)) for name in tools}
        self.text = frozenset(token for token in range(vocab.size) if token not in vocab.special)
        self.digits = {token: vocab.decode([token]) for token in self.text}
        self.digits = {token: text for token, text in self.digits.items() if text.isascii() and text.isdigit()}
        self._mask = cache(self._mask_of)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return ``scores`` [B, V] with −inf at every token that a row of ``input_ids`` [B, T] may not write now."""
        allowed = [self._mask(self.next_tokens(row, ids)) for row, ids in enumerate(input_ids.tolist())]
        kept = torch.zeros_like(scores, dtype=torch.bool)
        kept[:, : self.vocab.size] = torch.stack(allowed).to(scores.device)
        return scores.masked_fill(~kept, float("-inf"))

    def next_tokens(self, row: int, ids: Sequence[int]) -> frozenset[int]:
        """Return what may follow ``ids``; in a turn that has ended, only its end again."""
        vocab = self.vocab
        openers = {vocab.trace_start, vocab.result_end, vocab.step, vocab.trace_end}
        at = next(i for i in range(len(ids) - 1, -1, -1) if ids[i] in openers)
        turn = list(ids[at + 1 :])
        if ids[at] in (vocab.trace_start, vocab.result_end):
            return frozenset({vocab.step, vocab.trace_end})
        if ids[at] == vocab.trace_end:
            if vocab.output not in turn:
                return frozenset({vocab.output})
            answer = turn[turn.index(vocab.output) + 1 :]
            return frozenset({vocab.eot}) if vocab.eot in answer else self._more_text(answer) | {vocab.eot}
        if vocab.tool_start not in turn:
            return self._more_text(turn) | {vocab.tool_start}
        call = turn[turn.index(vocab.tool_start) + 1 :]
        if vocab.tool_end in call:
            return frozenset({vocab.tool_end})
        if vocab.args not in call:
            return _continue({name: (*tokens, vocab.args) for name, tokens in self.names.items()}, call)
        end = call.index(vocab.args)
        return self._arguments(self.tools[vocab.decode(call[:end])], call[end + 1 :], self.handles[row])

    def _arguments(self, spec: ToolSpec, ids: list[int], handles: Handles) -> frozenset[int]:
        vocab = self.vocab
        if not ids:
            return self._between(spec, ())
        pieces = _split(ids, vocab.arg)
        given = [self._parameter(spec, piece) for piece in pieces[:-1]]
        last = pieces[-1]
        if vocab.val not in last and vocab.json not in last:
            unused = [p for p in spec.parameters if p not in given]
            ends = {p.name: (*vocab.encode(p.name), vocab.val if p.type == "string" else vocab.json) for p in unused}
            return _continue(ends, last)
        parameter = self._parameter(spec, last)
        value = last[next(i for i, token in enumerate(last) if token in (vocab.val, vocab.json)) + 1 :]
        end = self._between(spec, (*given, parameter))
        if parameter.type == "string":
            return self._string(parameter, value, handles, end)
        return self._json(parameter, value, self._lines(spec, pieces, handles), end)

    def _between(self, spec: ToolSpec, given: Sequence[Parameter]) -> frozenset[int]:
        """Return what ends a value: another argument while one is left, the call's end once it has what it needs."""
        left = [parameter for parameter in spec.parameters if parameter not in given]
        another = {self.vocab.arg} if left else set()
        done = set() if any(parameter.required for parameter in left) else {self.vocab.tool_end}
        return frozenset(another | done)

    def _string(self, parameter: Parameter, value: list[int], handles: Handles, end: frozenset[int]) -> frozenset[int]:
        files = self.vocab.files
        if value and value[0] in files:
            return end
        if value or parameter.refers_to != "file":
            return self._more_text(value) | end
        return self.text | {token for index, token in enumerate(files) if handles.path(index) is not None}

    def _json(
        self, parameter: Parameter, value: list[int], lines: frozenset[int], end: frozenset[int]
    ) -> frozenset[int]:
        if value and value[0] in self.vocab.lines:
            return end
        pointers = lines if parameter.refers_to == "line" and not value else frozenset()
        text = self.vocab.decode(value)
        if parameter.type == "integer":
            return self._digits_after(text) | pointers | (end if text else frozenset())
        return self.text | (end if _is_json(text) else frozenset())

    def _more_text(self, written: Sequence[int]) -> frozenset[int]:
        return self.text if len(written) < self.longest_text else frozenset()

    def _digits_after(self, text: str) -> frozenset[int]:
        """Return the digits that keep ``text`` a JSON integer: nothing but 0 itself begins with a 0."""
        if text:
            return frozenset() if text == "0" or len(text) >= LONGEST_INTEGER else frozenset(self.digits)
        return frozenset(token for token, digits in self.digits.items() if digits == "0" or digits[0] != "0")

    def _lines(self, spec: ToolSpec, pieces: list[list[int]], handles: Handles) -> frozenset[int]:
        """Return the line handles of the file that this call has pointed at so far."""
        for piece in pieces:
            if self.vocab.val in piece and self._parameter(spec, piece).refers_to == "file":
                value = piece[piece.index(self.vocab.val) + 1 :]
                file = (
                    self.vocab.files.index(value[0])
                    if value and value[0] in self.vocab.files
                    else handles.file(self.vocab.decode(value))
                )
                if file is not None:
                    return frozenset(self.vocab.lines[: handles.lines_in(file)])
        return frozenset()

    def _parameter(self, spec: ToolSpec, piece: list[int]) -> Parameter:
        at = next(i for i, token in enumerate(piece) if token in (self.vocab.val, self.vocab.json))
        name = self.vocab.decode(piece[:at])
        return next(parameter for parameter in spec.parameters if parameter.name == name)

    def _mask_of(self, tokens: frozenset[int]) -> Tensor:
        mask = torch.zeros(self.vocab.size, dtype=torch.bool)
        mask[list(tokens)] = True
        return mask


def _split(ids: list[int], separator: int) -> list[list[int]]:
    """Split what follows the first separator; ``ids`` begins with one."""
    pieces: list[list[int]] = []
    for token in ids:
        if token == separator:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces


def _continue(endings: Mapping[str, Sequence[int]], written: Sequence[int]) -> frozenset[int]:
    """Return the tokens that continue ``written`` towards one of ``endings``."""
    size = len(written)
    return frozenset(e[size] for e in endings.values() if len(e) > size and list(e[:size]) == list(written))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
