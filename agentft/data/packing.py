"""How a rank's batch is cut into forward passes (floor 3): pure functions from the lengths of sessions to rows.

``cut`` answers for ``data.packing``:

* ``none``: rows in the order in which they were drawn, ``data.microbatch_size`` at a time, padded to the longest.
* ``buckets``: the same after sorting by length.
* ``pack``: first-fit-decreasing into passes of ``data.pack_tokens`` tokens; a pass computes no padding
  (``AgentModel.unpadded``), so only the number of passes depends on how well sessions fit.

Only the cut differs: order, samples and losses are the same. First-fit-decreasing needs at most 11/9 of the fewest
passes and 6/9 of one more (Dósa 2007, "The tight bound of first fit decreasing bin-packing algorithm").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Packing = Literal["none", "buckets", "pack"]


def cut(lengths: Sequence[int], packing: Packing, *, rows: int, tokens: int) -> list[list[int]]:
    """Return the rows of each forward pass; every row of ``lengths`` (tokens a row) is in exactly one.

    Args:
        lengths: Tokens of each row.
        packing: See above.
        rows: Most rows of a pass (``none`` and ``buckets``).
        tokens: Most tokens of a pass (``pack``).
    """
    if packing == "pack":
        return first_fit_decreasing(lengths, tokens)
    order = list(range(len(lengths)))
    if packing == "buckets":
        order.sort(key=lambda row: -lengths[row])
    return [order[start : start + rows] for start in range(0, len(order), rows)]


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return bins of rows: the longest row first, each into the first bin that has room for it, else into a new one.

    A row that is longer than ``capacity`` gets a bin of its own.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = next((place for place, left in enumerate(room) if left >= lengths[row]), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(capacity)
        bins[place].append(row)
        room[place] -= lengths[row]
    return bins


def spread(bins: Sequence[Sequence[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Return at least ``count`` bins, as far as there are rows, by moving rows out of the fullest ones into new ones.

    Sharded models need it: every rank takes part in every other rank's forward pass.
    """
    result = [list(rows) for rows in bins]
    while len(result) < min(count, sum(map(len, result))):
        fullest = max((rows for rows in result if len(rows) > 1), key=lambda rows: sum(lengths[row] for row in rows))
        result.append([fullest.pop()])
    return result
