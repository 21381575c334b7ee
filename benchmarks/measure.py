"""Time several ways to do one thing against each other, in turns, on all ranks.

A machine's speed drifts from second to second. So the ways take turns, and what
counts is the median over the rounds of the ratio within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from mpi4py import MPI

from mpimesh.cli.bench import round_s

__all__ = ["FULL", "TINY", "Effort", "Timing", "in_turns"]


@dataclass(frozen=True, slots=True)
class Effort:
    """The extent of a measurement.

    Attributes:
        rounds: How often all ways take their turn.
        most_calls: Most calls in one turn.
        turn_bytes: Bytes of all calls in one turn together, but there are at least 3 calls.
        most_bytes: Larger arrays are left out.
    """

    rounds: int = 15
    most_calls: int = 2000
    turn_bytes: int = 32 << 20
    most_bytes: int = 1 << 62

    def sizes(self, sizes_bytes: Iterable[int]) -> list[int]:
        """Return those of `sizes_bytes` that are measured."""
        return [nbytes for nbytes in sizes_bytes if nbytes <= self.most_bytes]

    def calls(self, nbytes: int) -> int:
        """Return how often an array of `nbytes` is exchanged in one turn."""
        return min(self.most_calls, max(3, self.turn_bytes // nbytes))


FULL = Effort()
TINY = Effort(rounds=2, most_calls=2, most_bytes=64 << 10)
"""Only to see that everything runs."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of one way.

    Attributes:
        median_s: Median over the rounds of the seconds for one call.
        ratio: Median over the rounds of its time over that of the first way.
        over_s: Median over the rounds of its time less that of the first way.
        rounds_s: The seconds for one call, round by round.
    """

    median_s: float
    ratio: float
    over_s: float
    rounds_s: tuple[float, ...]

    def over(self, other: Timing) -> float:
        """Return the median over the rounds of its time over that of `other`."""
        return statistics.median(a / b for a, b in zip(self.rounds_s, other.rounds_s, strict=True))


def in_turns(
    comm: MPI.Intracomm,
    ways: Mapping[str, Callable[[], object]],
    *,
    calls: int,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time each of `ways`; the first is what the others are compared with.

    Collective. A round calls each way `calls` times between two barriers, in an
    order that turns by one from round to round; the slowest rank's time counts. `clock` may be
    :func:`time.process_time` where a way is one thread, which other programs disturb less.

    Returns:
        The same on every rank.
    """
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            spent_s = round_s(comm, ways[name], calls, clock)
            if number:  # the first round warms up
                seconds[name].append(spent_s)
    first = seconds[names[0]]
    return {
        name: Timing(
            statistics.median(own),
            statistics.median(a / b for a, b in zip(own, first, strict=True)),
            statistics.median(a - b for a, b in zip(own, first, strict=True)),
            tuple(own),
        )
        for name, own in seconds.items()
    }
