"""Measure how fast bytes get from rank to rank, so that all ranks know the same numbers.

Short measurements: they tell the order of magnitude, not the last tenth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.comm import MAX_USER_TAG
from mpimesh.layout import DEFAULT_LINK_COSTS, Give, LinkCost, LinkCosts, Part, Regions, Take
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.group import ProcessGroup

__all__ = ["best_s", "measured_links", "ping_pong"]

_TAG = MAX_USER_TAG + 10
_LARGE_BYTES = 4 << 20
_WHAT = "measure_links"
_SMALL_BYTES = 8
_SMALL_TIMES = 100
_LARGE_TIMES = 4


def measured_links(group: ProcessGroup) -> LinkCosts:
    """Measure the links between the ranks of a group. Collective; the result is that of all.

    Near: two ranks of each node send to each other, and then each rank of a node reads an array
    of the next one. Far: the first ranks of every two nodes send to each other. All pairs do so
    at once, and the slowest counts. What no pair can tell, for there is no second node or each
    rank is alone on its own, stays as assumed.

    Args:
        group: The ranks.
    """
    if group.size == 1:
        return DEFAULT_LINK_COSTS
    nodes = group.communicator.nodes or (0,) * group.size
    places = [[at for at in range(group.size) if nodes[at] == node] for node in sorted({*nodes})]
    firsts = [here[0] for here in places]
    near = _pinged(group, [(here[0], here[1]) for here in places if len(here) > 1])
    read_s = _read(group, next(here for here in places if group.rank in here))
    far = _pinged(group, list(zip(firsts[::2], firsts[1::2], strict=False)))
    rows = agree(group, _WHAT, [near, read_s, far])
    nears, reads, fars = ([one for one in column if one] for column in zip(*rows, strict=True))
    links = DEFAULT_LINK_COSTS
    if nears and reads:
        links = LinkCosts(_link(_slowest(nears)[0], _LARGE_BYTES / max(reads)), links.inter_node)
    if fars:
        links = LinkCosts(links.intra_node, _link(*_slowest(fars)))
    return links


def _link(latency_s: float, bytes_per_s: float) -> LinkCost:
    """Return a link of three digits: what is measured says no more."""
    return LinkCost(float(f"{latency_s:.3g}"), float(f"{bytes_per_s:.3g}"), measured=True)


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


def _read(group: ProcessGroup, here: Sequence[int]) -> float:
    """Return the seconds of reading an array of the next rank of the node; 0.0 if it is alone."""
    place = here.index(group.rank or 0)
    before, after = here[place - 1], here[(place + 1) % len(here)]
    take = group._core.context.world.shared_bytes
    source, target = take(_LARGE_BYTES), take(_LARGE_BYTES)
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


# -- clocks ----------------------------------------------------------------------------------------

_Transfer = Callable[[HostArray], object]
"""Sends a buffer to the other rank, or receives one from there, and waits until it is done."""


def ping_pong(
    send: _Transfer, receive: _Transfer, *, first: bool, large_bytes: int
) -> tuple[float, float]:
    """Send to another rank and back. Both do it.

    Args:
        send: Sends to the other one.
        receive: Receives from it.
        first: Whether this rank begins; the other one does not.
        large_bytes: The size of a message by which the speed is told.

    Returns:
        The seconds of 8 bytes one way, and the bytes per second of large ones.
    """
    small, large = np.zeros(_SMALL_BYTES, np.uint8), np.zeros(large_bytes, np.uint8)
    there, back = (send, receive) if first else (receive, send)

    def step(buffer: HostArray) -> None:
        there(buffer)
        back(buffer)

    times = []
    for _ in range(_SMALL_TIMES):
        start_s = time.perf_counter()
        step(small)
        times.append(time.perf_counter() - start_s)
    round_s = best_s(lambda: step(large))
    return float(np.median(times)) / 2, 2 * large_bytes / round_s


def best_s(step: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few steps; the first, which warms up, does not count.

    Of several, the fastest is least disturbed by others on the machine.
    """
    step()
    times = []
    for _ in range(_LARGE_TIMES):
        start_s = time.perf_counter()
        step()
        times.append(time.perf_counter() - start_s)
    return max(min(times), 1e-9)
