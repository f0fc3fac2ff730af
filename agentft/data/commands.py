"""``agentft shards write | write-corpus | verify | upload`` (floor 3): arguments in, a table or JSON out, a code."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentft.config.schema import FeedbackPositionsConfig, TextConfig
from agentft.data.meta import ShardMeta
from agentft.errors import EXIT_OK


def write(arguments: argparse.Namespace) -> int:
    """Render sessions and write shards."""
    from agentft.data.shards import write_shards

    text, positions = _sections(arguments.config)
    report = write_shards(
        arguments.sessions,
        arguments.output,
        text=text,
        positions=positions,
        tokenizer=arguments.tokenizer,
        vocab_size=arguments.vocab_size,
        holdout=arguments.holdout,
        val_share=arguments.val_share,
        progress=not arguments.json,
    )
    meta = report.meta
    _warn(report.rejected, report.unreadable)
    if arguments.json:
        return _print_json(
            folder=str(report.folder),
            size_bytes=report.size_bytes,
            unreadable=report.unreadable,
            rejected=[{"session_id": name, "reason": reason} for name, reason in report.rejected],
            meta=meta.model_dump(),
        )
    Console().print(_table(meta, f"{report.folder} ({report.size_bytes / 2**20:.1f} MiB)"))
    cut = f"{meta.dropped_result_tokens} tokens of results and {meta.dropped_steps} steps were cut to fit"
    Console().print(f"{cut} {meta.text['max_tokens']} tokens a session.", highlight=False)
    return EXIT_OK


def write_corpus(arguments: argparse.Namespace) -> int:
    """Cut source files into rows and write shards for pretraining."""
    from agentft.data.corpus_shards import write_corpus as write_rows

    text, _ = _sections(arguments.config)
    report = write_rows(
        arguments.paths,
        arguments.output,
        max_tokens=text.max_tokens,
        tokenizer=arguments.tokenizer,
        vocab_size=arguments.vocab_size,
        holdout=arguments.holdout,
        val_share=arguments.val_share,
        progress=not arguments.json,
    )
    _warn(report.rejected, 0)
    if arguments.json:
        return _print_json(
            folder=str(report.folder),
            size_bytes=report.size_bytes,
            documents=report.documents,
            split_by=report.split_by,
            skipped=report.skipped,
            rejected=[{"document": name, "reason": reason} for name, reason in report.rejected],
            meta=report.meta.model_dump(),
        )
    Console().print(_table(report.meta, f"{report.folder} ({report.size_bytes / 2**20:.1f} MiB)", "rows"))
    refused = f"{len(report.rejected)} refused, {sum(report.skipped.values())} files left out as no source"
    Console().print(f"{report.documents} documents, split by {report.split_by}; {refused}.", highlight=False)
    for reason, files in list(report.skipped.items())[:8]:
        Console().print(f"  {files:,} {reason}", highlight=False)
    return EXIT_OK


def verify(arguments: argparse.Namespace) -> int:
    """Check every shard and every sample."""
    from agentft.data.verify import verify_shards

    report = verify_shards(arguments.folder, progress=not arguments.json)
    if arguments.json:
        return _print_json(
            ok=True,
            shards=report.shards,
            samples=report.samples,
            size_bytes=report.size_bytes,
            meta=report.meta.model_dump(),
        )
    Console().print(_table(report.meta, arguments.folder))
    Console().print(f"{report.shards} shards, {report.samples} samples: sizes, checksums and contents agree.")
    return EXIT_OK


def upload(arguments: argparse.Namespace) -> int:
    """Publish shards, indexes last."""
    from agentft.data.upload import upload_shards

    report = upload_shards(arguments.folder, arguments.remote, workers=arguments.workers, progress=not arguments.json)
    if arguments.json:
        return _print_json(
            remote=report.remote,
            uploaded=report.uploaded,
            skipped=report.skipped,
            size_bytes=report.size_bytes,
            seconds=round(report.seconds, 2),
        )
    size = f"{report.size_bytes / 2**20:.1f} MiB in {report.seconds:.1f} s"
    Console().print(f"{report.remote}: {report.uploaded} files sent ({size}), {report.skipped} were there already.")
    Console().print(f"Train from it with data.remote={report.remote}", highlight=False)
    return EXIT_OK


def _sections(config: str | None) -> tuple[TextConfig, FeedbackPositionsConfig]:
    if config is None:
        return TextConfig(), FeedbackPositionsConfig()
    from agentft.config.load import load
    from agentft.config.tools import use_tools

    run = load(config)
    use_tools(run.tools)
    return run.text, run.model.feedback_positions


def _table(meta: ShardMeta, title: str, unit: str = "sessions") -> Table:
    table = Table(
        title=title, title_justify="left", caption="trained, context, longest: tokens", caption_justify="left"
    )
    for name in ("split", unit, "steps", "trained", "context", "longest", "shards", "from"):
        table.add_column(name, justify="left" if name in ("split", "from") else "right")
    for split, part in meta.splits.items():
        origins = ", ".join(f"{name or 'unknown'} {count}" for name, count in list(part.repositories.items())[:4])
        more = len(part.repositories) - 4
        numbers = (
            part.sessions,
            part.steps,
            part.trained_tokens,
            part.context_tokens,
            part.longest_tokens,
            part.shards,
        )
        table.add_row(
            split, *(f"{number:,}" for number in numbers), origins + (f" and {more} more" if more > 0 else "")
        )
    return table


def _warn(rejected: tuple[tuple[str, str], ...], unreadable: int) -> None:
    if unreadable:
        print(f"agentft: {unreadable} unreadable lines were put aside as .rejected.jsonl", file=sys.stderr)
    for name, reason in rejected[:5]:
        print(f"agentft: left out {name}: {reason}", file=sys.stderr)
    if len(rejected) > 5:
        print(f"agentft: and {len(rejected) - 5} more, see {Path('rejected.jsonl')} in the output", file=sys.stderr)


def _print_json(**values: Any) -> int:
    print(json.dumps(values))
    return EXIT_OK
