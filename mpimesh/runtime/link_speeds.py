"""Measure how fast bytes get from rank to rank, so that all ranks know the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpimesh.arrays import DType, HostArray
from mpimesh.comm import MAX_USER_TAG
from mpimesh.comm.ping import best_s, ping_pong
from mpimesh.layout import ASSUMED_LINKS, Give, Link, Links, Part, Regions, Take
from mpimesh.runtime.agreement import exchange
from mpimesh.runtime.group import ProcessGroup

__all__ = ["measured_links"]

_TAG = MAX_USER_TAG + 10
_LARGE_BYTES = 4 << 20
_WHAT = "measure_links"


def measured_links(
    group: ProcessGroup, empty: Callable[[Sequence[int], DType], HostArray]
) -> Links:
    """Measure the links between the ranks of a group. Collective; the result is that of all.

    Near: two ranks of each node send to each other, and then each rank of a node reads an array
    of the next one. Far: the first ranks of every two nodes send to each other. All pairs do so
    at once, and the slowest counts. What no pair can tell, for there is no second node or each
    rank is alone on its own, stays as assumed.

    Args:
        group: The ranks.
        empty: Gives memory that the ranks of the node can reach.
    """
    if group.size == 1:
        return ASSUMED_LINKS
    nodes = group.communicator.nodes or (0,) * group.size
    places = [[at for at in range(group.size) if nodes[at] == node] for node in sorted({*nodes})]
    firsts = [here[0] for here in places]
    near = _pinged(group, [(here[0], here[1]) for here in places if len(here) > 1])
    read_s = _read(group, next(here for here in places if group.rank in here), empty)
    far = _pinged(group, list(zip(firsts[::2], firsts[1::2], strict=False)))
    rows = exchange(group._core.progress, group.communicator, [near, read_s, far], what=_WHAT)
    nears, reads, fars = ([one for one in column if one] for column in zip(*rows, strict=True))
    links = ASSUMED_LINKS
    if nears and reads:
        links = Links(_link(_slowest(nears)[0], _LARGE_BYTES / max(reads)), links.far, True)
    if fars:
        links = Links(links.near, _link(*_slowest(fars)), True)
    return links


def _link(latency_s: float, bytes_per_s: float) -> Link:
    """Return a link of three digits: what is measured says no more."""
    return Link(float(f"{latency_s:.3g}"), float(f"{bytes_per_s:.3g}"))


def _slowest(rows: Sequence[Sequence[float]]) -> tuple[float, float]:
    return max(row[0] for row in rows), min(row[1] for row in rows)


def _pinged(group: ProcessGroup, pairs: Sequence[tuple[int, int]]) -> tuple[float, float] | None:
    """Send to the other one of this rank's pair and back; None if it is in no pair."""
    for pair in pairs:
        if group.rank in pair:
            other = pair[1 - pair.index(group.rank)]
            return ping_pong(
                partial(_pass, group, group.communicator.isend, other),
                partial(_pass, group, group.communicator.irecv, other),
                first=group.rank == pair[0],
                large_bytes=_LARGE_BYTES,
            )
    return None


def _pass(
    group: ProcessGroup, start: Callable[[HostArray, int, int], Any], other: int, buffer: HostArray
) -> None:
    group._core.wait_for(start(buffer, other, _TAG), what=_WHAT, peers=(other,))


def _read(
    group: ProcessGroup, here: Sequence[int], empty: Callable[[Sequence[int], DType], HostArray]
) -> float:
    """Return the seconds of reading an array of the next rank of the node; 0.0 if it is alone."""
    place = here.index(group.rank or 0)
    before, after = here[place - 1], here[(place + 1) % len(here)]
    source, target = (empty((_LARGE_BYTES,), np.dtype(np.uint8)) for _ in range(2))
    source[...] = target[...] = 0  # memory that is there
    whole = ((0, _LARGE_BYTES),)
    regions = Regions()
    if len(here) > 1:
        takes = [Take(whole, (Part(after, source.shape, whole),))]
        regions = Regions(tuple(takes), (Give(before, whole),))

    def step() -> None:
        group._core.compose(
            _WHAT,
            lambda: group.communicator.exchange_regions(source, target, regions),
            rule=f"{_LARGE_BYTES} bytes",
        ).resolve()

    seconds = best_s(step)
    return seconds if len(here) > 1 else 0.0
