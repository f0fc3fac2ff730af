"""Repair sessions from real packages, end to end (floor 3).

    report = synthesize(["toolz==1.2.0", "boltons==26.2.0"], 200, Path("sessions.jsonl"))

Rounds of two phases, each spread over the workers: defects are dealt and screened by the packages' own tests; those
that the tests catch become sessions. Results are taken in the order of dealing, so that threads change nothing: the
same packages, count and seed give the same sessions (durations apart). Every answer goes to ``<output>.partial.jsonl``
at once; a second call with the same request goes on from there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from agentft.data.synthesis.case import Case
from agentft.data.synthesis.defects import Defect, cap_of
from agentft.data.synthesis.draw import Deck
from agentft.data.synthesis.journal import Journal
from agentft.data.synthesis.package import load_package
from agentft.data.synthesis.profile import profile_package
from agentft.data.synthesis.report import SynthReport, load_report
from agentft.data.synthesis.screen import Verdict, screen
from agentft.data.synthesis.session import Dropped, write_session
from agentft.errors import ConfigError
from agentft.etai import Session
from agentft.etai_io import read, write
from agentft.sandbox.base import Lease, Limits, Sandbox
from agentft.sandbox.pool import open_sandbox

FORMAT = 9
"""Raise when the same request gives other sessions than before."""
BATCH = 10
MAX_ROUNDS = 12

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a synthesis is."""

    kept: int
    tried: int
    wanted: int
    doing: str


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """Where the code runs."""

    backend: Literal["docker", "local"] = "docker"
    image: str = "python"
    workers: int = 2
    limits: Limits = field(default_factory=Limits)


def synthesize(
    packages: Sequence[str],
    count: int,
    output: Path,
    *,
    sandbox: SandboxSettings | None = None,
    seed: int = 17,
    progress: Callable[[Progress], None] = lambda state: None,
) -> SynthReport:
    """Write ``count`` sessions of ``packages`` (``name==version`` each) to ``output``, and the report beside it.

    A finished output of the same request is not made again (``report.reused``).

    Raises:
        ConfigError: a package or count makes no sense.
        DataError: a package cannot be fetched, has no tests that pass, or yields no session at all.
        SandboxError: the sandbox cannot be opened or failed.
    """
    settings = sandbox or SandboxSettings()
    if count < 1 or not packages:
        raise ConfigError("nothing to synthesise", got=f"{count} sessions of {len(packages)} packages")
    request = _request(packages, count, seed, settings)
    if (finished := load_report(output, request)) is not None:
        return finished
    journal = Journal(output.with_name(f"{output.name}.partial.jsonl"), request)
    pool = open_sandbox(
        settings.backend, settings.image, workers=settings.workers, limits=settings.limits, run_name="synth"
    )
    with closing(pool), closing(journal):
        report = SynthReport(output, request, wanted=count, resumed=len(journal))
        run = _Run(pool, settings.workers, journal, count, seed, progress, report)
        with _timed(report, "profile"):
            run.prepare(packages)
        kept = run.rounds()
        kept = _balanced(kept, report)
        write(output, [session for _, session in kept])
        report.describe(session for _, session in kept)
        report.write()
        journal.close(remove=True)
    return report


def sessions_of(output: Path) -> list[Session]:
    """Return the sessions that a synthesis has written."""
    return list(read(output, strict=True))


class _Run:
    """The state of one synthesis: decks, caught cases that wait, and what was kept."""

    def __init__(
        self,
        pool: Sandbox,
        workers: int,
        journal: Journal,
        count: int,
        seed: int,
        progress: Callable[[Progress], None],
        report: SynthReport,
    ) -> None:
        self.pool, self.workers, self.journal, self.count, self.seed = pool, workers, journal, count, seed
        self.progress, self.report = progress, report
        self.decks: list[Deck] = []
        self.kept: list[tuple[Defect, Session]] = []
        self.kinds: Counter[str] = Counter()
        self.packages: Counter[str] = Counter()
        self.cap = cap_of(count)

    def prepare(self, packages: Sequence[str]) -> None:
        """Fetch, profile and deal every package."""

        def prepared(requirement: str, lease: Lease) -> Deck:
            self._say(f"profiling {requirement}")
            package = load_package(requirement)
            return Deck(package, profile_package(package, lease, self.pool.image_digest), self.seed)

        self.decks = [deck for _, deck in self._map(prepared, packages)]

    def rounds(self) -> list[tuple[Defect, Session]]:
        """Screen and write until there are enough sessions or no defects left; return what was kept."""
        waiting: list[Case] = []
        for _ in range(MAX_ROUNDS):
            with _timed(self.report, "screen"):
                caught = self._screen(len(self.kept))
            waiting = _interleaved([*waiting, *caught])
            with _timed(self.report, "write"):
                waiting = self._write(waiting)
            if len(self.kept) >= self.count or not (caught or waiting):
                break
        self.report.unused = self.report.tried - len(self.kept) - sum(self.report.dropped.values())
        return self.kept

    def _screen(self, before: int) -> list[Case]:
        """Deal and screen as many defects as the missing sessions need; return those that tests catch."""
        full = {kind: held >= self.cap for kind, held in self.kinds.items()}
        batches: list[tuple[Deck, list[Defect]]] = []
        for deck in self.decks:
            missing = self._share(deck) - self.packages[deck.package.name]
            hand = deck.deal(max(0, -(-missing * 18 // 10)) + (4 if missing > 0 else 0), full)
            batches += [(deck, hand[at : at + BATCH]) for at in range(0, len(hand), BATCH)]
        caught = []
        for (deck, hand), verdicts in self._map(self._verdicts, batches):
            self.report.tried += len(hand)
            for defect, verdict in zip(hand, verdicts, strict=True):
                self.journal.put(f"screen {deck.package.name} {defect.identity}", asdict(verdict))
                if verdict.caught:
                    caught.append(Case(deck.package, deck.profile, defect, verdict, self.seed))
                else:
                    self.report.dropped[verdict.reason] += 1
            self._say("screening defects")
        return caught

    def _verdicts(self, batch: tuple[Deck, list[Defect]], lease: Lease) -> list[Verdict]:
        deck, hand = batch
        keys = [f"screen {deck.package.name} {defect.identity}" for defect in hand]
        if all(key in self.journal for key in keys):
            return [_verdict(self.journal.get(key)) for key in keys]
        return screen(deck.package, [(defect, deck.tests[defect.function.key]) for defect in hand], lease)

    def _write(self, cases: list[Case]) -> list[Case]:
        """Write sessions in order until every share is full; return the cases that were not needed."""
        unused: list[Case] = []

        def wanted() -> Iterator[Case]:
            for case in cases:
                if self._has_room(case):
                    yield case
                else:
                    unused.append(case)

        for case, (reason, opening, session) in self._map(self._session, wanted()):
            self.journal.put(f"session {case.session_id}", [reason, opening, session and session.model_dump()])
            if session is None:
                self.report.dropped[reason] += 1
            elif not self._has_room(case):
                unused.append(case)
            else:
                self.kept.append((case.defect, session))
                self.kinds[case.defect.kind] += 1
                self.packages[case.package.name] += 1
                self.report.by_opening[opening] += 1
            self._say("writing sessions")
        return [case for case in unused if self.kinds[case.defect.kind] < self.cap]

    def _session(self, case: Case, lease: Lease) -> tuple[str, str, Session | None]:
        known = self.journal.get(f"session {case.session_id}")
        if known is not None:
            reason, opening, plain = known
            return reason, opening, None if plain is None else Session.model_validate(plain)
        try:
            opening, session = write_session(case, lease)
        except Dropped as reason:
            return str(reason), "", None
        return "", opening, session

    def _has_room(self, case: Case) -> bool:
        deck = next(deck for deck in self.decks if deck.package is case.package)
        return (
            len(self.kept) < self.count
            and self.kinds[case.defect.kind] < self.cap
            and self.packages[case.package.name] < self._share(deck)
        )

    def _share(self, deck: Deck) -> int:
        """Return how many sessions a package should give: an equal part of what others do not leave over."""
        open_decks = [other for other in self.decks if not other.exhausted or other is deck]
        settled = sum(self.packages[other.package.name] for other in self.decks if other not in open_decks)
        part, rest = divmod(self.count - settled, len(open_decks))
        return part + (1 if open_decks.index(deck) < rest else 0)

    def _map(self, work: Callable[[T, Lease], R], items: Sequence[T] | Iterator[T]) -> Iterator[tuple[T, R]]:
        """Yield (item, work(item, lease)) in order. Items are drawn a fixed number ahead, whatever the timing is."""
        source = iter(items)
        with ThreadPoolExecutor(self.workers, thread_name_prefix="synth") as threads:

            def leased(item: T) -> R:
                with self.pool.lease() as lease:
                    return work(item, lease)

            ahead: deque[tuple[T, Future[R]]] = deque()
            try:
                for item in itertools.chain(source):
                    ahead.append((item, threads.submit(leased, item)))
                    if len(ahead) > self.workers:
                        first, future = ahead.popleft()
                        yield first, future.result()
                while ahead:
                    first, future = ahead.popleft()
                    yield first, future.result()
            finally:
                for _, future in ahead:
                    future.cancel()

    def _say(self, doing: str) -> None:
        self.progress(Progress(kept=len(self.kept), tried=self.report.tried, wanted=self.count, doing=doing))


def _request(packages: Sequence[str], count: int, seed: int, settings: SandboxSettings) -> str:
    facts: list[Any] = [FORMAT, list(packages), count, seed, settings.backend, settings.image, asdict(settings.limits)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _verdict(plain: dict[str, Any]) -> Verdict:
    return Verdict(plain["exit_code"], tuple(plain["failing"]), tuple(plain["passing"]), plain["errors"])


def _interleaved(cases: Sequence[Case]) -> list[Case]:
    """Take the packages in turn."""
    by_package: dict[str, list[Case]] = {}
    for case in cases:
        by_package.setdefault(case.package.name, []).append(case)
    turns = itertools.zip_longest(*by_package.values())
    return [case for turn in turns for case in turn if case is not None]


def _balanced(kept: list[tuple[Defect, Session]], report: SynthReport) -> list[tuple[Defect, Session]]:
    """Drop the last of a kind while it holds more than its part of what is kept (where fewer came out than wanted)."""
    kept = list(kept)
    while True:
        kinds = Counter(defect.kind for defect, _ in kept)
        over = [kind for kind, held in sorted(kinds.items()) if held > cap_of(len(kept))]
        if not over:
            report.by_kind = kinds
            return kept
        last = max(at for at, (defect, _) in enumerate(kept) if defect.kind == over[0])
        kept.pop(last)
        report.dropped["more than a tenth of one kind"] += 1


@contextmanager
def _timed(report: SynthReport, stage: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    report.seconds[stage] = round(report.seconds.get(stage, 0.0) + time.monotonic() - started, 2)
