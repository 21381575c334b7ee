"""All-reduce, reduce and broadcast by messages between pairs of ranks.

They run on every communicator, as it needs nothing for them but `isend` and `irecv`:

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
    fewer elements than ranks it is ``tree(2)``.

Each element is reduced in one place, or handed on from where it was, and then copied to the others:
all ranks have the same bits. From one algorithm to the next the order of a sum differs, and so may
its last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mpimesh.arrays.types import HostArray
from mpimesh.comm.engine import Steps
from mpimesh.comm.regions import FUNCTIONS
from mpimesh.comm.requests import MAX_USER_TAG, Messages, Request, all_done, block_slices
from mpimesh.layout.cuts import even_sizes
from mpimesh.settings import tree_arity

__all__ = [
    "all_reduce_by_messages",
    "broadcast_by_messages",
    "by_messages",
    "reduce_by_messages",
    "segments",
]

_TAG = MAX_USER_TAG + 12
_CENTER = 0
"""The rank where an all-reduce comes together that has no root."""
_RING = 0
_ARITY_OF_SMALL = 2


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
    return lambda *arguments: start(communicator, arity, *arguments)


def all_reduce_by_messages(
    communicator: Messages, arity: int, send: HostArray | None, recv: HostArray, op: str
) -> Steps:
    """Reduce over all ranks into `recv` on each.

    Args:
        communicator: The ranks.
        arity: How many ranks are below each in the tree; 0 for the ring.
        send: This rank's array; None if it is what `recv` holds.
        recv: Where the result comes; shares no memory with `send`.
        op: The reduction.
    """
    source = recv if send is None else send
    ranks, rank = communicator.size, communicator.rank
    if ranks == 1 or not recv.size:
        recv[...] = source
        return
    if arity == _RING and recv.size >= ranks:
        parts = segments(recv.size, ranks)
        yield from _reduce_round(communicator, source, recv[parts[rank]], parts, op)
        yield from _copy_round(communicator, recv, parts)
        return
    tree = _Tree(communicator, _CENTER, arity or _ARITY_OF_SMALL)
    if tree.below:
        yield from _take_in(communicator, tree.order, source, recv, op)
    if tree.above is not None:
        yield communicator.isend(recv if tree.below else source, tree.above, _TAG)
    yield from _hand_down(communicator, tree, recv)


def reduce_by_messages(
    communicator: Messages,
    arity: int,
    send: HostArray,
    recv: HostArray | None,
    op: str,
    root: int,
) -> Steps:
    """Reduce over all ranks into `recv` on `root`.

    Args:
        communicator: The ranks.
        arity: As for an all-reduce.
        send: This rank's array.
        recv: Where the result comes on `root`; shares no memory with `send`.
        op: The reduction.
        root: Who gets it.
    """
    ranks, rank = communicator.size, communicator.rank
    if rank != root:
        recv = None
    if ranks == 1 or not send.size:
        if recv is not None:
            recv[...] = send
        return
    if arity == _RING and send.size >= ranks:
        parts = segments(send.size, ranks)
        own = np.empty_like(send[parts[rank]]) if recv is None else recv[parts[rank]]
        yield from _reduce_round(communicator, send, own, parts, op)
        if recv is None:
            yield communicator.isend(own, root, _TAG)
        else:
            others = _others(communicator)
            yield all_done(*(communicator.irecv(recv[parts[r]], r, _TAG) for r in others))
        return
    tree = _Tree(communicator, root, arity or _ARITY_OF_SMALL)
    total = send
    if tree.below:
        total = np.empty_like(send) if recv is None else recv
        yield from _take_in(communicator, tree.order, send, total, op)
    if tree.above is not None:
        yield communicator.isend(total, tree.above, _TAG)


def broadcast_by_messages(
    communicator: Messages, arity: int, buffer: HostArray, root: int
) -> Steps:
    """Copy `buffer` of `root` into `buffer` of every rank.

    Args:
        communicator: The ranks.
        arity: As for an all-reduce. In a ring the root gives each rank a segment, and these go
            round.
        buffer: The array.
        root: Who has it.
    """
    ranks, rank = communicator.size, communicator.rank
    if ranks == 1 or not buffer.size:
        return
    if arity == _RING and buffer.size >= ranks:
        parts = segments(buffer.size, ranks)
        if rank == root:
            others = _others(communicator)
            yield all_done(*(communicator.isend(buffer[parts[r]], r, _TAG) for r in others))
        else:
            yield communicator.irecv(buffer[parts[rank]], root, _TAG)
        yield from _copy_round(communicator, buffer, parts, root)
        return
    tree = _Tree(communicator, root, arity or _ARITY_OF_SMALL)
    yield from _hand_down(communicator, tree, buffer)


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
        return _RING
    if algorithm == "centralized":
        return max(2, ranks)  # the tree in which all are below the root
    return tree_arity(algorithm) or None


# -- trees ----------------------------------------------------------------------------------------


class _Tree:
    """A rank's place in the tree of all.

    Args:
        communicator: The ranks.
        root: The one at the top; the others follow in their order, and round.
        arity: How many are below each.

    Attributes:
        above: Whom it sends partial results to; None for the root.
        below: Whom it takes them from.
    """

    __slots__ = ("above", "below", "rank")

    def __init__(self, communicator: Messages, root: int, arity: int) -> None:
        ranks, self.rank = communicator.size, communicator.rank
        place = (self.rank - root) % ranks
        first = place * arity + 1
        places = range(min(first, ranks), min(first + arity, ranks))
        self.below = [(each + root) % ranks for each in places]
        self.above = ((place - 1) // arity + root) % ranks if place else None

    @property
    def order(self) -> list[int]:
        """This rank and those below it, in the order of the ranks."""
        return sorted([self.rank, *self.below])


def _take_in(
    communicator: Messages, order: Sequence[int], source: HostArray, total: HostArray, op: str
) -> Steps:
    """Reduce what those in `order` send, and this rank's `source`, in that order into `total`.

    `total` may be `source` if this rank comes first. Two arrays are on their way at a time.
    """
    first, *rest = order
    if first != communicator.rank:
        yield communicator.irecv(total, first, _TAG)
    elif total is not source:
        total[...] = source
    others = [rank for rank in rest if rank != communicator.rank]
    pads = [np.empty_like(total) for _ in others[:2]]
    coming: list[Request] = [
        communicator.irecv(pad, rank, _TAG) for pad, rank in zip(pads, others, strict=False)
    ]
    taken = 0
    for rank in rest:
        if rank == communicator.rank:
            _combine(op, total, source, total)
            continue
        place = taken % 2
        yield coming[place]
        _combine(op, total, pads[place], total)
        taken += 1
        if taken + 1 < len(others):
            coming[place] = communicator.irecv(pads[place], others[taken + 1], _TAG)


def _hand_down(communicator: Messages, tree: _Tree, buffer: HostArray) -> Steps:
    """Take `buffer` from above, and give it to those below."""
    if tree.above is not None:
        yield communicator.irecv(buffer, tree.above, _TAG)
    if tree.below:
        yield all_done(*(communicator.isend(buffer, rank, _TAG) for rank in tree.below))


# -- rings ----------------------------------------------------------------------------------------


def _reduce_round(
    communicator: Messages,
    source: HostArray,
    own: HostArray,
    parts: Sequence[slice],
    op: str,
) -> Steps:
    """Reduce the segments on their way round the ring; this rank's one ends in `own`.

    `own` may be that segment of `source`. Nothing else of `source` is written.
    """
    ranks, rank = communicator.size, communicator.rank
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    # One comes while the other leaves. The first segments are the largest ones.
    pads = [np.empty_like(source[parts[0]]) for _ in range(min(2, ranks - 1))]
    outgoing = source[parts[before]]
    for step in range(ranks - 1):
        mine = source[parts[(rank - step - 2) % ranks]]
        pad = pads[step % 2][: mine.size]
        yield all_done(
            communicator.irecv(pad, before, _TAG), communicator.isend(outgoing, after, _TAG)
        )
        outgoing = own if step == ranks - 2 else pad
        _combine(op, pad, mine, outgoing)


def _copy_round(
    communicator: Messages, buffer: HostArray, parts: Sequence[slice], root: int | None = None
) -> Steps:
    """Copy each rank's segment of `buffer` round the ring; `root` has all of them already."""
    ranks, rank = communicator.size, communicator.rank
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    for step in range(ranks - 1):
        requests: list[Request] = []
        if rank != root:
            part = parts[(rank - step - 1) % ranks]
            requests.append(communicator.irecv(buffer[part], before, _TAG))
        if after != root:
            part = parts[(rank - step) % ranks]
            requests.append(communicator.isend(buffer[part], after, _TAG))
        yield all_done(*requests)


# -- helpers --------------------------------------------------------------------------------------


def _others(communicator: Messages) -> Iterable[int]:
    return (rank for rank in range(communicator.size) if rank != communicator.rank)


def _combine(op: str, first: HostArray, second: HostArray, target: HostArray) -> None:
    """Reduce two arrays; overflow and NaN pass silently."""
    with np.errstate(all="ignore"):
        FUNCTIONS[op](first, second, out=target)
