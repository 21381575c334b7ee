"""Collectives on two levels: inside a node in shared memory, between nodes by MPI.

All have one rhythm. The array goes in rounds. In each, the ranks of a node bring
together what is to leave it; the leaders start MPI on their rails; and once what was
started some rounds before has arrived, the ranks of the node share it. So the network
is busy while the nodes are.

The ranks with one number on their nodes are a *rail*, and there are as many as the
smallest node has ranks: the first ranks of each node, its *leaders*, are on one each.
What crosses the network does so once for each other node, side by side on the rails.
Blocks that belong to ranks, as in an all-gather, travel on the rail of their rank. Where
a node has more ranks than another, its leaders carry the blocks of the others in further
*turns*: with 2 rails, a node of 5 ranks has three.

```text
           rail 0  rail 1
node A:  0   1    | turn 0        node B:  5   6    | turn 0
         2   3    | turn 1
         4        | turn 2
```

On one node all arrays may lie in shared memory, on another one not, and neither knows
of the other. It need not: MPI gets a leader's own memory and never another rank's, so
what travels on a rail, and in which order, depends on sizes alone.

Sums run over the ranks of a node in their order, and over the nodes as MPI's reduction
of so many ranks and elements does: the same in every run, and on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

from mpimesh.arrays.namespace import HostArray
from mpimesh.comm.algorithms import Ways
from mpimesh.comm.engine import ProgressEngine, StagedRequest, Steps
from mpimesh.comm.mpi import MPICommunicator
from mpimesh.comm.region_shared import SharedRegions
from mpimesh.comm.requests import Request, agreed_counts, chunk_slices
from mpimesh.comm.shared_window import NOT_READ, SharedWindow, WindowEntry, enter
from mpimesh.comm.shared_work import (
    all_to_all_staged,
    length,
    part_of,
    pass_on,
    reduce_parts,
    share,
)
from mpimesh.comm.signatures import Operation, operation_number
from mpimesh.errors import TransportError

__all__ = ["NO_RANK", "OverNodes", "Rails"]

NO_RANK = -1

_Round: TypeAlias = Generator[Request, None, tuple[Sequence[Request], Iterable[Request]]]
"""Steps up to a round's start; returns what it has started, and what follows once that is done."""

_ROUNDS_AHEAD = 2
"""Rounds that are on their way between the nodes while the ranks go on with the next."""

_ROUND_STAGES = 4
"""Stages full that a leader sends in a round: fewer, and the ranks of a node meet too often."""


class Rails:
    """The nodes of a communicator as one of its ranks sees them, and its rail.

    Args:
        nodes: The ranks of each node, in order.
        rank: This one.

    Attributes:
        nodes: The ranks of each node.
        node: The number of this rank's node.
        node_of: The number of each rank's node.
        here: The ranks on it.
        count: How many rails there are.
        turns: How many blocks of one node travel on a rail at most.
    """

    __slots__ = ("_comm", "count", "here", "node", "node_of", "nodes", "turns")

    def __init__(self, nodes: Sequence[Sequence[int]], rank: int) -> None:
        self.nodes = nodes
        self.node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
        self.node = self.node_of[rank]
        self.here = nodes[self.node]
        self.count = min(map(len, nodes))
        self.turns = -(-max(map(len, nodes)) // self.count)
        self._comm: MPICommunicator | None = None

    @property
    def comm(self) -> MPICommunicator:
        """The ranks on this one's rail, in the order of the nodes.

        Raises:
            TransportError: If it is on none.
        """
        if self._comm is None:
            raise TransportError("this rank is on no rail and has nothing to carry")
        return self._comm

    def connect(self, comm: MPI.Intracomm, *, limit: int) -> MPICommunicator | None:
        """Collective: split the ranks of `comm` into their rails; return this rank's, if any."""
        place = self.here.index(comm.rank)
        part: Any = comm.Split(place if place < self.count else MPI.UNDEFINED, self.node)
        if part != MPI.COMM_NULL:
            self._comm = MPICommunicator(part, limit=limit)
        return self._comm

    def sources(self, rail: int) -> list[list[int]]:
        """Return whose blocks travel on a rail, turn by turn: a rank of each node, or `NO_RANK`."""
        if rail >= self.count:
            return []
        places = range(rail, self.turns * self.count, self.count)
        return [
            [ranks[place] if place < len(ranks) else NO_RANK for ranks in self.nodes]
            for place in places
        ]

    def remote_sources(self, place: int) -> list[int]:
        """Return whose blocks come to the rank at `place` of this node: of ranks on others."""
        return [
            rank
            for turn in self.sources(place)
            for number, rank in enumerate(turn)
            if number != self.node and rank != NO_RANK
        ]

    def followers(self, place: int) -> list[int]:
        """Return for whom else on this node the rank at `place` carries blocks."""
        return list(self.here[place + self.count :: self.count]) if place < self.count else []


class OverNodes:
    """The collectives of one communicator; each returns a request, and they run in order.

    Args:
        window: The ranks of this node.
        engine: Moves the operations along.
        messages: All ranks. What is started there must wait for its turn, as on one node.
        rails: Who carries what.

    Attributes:
        regions: The exchanges of regions.
    """

    def __init__(
        self, window: SharedWindow, engine: ProgressEngine, messages: MPICommunicator, rails: Rails
    ) -> None:
        self._window = window
        self._engine = engine
        self._messages = messages
        self._rails = rails
        self.regions = SharedRegions(window, engine, messages, self, rails.here)

    def start(self, name: str, ways: Ways, *arguments: Any) -> StagedRequest:
        """Start a collective, with the arguments of the communicator's method."""
        return self._engine.stage(self, getattr(self, f"_{name}")(*arguments))

    def prepare(self, name: str, ways: Ways, *arguments: Any) -> Callable[[], Request]:
        """Return what starts a collective with the same arrays again and again."""
        return partial(self.start, name, ways, *arguments)

    # -- steps -----------------------------------------------------------------------

    def _all_reduce(self, send: HostArray | None, recv: HostArray, op: str) -> Steps:
        """Each leader has a part of each chunk: it reduces it here, then on its rail."""
        window, rails = self._window, self._rails
        source = recv if send is None else send
        what = operation_number(Operation.ALL_REDUCE, recv, op)
        entry = yield from self._enter(what, self._place(source), self._place(recv))

        def in_round(chunk: slice) -> _Round:
            parts = self._parts(chunk, recv.itemsize)
            own = recv[parts[window.rank][0]]
            carried = parts[: rails.count]
            yield from reduce_parts(window, op, source, entry.sources, carried, own)
            requests = [rails.comm.all_reduce(None, own, op)] if own.size else []
            return requests, share(window, recv, parts, entry.targets)

        yield from _rounds(map(in_round, self._chunks(recv)))
        yield window.meet()

    def _reduce_scatter(
        self, send: HostArray, recv: HostArray, counts: Sequence[int], op: str
    ) -> Steps:
        """A leader reduces the blocks of its rail, here and then on it, and hands some on."""
        window, rails = self._window, self._rails
        what = operation_number(Operation.REDUCE_SCATTER, send, op)
        entry = yield from self._enter(what, self._place(send))
        blocks = _Blocks(counts)
        carried = [rails.sources(rail) for rail in range(rails.count)]
        mine = rails.sources(window.rank)
        followers = [rails.followers(place) for place in range(window.size)]
        results = {rank: np.empty(counts[rank], send.dtype) for rank in followers[window.rank]}
        results |= {NO_RANK: np.empty(0, send.dtype), rails.here[window.rank]: recv}
        width = max(1, self._round(send) // (len(rails.nodes) * rails.turns))

        def in_round(at: int) -> _Round:
            parts = [[blocks.part(r, at, width) for turn in row for r in turn] for row in carried]
            sizes = [[length(blocks.part(rank, at, width)) for rank in turn] for turn in mine]
            sums = np.empty(sum(map(sum, sizes)), send.dtype)
            yield from reduce_parts(window, op, send, entry.sources, parts, sums)
            requests = []
            for turn, each in zip(mine, sizes, strict=True):
                own, sums = sums[: sum(each)], sums[sum(each) :]
                if own.size:
                    into = results[turn[rails.node]][at : at + width]
                    requests.append(rails.comm.reduce_scatter(own, into, each, op))
            return requests, ()

        yield from _rounds(map(in_round, range(0, max(counts), width)))
        me = rails.here[window.rank]
        handed = [[(counts[r], recv if r == me else None) for r in ranks] for ranks in followers]
        outgoing = [results[rank] for rank in followers[window.rank]]
        yield from pass_on(window, outgoing, handed, send.dtype)
        yield window.meet()

    def _all_gather(self, send: HostArray, recv: HostArray, counts: Sequence[int]) -> Steps:
        """The ranks of a node gather their blocks; then each travels on its rank's rail."""
        window, rails = self._window, self._rails
        what = operation_number(Operation.ALL_GATHER, recv)
        entry = yield from self._enter(what, self._place(send), self._place(recv))
        blocks = _Blocks(counts)
        mine = rails.sources(window.rank)
        remote = [rails.remote_sources(place) for place in range(window.size)]
        width = self._round(recv)

        def in_round(at: int) -> _Round:
            here = [blocks.part(rank, at, width) for rank in rails.here]
            recv[here[window.rank]] = send[at : at + width]
            yield from self._gather_here(recv, here, entry, at * recv.itemsize)
            travelling = [[blocks.part(rank, at, width) for rank in turn] for turn in mine]
            requests = [
                rails.comm.all_gather_in_place(recv, turn)
                for turn in travelling
                if any(map(length, turn))
            ]
            held = [[blocks.part(rank, at, width) for rank in ranks] for ranks in remote]
            return requests, share(window, recv, held, entry.targets)

        yield from _rounds(map(in_round, range(0, max(counts), width)))
        yield window.meet()

    def _gather_here(
        self, recv: HostArray, here: Sequence[slice], entry: WindowEntry, offset_bytes: int
    ) -> Steps:
        """Copy parts of the blocks of this node's ranks, of which `recv` has this rank's."""
        window = self._window
        if min(entry.sources) < 0:
            yield from share(window, recv, [[part] for part in here], [-1] * window.size)
            return
        for member, part in enumerate(here):
            if member != window.rank:
                begin = entry.sources[member] + offset_bytes
                block = recv[part]
                block[...] = window.view(member, begin, block.nbytes, block.dtype)

    def _broadcast(self, buffer: HostArray, root: int) -> Steps:
        """On the root's node all read the root's array; each leader sends a part on its rail."""
        window, rails = self._window, self._rails
        what = operation_number(Operation.BROADCAST, buffer, root=root)
        entry = yield from self._enter(what, self._place(buffer))
        home = rails.node_of[root]

        def in_round(chunk: slice) -> _Round:
            parts = self._parts(chunk, buffer.itemsize)
            then: Iterable[Request] = ()
            if rails.node == home:
                whole = [[chunk] if rank == root else [] for rank in rails.here]
                yield from share(window, buffer, whole, entry.sources)
            else:
                then = share(window, buffer, parts, entry.sources)
            own = buffer[parts[window.rank][0]]
            return [rails.comm.broadcast(own, home)] if own.size else [], then

        yield from _rounds(map(in_round, self._chunks(buffer)))
        yield window.meet()

    def _all_to_all(
        self,
        send: HostArray,
        recv: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
    ) -> Steps:
        """Blocks of other nodes go by MPI, while those of this one are read."""
        window, here = self._window, self._rails.here
        # The sizes of the arrays may differ over the ranks; those of the blocks are compared.
        what = operation_number(Operation.ALL_TO_ALL, send[:0])
        outgoing, incoming = _Blocks(send_counts), _Blocks(recv_counts)
        counts = [send_counts[rank] for rank in here] + [recv_counts[rank] for rank in here]
        entry = yield from self._enter(what, self._place(send), counts=counts)
        sent = agreed_counts(entry.counts, here)
        request = self._messages.all_to_all_but(send, recv, send_counts, recv_counts, set(here))
        targets = [recv[incoming.whole(rank)] for rank in here]
        if min(entry.sources) >= 0:
            starts = [outgoing.whole(rank).start for rank in here]
            entry = yield from self._enter(what, self._place(send), counts=starts * 2)
            for member, target in enumerate(targets):
                at = entry.sources[member] + entry.counts[member][window.rank] * target.itemsize
                target[...] = window.view(member, at, target.nbytes, target.dtype)
        else:
            blocks = [send[outgoing.whole(rank)] for rank in here]
            yield from all_to_all_staged(window, blocks, targets, sent)
        yield request
        yield window.meet()

    # -- helpers -----------------------------------------------------------------------

    def _enter(
        self,
        what: int,
        source_at: int,
        target_at: int = NOT_READ,
        counts: Sequence[int] | None = None,
    ) -> Steps:
        """Meet the ranks of this node; those of other nodes do not know of a mismatch here."""
        return enter(self._window, what, source_at, target_at, counts=counts, on_all=False)

    def _place(self, array: HostArray) -> int:
        """Return where an array begins in this rank's arena; of an empty one nothing is read."""
        return self._window.find(array) if array.size else NOT_READ

    def _round(self, array: HostArray) -> int:
        """Return how many elements of an array a leader sends in a round."""
        return _ROUND_STAGES * self._window.stage_bytes // array.itemsize

    def _chunks(self, array: HostArray) -> list[slice]:
        """Cut an array into what travels on all rails together in a round."""
        return chunk_slices(array.size, self._round(array) * self._rails.count)

    def _parts(self, chunk: slice, itemsize: int) -> list[list[slice]]:
        """Return which part of a chunk each rank of this node carries: none if on no rail."""
        count = self._rails.count
        parts = [part_of(length(chunk), itemsize, place, count) for place in range(count)]
        nothing = [[slice(0, 0)]] * (self._window.size - count)
        return [[slice(chunk.start + p.start, chunk.start + p.stop)] for p in parts] + nothing


class _Blocks:
    """The blocks of all ranks in an array, one after the other."""

    __slots__ = ("_starts",)

    def __init__(self, counts: Sequence[int]) -> None:
        self._starts = [0, *accumulate(counts)]

    def whole(self, rank: int) -> slice:
        """Return a rank's block."""
        return slice(self._starts[rank], self._starts[rank + 1])

    def part(self, rank: int, at: int, width: int) -> slice:
        """Return `width` elements of a rank's block from its element `at` on, or what is left."""
        if rank == NO_RANK:
            return slice(0, 0)
        end = self._starts[rank + 1]
        start = min(self._starts[rank] + at, end)
        return slice(start, min(start + width, end))


def _rounds(rounds: Iterable[_Round]) -> Steps:
    """Start one round after the other, and end each some rounds later, in the same order."""
    in_flight: deque[tuple[Sequence[Request], Iterable[Request]]] = deque()
    for steps in rounds:
        in_flight.append((yield from steps))
        if len(in_flight) > _ROUNDS_AHEAD:
            yield from chain(*in_flight.popleft())
    for started, then in in_flight:
        yield from chain(started, then)
