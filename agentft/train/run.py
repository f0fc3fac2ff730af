"""A run from its YAML to its summary (floor 5): ``composer train.py RUN.yaml [key=value ...]``, ``agentft train``.

Check everything cheap → initialise → ``build`` → fit → save the model → ``summary.json``. What a run leaves in
``runs/<name>/``: config.yaml, train.log, metrics.jsonl, losses.jsonl, traces/, tensorboard/, checkpoints/, model/,
summary.json; ``failed.txt`` says why, if it failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentft.config.load import to_yaml
from agentft.config.schema import RunConfig
from agentft.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, AgentFTError, ConfigError
from agentft.train.check import load_run_config
from agentft.train.preflight import preflight, run_folder
from agentft.train.resume import alone, cut_records, forget_failure, is_finished, resume_point

if TYPE_CHECKING:
    from agentft.train.build import BuiltRun

FIRST_RANK_SPEAKS_S = 5.0
LONGEST_WAIT_S = 3600.0
"""How long a process waits for the others, one of which may be writing a large checkpoint."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse ``RUN.yaml key=value …`` and run; return the exit code."""
    parser = argparse.ArgumentParser(prog="train.py", description="Train; every key of the YAML can be overridden.")
    parser.add_argument("config", metavar="RUN.yaml")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    return command(parser.parse_args(argv))


def command(arguments: argparse.Namespace) -> int:
    """``agentft train``: run and return the exit code. Of several processes only the one that fails first speaks."""
    first = int(os.environ.get("RANK", "0")) == 0
    folder: Path | None = None
    try:
        config = load_run_config(arguments.config, arguments.overrides)
        if config.train.checkpoints.autoresume and is_finished(run_folder(config)):
            print(f"{run_folder(config)}: this run is finished")
            return EXIT_OK
        with _prepared(config) if first else nullcontext():
            folder = run_folder(config)
            _train(config, folder)
    except KeyboardInterrupt:
        if first:
            print("agentft: interrupted; the run's folder keeps what was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    except AgentFTError as error:
        _report(folder, first, str(error))
        return error.exit_code
    except Exception:
        _report(folder, first, traceback.format_exc())
        return EXIT_FAILED
    return EXIT_OK


@contextmanager
def _prepared(config: RunConfig) -> Iterator[None]:
    """Check what the run needs, make its folder with the resolved configuration, and hold it for this process."""
    preflight(config)
    folder = run_folder(config)
    if config.overwrite and folder.exists():
        with alone(folder):
            shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        forget_failure(folder)
        if not (folder / "config.yaml").is_file():  # a run that goes on keeps the one that it began with
            (folder / "config.yaml").write_text(to_yaml(config))
        yield


def _train(config: RunConfig, folder: Path) -> None:
    """Build, fit, save. Heavy imports start here."""
    started = time.monotonic()
    _quiet()
    import torch
    from composer.utils import dist

    from agentft.models.export import save_model
    from agentft.train.build import build
    from agentft.train.summary import write_summary

    # Importing Composer turns both signals into a silent exit. Ctrl-C shall close the run and say so; SIGTERM shall end
    # the process as a signal does (the sandbox ends with it), so that a launcher reports only the rank that failed.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if config.train.device == "gpu" and not torch.cuda.is_available():
        raise ConfigError("no GPU that torch can use", where="train.device", got="gpu", hint="set train.device=cpu")
    if dist.get_world_size() > 1 or config.train.distributed.strategy == "fsdp":
        dist.initialize_dist(None if config.train.device == "auto" else config.train.device, timeout=LONGEST_WAIT_S)
        dist.barrier()  # the first rank has made the folder
    if config.train.threads or "OMP_NUM_THREADS" not in os.environ:
        share = len(os.sched_getaffinity(0)) // dist.get_local_world_size()
        torch.set_num_threads(config.train.threads or max(1, share))
    point = None
    if config.train.checkpoints.autoresume:
        point = resume_point(config, folder)
        cut_records(folder, point.records if point else {}, rank=dist.get_global_rank(), ranks=dist.get_world_size())
    run = build(config, folder, resume_from=point.checkpoint if point else None)
    calibration: dict[str, Any] | None = None
    try:
        built = time.monotonic()
        if not run.is_trained():  # killed between its last batch and its summary
            run.trainer.fit()
        fitted = time.monotonic()
        run = run.whole(config)
        if dist.get_global_rank() == 0:
            calibration = _calibrate(run) if config.data.calibration_split else None
            save_model(run.model, folder / "model", tokenizer=Path(config.data.shards) / "tokenizer")
        seconds = {"build": built - started, "fit": fitted - built, "save": time.monotonic() - fitted}
        write_summary(folder, run, seconds, calibration)
    finally:
        run.close()
    if dist.get_global_rank() == 0:
        print(f"{folder}: {run.trainer.state.timestamp.batch.value} batches in {fitted - built:.0f} s; next:")
        print(*([f"  agentft traces {folder}"] if run.feedback else []), f"  {_what_next(config, folder)}", sep="\n")


def _what_next(config: RunConfig, folder: Path) -> str:
    if config.stage == "pretrain":
        return (
            f"agentft shards write SESSIONS.jsonl -o SHARDS --tokenizer {folder}/model, then model.path={folder}/model"
        )
    return f"agentft export {folder} -o MODEL" if config.stage == "sft" else f"agentft eval {folder}"


def _calibrate(run: BuiltRun) -> dict[str, Any] | None:
    """Calibrate the outcome head of the model that will be saved; say so where there is too little to go by."""
    from agentft.evals.calibrate import FEWEST_RUNS, calibrate_outcome
    from agentft.feedback.judged import session_of

    dataset = run.calibration
    samples = [] if dataset is None else [dataset[row] for row in range(dataset.num_samples)]
    found = calibrate_outcome(run.model, samples, [session_of(sample["record"]) for sample in samples])
    if found is None:
        what = f"{FEWEST_RUNS} runs of code, passed and failed, in data.calibration_split"
        print(f"outcome head: not calibrated; it takes {what}")
        return None
    moved = f"{found.brier_before:.3f} -> {found.brier_after:.3f}"
    print(f"outcome head: calibrated on {found.runs} runs of code that were not trained on, Brier there {moved}")
    return found.as_dict()


def _report(folder: Path | None, first: bool, text: str) -> None:
    """Print the cause once, however many processes fail: the one that ``failed.txt`` was written for.

    The first rank prints it, whosever it is. Another rank leaves it time to do so (its launcher then ends the others)
    and speaks only if the first rank has nothing to say.
    """
    if folder is None or not folder.is_dir():
        if first:
            print(f"agentft: {text}", file=sys.stderr)
        return
    cause, mine = folder / "failed.txt", folder / f"failed-{os.getpid()}.txt"
    mine.write_text(text)
    with suppress(FileExistsError):
        os.link(mine, cause)  # at once and whole, or not at all
    mine.unlink()
    if first:
        print(f"agentft: {cause.read_text()}", file=sys.stderr)
    elif cause.read_text() == text:
        time.sleep(FIRST_RANK_SPEAKS_S)
        print(f"agentft: {text}", file=sys.stderr)


def _quiet() -> None:
    """Keep what other libraries say about themselves away from the user."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", module=r"(composer|torch|streaming|torchmetrics|torch_optimizer)\b")
