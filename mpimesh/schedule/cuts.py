"""Cuts of a row of layers that make the longest stage as short as can be, exactly.

Layers i to j - 1 may be a stage that keeps to a limit if ``up[j] - down[i]`` does, with ``up[j]``
the time of all layers before j plus that of the message there, and ``down[i]`` the time of all
before i minus that of the message there. Two steps:

1. The least limit that some cut into so many stages keeps to. It is known from which layers one
   stage leads to the end, from which two do, and so on. A greater limit allows all that a smaller
   one does, so bisection finds the least. (To let each stage take as many layers as fit, as one
   does where messages cost nothing, is wrong here: the message one layer earlier may cost less.)
2. Among the cuts that keep to it, a table for each number of stages: the least messages from a
   layer to the end. It is filled from the end back, and read forward, where at each cut the
   earliest is taken that loses nothing.

Sets of layers are the bits of a number, so that one operation takes 64 of them at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import accumulate, compress
from operator import or_

__all__ = ["Row"]

_IS_MEMBER = bytes.maketrans(b"01", b"\x00\x01")


class Row:
    """Layers in a row, with the messages between them, in whole numbers.

    A set of starts or ends of stages is a number with their bits.

    Args:
        layers: The time of each layer.
        messages: The time of a message between each and the next.
    """

    def __init__(self, layers: Sequence[int], messages: Sequence[int]) -> None:
        self.size = len(layers)
        self.longest = max(layers)
        self.messages = [0, *messages, 0]
        before = list(accumulate(layers, initial=0))
        self.up = [time + message for time, message in zip(before, self.messages, strict=True)]
        self.down = [time - message for time, message in zip(before, self.messages, strict=True)]
        starts = sorted(range(self.size), key=self.down.__getitem__)
        self._sorted_down = [self.down[start] for start in starts]
        sets = accumulate((1 << start for start in reversed(starts)), or_, initial=0)
        self._starts_from = list(sets)[::-1]
        """At place p the starts from the p-th on, in the order of their `down`."""

    def stage(self, start: int, end: int) -> int:
        """Return the time of a stage."""
        return self.up[end] - self.down[start]

    def least_limit(self, num_stages: int) -> int:
        """Return the least time that the slowest of so many stages can have."""
        total = self.up[-1]
        too_low = max(self.longest, -(-total // num_stages)) - 1
        enough = total + 2 * max(self.messages)
        while enough - too_low > 1:
            limit = (too_low + enough) // 2
            places = self._places(limit)
            # Between two differences of an `up` and a `down` all limits allow the same.
            ups_places = zip(self.up[1:], places, strict=True)
            if self._can_be_cut(num_stages, self._starts(places)):
                within = [up - self._sorted_down[p] for up, p in ups_places if p < self.size]
                enough = max(within)
            else:
                above = [up - self._sorted_down[p - 1] for up, p in ups_places if p]
                too_low = min(above) - 1
        return enough

    def best_cut(self, num_stages: int, limit: int) -> tuple[int, ...]:
        """Return the bounds of stages that keep to `limit`: least messages, then earliest."""
        starts = self._starts(self._places(limit))
        # For each number of stages from a start to the end: the least messages on the way.
        tables: list[dict[int, int]] = [{self.size: 0}]
        for stages_before in reversed(range(num_stages)):
            table = self._with_a_stage_before(tables[-1], starts)
            tables.append(
                {start: least for start, least in table.items() if start >= stages_before}
            )
        bounds = [0]
        for stages_left in reversed(range(num_stages)):
            start, after = bounds[-1], tables[stages_left]
            least = tables[stages_left + 1][start]
            bounds.append(
                next(
                    end
                    for end in sorted(after)
                    if starts[end] >> start & 1 and self.messages[end] + after[end] == least
                )
            )
        return tuple(bounds)

    def _with_a_stage_before(self, after: dict[int, int], starts: Sequence[int]) -> dict[int, int]:
        table: dict[int, int] = {}
        reached = 0
        # The first end, from the least messages on, that a start reaches is its best.
        for least, end in sorted((self.messages[end] + least, end) for end, least in after.items()):
            new = starts[end] & ~reached
            if new:
                reached |= new
                table.update(dict.fromkeys(_members(new), least))
        return table

    def _can_be_cut(self, num_stages: int, starts: Sequence[int]) -> bool:
        reached = 1 << self.size
        for stages_before in reversed(range(num_stages)):
            reached = reduce(or_, compress(starts, _bits(reached)), 0)
            # Each stage before has a layer.
            reached = reached >> stages_before << stages_before
        return bool(reached & 1)

    def _places(self, limit: int) -> list[int]:
        """Return for each end but 0 where the starts begin, by `down`, that may go with it."""
        return [bisect_left(self._sorted_down, up - limit) for up in self.up[1:]]

    def _starts(self, places: Sequence[int]) -> list[int]:
        """Return for each end the starts of the stages that may end there; none for 0."""
        return [
            0,
            *(
                self._starts_from[place] & ((1 << end) - 1)
                for end, place in enumerate(places, start=1)
            ),
        ]


def _bits(members: int) -> bytes:
    """Return a byte for each number from 0 on: 1 if it is a member."""
    return f"{members:b}".encode()[::-1].translate(_IS_MEMBER)


def _members(members: int) -> Iterator[int]:
    while members:
        lowest = members & -members
        yield lowest.bit_length() - 1
        members ^= lowest
