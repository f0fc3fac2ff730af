"""Documents out of folders and jsonl, rows that fit and are the document again, and nothing lost without a word."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support_corpus import MODULE, PROSE, SCRIPT, document, marks, rows, sources, tokenizer, vocab

from agentft.cli import main
from agentft.config.schema import TextConfig
from agentft.data.corpus import Document, ReadReport, cut, read_documents
from agentft.data.corpus_shards import ROOM, rows_of, write_corpus
from agentft.data.lexing import known_language, language_of, units
from agentft.data.marks import FIM_TOKENS, Marks
from agentft.data.read import read_samples
from agentft.data.verify import verify_shards
from agentft.errors import ConfigError, DataError
from agentft.text.vocab import SPECIAL_TOKENS, Vocab, add_special_tokens, train_tokenizer


def read(*paths: Path) -> tuple[list[Document], ReadReport]:
    report = ReadReport()
    return list(read_documents(paths, report)), report


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with two git checkouts, loose files and what is no source."""
    root = tmp_path / "code"
    for path, text in {
        "one/.git/HEAD": "ref",
        "one/a.py": MODULE,
        "one/deep/b.py": "x = 1\n",
        "two/.git": "gitdir: elsewhere",
        "two/readme.md": PROSE,
        "loose/c.js": SCRIPT,
        "alone.py": "y = 2\n",
        "loose/__pycache__/c.py": "cached = 1\n",
        "loose/empty.py": "\n",
        "loose/LICENSE": "do what you like",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "loose/picture.png").write_bytes(b"\x89PNG\0")
    (root / "loose/latin.py").write_bytes("# größe\n".encode("latin-1"))
    (root / "loose/nul.py").write_bytes(b"x = 1\0\n")
    (root / "loose/bom.py").write_bytes(b"\xef\xbb\xbfz = 3\r\n")
    (root / "link.py").symlink_to(root / "alone.py")
    return root


def test_a_folder_gives_its_sources_and_says_what_it_left_out(tree: Path) -> None:
    documents, report = read(tree)
    found = {d.session_id: (d.repository, d.language) for d in documents}
    assert found == {
        "code/one:one/a.py": ("code/one", "python"),
        "code/one:one/deep/b.py": ("code/one", "python"),
        "code/two:two/readme.md": ("code/two", "markdown"),
        "code/loose:loose/c.js": ("code/loose", "javascript"),
        "code/loose:loose/bom.py": ("code/loose", "python"),
        "code/alone.py": ("code/alone.py", "python"),
    }
    assert {d.content for d in documents if d.path == "loose/bom.py"} == {"z = 3\r\n"}
    assert {Path(name).name: reason for name, reason in report.rejected} == {
        "empty.py": "empty",
        "latin.py": "not UTF-8 (byte 4)",
        "nul.py": "holds NUL characters",
    }
    assert report.skipped == {
        "folder of a tool, or a link": 2,
        "link or special file": 1,
        "no source: .png": 1,
        "no source: no suffix": 2,
    }
    files = sum(len(files) for folder, _, files in os.walk(tree) if ".git" not in folder and "__pyc" not in folder)
    assert files == len(documents) + len(report.rejected) + report.skipped.total() - 2


def test_lines_of_jsonl_and_what_is_wrong_with_them(tmp_path: Path) -> None:
    lines = [
        json.dumps({"content": MODULE, "language": "Python", "path": "a.py", "repository": "r"}),
        json.dumps({"content": MODULE, "path": "a.py", "repository": "r"}),
        json.dumps({"content": SCRIPT, "language": "C++"}),
        json.dumps({"content": PROSE}),
        "",
        "{broken",
        "[1]",
        json.dumps({"text": "x"}),
        json.dumps({"content": 3}),
        json.dumps({"content": "x = 1", "language": 3}),
        json.dumps({"content": "\ud800"}),
    ]
    plain, packed, zst = (tmp_path / name for name in ("c.jsonl", "c.jsonl.gz", "c.jsonl.zst"))
    plain.write_text("\n".join(lines) + "\n")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    zst.write_bytes(zstandard.compress(plain.read_bytes()))
    documents, report = read(plain)
    assert [(d.session_id, d.repository, d.language, d.split_key) for d in documents] == [
        ("r:a.py", "r", "python", "r"),
        ("r:a.py~2", "r", "python", "r"),
        ("c.jsonl:3", "c.jsonl", "cpp", "c.jsonl:3"),
        ("c.jsonl:4", "c.jsonl", None, "c.jsonl:4"),
    ]
    assert [name.rpartition(":")[2] for name, _ in report.rejected] == ["6", "7", "8", "9", "10", "11"]
    reasons = " ".join(reason for _, reason in report.rejected)
    for part in ("not JSON", "not an object but list", "`content` is missing", "no text", "lone surrogate"):
        assert part in reasons
    assert report.skipped == {"empty line": 1}
    for other in (packed, zst):
        assert [d.content for d in read(other)[0]] == [d.content for d in documents]
    packed.write_bytes(packed.read_bytes()[:-20])
    _, cut_short = read(packed)
    assert any("cannot be read" in reason for _, reason in cut_short.rejected)
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "absent")


@given(sources(), st.integers(20, 200))
@settings(max_examples=80, deadline=None)
def test_rows_are_the_document_again_and_fit(source: tuple[str, str | None], limit: int) -> None:
    text, language = source
    text = vocab().decode(vocab().encode(text))
    spans = cut(text, vocab(), limit)
    assert "".join(text[a:b] for a, b in spans) == text
    assert all(len(vocab().encode(text[a:b])) <= limit for a, b in spans)
    made = rows_of(document(text, language), vocab(), marks(), max_tokens=limit + ROOM)
    assert [row.ids[-1] == marks().end for row in made] == [False] * (len(made) - 1) + [True]
    content = [i for row in made for i in row.ids if i != marks().end]
    assert vocab().decode(content) == text


def test_rows_end_at_blank_lines_where_they_can() -> None:
    texts = [vocab().decode(row.ids).removesuffix("<|eot|>") for row in rows(MODULE * 4, max_tokens=200)]
    assert "".join(texts) == MODULE * 4
    assert all(text.endswith("\n") for text in texts)
    assert sum(text.endswith("\n\n") for text in texts) >= len(texts) // 3


@given(sources())
@settings(max_examples=60, deadline=None)
def test_units_are_everything_but_white_space(source: tuple[str, str | None]) -> None:
    text, language = source
    found = units(text, language)
    covered = {place for unit in found for place in range(unit.start, unit.end)}
    assert sum(unit.end - unit.start for unit in found) == len(covered)
    assert {text[i] for i in set(range(len(text))) - covered} <= {c for c in text if c.isspace()}


def test_languages() -> None:
    assert language_of("src/x.rs") == "rust"
    assert language_of("Dockerfile") == "docker"
    assert language_of("x.unknown") is None
    assert known_language("C#") == "csharp"
    assert known_language("Klingon") is None


def corpus_files(folder: Path, repositories: int) -> Path:
    path = folder / "corpus.jsonl"
    with path.open("w") as out:
        for number in range(repositories):
            for name, text in (("a.py", MODULE), ("b.js", SCRIPT), ("c.md", PROSE)):
                line = {"content": f"{text}\n# {number}\n", "path": name, "repository": f"repo{number}"}
                out.write(json.dumps(line) + "\n")
    return path


def test_shards_have_the_columns_of_sessions(tmp_path: Path) -> None:
    report = write_corpus([corpus_files(tmp_path, 30)], tmp_path / "shards", max_tokens=256, vocab_size=600)
    assert report.split_by == "repository"
    assert verify_shards(tmp_path / "shards").samples == sum(p.sessions for p in report.meta.splits.values())
    seen: dict[str, set[str]] = {}
    for split, part in report.meta.splits.items():
        samples = list(read_samples(tmp_path / "shards", split))
        assert [(s["group"], s["session_id"]) for s in samples] == sorted(
            (s["group"], s["session_id"]) for s in samples
        )
        assert sum(int(s["loss_mask"].sum()) for s in samples) == part.trained_tokens
        assert max(len(s["input_ids"]) for s in samples) == part.longest_tokens <= 256 - ROOM + 1
        seen[split] = {json.loads(s["record"])["repository"] for s in samples}
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["val"]
    assert sum(map(len, seen.values())) == 30


def test_few_repositories_are_split_by_file_and_a_holdout_by_name(tmp_path: Path) -> None:
    file = corpus_files(tmp_path, 3)
    assert write_corpus([file], tmp_path / "a", max_tokens=256, vocab_size=600).split_by == "file"
    held = write_corpus([file], tmp_path / "b", max_tokens=256, vocab_size=600, holdout=["repo1"], val_share=0.4)
    assert set(held.meta.splits["test"].repositories) == {"repo1"}
    assert "repo1" not in held.meta.splits["train"].repositories
    with pytest.raises(DataError, match="no document of this repository"):
        write_corpus([file], tmp_path / "c", max_tokens=256, vocab_size=600, holdout=["absent"])
    assert not (tmp_path / "c").exists()


def test_the_same_input_gives_the_same_shards(tmp_path: Path) -> None:
    file = corpus_files(tmp_path, 12)
    one, two = (write_corpus([file], tmp_path / n, max_tokens=256, vocab_size=600).meta for n in ("a", "b"))
    assert one == two


def _model_tokenizer(family: tuple[str, str, str]) -> Any:
    made = train_tokenizer([MODULE, SCRIPT], 600)
    made.add_tokens([*family, "<|endoftext|>"])  # plain added tokens, as in Qwen's tokenizer
    return made


@pytest.mark.parametrize("family", FIM_TOKENS, ids=lambda f: f[0])
def test_a_models_own_marks_are_used(family: tuple[str, str, str]) -> None:
    made = _model_tokenizer(family)
    add_special_tokens(made)
    found, known = Marks.of(made, Vocab.of(made)), made.get_vocab()
    assert (found.prefix, found.suffix, found.middle) == tuple(known[token] for token in family)
    assert found.end == known["<|endoftext|>"]
    assert found.mask == known["<|reserved_115|>"]
    spells = document(f"token = '{family[0]}'\n")
    with pytest.raises(DataError, match="which the tokenizer reads as a mark"):
        rows_of(spells, Vocab.of(made), found, 256)


def test_ours_are_reserved_tokens_and_cannot_be_spelled() -> None:
    found, known = marks(), tokenizer().get_vocab()
    assert [found.prefix, found.suffix, found.middle, found.mask, found.sep] == [
        known[f"<|reserved_{i}|>"] for i in range(112, 117)
    ]
    assert found.end == known["<|eot|>"]
    (row,) = rows("x = '" + "".join(SPECIAL_TOKENS[-16:]) + "'\n", max_tokens=512)
    assert row.ids.count(found.end) == 1
    assert not found.forbidden.intersection(row.ids[:-1])


def test_what_opens_every_text_opens_every_row() -> None:
    from tokenizers.processors import TemplateProcessing

    made = train_tokenizer([MODULE], 600)
    made.add_special_tokens(
        {"additional_special_tokens": ["[gMASK]", "<sop>"]}, replace_additional_special_tokens=False
    )
    ids = made.get_vocab()
    pair = [("[gMASK]", ids["[gMASK]"]), ("<sop>", ids["<sop>"])]
    made.backend_tokenizer.post_processor = TemplateProcessing("[gMASK] <sop> $A", special_tokens=pair)
    own = Vocab.of(made)
    found = Marks.of(made, own)
    assert found.opening == (ids["[gMASK]"], ids["<sop>"])
    made_rows = rows_of(document(MODULE), own, found, 128)
    assert all(tuple(row.ids[:2]) == found.opening and row.untrained == 2 for row in made_rows)
    assert all(len(row.ids) <= 128 - ROOM + 1 for row in made_rows)


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = corpus_files(tmp_path, 12)
    words = ["shards", "write-corpus", str(file), "-o", str(tmp_path / "s"), "--vocab-size", "600"]
    assert main(words) == 0
    assert "36 documents, split by" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["meta"]["kind"] == "corpus"
    assert said["meta"]["text"] == {"max_tokens": TextConfig().max_tokens}
    (tmp_path / "empty").mkdir()
    assert main(["shards", "write-corpus", str(tmp_path / "empty"), "-o", str(tmp_path / "t")]) == 1
    assert "no documents" in capsys.readouterr().err


def test_rows_too_short_to_cut_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rows too short"):
        write_corpus([corpus_files(tmp_path, 2)], tmp_path / "s", max_tokens=32)
