"""Kinds of broken YAML: each gives one message that names the line, what was got and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentft.config.load import InvalidConfigError
from agentft.train.check import load_run_config

GOOD = """\
run_name: t
model:
  preset: tiny-glm
data:
  shards: shards
train:
  duration: 3ba
"""

BROKEN: dict[str, tuple[str, str, int, tuple[str, ...]]] = {
    # kind: (text to find in GOOD, what replaces it, line of the error, parts of the message)
    "not YAML": ("  shards: shards", "  shards: [a, b", 6, ("not YAML",)),
    "misspelt key": ("duration", "durration", 7, ("unknown key train.durration", "did you mean train.duration?")),
    "key in the wrong section": ("run_name: t", "run_name: t\nbatch_size: 4", 2, ("did you mean data.batch_size?",)),
    "wrong type": ("shards: shards", "shards: shards\n  batch_size: many", 6, ("batch_size", "many", "a whole number")),
    "unknown choice": ("tiny-glm", "tiny-gml", 3, ("model.preset", "tiny-gml", "tiny-glm, tiny-kimi")),
    "missing key": ("  duration: 3ba", "  threads: 1", 7, ("train.duration is missing", "300ba")),
    "section instead of value": ("duration: 3ba", "duration: {batches: 3}", 7, ("a value, not a section",)),
    "value instead of section": ("data:\n  shards: shards", "data: shards", 4, ("a section, not a value", "shards")),
    "key given twice": ("run_name: t", "run_name: t\nrun_name: u", 2, ("run_name is given twice",)),
    "not a time": ("3ba", "3 batches", 7, ("train.duration is not a time", "3 batches", "300ba")),
    "out of range": ("shards: shards", "shards: shards\n  batch_size: 0", 6, ("data.batch_size", "1 or more")),
    "two backbones": ("tiny-glm", "tiny-glm\n  path: m", 3, ("exactly one of them", "path=m")),
    "no effect": (
        "run_name: t",
        "run_name: t\nfeedback: {replay_from: runs/x}",
        2,
        ("feedback.replay_from has no effect", "feedback.backend=docker", "feedback.backend=replay"),
    ),
    "objectives outside of pretraining": (
        "run_name: t",
        "run_name: t\nobjectives: {fim: 0.2}",
        2,
        ("objectives have no effect in this stage", "set stage=pretrain"),
    ),
    "feedback while pretraining": ("run_name: t", "run_name: t\nstage: pretrain", 2, ("set feedback.backend=off",)),
    "a share of masked words without masking": (
        "run_name: t",
        "run_name: t\nstage: pretrain\nfeedback: {backend: off}\nobjectives: {mask_most: 0.3}",
        4,
        ("objectives.mask_most has no effect", "objectives.masked=0"),
    ),
    "a cache without a size": (
        "run_name: t",
        "run_name: t\nsandbox: {cache: {folder: /x, mib: 0}}",
        2,
        ("sandbox.cache.folder has no effect", "memory only"),
    ),
    "schedule without its end": (
        "run_name: t",
        "run_name: t\nloss:\n  tool: {kind: cosine, start: 1.0, until: 5ep}",
        3,
        ("loss.tool.end", "`cosine` needs `end`"),
    ),
    "schedule field of another kind": (
        "run_name: t",
        "run_name: t\nloss:\n  tool:\n    kind: constant\n    start: 1.0\n    slope: 0.1",
        6,
        ("`constant` does not use `slope`", "remove `slope`"),
    ),
    "number where a schedule belongs": ("run_name: t", "run_name: t\nloss: {tool: 0.2}", 2, ("write {start: 0.2}",)),
    "positions inside the conversation": (
        "tiny-glm",
        "tiny-glm\n  feedback_positions:\n    enabled: true\n    start: 100",
        6,
        ("feedback positions", "start=100", "text.max_tokens"),
    ),
    "unknown variable": ("shards: shards", "shards: ${oc.env:AGENTFT_NOT_SET}", 5, ("AGENTFT_NOT_SET",)),
    "empty section": ("run_name: t", "run_name: t\nloss:", 2, ("loss is a section", "nothing")),
    "list for a name": ("run_name: t", "run_name: [t]", 1, ("run_name has the wrong type", "a text")),
}


def _errors(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(InvalidConfigError) as caught:
        load_run_config(path, overrides)
    return [problem.render().replace(str(tmp_path) + "/", "") for problem in caught.value.problems]


@pytest.mark.parametrize("kind", BROKEN)
def test_each_kind_gives_one_clear_message(kind: str, tmp_path: Path) -> None:
    old, new, line, parts = BROKEN[kind]
    errors = _errors(tmp_path, GOOD.replace(old, new))
    if kind == "misspelt key":  # the right name is then missing, which is true and said too
        errors = [error for error in errors if "is missing" not in error]
    (error,) = errors
    assert error.startswith(f"run.yaml:{line}: "), error
    for part in parts:
        assert part in error, error


def test_every_error_is_shown_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = GOOD.replace("tiny-glm", "tiny-gml").replace("3ba", "3").replace("run_name: t", "run_nane: t")
    errors = _errors(tmp_path, text, "data.batch_size=x", "feedback.replay_from=r", "nonsense", "loss.tool.start=-1")
    heads = [error.splitlines()[0] for error in errors]
    assert heads == [
        "run.yaml:1: unknown key run_nane",
        "run.yaml:3: model.preset has an unknown value",
        "run.yaml:7: train.duration is not a time",
        "run.yaml: run_name is missing",
        "override nonsense: not an override",
        "override data.batch_size=x: data.batch_size has the wrong type",
        "override feedback.replay_from=r: feedback.replay_from has no effect",
        "override loss.tool.start=-1: loss.tool.start: not a weight",
    ]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"absent\.yaml: the file cannot be read"):
        load_run_config(tmp_path / "absent.yaml")


def test_a_batch_that_two_processes_cannot_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    errors = _errors(tmp_path, GOOD, "data.batch_size=15")
    assert errors == [
        "override data.batch_size=15: the global batch cannot be shared by 2 processes\n"
        "  got: 15\n  expected: a multiple of 2"
    ]
