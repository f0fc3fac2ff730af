"""Which tools may be called (floor 3): intents and editor state decide, the tool head weighs, decoding obeys.

``ToolRouter.route`` turns intents and the live state of the workspace into a ``Route``: allowed tools and a bias each.
``ToolLogitsProcessor`` holds generation to it: behind the tool-start token only the names of allowed tools followed by
the args token can be produced. It is a plain ``transformers.LogitsProcessor``; with a ``HeadTap`` the tool head's own
log-probabilities join the bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedModel

from agentft.etai import IdeContext, InlineWorkspace, Workspace
from agentft.tools import TOOL_INDEX

RAISED_BIAS = math.log(4.0)
"""Bias of a raised tool at intent probability 1: four times the odds."""

_TESTS = frozenset({"pytest_run", "jest_run"})
_SHIPPING = frozenset({"npm_publish", "docker_build"})
_WRITING = frozenset({"file_write", "file_edit", "git_commit", "format_run"})


@dataclass(frozen=True, kw_only=True)
class IntentRule:
    """What an intent does to tools. A tool is hidden when every active intent hides it and none raises it."""

    hides: frozenset[str] = frozenset()
    raises: frozenset[str] = frozenset()


INTENT_RULES: dict[str, IntentRule] = {
    "fix_test_failure": IntentRule(hides=_SHIPPING, raises=_TESTS),
    "debug_runtime_error": IntentRule(hides=_SHIPPING, raises=frozenset({"python_run", "shell_run"})),
    "implement_function": IntentRule(hides=_SHIPPING, raises=frozenset({"file_edit", "file_write"})),
    "refactor_function_signature": IntentRule(hides=_SHIPPING, raises=frozenset({"code_search", "file_edit"})),
    "rename_symbol": IntentRule(hides=_SHIPPING, raises=frozenset({"code_search", "file_edit"})),
    "add_type_annotation": IntentRule(hides=_SHIPPING, raises=frozenset({"type_check", "file_edit"})),
    "write_tests": IntentRule(hides=_SHIPPING, raises=_TESTS | {"file_write"}),
    "explore_code": IntentRule(hides=_SHIPPING | _WRITING, raises=frozenset({"file_read", "file_list", "code_search"})),
    "update_dependency": IntentRule(hides=frozenset({"npm_publish"}), raises=frozenset({"file_edit", "shell_run"})),
    "fix_lint": IntentRule(hides=_SHIPPING, raises=frozenset({"lint_run", "format_run"})),
    "improve_performance": IntentRule(hides=_SHIPPING, raises=frozenset({"python_run"})),
    "release_package": IntentRule(raises=_SHIPPING | {"git_commit"}),
}
"""Intent → rule; a test holds its keys to the record's intents."""

_NEEDS_FILE: dict[str, Callable[[str], bool]] = {
    "npm_publish": lambda path: path.rpartition("/")[2] == "package.json",
    "jest_run": lambda path: path.rpartition("/")[2] == "package.json",
    "docker_build": lambda path: path.rpartition("/")[2].startswith("Dockerfile"),
    "pytest_run": lambda path: path.endswith(".py"),
}


@dataclass(frozen=True, kw_only=True)
class WorkspaceState:
    """What is known about the workspace now; None is "not known" and narrows nothing."""

    files: frozenset[str] | None = None
    clean: bool | None = None

    @classmethod
    def of(cls, ide: IdeContext, workspace: Workspace | None = None) -> WorkspaceState:
        """Read the state off an editor context and, where its files are inline, the workspace."""
        files = frozenset(workspace.files) if isinstance(workspace, InlineWorkspace) else None
        status = ide.git_status
        clean = None if status is None else not status.strip() or "nothing to commit" in status
        return cls(files=files, clean=clean)


@dataclass(frozen=True, kw_only=True)
class Route:
    """Allowed tools, and what is added to the log-probability of each (0 where not named)."""

    allowed: frozenset[str]
    bias: Mapping[str, float] = field(default_factory=dict)


class ToolRouter:
    """Intents and workspace → route.

    Args:
        tools: Names of all tools, in the order of the tool head; left out, those that the process works with.
        rules: Rule of each intent.
        threshold: Probability from which an intent is active.
    """

    def __init__(
        self,
        tools: Iterable[str] | None = None,
        rules: Mapping[str, IntentRule] = INTENT_RULES,
        threshold: float = 0.5,
    ) -> None:
        self.tools = tuple(TOOL_INDEX if tools is None else tools)
        self.rules, self.threshold = rules, threshold

    def route(self, intents: Mapping[str, float] | Iterable[str], state: WorkspaceState | None = None) -> Route:
        """Return the route of ``intents`` (names, or name → probability). Without an active intent all is allowed."""
        given = intents if isinstance(intents, Mapping) else dict.fromkeys(intents, 1.0)
        active = {name: p for name, p in given.items() if p >= self.threshold and name in self.rules}
        bias: dict[str, float] = {}
        for name, probability in active.items():
            for tool in self.rules[name].raises:
                bias[tool] = max(bias.get(tool, 0.0), probability * RAISED_BIAS)
        hidden = set.intersection(*(set(self.rules[name].hides) for name in active)) - set(bias) if active else set()
        if state is not None:
            hidden |= _impossible(state)
        allowed = frozenset(tool for tool in self.tools if tool not in hidden)
        return Route(allowed=allowed, bias={tool: value for tool, value in bias.items() if tool in allowed})


def _impossible(state: WorkspaceState) -> set[str]:
    hidden = {"git_commit"} if state.clean else set()
    if state.files is not None:
        files = state.files
        hidden |= {tool for tool, fits in _NEEDS_FILE.items() if not any(map(fits, files))}
    return hidden


class HeadTap:
    """Reads the tool head during generation, off the hidden state that the vocabulary head receives.

    A context manager; between entering and leaving, ``tool_log_probs()`` gives the log-probabilities [B, tools] at the
    newest token of each row.
    """

    def __init__(self, backbone: PreTrainedModel, tool_head: nn.Module) -> None:
        self.backbone, self.tool_head = backbone, tool_head
        self._hidden: Tensor | None = None

    def __enter__(self) -> HeadTap:
        vocabulary_head = self.backbone.get_output_embeddings()
        self._handle = vocabulary_head.register_forward_pre_hook(self._keep)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._handle.remove()
        self._hidden = None

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._hidden = inputs[0].detach()

    @torch.no_grad()
    def tool_log_probs(self) -> Tensor:
        """Return [B, tools] float32."""
        assert self._hidden is not None, "no forward pass since the tap was opened"
        return self.tool_head(self._hidden[:, -1]).float().log_softmax(-1)


@dataclass
class _Node:
    """A place in the trie of names: next token → node, and the rows of the tools below."""

    children: dict[int, _Node] = field(default_factory=dict)
    tools: list[int] = field(default_factory=list)


class ToolLogitsProcessor(LogitsProcessor):
    """Allows only calls of the route's tools.

    Args:
        name_ids: Tool → token ids of its name, in the order of the tool head.
        tool_start_id: The token that opens a call.
        args_id: The token that follows a name.
        routes: One route for all rows, or one a row.
        tap: Adds the tool head's log-probabilities, times ``head_weight``.
        head_weight: Weight of the tool head.
    """

    def __init__(
        self,
        name_ids: Mapping[str, Sequence[int]],
        *,
        tool_start_id: int,
        args_id: int,
        routes: Route | Sequence[Route],
        tap: HeadTap | None = None,
        head_weight: float = 1.0,
    ) -> None:
        self.tool_start_id, self.routes = tool_start_id, routes
        self.tap, self.head_weight = tap, head_weight
        self.names = tuple(name_ids)
        self.root = _Node()
        self.longest = 1 + max(len(ids) for ids in name_ids.values())
        for row, ids in enumerate(name_ids.values()):
            node = self.root
            node.tools.append(row)
            for token in (*ids, args_id):
                node = node.children.setdefault(int(token), _Node())
                node.tools.append(row)
        self._head: dict[bytes, Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return ``scores`` [B, V] with forbidden tokens at −inf where a row of ``input_ids`` [B, T] is in a name."""
        scores = scores.clone()
        head = self.tap.tool_log_probs() if self.tap is not None else None
        for row, ids in enumerate(input_ids[:, -self.longest - 1 :].tolist()):
            written = self._name_so_far(ids)
            node = self._walk(written) if written is not None else None
            if node is None or not node.children:
                continue
            weights = self._weights(row, input_ids, 0 if written is None else len(written), head)
            below = {token: _log_sum(weights, child.tools) for token, child in node.children.items()}
            here = _log_sum(weights, node.tools)
            tokens = [token for token, value in below.items() if value > -math.inf]
            if not tokens:  # a name that is not allowed was given in the prompt: too late to steer
                continue
            kept = scores[row, tokens] + scores.new_tensor([below[token] - here for token in tokens])
            scores[row] = -math.inf
            scores[row, tokens] = kept
        return scores

    def _name_so_far(self, ids: list[int]) -> list[int] | None:
        for back in range(len(ids) - 1, -1, -1):
            if ids[back] == self.tool_start_id:
                return ids[back + 1 :]
        return None

    def _walk(self, written: list[int]) -> _Node | None:
        node: _Node | None = self.root
        for token in written:
            node = node.children.get(token) if node is not None else None
        return node

    def _weights(self, row: int, input_ids: Tensor, written: int, head: Tensor | None) -> list[float]:
        route = self.routes if isinstance(self.routes, Route) else self.routes[row]
        weights = [route.bias.get(name, 0.0) if name in route.allowed else -math.inf for name in self.names]
        if all(weight == -math.inf for weight in weights):
            return [0.0] * len(weights)
        if head is None:
            return weights
        # The head speaks at the tool-start token only; remember what it said while the name is being written.
        key = input_ids[row, : input_ids.shape[1] - written].cpu().numpy().tobytes()
        if written == 0:
            self._head[key] = head[row]
        said = self._head.get(key)
        if said is None:
            return weights
        return [weight + self.head_weight * value for weight, value in zip(weights, said.tolist(), strict=True)]


def _log_sum(weights: list[float], tools: list[int]) -> float:
    values = [weights[tool] for tool in tools]
    top = max(values)
    return top if top == -math.inf else top + math.log(sum(math.exp(value - top) for value in values))
