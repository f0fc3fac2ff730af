"""Which defects are tried next (floor 3): balanced over kinds and functions, in an order that only the seed decides."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping

from agentft.data.synthesis.defects import Defect, find_defects, is_sound
from agentft.data.synthesis.package import Package
from agentft.data.synthesis.profile import Profile
from agentft.data.synthesis.source import source_of


class Deck:
    """The defects of one package that its tests could catch, dealt one at a time."""

    def __init__(self, package: Package, profile: Profile, seed: int) -> None:
        self.package, self.profile = package, profile
        self.tests: dict[str, tuple[str, ...]] = {}
        self._cards = self._shuffled(random.Random(f"{seed}:{package.name}:{package.version}"))
        self._dealt: Counter[str] = Counter()

    @property
    def exhausted(self) -> bool:
        """Whether every defect was dealt."""
        return not any(self._cards.values())

    def deal(self, count: int, full: Mapping[str, bool]) -> list[Defect]:
        """Return up to ``count`` sound defects, each of the kind that was dealt least by then; no ``full`` kinds."""
        hand: list[Defect] = []
        while len(hand) < count:
            kinds = [kind for kind, cards in self._cards.items() if cards and not full.get(kind)]
            if not kinds:
                break
            kind = min(kinds, key=lambda name: (self._dealt[name], name))
            card = self._cards[kind].pop(0)
            if is_sound(card):
                self._dealt[kind] += 1
                hand.append(card)
        return hand

    def _shuffled(self, rng: random.Random) -> dict[str, list[Defect]]:
        """Return the defects by kind, in random order, so that every function comes once before any comes twice."""
        by_kind: dict[str, list[Defect]] = defaultdict(list)
        for path in self.package.sources:
            for defect in find_defects(source_of(path, self.package.files[path])):
                if self._tests_of(defect):
                    by_kind[defect.kind].append(defect)
        for kind in sorted(by_kind):
            rng.shuffle(by_kind[kind])
            seen: Counter[str] = Counter()
            turns: dict[str, int] = {}
            for defect in by_kind[kind]:
                turns[defect.identity] = seen[defect.function.key]
                seen[defect.function.key] += 1
            by_kind[kind].sort(key=lambda card: turns[card.identity])
        return dict(sorted(by_kind.items()))

    def _tests_of(self, defect: Defect) -> tuple[str, ...]:
        key = defect.function.key
        if key not in self.tests:
            self.tests[key] = tuple(test.node_id for test in self.profile.tests_of(defect.function))
        return self.tests[key]
