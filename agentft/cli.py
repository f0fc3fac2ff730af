"""The command line (floor 6): one row per verb; the work is in the named function, imported when it is called.

A verb's function takes the parsed arguments and returns an exit code: 0 ok, 1 failed, 2 usage or config,
3 environment, 4 gate missed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from agentft import __version__
from agentft.errors import EXIT_INTERRUPTED, EXIT_OK, AgentFTError


def main(argv: Sequence[str] | None = None) -> int:
    """Parse ``argv`` and run the verb. Errors of ours are printed once, without a traceback."""
    arguments = build_parser().parse_args(argv)
    module, _, function = arguments.target.partition(":")
    try:
        code = int(getattr(importlib.import_module(module), function)(arguments))
        sys.stdout.flush()  # here, where a reader that has gone can still be told from a failure
        return code
    except BrokenPipeError:  # `agentft tools | head`: what was asked for has been shown
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except AgentFTError as error:
        print(f"agentft: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("agentft: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every verb, without importing any verb's module."""
    parser = argparse.ArgumentParser(prog="agentft", description="Turn real coding sessions into a better agent.")
    parser.add_argument("--version", action="version", version=f"agentft {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_data_verbs(verbs)
    _add_sandbox_verbs(verbs)
    _add_run_verbs(verbs)
    return parser


def _verb(verbs, name: str, target: str, help_text: str) -> argparse.ArgumentParser:  # type: ignore[no-untyped-def]
    parser = verbs.add_parser(name, help=help_text, description=help_text)
    parser.set_defaults(target=target)
    return parser


def _json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _add_data_verbs(verbs) -> None:  # type: ignore[no-untyped-def]
    p = _verb(verbs, "import", "agentft.data.importers.commands:import_sessions", "Import sessions of other agents.")
    p.add_argument("paths", nargs="+", metavar="PATH", help="files, folders, parquet, or hf:owner/name[:split]")
    p.add_argument("-o", "--output", required=True, help="file to write (.jsonl, .jsonl.gz, .jsonl.zst)")
    p.add_argument("--format", default="auto", help="swe-agent, mini-swe-agent, openhands, openai, etai, or auto")
    p.add_argument("--strict", action="store_true", help="stop at the first bad record")
    _json_flag(p)

    p = _verb(verbs, "synth", "agentft.data.synthesis.commands:synthesize", "Make repair sessions from packages.")
    p.add_argument("--package", action="append", required=True, metavar="NAME==VERSION", help="repeat for several")
    p.add_argument("-n", "--sessions", type=int, default=150, help="sessions to keep, over all packages")
    p.add_argument("-o", "--output", required=True)
    p.add_argument("--backend", choices=("docker", "local"), default="docker")
    p.add_argument("--image", default="python")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--seed", type=int, default=17)
    _json_flag(p)

    shards = verbs.add_parser("shards", help="Write, verify and upload shards.").add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    p = _verb(shards, "write", "agentft.data.commands:write", "Render sessions and write MDS shards.")
    p.add_argument("sessions", nargs="+", metavar="SESSIONS.jsonl")
    p.add_argument("-o", "--output", required=True, help="folder to write")
    p.add_argument("--config", help="run YAML whose text, model and tokenizer sections are used")
    p.add_argument("--tokenizer", default="train", help="folder or hub name; `train` learns a small BPE from the data")
    p.add_argument("--vocab-size", type=int, default=4096)
    p.add_argument("--holdout", action="append", default=[], metavar="REPOSITORY", help="goes to the test split whole")
    p.add_argument("--val-share", type=float, default=0.0, help="with --holdout: share of the other sessions for val")
    _json_flag(p)
    p = _verb(shards, "write-corpus", "agentft.data.commands:write_corpus", "Write shards of source code (pretrain).")
    p.add_argument("paths", nargs="+", metavar="PATH", help="folders, source files, .jsonl(.gz, .zst) with `content`")
    p.add_argument("-o", "--output", required=True, help="folder to write")
    p.add_argument("--config", help="run YAML whose text.max_tokens is used")
    p.add_argument("--tokenizer", default="train", help="folder or hub name; `train` learns one from the corpus")
    p.add_argument("--vocab-size", type=int, default=4096)
    p.add_argument("--holdout", action="append", default=[], metavar="REPOSITORY", help="goes to the test split whole")
    p.add_argument("--val-share", type=float, default=0.0, help="with --holdout: share of the other documents for val")
    _json_flag(p)
    p = _verb(shards, "verify", "agentft.data.commands:verify", "Check every shard against its index and checksums.")
    p.add_argument("folder")
    _json_flag(p)
    p = _verb(shards, "upload", "agentft.data.commands:upload", "Upload shards to an object store, index last.")
    p.add_argument("folder")
    p.add_argument("remote", metavar="s3://BUCKET/PREFIX")
    p.add_argument("--workers", type=int, default=8)
    _json_flag(p)

    p = _verb(verbs, "inspect", "agentft.text.inspect:command", "Show a record as tokens: trained, masked, anchors.")
    p.add_argument("sessions", metavar="SESSIONS.jsonl")
    p.add_argument("--id", help="session id; the first record if left out")
    p.add_argument("--tokenizer", help="tokenizer folder; the one beside the shards if left out")
    p.add_argument("--no-handles", action="store_true")
    p.add_argument("--ids", action="store_true", help="one line a token, with its id and position")
    p.add_argument("--html", metavar="FILE", help="write the same view as a page too")
    _json_flag(p)


def _add_sandbox_verbs(verbs) -> None:  # type: ignore[no-untyped-def]
    actions = verbs.add_parser("sandbox", help="Build images, run a command, attack it, clean up.").add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    p = _verb(actions, "build", "agentft.sandbox.commands:build", "Build a sandbox image.")
    p.add_argument("image", nargs="?", default="python")
    p.add_argument("--base", default="auto", choices=("auto", "registry", "debootstrap"))
    p.add_argument("--force", action="store_true", help="build even when the image is there")
    _json_flag(p)
    p = _verb(actions, "run", "agentft.sandbox.commands:run", "Run one command in the sandbox.")
    p.add_argument("--image", default="python")
    p.add_argument("--backend", choices=("docker", "local"), default="docker")
    p.add_argument("--timeout", type=float, default=20.0, metavar="S")
    p.add_argument("--dir", help="folder whose files are the workspace")
    _json_flag(p)
    p.add_argument("command", nargs="+", metavar="CMD")
    p = _verb(actions, "check", "agentft.sandbox.commands:check", "Attack the sandbox; shows what holds.")
    p.add_argument("--image", default="python")
    p.add_argument("--backend", choices=("docker", "local"), default="docker")
    p.add_argument("--host", help="engine to attack: unix:///path or tcp://name:port")
    p.add_argument("--only", action="append", default=[], metavar="NAME", help="a check or a group; repeat for several")
    p.add_argument("--json", metavar="FILE", help="write the outcomes to a file too")
    p = _verb(actions, "tool", "agentft.sandbox.tool_command:command", "Call one tool in a fresh sandbox.")
    p.add_argument("name", metavar="TOOL")
    p.add_argument("arguments", nargs="?", default="{}", metavar="JSON", help="the arguments, a JSON object")
    p.add_argument("--tools", action="append", default=[], metavar="TOOLS.yaml", help="file of user tools")
    p.add_argument("--image", default="python")
    p.add_argument("--backend", choices=("docker", "local"), default="docker")
    p.add_argument("--dir", help="folder whose files are the workspace")
    _json_flag(p)
    p = _verb(actions, "grade", "agentft.sandbox.grade_command:command", "Judge sessions where they never ran.")
    p.add_argument("sessions", metavar="SESSIONS.jsonl")
    p.add_argument("--image", default="python")
    p.add_argument("--backend", choices=("docker", "local"), default="docker")
    p.add_argument("--workers", type=int, default=2, help="containers at a time")
    _json_flag(p)
    p = _verb(actions, "clean", "agentft.sandbox.commands:clean", "Remove containers whose run has ended.")
    p.add_argument("--all", action="store_true", help="also those of runs that are alive (asks, or --yes)")
    p.add_argument("--cache", metavar="FOLDER", help="remove the results kept in a run's or a shared folder instead")
    p.add_argument("--yes", action="store_true")
    _json_flag(p)


def _add_run_verbs(verbs) -> None:  # type: ignore[no-untyped-def]
    p = _verb(verbs, "train", "agentft.train.run:command", "Train; the same as `composer train.py`.")
    p.add_argument("config", metavar="RUN.yaml")
    p.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    p = _verb(verbs, "validate", "agentft.train.check:validate", "Check a YAML; shows every error at once.")
    p.add_argument("config", metavar="RUN.yaml")
    p.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    _json_flag(p)
    p = _verb(verbs, "plan", "agentft.report.plan:command", "Memory, disk and hours of a run before it starts.")
    p.add_argument("config", metavar="RUN.yaml")
    p.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    p.add_argument("--gpus", type=int, default=1, metavar="N", help="processes that share the batch, on all nodes")
    p.add_argument("--gpu-memory", type=float, metavar="GIB", help="exit code 4 if a rank needs more")
    p.add_argument("--throughput", type=float, metavar="TOKENS/S", help="of all GPUs together, for the hours")
    p.add_argument("--trace", action="store_true", help="also trace a step of the backbone without its weights")
    _json_flag(p)
    p = _verb(verbs, "eval", "agentft.train.evaluate:command", "Evaluate the heads of a run beside baselines.")
    p.add_argument("run", metavar="RUN", help="run folder")
    p.add_argument("--split", default="test", choices=("train", "val", "test"))
    p.add_argument("--path-accuracy", type=int, default=0, metavar="N", help="sessions to replay for Path Accuracy@3")
    p.add_argument("--calls", type=int, default=0, metavar="N", help="sessions whose calls the model writes again")
    _json_flag(p)
    p = _verb(verbs, "export", "agentft.models.export:command", "Write a plain Hugging Face model and its heads.")
    p.add_argument("run", metavar="RUN")
    p.add_argument("-o", "--output", required=True)
    _json_flag(p)
    p = _verb(verbs, "fisher", "agentft.evals.fisher:command", "Measure which weights earlier data depends on (EWC).")
    p.add_argument("run", metavar="RUN", help="run folder, or the folder of a saved agent")
    p.add_argument("--shards", required=True, metavar="FOLDER", help="shards of the earlier data")
    p.add_argument("-o", "--output", required=True, metavar="FILE", help="safetensors file to write")
    p.add_argument("--split", default="train", choices=("train", "val", "test"))
    p.add_argument("--samples", type=int, default=1000, help="samples to measure on, at most")
    p.add_argument("--targets", choices=("true", "empirical"), default="true", help="drawn from the model, or recorded")
    p.add_argument("--seed", type=int, default=17, help="of the draws")
    _json_flag(p)
    p = _verb(verbs, "clean", "agentft.train.clean:command", "Remove checkpoints that are safe in a store.")
    p.add_argument("run", metavar="RUN")
    p.add_argument("--upload", metavar="s3://BUCKET/PREFIX", help="upload first what is not there yet")
    p.add_argument("--everything", action="store_true", help="the whole run folder, not only its checkpoints")
    p.add_argument("--yes", action="store_true", help="remove without asking")
    _json_flag(p)
    p = _verb(verbs, "traces", "agentft.report.traces:command", "Read the reward traces of a run.")
    p.add_argument("run", metavar="RUN")
    p.add_argument("--failed", action="store_true", help="only executions that did not pass")
    p.add_argument("--tool", help="only this tool")
    p.add_argument("--step", type=int, help="only this step of the sessions")
    p.add_argument("--source", choices=("recorded", "policy", "probe"))
    p.add_argument("--session", help="show one session step by step")
    p.add_argument("--limit", type=int, default=40)
    _json_flag(p)
    p = _verb(verbs, "tools", "agentft.report.tools:command", "Show the tools that an agent can call.")
    p.add_argument("files", nargs="*", metavar="TOOLS.yaml", help="files of user tools")
    p.add_argument("--markdown", action="store_true", help="as docs/tools.md")
    _json_flag(p)
    p = _verb(verbs, "doctor", "agentft.report.doctor:command", "Check this machine; says what to do.")
    _json_flag(p)
    p = _verb(verbs, "demo", "agentft.train.demo:command", "The main job from packages to a trained agent.")
    p.add_argument("--output", default="runs/demo")
    p.add_argument("--backend", choices=("auto", "docker", "local"), default="auto")
    p.add_argument("--seed", type=int, default=17)


if __name__ == "__main__":
    sys.exit(main())
