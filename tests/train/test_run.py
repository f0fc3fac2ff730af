"""Whole runs: from YAML to summary, twice with one seed, replayed, on two processes, refused, and killed."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_runs import launch, make_shards

from agentft.config.load import load
from agentft.feedback.trace import read_traces
from agentft.models.agent_model import AgentModel
from agentft.report.traces import how
from agentft.train.run import main

REPO = Path(__file__).resolve().parents[2]
YAML = str(REPO / "yamls" / "agent" / "tiny-glm.yaml")
SMALL = ["loggers.tensorboard=false", "data.batch_size=8", "data.microbatch_size=4", "train.eval_interval=0ba"]
SMALL += ["train.threads=1", "train.precision=fp32"]
PROBE = ["feedback.probe.every=4", "feedback.probe.calls=2", "feedback.policy.every=4", "feedback.policy.calls=2"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("run"))


@pytest.fixture
def local(bubblewrap: None) -> str:
    """Give the override of the embedded backend, where it can run."""
    return "feedback.backend=local"


def _words(name: str, runs: Path, shards: Path, *more: str) -> list[str]:
    return [YAML, f"run_name={name}", f"runs_dir={runs}", f"data.shards={shards}", *SMALL, *more]


@pytest.mark.s3
def test_a_run_streams_its_shards_from_the_store(tmp_path: Path, shards: Path, bucket: str, local: str) -> None:
    """The same losses from s3:// as from the folder, with nothing but an empty local cache."""
    from agentft.data.upload import upload_shards

    more = [local, "train.duration=1ep", "feedback.probe.every=0"]
    assert main(_words("folder", tmp_path, shards, *more)) == 0
    upload_shards(shards, f"s3://{bucket}/shards")
    assert main(_words("store", tmp_path, tmp_path / "cache", f"data.remote=s3://{bucket}/shards", *more)) == 0
    curve = (tmp_path / "store" / "losses.jsonl").read_bytes()
    assert curve == (tmp_path / "folder" / "losses.jsonl").read_bytes()
    assert list((tmp_path / "cache" / "train").glob("*.mds*"))


@pytest.mark.s3
def test_a_run_with_wrong_credentials_is_refused_in_one_message(
    tmp_path: Path, shards: Path, bucket: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from agentft.data.upload import upload_shards

    upload_shards(shards, f"s3://{bucket}/shards")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-this-one")
    words = _words("store", tmp_path, tmp_path / "cache", f"data.remote=s3://{bucket}/shards", "feedback.backend=off")
    assert main([*words, "train.duration=1ep"]) == 3
    said = capsys.readouterr().err
    assert said.count("agentft:") == 1
    assert "credentials" in said


def test_one_seed_one_curve_and_a_replay_without_a_sandbox(tmp_path: Path, shards: Path, local: str) -> None:
    more = ["train.duration=2ep", *PROBE]
    assert main(_words("first", tmp_path, shards, local, *more)) == 0
    assert main(_words("again", tmp_path, shards, local, *more)) == 0
    replay = ["feedback.backend=replay", f"feedback.replay_from={tmp_path / 'first'}"]
    assert main(_words("replayed", tmp_path, shards, *replay, *more)) == 0
    curve = (tmp_path / "first" / "losses.jsonl").read_bytes()
    assert len(curve.splitlines()) == 6
    assert (tmp_path / "again" / "losses.jsonl").read_bytes() == curve
    assert (tmp_path / "replayed" / "losses.jsonl").read_bytes() == curve

    summary = json.loads((tmp_path / "first" / "summary.json").read_text())
    lines = list(read_traces(tmp_path / "first"))
    assert summary["traces"]["lines"] == len(lines) > 0
    assert {line.source for line in lines} == {"recorded", "policy", "probe"}
    ran = [line for line in lines if line.status and not line.cached]
    assert summary["sandbox"]["executions"] == len(ran)
    assert sum(summary["sandbox"]["by_status"].values()) == len(ran)
    assert all(how(line) != "lost" for line in lines)
    code = summary["loss"]["code"]
    first = json.loads(curve.splitlines()[0])
    assert code["first"] == first["loss/code/raw"]
    assert code["last"] < code["first"]
    assert code["weight_first"] == 0.8
    assert summary["tokens"]["trained"] > 0
    assert summary["probe"]["calls"] >= 2
    assert load(tmp_path / "first" / "config.yaml").run_name == "first"
    assert (tmp_path / "first" / "model" / "model.safetensors").is_file()
    assert (tmp_path / "first" / "checkpoints" / "ba6.safetensors").is_file()


def test_a_closed_run_keeps_nothing_of_the_process(tmp_path: Path, shards: Path, local: str) -> None:
    """A sweep in one process, or a notebook: neither open files nor models pile up, run after run."""

    def held() -> tuple[int, int]:
        gc.collect()
        assert gc.get_freeze_count() == 0  # what is frozen is never let go, and not listed
        return sum(type(thing) is AgentModel for thing in gc.get_objects()), len(os.listdir("/proc/self/fd"))

    def after(run: str) -> tuple[int, int]:
        assert main(_words(run, tmp_path, shards, local, "train.duration=2ba", *PROBE)) == 0
        return held()

    models, _ = held()
    first, second = after("a"), after("b")
    assert first == second
    assert first[0] == models


def test_two_processes_share_a_batch_and_see_the_same_losses_as_one(tmp_path: Path, shards: Path, local: str) -> None:
    more = ["train.duration=2ba", "feedback.probe.every=0", "data.microbatch_size=4", local]
    two = launch(_words("two", tmp_path, shards, *more), processes=2)
    assert main(_words("one", tmp_path, shards, *more)) == 0
    output, _ = two.communicate(timeout=240)
    assert two.returncode == 0, output
    curves = [
        [json.loads(line) for line in (tmp_path / name / "losses.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    for one, both in zip(*curves, strict=True):
        for name in ("code", "intent", "tool", "reward"):
            assert both[f"loss/{name}/raw"] == pytest.approx(one[f"loss/{name}/raw"], rel=1e-4), name
    assert sorted(p.name for p in (tmp_path / "two" / "traces").iterdir()) == ["rank0.jsonl", "rank1.jsonl"]
    keys = [sorted(line.key for line in read_traces(tmp_path / name)) for name in ("one", "two")]
    assert keys[0] == keys[1]
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["traces"]["lines"] == len(keys[1])


def test_one_cause_is_printed_when_two_processes_fail(tmp_path: Path, shards: Path) -> None:
    words = _words("bad", tmp_path, shards, "text.max_tokens=900", "feedback.backend=off", "train.duration=1ba")
    process = launch(words, processes=2)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert output.count("text.max_tokens = 1024 in the shards") == 1, output
    assert "Traceback" not in output, output
    assert "another tokenizer, template or text configuration" in (tmp_path / "bad" / "failed.txt").read_text()


def test_what_is_missing_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = tmp_path / "absent"
    words = _words("x", tmp_path, absent, "feedback.backend=replay", f"feedback.replay_from={tmp_path / 'gone'}")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "no shards here" in error
    assert "agentft shards write" in error
    assert "no run to replay" in error
    assert not (tmp_path / "x").exists()


@pytest.mark.engine
def test_a_missing_image_names_the_command_that_builds_it(
    tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_words("x", tmp_path, shards, "sandbox.image=nothing-here")) == 3
    assert "agentft sandbox build nothing-here" in capsys.readouterr().err


def test_a_run_is_never_overwritten_by_accident(
    tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.yaml").write_text("run_name: taken\n")
    off = ["feedback.backend=off", "train.duration=1ba"]
    assert main(_words("taken", tmp_path, shards, *off)) == 2
    assert "overwrite=true" in capsys.readouterr().err
    assert main(_words("taken", tmp_path, shards, *off, "overwrite=true")) == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    assert main(_words("other", tmp_path, shards, *off, "overwrite=true")) == 2
    assert (tmp_path / "other" / "thesis.txt").read_text() == "mine"


@pytest.fixture
def running(tmp_path: Path, shards: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """Give a run with containers that is in the middle of training."""
    name = f"killed-{os.getpid()}"
    process = launch(_words(name, tmp_path, shards, "train.duration=500ep", "feedback.probe.every=0"))
    try:
        _wait(lambda: (tmp_path / name / "losses.jsonl").exists() or process.poll() is not None, 120)
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        yield process
    finally:
        process.kill()
        process.wait()


def _wait(condition: object, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.1)
    return False


def _containers() -> list[str]:
    import docker

    client = docker.from_env()
    label = f"agentft.run=killed-{os.getpid()}"
    found = client.containers.list(all=True, filters={"label": label}, sparse=True)
    client.close()
    return [container.id for container in found]


@pytest.mark.engine
@pytest.mark.slow
def test_a_killed_trainer_leaves_nothing_and_the_next_run_starts(
    tmp_path: Path, shards: Path, running: subprocess.Popen[str]
) -> None:
    assert _containers()
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert _wait(lambda: not _containers(), 5), "containers outlived the trainer by 5 s"
    assert main(_words("next", tmp_path, shards, "feedback.backend=off", "train.duration=1ba")) == 0
    killed = tmp_path / f"killed-{os.getpid()}"
    assert list(read_traces(killed))


@pytest.mark.engine
@pytest.mark.slow
def test_an_interrupted_run_closes_its_sandbox(running: subprocess.Popen[str]) -> None:
    assert _containers()
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 130, output
    assert "interrupted" in output
    assert _wait(lambda: not _containers(), 2)


def test_a_finished_run_is_evaluated_beside_baselines(tmp_path: Path, shards: Path, local: str) -> None:
    from agentft.train.evaluate import add_to_summary, evaluate_run

    assert main(_words("run", tmp_path, shards, local, "train.duration=1ep", "feedback.probe.every=0")) == 0
    result = evaluate_run(tmp_path / "run", "test", path_sessions=2, call_sessions=1)
    add_to_summary(tmp_path / "run", result)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["heads"] == result["heads"]
    assert summary["loss"]["code"]["first"] > 0, "what training wrote stays"
    tool = result["heads"]["tool_accuracy"]
    assert 0 <= tool["value"] <= 1
    assert tool["baseline"] == max(tool["baselines"].values())
    assert result["held_out"]["sessions"] == 8
    assert result["held_out"]["code_loss"] > 0
    assert result["path_accuracy"]["count"] == 2
    assert result["path_accuracy"]["parse_ok"] == result["path_accuracy"]["calls"]
    free, held = result["calls"]["free"], result["calls"]["grammar"]
    assert held["parsed"]["value"] == 1.0 >= free["parsed"]["value"]
    assert held["right_tool"]["count"] == held["same_call"]["count"] >= held["right_file"]["count"] > 0
