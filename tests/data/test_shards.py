"""Writing and verifying shards: splits, columns, what MDS refuses, and what a damaged or half-written folder says."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streaming.base.format.mds.encodings import mds_decode, mds_encode

from agentft import etai_io
from agentft.config.schema import FeedbackPositionsConfig, TextConfig
from agentft.data.grouping import choose_split, group_of, record_text
from agentft.data.meta import ShardMeta, check_fingerprint, load_meta
from agentft.data.shards import COLUMNS, ShardReport, sample_of, write_shards
from agentft.data.verify import verify_shards
from agentft.errors import DataError
from agentft.etai import Session, split_of
from agentft.text.render import TEMPLATE_VERSION, Renderer
from agentft.text.vocab import Vocab, load_tokenizer, tokenizer_fingerprint
from agentft.tools.builtin import BUILTIN_TOOLS

TEXT, POSITIONS = TextConfig(max_tokens=512), FeedbackPositionsConfig(enabled=True)
Factory = Callable[..., Session]


def _write(source: Path, output: Path, **changes: object) -> ShardReport:
    return write_shards(
        [source],
        output,
        **{"text": TEXT, "positions": POSITIONS, "vocab_size": 600, **changes},  # type: ignore[arg-type]
    )


def test_holdout_goes_to_test_whole_and_the_rest_to_train(written: ShardReport) -> None:
    splits = written.meta.splits
    assert set(splits) == {"train", "test"}
    assert splits["test"].repositories == {"iniconfig==2.0.0": 23}
    assert splits["train"].repositories == {"more-itertools==10.5.0": 23, "toolz==1.0.0": 23}
    assert written.meta.holdout == ["iniconfig"]
    assert not (written.folder / "val").exists()


def test_val_share_takes_from_the_rest_only(sessions_file: Path, tmp_path: Path) -> None:
    meta = _write(sessions_file, tmp_path / "s", holdout=["toolz==1.0.0"], val_share=0.3).meta
    assert meta.sessions("test") == 23
    assert 4 <= meta.sessions("val") <= 24
    assert meta.sessions("train") + meta.sessions("val") == 46


def test_without_holdout_the_repository_decides(session_factory: Factory) -> None:
    for repository in ("a", "b", "c", "d", "iniconfig==2.0.0"):
        assert {choose_split(session_factory(n, repository), ()) for n in range(5)} == {split_of(repository)}


def test_unknown_holdout_names_what_there_is(sessions_file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no session of this repository[\s\S]*got: nonesuch[\s\S]*toolz"):
        _write(sessions_file, tmp_path / "s", holdout=["nonesuch"])
    assert list(tmp_path.iterdir()) == []


@given(st.text())
def test_group_is_stable_and_in_range(session_id: str) -> None:
    digest = hashlib.sha256(session_id.encode("utf-8", "surrogatepass")).digest()
    assert group_of(session_id) == digest[0] % 128


def test_same_sessions_give_the_same_bytes_in_group_order(
    sessions_file: Path, written: ShardReport, tmp_path: Path
) -> None:
    again = _write(sessions_file, tmp_path / "again", holdout=["iniconfig"])
    assert again.meta == written.meta
    for path in written.folder.rglob("*.zstd"):
        assert (again.folder / path.relative_to(written.folder)).read_bytes() == path.read_bytes()
    ids = [sample["session_id"] for sample in _samples(written.folder / "train")]
    assert ids == sorted(ids, key=lambda name: (group_of(name), name))


def test_many_small_groups_share_a_file(written: ShardReport) -> None:
    assert written.meta.splits["train"].shards == 1
    groups = {sample["group"] for sample in _samples(written.folder / "train")}
    assert len(groups) > 20


def test_verify_accepts_what_was_written(written: ShardReport) -> None:
    report = verify_shards(written.folder)
    assert (report.shards, report.samples) == (2, 69)


def test_row_is_the_rendering_and_the_record_comes_back(written: ShardReport, session_factory: Factory) -> None:
    tokenizer = load_tokenizer(written.folder / "tokenizer")
    assert tokenizer_fingerprint(tokenizer) == written.meta.tokenizer_sha256
    renderer = Renderer(Vocab.of(tokenizer), TEXT, POSITIONS, BUILTIN_TOOLS)
    for sample in _samples(written.folder / "test")[:5]:
        session = Session.model_validate(json.loads(sample["record"]))
        assert session == session_factory(int(session.session_id[-4:]), session.repository)
        rendered = renderer.render(session)
        assert np.array_equal(sample["input_ids"], rendered.input_ids)
        assert np.array_equal(sample["loss_mask"].astype(bool), rendered.loss_mask)
        assert np.array_equal(sample["position_ids"], rendered.position_ids)
        anchors = sample["anchors"]
        assert [step["tool_at"] for step in anchors["steps"]] == [step.tool_at for step in rendered.steps]
        assert anchors["intents"] == ["fix_test_failure"]
        assert anchors["cursor_target"]["line"] == session.cursor_target.line  # type: ignore[union-attr]


def test_tokens_are_counted(written: ShardReport) -> None:
    part = written.meta.splits["test"]
    samples = _samples(written.folder / "test")
    assert part.trained_tokens == sum(int(s["loss_mask"].sum()) for s in samples)
    assert part.trained_tokens + part.context_tokens == sum(len(s["input_ids"]) for s in samples)
    assert part.longest_tokens == max(len(s["input_ids"]) for s in samples)
    assert part.steps == sum(len(s["anchors"]["steps"]) for s in samples)


def test_lone_surrogates_survive_in_the_record(session_factory: Factory) -> None:
    session = session_factory(1)
    step = session.execution_trace[0].model_copy(update={"tool_args": {"targets": "a\ud800b"}})
    odd = session.model_copy(update={"execution_trace": [step]})
    with pytest.raises(UnicodeEncodeError):
        mds_encode("str", "a\ud800b")
    text = mds_decode("str", mds_encode("str", record_text(odd)))
    assert json.loads(text)["execution_trace"][0]["tool_args"] == {"targets": "a\ud800b"}


def test_row_has_the_types_that_mds_insists_on(written: ShardReport, session_factory: Factory) -> None:
    renderer = Renderer(Vocab.of(load_tokenizer(written.folder / "tokenizer")), TEXT, POSITIONS, BUILTIN_TOOLS)
    rendered = renderer.render(session_factory(3))
    numpy_anchors = dataclasses.replace(rendered, intent_at=np.int64(rendered.intent_at))  # type: ignore[arg-type]
    row = sample_of(session_factory(3), numpy_anchors)
    assert set(row) == set(COLUMNS)
    for name, encoding in COLUMNS.items():
        mds_encode(encoding, row[name])
    with pytest.raises(AttributeError, match="int"):
        mds_encode("int", np.int64(3))
    unknown = [dataclasses.replace(step, outcome=float("nan")) for step in rendered.steps]
    row = sample_of(session_factory(3), dataclasses.replace(rendered, steps=tuple(unknown)))
    assert {step["outcome"] for step in row["anchors"]["steps"]} == {None}


def test_empty_rendering_is_refused_with_its_id(written: ShardReport, session_factory: Factory) -> None:
    renderer = Renderer(Vocab.of(load_tokenizer(written.folder / "tokenizer")), TEXT, POSITIONS, BUILTIN_TOOLS)
    empty = dataclasses.replace(renderer.render(session_factory(3)), input_ids=np.zeros(0, np.int32))
    with pytest.raises(DataError, match=r"iniconfig==2.0.0/0003: the session renders to no tokens"):
        sample_of(session_factory(3), empty)


def test_what_cannot_be_used_is_reported(session_factory: Factory, tmp_path: Path) -> None:
    """A duplicate id in a second file, a line that is no record, and a session too long to render."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    etai_io.write(first, [session_factory(n) for n in range(12)])
    long = session_factory(50).model_copy(update={"final_output": "word " * 4000})
    etai_io.write(second, [session_factory(3), long])
    with second.open("a") as stream:
        stream.write("{not json\n")
    report = write_shards(
        [first, second], tmp_path / "s", text=TEXT, positions=POSITIONS, vocab_size=600, holdout=["iniconfig"]
    )
    assert report.unreadable == 1
    reasons = dict(report.rejected)
    assert "the id was used before" in reasons["iniconfig==2.0.0/0003"]
    assert "512" in reasons["iniconfig==2.0.0/0050"]
    assert report.meta.rejected == 2
    lines = (tmp_path / "s" / "rejected.jsonl").read_text().splitlines()
    assert {json.loads(line)["session_id"] for line in lines} == set(reasons)
    assert verify_shards(tmp_path / "s").samples == 12


def test_no_usable_session_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="no sessions"):
        _write(tmp_path / "none.jsonl", tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_earlier_shards_are_replaced_but_nothing_else(sessions_file: Path, shards: Path, tmp_path: Path) -> None:
    report = _write(sessions_file, shards, holdout=["toolz"])
    assert load_meta(shards).holdout == ["toolz"]
    assert report.folder == shards
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shards"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="holds something else"):
        _write(sessions_file, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_kill_in_the_middle_publishes_nothing(sessions_file: Path, tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import os, signal, sys
        from agentft.config.schema import FeedbackPositionsConfig, TextConfig
        from agentft.data import shards
        true_sample_of, seen = shards.sample_of, []
        def sample_of(session, rendered):
            seen.append(session)
            if len(seen) == 30:
                os.kill(os.getpid(), signal.SIGKILL)
            return true_sample_of(session, rendered)
        shards.sample_of = sample_of
        shards.write_shards([sys.argv[1]], sys.argv[2], text=TextConfig(max_tokens=512),
                            positions=FeedbackPositionsConfig(), vocab_size=600)
        """
    )
    output = tmp_path / "shards"
    done = subprocess.run([sys.executable, "-c", script, str(sessions_file), str(output)], timeout=120, check=False)
    assert done.returncode == -9
    assert not output.exists()
    assert [path.name.startswith(".shards.partial-") for path in tmp_path.iterdir()] == [True]
    _write(sessions_file, output)
    assert [path.name for path in tmp_path.iterdir()] == ["shards"], "the next writer removes what was left"


def test_full_disk_is_one_clear_error(sessions_file: Path, tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        from agentft.config.schema import FeedbackPositionsConfig, TextConfig
        from agentft.data.shards import write_shards
        from agentft.errors import AgentFTError
        try:
            write_shards([sys.argv[1]], sys.argv[2], text=TextConfig(max_tokens=512),
                         positions=FeedbackPositionsConfig(), vocab_size=600)
        except AgentFTError as error:
            print(error)
            sys.exit(error.exit_code)
        """
    )
    small = tmp_path / "small"
    small.mkdir()
    mount = f'mount -t tmpfs -o size=48k none {small} && exec {sys.executable} -c "$SCRIPT" {sessions_file} {small}/s'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount]
    probe = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f"mount -t tmpfs none {small}"]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this machine gives no private mounts")
    environment = {**os.environ, "SCRIPT": script}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "no space left on the disk" in done.stdout


def _zip(folder: Path) -> Path:
    return folder / "train" / "shard.00000.mds.zstd"


def _truncate(folder: Path) -> None:
    _zip(folder).write_bytes(_zip(folder).read_bytes()[:-10])


def _flip(folder: Path) -> None:
    data = bytearray(_zip(folder).read_bytes())
    data[len(data) // 2] ^= 1
    _zip(folder).write_bytes(bytes(data))


def _edit_index(folder: Path) -> None:
    path = folder / "train" / "index.json"
    path.write_text(path.read_text().replace('"samples": 46', '"samples": 45'))


def _edit_meta(folder: Path, **changes: object) -> None:
    path = folder / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _smaller_count(folder: Path) -> None:
    splits = json.loads((folder / "meta.json").read_text())["splits"]
    splits["train"]["sessions"] -= 1
    _edit_meta(folder, splits=splits)


def _other_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer" / "tokenizer.json"
    state = json.loads(path.read_text())
    state["model"]["merges"].pop()
    path.write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: _zip(f).unlink(), r"train/shard.00000.mds: a shard is missing"),
        (_truncate, r"shard.00000.mds.zstd: a shard has the wrong size"),
        (_flip, r"shard.00000.mds.zstd: a shard is damaged: its sha1 differs"),
        (_edit_index, r"train/index.json: the index is not the one"),
        (lambda f: (f / "test" / "index.json").unlink(), r"test/index.json: the split has no index"),
        (_smaller_count, r"train: split 'train' does not hold what meta.json says"),
        (lambda f: _edit_meta(f, vocab_size=300), r"sample 0: a sample cannot be used[\s\S]*vocabulary of 300"),
        (lambda f: _edit_meta(f, surprise=1), r"meta.json: meta.json does not fit: surprise"),
        (lambda f: (f / "meta.json").write_text("{"), r"meta.json: meta.json is damaged"),
        (lambda f: (f / "meta.json").unlink(), r"meta.json: no shards here"),
        (_other_tokenizer, r"tokenizer: the tokenizer is not the one"),
    ],
)
def test_verify_names_what_is_wrong(shards: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(shards)
    with pytest.raises(DataError, match=message):
        verify_shards(shards)


def test_fingerprint_accepts_the_same_and_states_both_sides(written: ShardReport) -> None:
    meta = written.meta
    _fits(meta)
    with pytest.raises(DataError) as caught:
        _fits(meta, text=TextConfig(max_tokens=2048, handles=False), tokenizer_sha256="0" * 64)
    message = str(caught.value)
    assert "text.max_tokens = 512 in the shards" in message
    assert "text.max_tokens = 2048 in the run" in message
    assert "text.handles = True in the shards" in message
    assert "text.handles = False in the run" in message
    assert f"tokenizer_sha256 = '{meta.tokenizer_sha256}' in the shards" in message


def test_rotary_base_does_not_change_tokens(written: ShardReport) -> None:
    _fits(written.meta, positions=FeedbackPositionsConfig(enabled=True, rotary_base=500.0))
    with pytest.raises(DataError, match=r"feedback_positions.start = 10000 in the shards"):
        _fits(written.meta, positions=FeedbackPositionsConfig(enabled=True, start=20000))
    with pytest.raises(DataError, match=r"feedback_positions.enabled = True in the shards"):
        _fits(written.meta, positions=FeedbackPositionsConfig(enabled=False))
    plain = written.meta.model_copy(update={"positions": {**written.meta.positions, "enabled": False}})
    _fits(plain, positions=FeedbackPositionsConfig(enabled=False, start=20000))


def _fits(meta: ShardMeta, **changes: object) -> None:
    run: dict[str, object] = {
        "tokenizer_sha256": meta.tokenizer_sha256,
        "template_version": TEMPLATE_VERSION,
        "text": TEXT,
        "positions": POSITIONS,
        "tools": [tool.name for tool in BUILTIN_TOOLS],
    }
    check_fingerprint(meta, **(run | changes))  # type: ignore[arg-type]


def _samples(folder: Path) -> list[dict]:
    """Decode a split with Streaming's own reader."""
    from streaming.base.compression import decompress
    from streaming.base.format.mds.reader import MDSReader

    samples = []
    with tempfile.TemporaryDirectory() as unpacked:
        for info in json.loads((folder / "index.json").read_text())["shards"]:
            packed = (folder / info["zip_data"]["basename"]).read_bytes()
            Path(unpacked, info["raw_data"]["basename"]).write_bytes(decompress("zstd", packed))
            reader = MDSReader.from_json(unpacked, "", dict(info))
            samples += [reader[i] for i in range(info["samples"])]
    return samples
