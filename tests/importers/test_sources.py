"""Where documents come from: folders, lines, whole files, parquet, arrow, and data sets by their hub name."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from foreign import ALL, ETAI, MINI_V2, OPENAI, OPENHANDS, SWE_V1, imported

from agentft.data.importers.commands import import_paths
from agentft.data.importers.sources import documents, expand
from agentft.errors import DataError
from agentft.etai import Session
from agentft.etai_io import read


def run(paths: list[Path | str], folder: Path, **options: Any) -> list[Session]:
    import_paths([str(path) for path in paths], folder / "out.jsonl", **options)
    return list(read(folder / "out.jsonl", strict=True))


def rows_of(*documents: dict[str, Any]) -> list[dict[str, Any]]:
    """Return table rows: calls' arguments as JSON text, as every real table has them."""
    rows = json.loads(json.dumps(documents))
    for row in rows:
        for message in row["messages"]:
            for tool in message.get("tool_calls") or ():
                if not isinstance(tool["function"]["arguments"], str):
                    tool["function"]["arguments"] = json.dumps(tool["function"]["arguments"])
            if isinstance(message.get("content"), list):
                message["content"] = "Why does it fail?\n[image]"
    return rows


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / ".cache")


def test_a_folder_gives_its_files_sorted_and_nothing_else(tmp_path: Path) -> None:
    inside = tmp_path / "in"
    (inside / "deep").mkdir(parents=True)
    (inside / "b.traj").write_text(json.dumps(SWE_V1))
    (inside / "a.json").write_text(json.dumps([OPENAI, MINI_V2]))
    (inside / "deep" / "c.jsonl.gz").write_bytes(gzip.compress(json.dumps(OPENHANDS).encode()))
    (inside / "deep" / "events.json.gz").write_bytes(gzip.compress(json.dumps(OPENHANDS["history"]).encode()))
    for name in ("notes.md", ".hidden.json", "a.rejected.jsonl", "out.csv"):
        (inside / name).write_text("not a session")
    names = [Path(name).name for name in expand([str(inside)])]
    assert names == ["a.json", "b.traj", "c.jsonl.gz", "events.json.gz"]
    found = [session.source for session in run([inside], tmp_path)]
    assert found == ["openai", "mini-swe-agent", "swe-agent", "openhands", "openhands"]


def test_the_output_of_an_earlier_run_is_not_an_input(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(OPENAI))
    first = run([tmp_path], tmp_path)
    assert run([tmp_path], tmp_path) == first


def test_places_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(OPENAI) + "\n\n" + json.dumps([ETAI, ETAI]) + "\nnonsense\n")
    found = list(documents(str(tmp_path / "a.jsonl")))
    assert [d.where.removeprefix(str(tmp_path)) for d in found] == [
        "/a.jsonl:1",
        "/a.jsonl:3[0]",
        "/a.jsonl:3[1]",
        "/a.jsonl:4",
    ]
    assert [d.error is not None for d in found] == [False, False, False, True]


def test_json_that_holds_lines_and_files_without_a_known_suffix(tmp_path: Path) -> None:
    lines = json.dumps(OPENAI) + "\n" + json.dumps(ETAI) + "\n"
    (tmp_path / "lines.json").write_text(lines)
    (tmp_path / "whole.log").write_bytes(b"\xef\xbb\xbf" + json.dumps(MINI_V2, indent=1).encode())
    assert [s.source for s in run([tmp_path / "lines.json"], tmp_path)] == ["openai", "mine"]
    assert [s.source for s in run([tmp_path / "whole.log"], tmp_path)] == ["mini-swe-agent"]


def test_bytes_that_are_no_text_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.traj").write_bytes(json.dumps(SWE_V1).replace("Found", "F@und").encode().replace(b"@", b"\xff"))
    report = import_paths([str(tmp_path / "a.traj")], tmp_path / "out.jsonl")
    assert dict(+report.repaired) == {"non_utf8": 2}


def test_local_parquet_and_arrow_are_read_through_datasets(tmp_path: Path) -> None:
    import datasets

    rows = rows_of(OPENAI, {"messages": [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Ok."}]})
    table = datasets.Dataset.from_list(rows)
    assert table[0]["messages"][0]["tool_calls"] is None, "a table fills in what a row does not have"
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    [arrow] = (tmp_path / "saved").glob("*.arrow")
    for path in (tmp_path / "a.parquet", arrow):
        sessions = run([path], tmp_path)
        assert sessions == [imported(row)[0] for row in rows]
        assert sessions[0].session_id == "chat-7"
        assert sessions[0].execution_trace[3].tool_args == {"_raw": "{broken"}


def test_columns_with_json_text_are_decoded(tmp_path: Path) -> None:
    import datasets

    rows = [
        {
            "instance_id": "acme__tool-1",
            "trajectory": json.dumps(SWE_V1["trajectory"]),
            "history": json.dumps(SWE_V1["history"]),
        }
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    [session] = run([tmp_path / "a.parquet"], tmp_path)
    assert (session.source, len(session.execution_trace)) == ("swe-agent", 3)
    assert session.repository == "acme/tool"


def test_a_damaged_table_is_refused_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 this is no table")
    (tmp_path / "b.json").write_text(json.dumps(ETAI))
    report = import_paths([str(tmp_path)], tmp_path / "out.jsonl")
    assert (report.total("records"), dict(report.by_reason)) == (1, {"unreadable_file": 1})
    assert "a.parquet: the data set cannot be read" in report.rejects.read_text()
    with pytest.raises(DataError, match="the data set cannot be read"):
        import_paths([str(tmp_path)], tmp_path / "out.jsonl", strict=True)


def test_a_data_set_by_its_name_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``datasets`` takes a folder of that name in place of the hub: the whole path runs, without a network."""
    import datasets

    folder = tmp_path / "acme" / "sessions"
    folder.mkdir(parents=True)
    other = {"messages": [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Ok."}]}
    datasets.Dataset.from_list(rows_of(OPENAI)).to_parquet(folder / "train.parquet")
    datasets.Dataset.from_list(rows_of(other)).to_parquet(folder / "test.parquet")
    monkeypatch.chdir(tmp_path)
    assert [s.session_id for s in run(["hf:acme/sessions"], tmp_path)] == ["chat-7"]
    assert [s.final_output for s in run(["hf:acme/sessions:test"], tmp_path)] == ["Ok."]
    with pytest.raises(DataError, match="hf:acme/sessions:nosplit"):
        run(["hf:acme/sessions:nosplit"], tmp_path, strict=True)


def test_a_hub_that_cannot_be_reached_is_one_clear_error(tmp_path: Path) -> None:
    code = (
        "import sys; from agentft.data.importers.commands import import_paths\n"
        "from agentft.errors import DataError\n"
        "try: import_paths(['hf:acme/none'], sys.argv[1], strict=True)\n"
        "except DataError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "o.jsonl")], capture_output=True, text=True, env=environment
    )
    assert "hf:acme/none: the data set cannot be read" in done.stdout
    assert "check the name and the split" in done.stdout


@pytest.mark.parametrize("path", ["missing.jsonl", "hf:no-owner", "hf:a/b:c d", "empty"])
def test_sources_that_are_none(path: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no such file|malformed id|nothing to import"):
        expand([path if path.startswith("hf:") else str(tmp_path / path)])


def test_datasets_is_not_loaded_for_plain_files(tmp_path: Path) -> None:
    for name, document in ALL.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    code = (
        "import sys; from agentft.data.importers.commands import import_paths\n"
        "print(import_paths([sys.argv[1]], sys.argv[1] + '/out.jsonl').total('records'))\n"
        "print([m for m in ('datasets', 'torch', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["5", "[]"]
