"""Collectives made of messages, reductions also of one function that combines two arrays.

They work for arrays of any library: who calls them says how to send, receive, combine and allocate.
Every value is combined in one order by one rank, or by pairs of ranks that combine the same two
values, so the result is the same to the last bit on all ranks.

| | messages of one rank, each way | bytes of one rank, each way |
|---|---|---|
| doubling, for small arrays | log2(ranks) | log2(ranks) * n |
| ring, for large ones | 2 * (ranks - 1) | 2 * n * (ranks - 1) / ranks |
| blocks, from each to each | ranks - 1 | the blocks |
| binomial tree, a broadcast | at most log2(ranks) | n in, and n to each rank below |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mpimesh.arrays.types import Array
from mpimesh.transport.base import Request
from mpimesh.transport.device_work import AllDone
from mpimesh.transport.engine import Steps

__all__ = [
    "Links",
    "all_reduce_steps",
    "block_steps",
    "broadcast_steps",
    "cut",
    "reduce_scatter_steps",
    "reduce_steps",
]

SMALL_BYTES = 64 << 10
"""Up to here doubling is faster than the ring, which has more messages."""


@dataclass(frozen=True, slots=True)
class Links:
    """The primitives of the algorithms.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        isend: Starts to send an array to a rank.
        irecv: Starts to receive from a rank into an array.
        combine: Puts the combination of two arrays into the third, which may be one of them.
        empty: Returns a new array of so many elements.
        settled: Returns the request that is done when all that was combined or allocated so far
            may be sent or received into.
        small_bytes: Up to which size arrays go by doubling.
    """

    rank: int
    size: int
    isend: Callable[[Array, int], Request]
    irecv: Callable[[Array, int], Request]
    combine: Callable[[Array, Array, Array], None]
    empty: Callable[[int], Array]
    settled: Callable[[], Request]
    small_bytes: int = SMALL_BYTES


def all_reduce_steps(links: Links, data: Array) -> Steps:
    """Reduce `data` over all ranks, in place on each."""
    if links.size == 1 or data.size == 0:
        return
    if data.nbytes <= links.small_bytes:
        yield from _doubling(links, data)
        return
    counts = _even(data.size, links.size)
    yield from reduce_scatter_steps(links, data, counts)
    yield from _ring_gather(links, cut(data, counts))


def reduce_steps(links: Links, data: Array, root: int) -> Steps:
    """Reduce `data` over all ranks into that of `root`; on the others it holds nothing after."""
    if links.size == 1 or data.size == 0:
        return
    if data.nbytes <= links.small_bytes:
        yield from _doubling(links, data)
        return
    counts = _even(data.size, links.size)
    yield from reduce_scatter_steps(links, data, counts)
    blocks = cut(data, counts)
    if links.rank != root:
        yield links.isend(blocks[links.rank], root)
        return
    yield AllDone(*(links.irecv(blocks[r], r) for r in range(links.size) if r != root))


def reduce_scatter_steps(links: Links, data: Array, counts: Sequence[int]) -> Steps:
    """Reduce `data`; the steps' value is this rank's block of it, the rest holds nothing after."""
    rank, size = links.rank, links.size
    blocks = cut(data, counts)
    if size == 1:
        return blocks[0]
    after, before = (rank + 1) % size, (rank - 1) % size
    room = links.empty(max(counts))
    yield links.settled()
    # A block starts its way at the rank after its owner's, and each rank on it adds its own part.
    for step in range(size - 1):
        outgoing, incoming = blocks[(rank - 1 - step) % size], blocks[(rank - 2 - step) % size]
        arriving = room[: incoming.size]
        yield AllDone(links.irecv(arriving, before), links.isend(outgoing, after))
        links.combine(arriving, incoming, incoming)
        yield links.settled()
    return blocks[rank]


def block_steps(links: Links, outgoing: Sequence[Array], incoming: Sequence[Array]) -> Steps:
    """Send block d to rank d and receive block s from rank s, but for this rank's own.

    Args:
        links: What sends and receives.
        outgoing: A block for each rank, of which empty ones stay here; none at all sends nothing.
        incoming: The same for what comes.
    """
    # Step k talks to the rank k places on, so that no rank is everybody's first.
    peers = [(links.rank + step) % links.size for step in range(1, links.size)]
    receives = [links.irecv(incoming[p], p) for p in peers if incoming and incoming[p].size]
    sends = [links.isend(outgoing[p], p) for p in peers if outgoing and outgoing[p].size]
    yield AllDone(*receives, *sends)


def broadcast_steps(links: Links, data: Array, root: int) -> Steps:
    """Give every rank the root's `data`, which each rank passes on to those below it in a tree."""
    place = (links.rank - root) % links.size
    # The lowest bit that is set leads to the rank above; all lower ones to those below.
    reach = place & -place or 1 << (links.size - 1).bit_length()
    if not data.size:
        return
    if place:
        yield links.irecv(data, (place - reach + root) % links.size)
    steps = [1 << bit for bit in reversed(range(reach.bit_length() - 1))]
    below = [place + step for step in steps if place + step < links.size]
    yield AllDone(*[links.isend(data, (one + root) % links.size) for one in below])


def _ring_gather(links: Links, blocks: list[Array]) -> Steps:
    rank, size = links.rank, links.size
    after, before = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        outgoing, incoming = blocks[(rank - step) % size], blocks[(rank - 1 - step) % size]
        yield AllDone(links.irecv(incoming, before), links.isend(outgoing, after))


def _doubling(links: Links, data: Array) -> Steps:
    """Combine with a partner at distance 1, 2, 4, ...; ranks over a power of two go before."""
    rank, size = links.rank, links.size
    core = 1 << (size.bit_length() - 1)
    room = links.empty(data.size)
    yield links.settled()
    if rank >= core:
        yield links.isend(data, rank - core)
        yield links.irecv(data, rank - core)
        return
    extra = rank + core if rank + core < size else None
    if extra is not None:
        yield links.irecv(room, extra)
        links.combine(data, room, data)
        yield links.settled()
    distance = 1
    while distance < core:
        partner = rank ^ distance
        yield AllDone(links.irecv(room, partner), links.isend(data, partner))
        # The lower rank's part first on both sides, for functions to which the order matters.
        first, second = (data, room) if rank < partner else (room, data)
        links.combine(first, second, data)
        yield links.settled()
        distance *= 2
    if extra is not None:
        yield links.isend(data, extra)


def _even(size: int, parts: int) -> list[int]:
    return [size // parts + (part < size % parts) for part in range(parts)]


def cut(data: Array, counts: Sequence[int]) -> list[Array]:
    """Return the blocks of flat data that lie one after the other."""
    ends = list(accumulate(counts))
    return [data[end - count : end] for end, count in zip(ends, counts, strict=True)]
