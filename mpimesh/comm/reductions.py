"""Collectives by messages between pairs of ranks, of host memory or that of devices.

They run on every communicator, as they need nothing for them but `isend` and `irecv`:

``centralized``
    One rank takes the arrays of all, one after the other in the order of the ranks, and sends the
    result to each. Two steps whatever the number of ranks, but all bytes pass through one rank.
``tree(b)``
    A tree in which each rank has up to b others below it. Partial results go up, the result comes
    down: ``2 log_b(n)`` steps, in each of which a rank sends or takes up to b whole arrays.
``ring``
    Each rank talks to its two neighbours only. The array is cut into a segment for each rank, of
    sizes that differ by one element at most; the segments go round, first reduced and then copied:
    ``2 (n - 1)`` steps of one segment, so each rank sends and takes about two arrays in all. With
    fewer elements than ranks it is ``tree(2)``. A reduce-scatter is its first half.
doubling, of small arrays of devices (`host_strategies.py`)
    Pairs of ranks at distance 1, 2, 4, ... exchange whole arrays: ``log2(n)`` steps.

Each element is reduced in one place, or handed on from where it was, and then copied to the others,
or pairs of ranks combine the same two values in the same order: all ranks have the same bits. From
one algorithm to the next the order of a sum differs, and so may its last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from mpimesh.arrays.namespace import Array
from mpimesh.comm.algorithms import tree_arity
from mpimesh.comm.engine import Steps
from mpimesh.comm.regions import FUNCTIONS
from mpimesh.comm.requests import MAX_USER_TAG, Messages, Request, all_done, block_slices
from mpimesh.layout.boxes import even_sizes

__all__ = [
    "RING",
    "Peers",
    "all_reduce_by_messages",
    "broadcast_by_messages",
    "by_messages",
    "doubling",
    "reduce_by_messages",
    "reduce_scatter_by_messages",
    "segments",
]

RING = 0
"""In place of a tree's arity."""

_TAG = MAX_USER_TAG + 12
_CENTER = 0
"""The rank where an all-reduce comes together that has no root."""
_ARITY_OF_SMALL = 2


class Peers:
    """The ranks of a communicator, as the algorithms see them: for arrays in host memory.

    Args:
        ranks: Who sends and receives.

    Attributes:
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(self, ranks: Messages) -> None:
        self._ranks = ranks
        self.rank = ranks.rank
        self.size = ranks.size

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def isend(self, data: Array, dest: int) -> Request:
        """Start to send an array."""
        return self._ranks.isend(data, dest, _TAG)

    def irecv(self, data: Array, source: int) -> Request:
        """Start to receive into an array."""
        return self._ranks.irecv(data, source, _TAG)

    def combine(self, op: str, first: Array, second: Array, out: Array) -> None:
        """Put the combination of two arrays into the third; overflow and NaN pass silently."""
        with np.errstate(all="ignore"):
            FUNCTIONS[op](first, second, out=out)

    def empty(self, like: Array) -> Array:
        """Return a new array of the size and dtype of another one."""
        return np.empty_like(like)

    def settled(self) -> Steps:
        """Wait until all that was combined or allocated may be sent or received into."""
        yield from ()


def by_messages(
    communicator: Messages, name: str, algorithm: str
) -> Callable[..., Request | Steps] | None:
    """Return what starts a collective by messages; None if it is not one of these.

    Args:
        communicator: The ranks.
        name: ``"all_reduce"``, ``"reduce"`` or ``"broadcast"``.
        algorithm: Its name.

    Returns:
        A function that takes the arguments of the communicator's own method.
    """
    arity = _arity(algorithm, communicator.size)
    start = _STARTS.get(name)
    if arity is None or start is None:
        return None
    return partial(start, Peers(communicator), arity)


def all_reduce_by_messages(
    peers: Peers, arity: int, send: Array | None, recv: Array, op: str
) -> Steps:
    """Reduce over all ranks into `recv` on each.

    Args:
        peers: The ranks.
        arity: How many ranks are below each in the tree; 0 for the ring.
        send: This rank's array; None if it is what `recv` holds.
        recv: Where the result comes; shares no memory with `send`.
        op: The reduction.
    """
    source = recv if send is None else send
    ranks, rank = peers.size, peers.rank
    if ranks == 1 or not recv.size:
        recv[...] = source
        return
    if arity == RING and recv.size >= ranks:
        parts = segments(recv.size, ranks)
        yield from _reduce_round(peers, source, recv[parts[rank]], parts, op)
        yield from _copy_round(peers, recv, parts)
        return
    above, below = _tree(peers, _CENTER, arity or _ARITY_OF_SMALL)
    if below:
        yield from _take_in(peers, below, source, recv, op)
    if above is not None:
        yield peers.isend(recv if below else source, above)
    yield from _hand_down(peers, above, below, recv)


def reduce_by_messages(
    peers: Peers,
    arity: int,
    send: Array,
    recv: Array | None,
    op: str,
    root: int,
) -> Steps:
    """Reduce over all ranks into `recv` on `root`.

    Args:
        peers: The ranks.
        arity: As for an all-reduce.
        send: This rank's array.
        recv: Where the result comes on `root`; shares no memory with `send`, but in a ring of no
            more ranks than elements it may be the same array.
        op: The reduction.
        root: Who gets it.
    """
    ranks, rank = peers.size, peers.rank
    if rank != root:
        recv = None
    if ranks == 1 or not send.size:
        if recv is not None:
            recv[...] = send
        return
    if arity == RING and send.size >= ranks:
        parts = segments(send.size, ranks)
        own = peers.empty(send[parts[rank]]) if recv is None else recv[parts[rank]]
        yield from _reduce_round(peers, send, own, parts, op)
        if recv is None:
            yield peers.isend(own, root)
        else:
            others = peers.others
            yield all_done(*(peers.irecv(recv[parts[r]], r) for r in others))
        return
    above, below = _tree(peers, root, arity or _ARITY_OF_SMALL)
    total = send
    if below:
        total = peers.empty(send) if recv is None else recv
        yield from _take_in(peers, below, send, total, op)
    if above is not None:
        yield peers.isend(total, above)


def reduce_scatter_by_messages(
    peers: Peers, send: Array, recv: Array, counts: Sequence[int], op: str
) -> Steps:
    """Reduce `send`; rank r gets block r, ``counts[r]`` elements long. In a ring."""
    if peers.size == 1:
        recv[...] = send
    else:
        yield from _reduce_round(peers, send, recv, block_slices(counts), op)


def broadcast_by_messages(peers: Peers, arity: int, buffer: Array, root: int) -> Steps:
    """Copy `buffer` of `root` into `buffer` of every rank.

    Args:
        peers: The ranks.
        arity: As for an all-reduce. In a ring the root gives each rank a segment, and these go
            round.
        buffer: The array.
        root: Who has it.
    """
    ranks, rank = peers.size, peers.rank
    if ranks == 1 or not buffer.size:
        return
    if arity == RING and buffer.size >= ranks:
        parts = segments(buffer.size, ranks)
        if rank == root:
            others = peers.others
            yield all_done(*(peers.isend(buffer[parts[r]], r) for r in others))
        else:
            yield peers.irecv(buffer[parts[rank]], root)
        yield from _copy_round(peers, buffer, parts, root)
        return
    yield from _hand_down(peers, *_tree(peers, root, arity or _ARITY_OF_SMALL), buffer)


_STARTS: dict[str, Callable[..., Steps]] = {
    "all_reduce": all_reduce_by_messages,
    "reduce": reduce_by_messages,
    "broadcast": broadcast_by_messages,
}


def segments(size: int, ranks: int) -> list[slice]:
    """Return the segment of each rank of `size` elements; the first ones may have one more."""
    return block_slices(even_sizes(size, ranks))


def _arity(algorithm: str, ranks: int) -> int | None:
    """Return how many ranks are below each; 0 for a ring, None for what is none of these."""
    if algorithm == "ring":
        return RING
    if algorithm == "centralized":
        return max(2, ranks)  # the tree in which all are below the root
    return tree_arity(algorithm) or None


# -- trees ----------------------------------------------------------------------------------------


def _tree(peers: Peers, root: int, arity: int) -> tuple[int | None, list[int]]:
    """Return a rank's place in the tree of all: who is above it and who is below it.

    Args:
        peers: The ranks.
        root: The one at the top, with None above; the others follow in their order, and round.
        arity: How many are below each.
    """
    ranks, place = peers.size, (peers.rank - root) % peers.size
    first = place * arity + 1
    below = [(each + root) % ranks for each in range(first, min(first + arity, ranks))]
    return ((place - 1) // arity + root) % ranks if place else None, below


def _take_in(peers: Peers, below: Sequence[int], source: Array, total: Array, op: str) -> Steps:
    """Reduce what those below send, and this rank's `source`, in the order of the ranks.

    `total` may be `source` if this rank comes first. Two arrays are on their way at a time.
    """
    first, *rest = sorted([peers.rank, *below])
    others = [rank for rank in rest if rank != peers.rank]
    pads = [peers.empty(total) for _ in others[:2]]
    yield from peers.settled()
    if first != peers.rank:
        yield peers.irecv(total, first)
    elif total is not source:
        total[...] = source
    coming: list[Request] = [
        peers.irecv(pad, rank) for pad, rank in zip(pads, others, strict=False)
    ]
    taken = 0
    for rank in rest:
        if rank == peers.rank:
            peers.combine(op, total, source, total)
            yield from peers.settled()
            continue
        place = taken % 2
        yield coming[place]
        peers.combine(op, total, pads[place], total)
        yield from peers.settled()
        taken += 1
        if taken + 1 < len(others):
            coming[place] = peers.irecv(pads[place], others[taken + 1])


def _hand_down(peers: Peers, above: int | None, below: Sequence[int], buffer: Array) -> Steps:
    """Take `buffer` from above, and give it to those below."""
    if above is not None:
        yield peers.irecv(buffer, above)
    if below:
        yield all_done(*(peers.isend(buffer, rank) for rank in below))


# -- rings ----------------------------------------------------------------------------------------


def _reduce_round(
    peers: Peers,
    source: Array,
    own: Array,
    parts: Sequence[slice],
    op: str,
) -> Steps:
    """Reduce the segments on their way round the ring; this rank's one ends in `own`.

    `own` may be that segment of `source`. Nothing else of `source` is written.
    """
    ranks, rank = peers.size, peers.rank
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    # One comes while the other leaves.
    largest = max(parts, key=lambda part: part.stop - part.start)
    pads = [peers.empty(source[largest]) for _ in range(min(2, ranks - 1))]
    yield from peers.settled()
    outgoing = source[parts[before]]
    for step in range(ranks - 1):
        mine = source[parts[(rank - step - 2) % ranks]]
        pad = pads[step % 2][: mine.size]
        yield all_done(peers.irecv(pad, before), peers.isend(outgoing, after))
        outgoing = own if step == ranks - 2 else pad
        peers.combine(op, pad, mine, outgoing)
        yield from peers.settled()


def _copy_round(
    peers: Peers, buffer: Array, parts: Sequence[slice], root: int | None = None
) -> Steps:
    """Copy each rank's segment of `buffer` round the ring; `root` has all of them already."""
    ranks, rank = peers.size, peers.rank
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    for step in range(ranks - 1):
        requests: list[Request] = []
        if rank != root:
            part = parts[(rank - step - 1) % ranks]
            requests.append(peers.irecv(buffer[part], before))
        if after != root:
            part = parts[(rank - step) % ranks]
            requests.append(peers.isend(buffer[part], after))
        yield all_done(*requests)


# -- pairs ----------------------------------------------------------------------------------------


def doubling(peers: Peers, data: Array, op: str) -> Steps:
    """Combine with a partner at distance 1, 2, 4, ...; ranks over a power of two go before."""
    rank, size = peers.rank, peers.size
    core = 1 << (size.bit_length() - 1)
    buffer = peers.empty(data)
    yield from peers.settled()
    if rank >= core:
        yield peers.isend(data, rank - core)
        yield peers.irecv(data, rank - core)
        return
    extra = rank + core if rank + core < size else None
    if extra is not None:
        yield peers.irecv(buffer, extra)
        peers.combine(op, data, buffer, data)
        yield from peers.settled()
    distance = 1
    while distance < core:
        partner = rank ^ distance
        yield all_done(peers.irecv(buffer, partner), peers.isend(data, partner))
        # The lower rank's part first on both sides, for functions to which the order matters.
        first, second = (data, buffer) if rank < partner else (buffer, data)
        peers.combine(op, first, second, data)
        yield from peers.settled()
        distance *= 2
    if extra is not None:
        yield peers.isend(data, extra)
