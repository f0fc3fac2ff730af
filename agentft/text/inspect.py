"""``agentft inspect`` (floor 2): one record as the model sees it: trained, masked, mistakes, anchors, counts.

    agentft inspect sessions.jsonl --id ID [--tokenizer DIR] [--no-handles] [--ids] [--json] [--html FILE]

The gutter says the same as the colours (``+`` trained, ``x`` mistake, ``.`` masked), so a pipe loses nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentft.config.schema import FeedbackPositionsConfig, TextConfig
from agentft.errors import EXIT_OK, DataError
from agentft.etai import RecordError, Session, to_session
from agentft.etai_io import json_lines
from agentft.text.render import Renderer, session_texts
from agentft.text.rendered import Kind, Rendered
from agentft.text.vocab import Vocab, add_special_tokens, load_tokenizer, train_tokenizer
from agentft.tools import BUILTIN_TOOLS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_VOCAB_SIZE = 4096
_TRAINING_SESSIONS = 500
_STYLES: dict[Kind, str] = {
    Kind.STRUCTURE: "magenta",
    Kind.CONTEXT: "bright_black",
    Kind.INSTRUCTION: "yellow",
    Kind.THOUGHT: "bold green",
    Kind.CALL: "green",
    Kind.RESULT: "blue",
    Kind.OUTPUT: "bold green",
    Kind.MISTAKE: "red",
}
_LEGEND: tuple[tuple[str, str, str], ...] = (
    ("+", "bold green", "trained"),
    ("x", "red", "mistake: shown, never imitated"),
    (".", "blue", "result"),
    (".", "yellow", "instruction"),
    (".", "bright_black", "editor context"),
    ("◆", "bold cyan", "anchor of a head"),
)


@dataclass(frozen=True)
class Anchor:
    """One place where a head reads: position of the token, and what is read off there."""

    at: int
    label: str


def command(arguments: argparse.Namespace) -> int:
    """Print one session of ``arguments.sessions``; see the module's docstring for the options."""
    path = Path(arguments.sessions)
    session = find_session(path, arguments.id)
    vocab, text, positions, origin = _vocabulary(path, arguments.tokenizer)
    if arguments.no_handles:
        text = dataclasses.replace(text, handles=False)
    rendered = Renderer(vocab, text, positions).render(session)
    if arguments.json:
        print(json.dumps(as_json(session, rendered, vocab, origin), ensure_ascii=True))
        return EXIT_OK
    from rich.console import Console

    _print(Console(highlight=False), session, rendered, vocab, origin, arguments.ids)
    if arguments.html:
        page = Console(record=True, file=io.StringIO(), width=140, highlight=False, color_system="truecolor")
        _print(page, session, rendered, vocab, origin, arguments.ids)
        page.save_html(arguments.html, inline_styles=True)
        print(f"wrote {arguments.html}", file=sys.stderr)
    return EXIT_OK


def find_session(path: Path, session_id: str | None) -> Session:
    """Return the session with this id, or the first one.

    Raises:
        DataError: no such file or session, or the record is bad.
    """
    seen: list[str] = []
    for line in json_lines(path):
        try:
            if line.error is not None:
                raise line.error
            session = to_session(line.value, line.repairs)
        except RecordError as error:
            if session_id is None:
                raise error.at(f"{path}:{line.number}") from None
            continue
        if session_id is None or session.session_id == session_id:
            return session
        seen.append(session.session_id)
    raise DataError(
        "no such session" if session_id else "no session in this file",
        where=str(path),
        got=session_id,
        expected="one of " + ", ".join(seen[:5]) + (f" … ({len(seen)} in all)" if len(seen) > 5 else "")
        if seen
        else None,
    )


def anchors(session: Session, rendered: Rendered) -> list[Anchor]:
    """Return every place where a head reads, in order of position."""
    found = [Anchor(rendered.intent_at, "intent: " + (", ".join(session.intents or ()) or "no target"))]
    for step in rendered.steps:
        name = BUILTIN_TOOLS[step.tool].name if step.tool >= 0 else "not a built-in tool: no target"
        found.append(Anchor(step.tool_at, f"tool, step {step.step}: {name}"))
        if step.result_at >= 0:
            outcome = "not known" if math.isnan(step.outcome) else "passed" if step.outcome else "failed"
            found.append(Anchor(step.result_at, f"outcome, step {step.step}: {outcome}"))
    if rendered.cursor_at >= 0:
        target = session.cursor_target
        where = f"{target.placement} {target.file}:{target.line}:{target.column}" if target else "no target"
        found.append(Anchor(rendered.cursor_at, f"cursor: {where}"))
    return found


def as_json(session: Session, rendered: Rendered, vocab: Vocab, origin: str) -> dict[str, Any]:
    """Return everything that the terminal shows as one JSON-ready object, one entry a token."""
    return {
        "session_id": session.session_id,
        "tokenizer": origin,
        "counts": _counts(rendered),
        "dropped": dataclasses.asdict(rendered.dropped),
        "anchors": [dataclasses.asdict(anchor) for anchor in anchors(session, rendered)],
        "handles": rendered.handles,
        "tokens": [
            {
                "id": int(token),
                "text": vocab.decode([int(token)]),
                "trained": bool(trained),
                "kind": Kind(int(kind)).name.lower(),
                "position": int(position),
            }
            for token, trained, kind, position in zip(
                rendered.input_ids, rendered.loss_mask, rendered.kinds, rendered.position_ids, strict=True
            )
        ],
    }


def _counts(rendered: Rendered) -> dict[str, Any]:
    tokens, trained = len(rendered.input_ids), int(rendered.loss_mask.sum())
    by_kind = {kind.name.lower(): int((rendered.kinds == kind).sum()) for kind in Kind}
    return {"tokens": tokens, "trained": trained, "trained_share": round(trained / tokens, 4), "by_kind": by_kind}


def _vocabulary(path: Path, wanted: str | None) -> tuple[Vocab, TextConfig, FeedbackPositionsConfig, str]:
    """Return the vocabulary to show with, how the shards beside it were rendered, and where it comes from."""
    near = [path.parent / "tokenizer", path.parent / "shards" / "tokenizer", Path("shards") / "tokenizer"]
    source = Path(wanted) if wanted else next((folder for folder in near if folder.is_dir()), None)
    if source is None:
        print(
            f"agentft: no tokenizer beside {path}; learning one from its first {_TRAINING_SESSIONS} sessions "
            "(ids will differ from those of shards)",
            file=sys.stderr,
        )
        trained = train_tokenizer(session_texts(_good_sessions(path)), _VOCAB_SIZE)
        return Vocab.of(trained), TextConfig(), FeedbackPositionsConfig(), f"learned from {path}"
    tokenizer = load_tokenizer(source)
    add_special_tokens(tokenizer)
    meta = source.parent / "meta.json"
    made = json.loads(meta.read_text()) if meta.is_file() else {}
    text, positions = TextConfig(**made.get("text", {})), FeedbackPositionsConfig(**made.get("positions", {}))
    return Vocab.of(tokenizer), text, positions, str(source)


def _good_sessions(path: Path) -> Iterator[Session]:
    count = 0
    for line in json_lines(path):
        try:
            if line.error is None and count < _TRAINING_SESSIONS:
                yield to_session(line.value, line.repairs)
                count += 1
        except RecordError:
            continue


def _print(console: Console, session: Session, rendered: Rendered, vocab: Vocab, origin: str, ids: bool) -> None:
    from rich.text import Text

    console.print(Text(f"{session.session_id}  tokenizer: {origin}", style="bold"), soft_wrap=True)
    legend = Text("legend  ")
    for mark, style, meaning in _LEGEND:
        legend.append(f"{mark} ", style).append(f"{meaning}   ", style)
    console.print(legend, soft_wrap=True)
    console.print()
    notes = {anchor.at: anchor.label for anchor in anchors(session, rendered)}
    lines = _token_rows(rendered, vocab, notes) if ids else _blocks(rendered, vocab, notes)
    for line in lines:
        console.print(line, soft_wrap=True)
    console.print()
    _print_counts(console, rendered)


def _print_counts(console: Console, rendered: Rendered) -> None:
    counts, dropped = _counts(rendered), rendered.dropped
    kinds = "  ".join(f"{name} {count}" for name, count in counts["by_kind"].items() if count)
    console.print(
        f"{counts['tokens']} tokens, {counts['trained']} trained ({counts['trained_share']:.0%}): {kinds}",
        soft_wrap=True,
    )
    cut = [
        (dropped.result_tokens, "tokens of results"),
        (dropped.steps, "oldest steps"),
        (dropped.instruction_tokens, "tokens of the instruction"),
    ]
    console.print("left out: " + (", ".join(f"{count} {what}" for count, what in cut if count) or "nothing"))
    files = {name: path for name, path in rendered.handles.items() if "<L" not in name}
    lines = len(rendered.handles) - len(files)
    if files:
        table = "  ".join(f"{name} {path}" for name, path in files.items())
        console.print(f"handles: {table}  and {lines} lines", soft_wrap=True, markup=False)


def _gutter(at: int, trained: bool, kind: Kind) -> Text:
    from rich.text import Text

    mark = "+" if trained else "x" if kind == Kind.MISTAKE else "."
    return Text(f"{at:5d} ", "bright_black").append(f"{mark} ", _STYLES[kind])


def _blocks(rendered: Rendered, vocab: Vocab, notes: dict[int, str]) -> Iterator[Text]:
    """Yield the tokens as text, a new line at every mark of structure that opens something."""
    from rich.text import Text

    opening = {vocab.context, vocab.file, vocab.cursor, vocab.instruction, vocab.trace_start, vocab.step}
    opening |= {vocab.tool_start, vocab.arg, vocab.result, vocab.trace_end, vocab.output}
    ids, at = rendered.input_ids.tolist(), 0
    indent = {vocab.arg: "    ", vocab.tool_start: "  ", vocab.result: "  "}
    while at < len(ids):
        end = at + 1
        while end < len(ids) and (ids[end] not in opening or _inside_result(ids[end], rendered, end, vocab)):
            end += 1
        kind, trained = Kind(int(rendered.kinds[at])), bool(rendered.loss_mask[at])
        margin = indent.get(ids[at], "")
        style = _STYLES[kind]
        body = Text()
        for special, piece in _pieces(ids[at:end], vocab):
            text = piece.replace("\r", "␍").replace("\n", "\n" + " " * 8 + margin + "  ")
            body.append(text, f"{style} not bold dim" if special and kind != Kind.STRUCTURE else style)
        first, *more = body.split("\n", allow_blank=True)
        line = _gutter(at, trained, kind).append(margin).append_text(first)
        if at in notes:
            line.append(f"   ◆ {notes[at]}", "bold cyan")
        yield Text("\n").join([line, *more])
        at = end


def _inside_result(token: int, rendered: Rendered, at: int, vocab: Vocab) -> bool:
    return token in (vocab.file, vocab.cursor) and rendered.kinds[at] == Kind.RESULT


def _pieces(ids: list[int], vocab: Vocab) -> Iterator[tuple[bool, str]]:
    """Yield (whether special, text) of runs of tokens."""
    start = 0
    for at, token in enumerate(ids):
        if token in vocab.special:
            if start < at:
                yield False, vocab.decode(ids[start:at])
            yield True, vocab.special[token]
            start = at + 1
    if start < len(ids):
        yield False, vocab.decode(ids[start:])


def _token_rows(rendered: Rendered, vocab: Vocab, notes: dict[int, str]) -> Iterator[Text]:
    """Yield one line a token: place, mark, id, position, text, anchor."""
    rows = zip(rendered.input_ids, rendered.loss_mask, rendered.kinds, rendered.position_ids, strict=True)
    for at, (token, trained, number, position) in enumerate(rows):
        kind, text = Kind(int(number)), vocab.decode([int(token)])
        shown = text if int(token) in vocab.special else json.dumps(text, ensure_ascii=False)
        line = _gutter(at, bool(trained), kind).append(f"id {int(token):6d}  pos {int(position):6d}  ", "bright_black")
        line.append(shown, _STYLES[kind])
        if at in notes:
            line.append(f"   ◆ {notes[at]}", "bold cyan")
        yield line
