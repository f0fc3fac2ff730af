"""The verb, the function behind it and the script: report, refusals, strict mode, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from foreign import ALL, ETAI, OPENAI, OPENHANDS

from agentft.cli import main
from agentft.data.importers.commands import import_paths, print_report
from agentft.errors import EXIT_FAILED, EXIT_USAGE, ConfigError, DataError
from agentft.etai import RecordError
from agentft.etai_io import read

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Return a file with two good documents among four bad ones."""
    bad: list[Any] = [{"conversations": [{"from": "human", "value": "Hi"}]}, OPENAI, {"messages": [{"role": "user"}]}]
    lines = [json.dumps(d) for d in (OPENAI, *bad, ETAI)]
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join([*lines, "{nonsense"]) + "\n")
    return path


def test_good_documents_are_kept_and_bad_ones_explained(mixed: Path, tmp_path: Path) -> None:
    report = import_paths([str(mixed)], tmp_path / "deep" / "out.jsonl.zst")
    assert [s.session_id for s in read(report.output, strict=True)] == ["chat-7", "e1"]
    [file] = report.files
    assert (file.records, file.steps, file.null_exit_codes, file.rejected) == (2, 4, 3, 4)
    assert dict(file.formats) == {"openai": 1, "etai": 1}
    reasons = {"unsupported_format": 1, "duplicate_id": 1, "no_instruction": 1, "not_json": 1}
    assert dict(report.by_reason) == reasons
    rejected = [json.loads(line) for line in report.rejects.read_text().splitlines()]
    assert report.rejects == tmp_path / "deep" / "out.rejected.jsonl"
    assert [(r["line"], r["reason"]) for r in rejected] == [
        (2, "unsupported_format"),
        (3, "duplicate_id"),
        (4, "no_instruction"),
        (6, "not_json"),
    ]
    assert f"the first record with this one is at {mixed}:1" in rejected[1]["message"]
    assert json.loads(rejected[1]["record"]) == OPENAI


def test_strict_stops_at_the_first_and_writes_nothing(mixed: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"mixed\.jsonl:2: format ShareGPT"):
        import_paths([str(mixed)], tmp_path / "out.jsonl", strict=True)
    assert os.listdir(tmp_path) == ["mixed.jsonl"]


def test_a_named_format_is_believed(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(OPENHANDS))
    report = import_paths([str(tmp_path / "a.json")], tmp_path / "out.jsonl", format="openhands")
    assert dict(report.files[0].formats) == {"openhands": 1}
    with pytest.raises(DataError, match="the user asked for nothing"):
        import_paths([str(tmp_path / "a.json")], tmp_path / "out.jsonl", format="openai")
    with pytest.raises(ConfigError, match="did you mean openhands"):
        import_paths([str(tmp_path / "a.json")], tmp_path / "out.jsonl", format="openhand")


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, document in ALL.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    import_paths([str(tmp_path)], tmp_path / "one.jsonl")
    (tmp_path / "one.jsonl").rename(tmp_path / "one")
    import_paths([str(tmp_path)], tmp_path / "two.jsonl")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


def test_etai_passes_through_byte_for_byte(tmp_path: Path) -> None:
    for name, document in ALL.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    import_paths([str(tmp_path)], tmp_path / "one.jsonl")
    report = import_paths([str(tmp_path / "one.jsonl")], tmp_path / "two.jsonl", format="etai", strict=True)
    assert dict(report.files[0].formats) == {"etai": 5}
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


def test_the_verb_prints_a_table_or_json(mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(mixed), "-o", str(tmp_path / "out.jsonl"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["records"], printed["steps"], printed["null_exit_codes"], printed["rejected"]) == (2, 4, 3, 4)
    assert printed["files"][0]["formats"] == {"etai": 1, "openai": 1}
    assert printed["notes"]["malformed_arguments"] == 1
    assert printed["rejects"] == str(tmp_path / "out.rejected.jsonl")
    assert main(["import", str(mixed), "-o", str(tmp_path / "out.jsonl")]) == 0
    text = capsys.readouterr().out
    for part in ("etai + openai", "no exit code", "rejected: duplicate_id 1", "2 sessions in", "4 refused"):
        assert part in text


def test_the_verb_fails_with_one_message(mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "out.jsonl")
    assert main(["import", str(tmp_path / "none.jsonl"), "-o", output]) == EXIT_FAILED
    assert main(["import", str(mixed), "-o", output, "--format", "swe"]) == EXIT_USAGE
    assert main(["import", str(mixed), "-o", output, "--strict"]) == EXIT_FAILED
    assert main(["import", str(mixed), "-o", str(tmp_path / "out.csv")]) == EXIT_FAILED
    errors = capsys.readouterr().err
    assert errors.count("agentft: ") == 4
    assert "Traceback" not in errors
    (tmp_path / "only.jsonl").write_text('{"a": 1}\n')
    assert main(["import", str(tmp_path / "only.jsonl"), "-o", output]) == EXIT_FAILED
    message = capsys.readouterr().err
    assert "no session could be imported" in message
    assert "the format is not recognised" in message
    assert not Path(output).exists()


def test_many_files_are_shown_by_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(40):
        (tmp_path / f"{i:02}.json").write_text(
            json.dumps({**OPENAI, "id": f"c{i}"} if i % 2 else {**ETAI, "session_id": f"e{i}"})
        )
    seen: list[int] = []
    report = import_paths(
        [str(tmp_path)], tmp_path / "out.jsonl", on_document=lambda r, n: seen.append(r.total("records"))
    )
    print_report(report)
    text = capsys.readouterr().out
    assert seen == list(range(1, 41))
    assert "00.json" not in text
    counts = {cells[1].strip(): cells[2].strip() for line in text.splitlines() if len(cells := line.split("│")) > 3}
    assert counts == {"etai": "20", "openai": "20"}


def test_the_script_runs_by_itself(mixed: Path, tmp_path: Path) -> None:
    script = str(REPO / "data_prep" / "import_sessions.py")
    command = [sys.executable, script, str(mixed), "-o", str(tmp_path / "out.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "2 sessions in" in done.stdout) == (0, True), done.stderr
    done = subprocess.run([*command, "--strict"], capture_output=True, text=True)
    assert done.returncode == EXIT_FAILED
    assert done.stderr.startswith(f"import_sessions: {mixed}:2: format ShareGPT")
