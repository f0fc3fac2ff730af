"""The checks of ``run.sh``: whole tiny runs on one GPU or, where it makes sense, on a CPU; a minute or two each.

    python tests/gpu/checks.py [--device gpu|cpu] [--only NAME]...

Exit code 0: nothing failed (skips say why); 1: a check failed; 3: there is no GPU and none was done without.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from support_runs import SMALL, YAMLS, make_shards

from agentft.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_OK
from agentft.models.agent_model import AgentModel, build_agent_model
from agentft.train.run import main as train

CLOSE, ROUNDED = 1e-4, 0.03
"""Relative difference of losses: of two orders of the same sums in float32, and of float32 and bfloat16."""


class NotHereError(Exception):
    """A check cannot be made on this machine; says why."""


class Place:
    """A folder for runs, shards of tiny sessions, and the device."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device, self.shards = folder, device, make_shards(folder)

    def run(self, name: str, *more: str) -> list[dict[str, float]]:
        """Train a tiny model; return the losses of each batch."""
        words = [
            str(YAMLS / "tiny-glm.yaml"),
            f"run_name={name}",
            f"runs_dir={self.folder}",
            f"data.shards={self.shards}",
        ]
        words += [*SMALL, f"train.device={self.device}", "feedback.backend=off", "train.duration=6ba", *more]
        assert train(words) == EXIT_OK, f"the run {name} failed"
        return [json.loads(line) for line in (self.folder / name / "losses.jsonl").read_text().splitlines()]

    def reference(self) -> list[dict[str, float]]:
        """Return the losses of the plain run in float32, trained once."""
        done = self.folder / "reference" / "losses.jsonl"
        return [json.loads(line) for line in done.read_text().splitlines()] if done.is_file() else self.run("reference")

    def need_gpu(self) -> None:
        """Skip on a CPU."""
        if self.device != "gpu":
            raise NotHereError("needs a GPU")


def close(found: list[dict[str, float]], expected: list[dict[str, float]], share: float) -> None:
    """Check that two loss curves agree."""
    assert len(found) == len(expected)
    for line, other in zip(found, expected, strict=True):
        for name in ("code", "tool"):
            one, two = line[f"loss/{name}/raw"], other[f"loss/{name}/raw"]
            assert math.isclose(one, two, rel_tol=share, abs_tol=share), (
                f"batch {line['batch']}: {name} {one} and {two}"
            )


def bf16(place: Place) -> str:
    """Autocast in bfloat16 gives the losses of float32, rounded."""
    found = place.run("bf16", "train.precision=amp_bf16")
    close(found, place.reference(), ROUNDED)
    return f"code loss {found[-1]['loss/code/raw']:.3f}, float32 {place.reference()[-1]['loss/code/raw']:.3f}"


def flash(place: Place) -> str:
    """The variable-length kernel over packed rows gives the losses of PyTorch's kernel a session."""
    place.need_gpu()
    if find_spec("flash_attn") is None:
        raise NotHereError("the package flash-attn is not installed")
    found = place.run("flash", "train.precision=amp_bf16", "model.attention=flash_attention_2", "data.packing=pack")
    close(found, place.run("sdpa", "train.precision=amp_bf16", "data.packing=pack"), ROUNDED)
    return "same losses as sdpa"


def lora(place: Place) -> str:
    """Adapters on float32 weights lower the loss; only they are saved."""
    return _adapters(place, "lora")


def qlora(place: Place) -> str:
    """Adapters on 4-bit weights lower the loss."""
    place.need_gpu()
    if find_spec("bitsandbytes") is None:
        raise NotHereError("the package bitsandbytes is not installed")
    return _adapters(place, "qlora", "model.quantize=nf4", "train.precision=amp_bf16")


def _adapters(place: Place, name: str, *more: str) -> str:
    from agentft.models.export import export

    place.reference()
    backbone = place.folder / "backbone"
    if not backbone.exists():
        export(place.folder / "reference", backbone)
    found = place.run(name, "model.preset=null", f"model.path={backbone}", "model.lora={rank: 8}", *more)
    first, last = found[0]["loss/code/raw"], found[-1]["loss/code/raw"]
    assert last < first, f"the loss went from {first} to {last}"
    assert (place.folder / name / "model" / "adapters.safetensors").is_file()
    return f"code loss {first:.3f} -> {last:.3f}"


def checkpointing(place: Place) -> str:
    """Activations that are computed again: the same gradients, less memory."""
    device = torch.device("cuda" if place.device == "gpu" else "cpu")
    losses, peaks, gradients = zip(*(_step(device, again) for again in (False, True)), strict=True)
    assert math.isclose(losses[0], losses[1], rel_tol=1e-5), losses
    assert math.isclose(gradients[0], gradients[1], rel_tol=CLOSE), gradients
    if device.type == "cpu":
        return "same loss and gradients; memory is measured on a GPU only"
    assert peaks[1] < 0.8 * peaks[0], f"peak {peaks[1] / 2**20:.0f} MiB, without it {peaks[0] / 2**20:.0f} MiB"
    return f"peak {peaks[0] / 2**20:.0f} -> {peaks[1] / 2**20:.0f} MiB"


def _step(device: torch.device, again: bool) -> tuple[float, int, float]:
    """Return loss, peak memory in bytes and gradient norm of one backward pass over 4 rows of 2,048 tokens."""
    from agentft.config.schema import ModelConfig
    from agentft.models.backbone import checkpoint_activations, hidden_states

    model: AgentModel = build_agent_model(ModelConfig(preset="tiny-glm"), vocab_size=600, tools=["a"], seed=1).to(
        device
    )
    if again:
        checkpoint_activations(model.backbone)
    model.train()
    ids = torch.arange(4 * 2048, device=device).reshape(4, 2048) % 600
    positions = torch.arange(2048, device=device).expand(4, -1)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    loss: Any = hidden_states(model.backbone, ids, positions).square().mean()
    loss.backward()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return float(loss), peak, float(norm)


def resume(place: Place) -> str:
    """A run that goes on from the middle ends as the one that never stopped (to the order of sums on a GPU)."""
    more = ["train.checkpoints.interval=3ba", "train.checkpoints.autoresume=true"]
    whole = place.run("resumed", *more)
    run = place.folder / "resumed"
    (run / "summary.json").unlink()
    listed = json.loads((run / "checkpoints" / "checkpoints.json").read_text())
    listed["checkpoints"] = listed["checkpoints"][:1]
    (run / "checkpoints" / "checkpoints.json").write_text(json.dumps(listed))
    close(place.run("resumed", *more), whole, CLOSE)
    return "from batch 3 of 6"


def fsdp(place: Place) -> str:
    """FSDP2 in one process: the losses of the plain run, in float32 and rounded in bfloat16; with recomputation."""
    on = "train.distributed.strategy=fsdp"
    close(place.run("fsdp", on), place.reference(), CLOSE)
    close(place.run("fsdp-again", on, "train.activation_checkpointing=true"), place.reference(), CLOSE)
    if place.device == "cpu":
        return "float32"
    close(place.run("fsdp-bf16", on, "train.precision=amp_bf16"), place.reference(), ROUNDED)
    return "float32 and bfloat16"


CHECKS: tuple[Callable[[Place], str], ...] = (bf16, flash, lora, qlora, checkpointing, resume, fsdp)


def main() -> int:
    """Make the checks that were asked for; print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--only", action="append", choices=[check.__name__ for check in CHECKS], default=[])
    arguments = parser.parse_args()
    if arguments.device == "gpu" and not torch.cuda.is_available():
        print("no GPU that torch can use: run this on one, or with --device cpu", file=sys.stderr)
        return EXIT_ENVIRONMENT
    failed = 0
    with tempfile.TemporaryDirectory(prefix="agentft-gpu-") as folder:
        place = Place(Path(folder), arguments.device)
        for check in CHECKS:
            if arguments.only and check.__name__ not in arguments.only:
                continue
            started = time.monotonic()
            try:
                state, said = "ok", check(place)
            except NotHereError as reason:
                state, said = "skipped", str(reason)
            except Exception:
                state, said = "FAILED", traceback.format_exc()
                failed += 1
            print(f"{check.__name__:14} {state:8} {time.monotonic() - started:6.1f} s  {said}", flush=True)
    return EXIT_FAILED if failed else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
