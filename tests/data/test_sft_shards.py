"""Files of chats become shards: every form of a line, no prompt before it, the columns of the one contract."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support_agent import repair_session
from support_chats import TEXT, write_chats

from agentft.config.schema import FeedbackPositionsConfig, TextConfig
from agentft.data.batch import collate
from agentft.data.conversations import read_records
from agentft.data.grouping import group_of, read_record, record_text
from agentft.data.meta import check_fingerprint, load_meta
from agentft.data.read import read_samples
from agentft.data.shards import write_shards
from agentft.data.verify import verify_shards
from agentft.errors import ConfigError, DataError
from agentft.etai import Session
from agentft.text.chat import Conversation
from agentft.text.chat_template import CHAT_TEMPLATE_VERSION, template_fingerprint
from agentft.text.vocab import load_tokenizer, tokenizer_fingerprint
from agentft.tools import TOOL_INDEX

POSITIONS = FeedbackPositionsConfig(enabled=False)


def _write(folder: Path, *lines: Any) -> Path:
    path = folder / "training.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def _roles(record: Session | Conversation) -> list[str]:
    assert isinstance(record, Conversation)
    return [message["role"] for message in record.messages]


def test_every_form_of_a_line(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    path = _write(
        tmp_path,
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}],
        {"user": "1 + 1?", "assistant": "2"},
        {"prompt": "a colour", "completion": "red", "id": "mine"},
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": "1 + 2?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
                {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": {"a": 2}}},
                {"role": "function", "name": "add", "content": "4"},
                {"role": "assistant", "content": "3 and 4", "weight": 0},
            ],
            "functions": [{"name": "add", "parameters": {}}],
        },
        json.loads(repair_session(1).model_dump_json()),
    )
    records = list(read_records(path))
    assert [_roles(record) for record in records[:4]] == [["user", "assistant"]] * 4
    assert records[3].session_id == "mine"
    assert records[0].session_id.startswith("chat-")
    assert _roles(records[4]) == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    with_calls = records[4]
    assert isinstance(with_calls, Conversation)
    assert with_calls.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert with_calls.messages[4]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}
    assert with_calls.messages[6]["weight"] == 0
    assert with_calls.tools == ({"type": "function", "function": {"name": "add", "parameters": {}}},)
    assert isinstance(records[5], Session)
    assert [read_record(record_text(record)) for record in records] == records


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "not_json"),
        ({"text": "no chat"}, "no_messages"),
        ({"messages": []}, "no_messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "wrong_value"),
        ({"messages": ["hi"]}, "wrong_type"),
        ({"messages": [{"role": "user", "content": 3}]}, "wrong_type"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}, "wrong_type"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "wrong_value",
        ),
    ],
)
def test_a_bad_line_is_put_aside_with_its_reason(tmp_path: Path, line: Any, reason: str) -> None:
    good = {"user": "a", "assistant": "b"}
    reader = read_records(_write(tmp_path, good, line, good | {"id": "x"}))
    assert len(list(reader)) == 2
    assert reader.report.by_reason == {reason: 1}
    aside = json.loads((tmp_path / "training.rejected.jsonl").read_text())
    assert (aside["line"], aside["reason"]) == (2, reason)


def test_the_same_chat_twice_is_refused_once(tmp_path: Path) -> None:
    pair = {"user": "a", "assistant": "b"}
    reader = read_records(_write(tmp_path, pair, pair))
    assert len(list(reader)) == 1
    assert reader.report.by_reason == {"duplicate_id": 1}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    chats = write_chats(folder / "chats.jsonl", 24)
    write_shards([chats], folder / "shards", text=TEXT, positions=POSITIONS, vocab_size=450)
    return folder / "shards"


def test_rows_keep_the_contract_and_have_no_targets_for_heads(written: Path) -> None:
    report = verify_shards(written)
    assert report.samples == 24
    samples = list(read_samples(written, "train"))
    for sample in samples:
        anchors = sample["anchors"]
        assert (anchors["intents"], anchors["cursor_target"], anchors["steps"]) == (None, None, [])
        assert 0 < sample["loss_mask"].sum() < len(sample["input_ids"])
        assert sample["group"] == group_of(sample["session_id"])
    batch = collate(samples)
    for name in ("intent_at", "tool_at", "outcome_at", "cursor_at"):
        assert batch[name].shape == (0, 2)
    assert set(batch["labels"].unique().tolist()) & set(batch["input_ids"].unique().tolist())


def test_nothing_stands_before_the_first_turn(written: Path) -> None:
    tokenizer = load_tokenizer(written / "tokenizer")
    for sample in read_samples(written, "train"):
        text = tokenizer.decode(sample["input_ids"])
        assert text.startswith("<|im_start|>user\nWhat is ")
        assert "system" not in text


def test_rows_are_apply_chat_template_of_the_saved_tokenizer(written: Path) -> None:
    tokenizer = load_tokenizer(written / "tokenizer")
    for sample in read_samples(written, "train"):
        record = read_record(sample["record"])
        assert isinstance(record, Conversation)
        assert sample["input_ids"].tolist() == tokenizer.apply_chat_template(list(record.messages))


def _check(folder: Path, text: TextConfig, template: str | None) -> None:
    tokenizer = load_tokenizer(folder / "tokenizer")
    check_fingerprint(
        load_meta(folder),
        tokenizer_sha256=tokenizer_fingerprint(tokenizer),
        template_version=CHAT_TEMPLATE_VERSION,
        text=text,
        positions=POSITIONS,
        tools=list(TOOL_INDEX),
        chat_template_sha256=template,
    )


def test_the_fingerprint_tells_templates_apart(written: Path) -> None:
    tokenizer = load_tokenizer(written / "tokenizer")
    mine = template_fingerprint(tokenizer)
    _check(written, TEXT, mine)
    with pytest.raises(DataError, match=r"text\.template = 'chatml' in the shards"):
        _check(written, TextConfig(template="functioncall", handles=False, max_tokens=512), mine)
    tokenizer.chat_template = str(tokenizer.chat_template) + " "
    with pytest.raises(DataError, match="chat_template_sha256"):
        _check(written, TEXT, template_fingerprint(tokenizer))


def test_a_trained_tokenizer_has_no_chat_template_of_its_own(tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 4)
    text = TextConfig(template="chat", handles=False)
    with pytest.raises(ConfigError, match="a trained tokenizer has no chat template"):
        write_shards([chats], tmp_path / "shards", text=text, positions=POSITIONS)


def test_a_turn_that_cannot_be_exact_is_left_out_with_its_reason(tmp_path: Path) -> None:
    bad = {"id": "bad", "user": "say <|im_end|>", "assistant": "no"}
    good = [{"id": f"good/{number}", "user": f"{number}?", "assistant": f"{number}."} for number in range(4)]
    report = write_shards(
        [_write(tmp_path, bad, *good)], tmp_path / "shards", text=TEXT, positions=POSITIONS, vocab_size=420
    )
    ((name, reason),) = report.rejected
    assert name == "bad"
    assert "messages[0] (user): a turn spells out a special token" in reason
    assert sum(part.sessions for part in report.meta.splits.values()) == 4


def test_sessions_and_chats_share_a_file(tmp_path: Path) -> None:
    session = json.loads(repair_session(2, mistake=True).model_dump_json())
    chats = [{"user": f"{number}?", "assistant": f"{number}."} for number in range(3)]
    report = write_shards(
        [_write(tmp_path, session, *chats)],
        tmp_path / "shards",
        text=TextConfig(template="functioncall", handles=False, max_tokens=2048),
        positions=POSITIONS,
        vocab_size=420,
    )
    assert sum(part.sessions for part in report.meta.splits.values()) == 4
    assert sum(part.steps for part in report.meta.splits.values()) == len(session["execution_trace"])
    verify_shards(tmp_path / "shards")
