"""What a good configuration becomes, and that the shipped YAMLs explain every key."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path

import pytest

from agentft.cli import main
from agentft.config.describe import field_docs, types_by_key
from agentft.config.load import InvalidConfigError, load, to_yaml
from agentft.config.objectives import ObjectivesConfig
from agentft.config.schema import RunConfig, ScheduleConfig

REPO = Path(__file__).resolve().parents[2]
YAMLS = sorted(p for p in (REPO / "yamls").rglob("*.yaml") if p.parent.name != "tools")
REFERENCES = {REPO / "yamls" / "agent" / f"tiny-{name}.yaml" for name in ("glm", "kimi")}  # hold every key
SCHEDULE_KEYS = {"kind", "start"}  # the other fields of a schedule depend on its kind


def _load(text: str, tmp_path: Path, *overrides: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load(path, overrides)


MINIMAL = "{run_name: t, model: {preset: tiny-glm}, data: {shards: s}, train: {duration: 1ep}}"


def test_defaults_and_overrides(tmp_path: Path) -> None:
    config = _load(MINIMAL, tmp_path, "optimizer.tool_lr=1e-4", "optimizer.betas=[0.9, 0.95]", "model.path=null")
    assert config.optimizer.tool_lr == 1e-4
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.data.batch_size == 16


def test_a_text_stays_what_was_written(tmp_path: Path) -> None:
    config = _load(MINIMAL, tmp_path, "feedback.backend=off", "run_name=1e3", "model.path=null", "data.remote=s3://yes")
    assert (config.feedback.backend, config.run_name, config.data.remote) == ("off", "1e3", "s3://yes")
    assert config.model.path is None


def test_a_schedule_that_names_its_kind_starts_afresh(tmp_path: Path) -> None:
    config = _load(MINIMAL, tmp_path, "loss.code={kind: constant, start: 0.5}", "loss.reward.start=0.3")
    assert config.loss.code == ScheduleConfig(start=0.5)
    assert config.loss.reward.points == ["10ep=0.25"]


def test_the_resolved_configuration_reads_back_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFT_TEST_SHARDS", "/somewhere")
    config = _load(MINIMAL, tmp_path, "data.shards=${oc.env:AGENTFT_TEST_SHARDS}/x")
    assert config.data.shards == "/somewhere/x"
    assert _load(to_yaml(config), tmp_path) == config


def test_every_field_has_a_line_of_doc() -> None:
    assert [key for key, doc in field_docs().items() if not doc] == []


@pytest.mark.parametrize("path", YAMLS, ids=lambda p: p.stem)
def test_shipped_yaml_is_valid_complete_and_explained(path: Path) -> None:
    config = load(path)
    keys, unexplained, stack = set(), [], []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = re.match(r"( *)(\w+):(.*)", line)
        if not match:
            continue
        depth, name, rest = len(match[1]) // 2, match[2], match[3]
        stack[depth:] = [name]
        keys.add(".".join(stack))
        if rest and not re.search(r" # \S", rest):
            unexplained.append(f"{path.name}:{number}")
    assert unexplained == []
    if path not in REFERENCES:
        return
    wanted = {
        key
        for key, kind in types_by_key().items()
        if not is_dataclass(kind)
        and _section(config, key) is not None
        and (key.count(".") < 2 or not key.startswith("loss.") or _counts(key))
    }
    assert wanted - keys == set()


def _section(config: object, key: str) -> object:
    """Return the section that holds ``key``; None where it, or one above it, is null."""
    for name in key.split(".")[:-1]:
        config = getattr(config, name, None)
    return config


def _counts(key: str) -> bool:
    return key.rpartition(".")[2] in SCHEDULE_KEYS


def test_a_section_that_may_be_null_starts_with_its_defaults(tmp_path: Path) -> None:
    pretrain = ["stage=pretrain", "feedback.backend=off"]
    assert _load(MINIMAL, tmp_path, *pretrain).objectives is None
    config = _load(MINIMAL, tmp_path, *pretrain, "objectives.fim=0.5", "objectives={causal: 0.5}")
    assert config.objectives == ObjectivesConfig(causal=0.5, fim=0.5)
    assert _load(to_yaml(config), tmp_path) == config
    assert _load(MINIMAL, tmp_path, *pretrain, "objectives.fim=0.5", "objectives=null").objectives is None
    with pytest.raises(InvalidConfigError, match="objectives is a section, not a value"):
        _load(MINIMAL, tmp_path, *pretrain, "objectives=3")
    with pytest.raises(InvalidConfigError, match=r"did you mean objectives\.causal"):
        _load(MINIMAL, tmp_path, *pretrain, "objectives.causl=3")


def test_validate_prints_errors_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    assert main(["validate", "--json", str(path), "seed=x"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["where"] == "override seed=x"
    assert error["got"] == "x"
    assert main(["validate", "--json", str(path)]) == 0


def test_validate_imports_nothing_heavy() -> None:
    code = (
        "import sys; from agentft.cli import main; code = main(['validate', 'yamls/agent/tiny-glm.yaml']);"
        "print([m for m in ('torch', 'composer', 'streaming', 'transformers') if m in sys.modules], code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"
