"""Which split and group a session belongs to (floor 3), and sessions put by on disk so that one group fits in memory.

Both are stable hashes: the same on every machine and in every process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from agentft import etai_io
from agentft.data.conversations import RecordReader
from agentft.errors import DataError
from agentft.etai import Session, Split, split_of
from agentft.text.chat import Conversation, Record

GROUPS = 128
HELD_BYTES = 32 << 20
"""What ``Buckets`` keeps in memory before it writes."""


def group_of(session_id: str) -> int:
    """Return the group (0…127) of a session: the same on every machine, in every process."""
    return hashlib.sha256(session_id.encode("utf-8", "surrogatepass")).digest()[0] % GROUPS


def choose_split(session: Record, holdout: Sequence[str], val_share: float = 0.0) -> Split:
    """Return the split of a session.

    With a holdout: test holds exactly the sessions of those repositories (a name matches with or without its
    ``==version``), ``val_share`` of the rest goes to val by a stable hash of the id, everything else to train.
    Without: 8:1:1 by ``Session.split_key()``.
    """
    if not holdout:
        return split_of(session.split_key())
    if session.repository is not None and {session.repository, _name(session.repository)} & set(holdout):
        return "test"
    return val_or_train(session.session_id, val_share)


def val_or_train(session_id: str, val_share: float) -> Split:
    """Return the split of what is not held out: ``val`` for this share (0…1) of the ids, by a stable hash."""
    draw = int.from_bytes(hashlib.sha256(f"val/{session_id}".encode("utf-8", "replace")).digest()[:8], "big")
    return "val" if draw / 2**64 < val_share else "train"


class Named(Protocol):
    """What can be put into ``Buckets``."""

    @property
    def session_id(self) -> str:
        """The name that decides about group and order."""


Item = TypeVar("Item", bound=Named)


class Buckets(Generic[Item]):
    """Sessions (or rows of a corpus) on disk, one file of lines per (split, group), so that one group is in memory.

    Args:
        folder: Where; it is made.
        dump: Gives an item as one line of ASCII, without the line break.
        load: Reads that line back.
    """

    def __init__(self, folder: Path, dump: Callable[[Item], str], load: Callable[[str], Item]) -> None:
        self.folder, self._dump, self._load = folder, dump, load
        self.counts: Counter[tuple[Split, int]] = Counter()
        folder.mkdir()

    @contextlib.contextmanager
    def filling(self) -> Iterator[Callable[[Split, Item], None]]:
        """Give a function that puts one item away; all are on disk once the context is left."""
        waiting: dict[tuple[Split, int], list[str]] = {}
        held = 0

        def write() -> None:
            nonlocal held
            for key, lines in waiting.items():  # one file open at a time, however many there are
                with self._path(*key).open("a", encoding="ascii") as stream:
                    stream.writelines(lines)
            waiting.clear()
            held = 0

        def put(split: Split, item: Item) -> None:
            nonlocal held
            key, line = (split, group_of(item.session_id)), self._dump(item) + "\n"
            waiting.setdefault(key, []).append(line)
            self.counts[key] += 1
            held += len(line)
            if held >= HELD_BYTES:
                write()

        yield put
        write()

    def splits(self) -> set[Split]:
        """Return the splits that hold at least one item."""
        return {split for split, _ in self.counts}

    def read(self, split: Split, group: int) -> list[Item]:
        """Return the items of one group, sorted by id."""
        path = self._path(split, group)
        if not path.exists():
            return []
        with path.open(encoding="ascii") as lines:
            items = [self._load(line) for line in lines]
        return sorted(items, key=lambda item: item.session_id)

    def split(self, split: Split) -> Iterator[Item]:
        """Yield the items of a split by (group, id)."""
        for group in range(GROUPS):
            yield from self.read(split, group)

    def _path(self, split: Split, group: int) -> Path:
        return self.folder / f"{split}-{group:03d}.jsonl"


def fill(
    buckets: Buckets[Record],
    files: Sequence[str | Path],
    holdout: Sequence[str],
    val_share: float,
    read: Callable[[str | Path], etai_io.Reader | RecordReader] = etai_io.read,
) -> tuple[int, list[tuple[str, str]]]:
    """Put every record into its bucket; return the unreadable lines, and (id, reason) of ids used before."""
    seen: dict[str, str] = {}
    repositories: set[str] = set()
    unreadable, rejected = 0, []
    with buckets.filling() as put:
        for file in files:
            reader = read(file)
            for session in reader:
                if session.session_id in seen:
                    rejected.append(
                        (session.session_id, f"{file}: the id was used before, in {seen[session.session_id]}")
                    )
                    continue
                seen[session.session_id] = str(file)
                if session.repository is not None:
                    repositories |= {session.repository, _name(session.repository)}
                put(choose_split(session, holdout, val_share), session)
            unreadable += reader.report.rejected
    unknown = sorted(set(holdout) - repositories)
    if unknown:
        known = ", ".join(sorted(repositories)) or "none: no session names its repository"
        raise DataError("no session of this repository", where="--holdout", got=", ".join(unknown), expected=known)
    if not seen:
        raise DataError("no sessions", where=", ".join(map(str, files)), got=f"{unreadable} unreadable lines")
    return unreadable, rejected


def record_text(record: Record) -> str:
    """Return a session or conversation as one line of ASCII JSON; ``read_record`` gives it back."""
    return json.dumps(record.as_dict() if isinstance(record, Conversation) else record.model_dump(), ensure_ascii=True)


def read_record(text: str) -> Record:
    """Return the session or conversation of ``record_text``."""
    value = json.loads(text)
    return Conversation.from_dict(value) if "messages" in value else Session.model_validate(value)


def _name(repository: str) -> str:
    return repository.partition("==")[0]
