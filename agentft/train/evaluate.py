"""``agentft eval RUN`` (floor 5): the heads of a finished run beside their baselines, added to its summary.json."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from agentft.config.load import load
from agentft.config.schema import RunConfig
from agentft.config.tools import use_tools
from agentft.data.meta import TOKENIZER_NAME, load_meta
from agentft.data.read import read_samples
from agentft.errors import ConfigError, DataError
from agentft.etai import Split
from agentft.evals.calls import call_metrics
from agentft.evals.facts import session_facts
from agentft.evals.heads import predict
from agentft.evals.metrics import head_metrics
from agentft.evals.replay import path_accuracy
from agentft.feedback.judged import session_of
from agentft.files import write_json
from agentft.models.export import load_model
from agentft.report.page import calls_table, head_table, path_line
from agentft.text.render import Renderer
from agentft.text.vocab import load_tokenizer
from agentft.train.build import build_executor, build_renderer


def command(arguments: argparse.Namespace) -> int:
    """Evaluate ``arguments.run`` on ``arguments.split``; prints a table or, with ``--json``, the object."""
    run = Path(arguments.run)
    counts = {"path_sessions": arguments.path_accuracy, "call_sessions": arguments.calls}
    result = evaluate_run(run, arguments.split, **counts, progress=not arguments.json)
    add_to_summary(run, result)
    if arguments.json:
        print(json.dumps(result))
        return 0
    console = Console()
    held_out = result["held_out"]
    console.print(head_table(result["heads"], title=f"Heads on {held_out['sessions']} sessions of {arguments.split}"))
    console.print(f"code loss there: {held_out['code_loss']:.3f} nats a trained token")
    if "calls" in result:
        console.print(calls_table(result["calls"]))
    if "path_accuracy" in result:
        console.print(path_line(result["path_accuracy"]))
    return 0


def evaluate_run(
    run: Path, split: Split, *, path_sessions: int = 0, call_sessions: int = 0, progress: bool = False
) -> dict[str, Any]:
    """Return ``heads`` (metric → value, baselines), ``held_out`` code loss and, if asked, ``calls``, ``path_accuracy``.

    Args:
        run: Folder of a finished run.
        split: What is measured.
        path_sessions: How many sessions the agent acts on, for Path Accuracy@3.
        call_sessions: In how many sessions the model writes every recorded call again, without and with the grammar.
        progress: Show a bar while calls are written.

    Raises:
        DataError: The run or the split is not there.
        ConfigError: Path Accuracy is asked of a run that has no sandbox, or calls of one with a chat template.
    """
    if not (run / "config.yaml").is_file():
        raise DataError("no run here", where=str(run), expected="a folder that `composer train.py` has written")
    config = load(run / "config.yaml")
    if config.stage != "agent":
        hint = "its held-out losses are in summary.json (eval_loss)"
        raise ConfigError("a run of this stage has no heads to evaluate", where=str(run), got=config.stage, hint=hint)
    use_tools(config.tools)
    if path_sessions:
        _need_sandbox(config)
    renderer = _renderer(config) if call_sessions or path_sessions else None
    model = load_model(run / "model")
    train = [session_of(sample["record"]) for sample in read_samples(config.data.shards, config.data.train_split)]
    samples = list(read_samples(config.data.shards, split))
    sessions = [session_of(sample["record"]) for sample in samples]
    said = predict(model, samples)
    train_facts, facts = [session_facts(s) for s in train], [session_facts(s) for s in sessions]
    metrics = head_metrics(train_facts, facts, said)
    result: dict[str, Any] = {
        "heads": {name: metric.as_dict() for name, metric in metrics.items()},
        "held_out": {"split": split, "sessions": len(sessions), "code_loss": said.code_loss},
    }
    if renderer and call_sessions:
        shown = list(zip(sessions, facts, strict=True))[:call_sessions]
        result["calls"] = {}
        for name, grammar in (("free", False), ("grammar", True)):
            found = call_metrics(model, renderer, train_facts, shown, grammar=grammar, progress=progress)
            result["calls"][name] = {metric: value.as_dict() for metric, value in found.items()}
    if renderer and path_sessions:
        executor = build_executor(config, run)
        try:
            result["path_accuracy"] = path_accuracy(model, renderer, sessions[:path_sessions], executor).as_dict()
        finally:
            executor.close()
    return result


def add_to_summary(run: Path, result: Mapping[str, Any]) -> None:
    """Put the evaluation into the run's summary.json, beside what training wrote."""
    path = run / "summary.json"
    summary = json.loads(path.read_text()) if path.is_file() else {}
    write_json(path, {**summary, **result})


def _need_sandbox(config: RunConfig) -> None:
    if config.feedback.backend not in ("docker", "local"):
        raise ConfigError(
            "Path Accuracy executes new calls and needs a sandbox",
            where="feedback.backend",
            got=config.feedback.backend,
            expected="a run with docker or local",
        )


def _renderer(config: RunConfig) -> Renderer:
    """Return the renderer of the run's shards.

    Raises:
        ConfigError: The run renders with a chat template, whose turns are not parsed.
    """
    tokenizer = load_tokenizer(Path(config.data.shards) / TOKENIZER_NAME)
    renderer = build_renderer(config, tokenizer, load_meta(config.data.shards))
    if renderer is None:
        raise ConfigError(
            "the model's own calls are read in the native template only",
            where="text.template",
            got=config.text.template,
            expected="etai",
        )
    return renderer
