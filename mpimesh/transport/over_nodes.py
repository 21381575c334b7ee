"""Collectives on two levels: inside a node in shared memory, between nodes by MPI.

All have one rhythm. The array goes in rounds. In each, the ranks of a node bring
together what is to leave it; the workers start MPI on their lanes (`lanes.py`); and
once what was started some rounds before has arrived, the ranks of the node share it.
So the network is busy while the nodes are.

On one node all arrays may lie in shared memory, on another one not, and neither knows
of the other. It need not: MPI gets a worker's own memory and never another rank's, so
what travels on a lane, and in which order, depends on sizes alone.

Sums run over the ranks of a node in their order, and over the nodes as MPI's reduction
of so many ranks and elements does: the same in every run, and on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from mpimesh.arrays.types import HostArray
from mpimesh.layout.regions import Regions
from mpimesh.transport.base import Request
from mpimesh.transport.board import Entry
from mpimesh.transport.crossing import Crossing
from mpimesh.transport.engine import Engine, StagedRequest, Steps
from mpimesh.transport.entering import NOT_READ, enter
from mpimesh.transport.lanes import NOBODY, Lanes
from mpimesh.transport.region_messages import MessageExchange
from mpimesh.transport.region_shared import Copies, blocks_of_node, copied_boxes
from mpimesh.transport.regions import check_dtypes, check_regions, descriptor
from mpimesh.transport.team import Team
from mpimesh.transport.team_move import agreed_counts
from mpimesh.transport.team_pass import pass_on, reduce_parts, share
from mpimesh.transport.team_reduce import chunks_of, part_of
from mpimesh.transport.what import EXCHANGE, Operation, operation_number
from mpimesh.transport.windows import length

__all__ = ["OverNodes"]

_Flying: TypeAlias = deque[tuple[list[Request], Iterable[Request]]]
"""Requests started on a lane, and the steps that follow once they are done, oldest first."""

_ROUNDS_AHEAD = 2
"""Rounds that are on their way between the nodes while the ranks go on with the next."""

_ROUND_STAGES = 4
"""Stages full that a worker sends in a round: fewer, and the ranks of a node meet too often."""


class OverNodes:
    """The collectives of one communicator; each returns a request, and they run in order.

    Args:
        team: The ranks of this node.
        engine: Moves the operations along.
        crossing: All ranks. What is started there must queue while :attr:`busy`.
        lanes: Who carries what.
    """

    def __init__(self, team: Team, engine: Engine, crossing: Crossing, lanes: Lanes) -> None:
        self._team = team
        self._engine = engine
        self._crossing = crossing
        self._lanes = lanes
        self._copies = Copies(team, meets=True)

    @property
    def busy(self) -> bool:
        """Whether an operation is unfinished."""
        return self._engine.busy(self)

    def all_reduce(self, send: HostArray | None, recv: HostArray, op: str) -> StagedRequest:
        """Reduce over all ranks into `recv` on each."""
        return self._engine.stage(self, self._all_reduce(recv if send is None else send, recv, op))

    def reduce_scatter(
        self, send: HostArray, recv: HostArray, counts: Sequence[int], op: str
    ) -> StagedRequest:
        """Reduce `send`; rank r gets block r."""
        return self._engine.stage(self, self._reduce_scatter(send, recv, counts, op))

    def all_gather(self, send: HostArray, recv: HostArray, counts: Sequence[int]) -> StagedRequest:
        """Lay the ranks' `send` one after the other in `recv`."""
        return self._engine.stage(self, self._all_gather(send, recv, counts))

    def broadcast(self, buffer: HostArray, root: int) -> StagedRequest:
        """Copy `buffer` of `root` into `buffer` of every rank."""
        return self._engine.stage(self, self._broadcast(buffer, root))

    def all_to_all(
        self,
        send: HostArray,
        recv: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
    ) -> StagedRequest:
        """Block d of `send` goes to rank d; block s of `recv` comes from rank s."""
        return self._engine.stage(self, self._all_to_all(send, recv, send_counts, recv_counts))

    def exchange_regions(
        self,
        source: HostArray | None,
        target: HostArray | None,
        regions: Regions,
        max_bytes: int,
    ) -> StagedRequest:
        """Copy or reduce boxes of the ranks' blocks into boxes of `target`."""
        check_regions(regions, self._crossing.rank, self._crossing.size, source, target)
        steps = self._exchange_regions(source, target, regions, max_bytes)
        return self._engine.stage(self, steps)

    def close(self) -> None:
        """End what has not ended; what was started by then raises when it is tested."""
        self._team.close()

    # -- steps -----------------------------------------------------------------------

    def _all_reduce(self, source: HostArray, recv: HostArray, op: str) -> Steps:
        """Each worker has a part of each chunk: it reduces it here, then on its lane."""
        team, lanes = self._team, self._lanes
        what = operation_number(Operation.ALL_REDUCE, recv, op)
        entry = yield from self._enter(what, self._place(source), self._place(recv))
        flying: _Flying = deque()
        for chunk in self._chunks(recv):
            parts = self._parts(chunk, recv.itemsize)
            own = recv[parts[team.rank][0]]
            workers = parts[: lanes.workers]
            yield from reduce_parts(team, op, source, entry.sources, workers, own)
            requests = [lanes.crossing.all_reduce(None, own, op)] if own.size else []
            flying.append((requests, share(team, recv, parts, entry.targets)))
            yield from _land(flying, _ROUNDS_AHEAD)
        yield from _land(flying)
        yield team.meet()

    def _reduce_scatter(
        self, send: HostArray, recv: HostArray, counts: Sequence[int], op: str
    ) -> Steps:
        """A worker reduces the blocks of its lane, here and then on it, and hands some on."""
        team, lanes = self._team, self._lanes
        what = operation_number(Operation.REDUCE_SCATTER, send, op)
        entry = yield from self._enter(what, self._place(send))
        blocks = _Blocks(counts)
        loads = [lanes.load(lane) for lane in range(lanes.workers)]
        mine = loads[team.rank] if team.rank < lanes.workers else []
        beyond = [lanes.beyond(place) for place in range(team.size)]
        results = {rank: np.empty(counts[rank], send.dtype) for rank in beyond[team.rank]}
        results |= {NOBODY: np.empty(0, send.dtype), lanes.here[team.rank]: recv}
        width = max(1, self._round(send) // (len(lanes.nodes) * lanes.waves))
        flying: _Flying = deque()
        for at in range(0, max(counts), width):
            parts = [[blocks.part(r, at, width) for wave in load for r in wave] for load in loads]
            sizes = [[length(blocks.part(rank, at, width)) for rank in wave] for wave in mine]
            sums = np.empty(sum(map(sum, sizes)), send.dtype)
            yield from reduce_parts(team, op, send, entry.sources, parts, sums)
            requests = []
            for wave, each in zip(mine, sizes, strict=True):
                own, sums = sums[: sum(each)], sums[sum(each) :]
                if own.size:
                    into = results[wave[lanes.node]][at : at + width]
                    requests.append(lanes.crossing.reduce_scatter(own, into, each, op))
            flying.append((requests, ()))
            yield from _land(flying, _ROUNDS_AHEAD)
        yield from _land(flying)
        me = lanes.here[team.rank]
        handed = [[(counts[r], recv if r == me else None) for r in ranks] for ranks in beyond]
        outgoing = [results[rank] for rank in beyond[team.rank]]
        yield from pass_on(team, outgoing, handed, send.dtype)
        yield team.meet()

    def _all_gather(self, send: HostArray, recv: HostArray, counts: Sequence[int]) -> Steps:
        """The ranks of a node gather their blocks; then each travels on its rank's lane."""
        team, lanes = self._team, self._lanes
        what = operation_number(Operation.ALL_GATHER, recv)
        entry = yield from self._enter(what, self._place(send), self._place(recv))
        blocks = _Blocks(counts)
        mine = lanes.load(team.rank) if team.rank < lanes.workers else []
        arriving = [lanes.arriving(place) for place in range(team.size)]
        width = self._round(recv)
        flying: _Flying = deque()
        for at in range(0, max(counts), width):
            here = [blocks.part(rank, at, width) for rank in lanes.here]
            recv[here[team.rank]] = send[at : at + width]
            yield from self._gather_here(recv, here, entry, at * recv.itemsize)
            travelling = [[blocks.part(rank, at, width) for rank in wave] for wave in mine]
            requests = [
                lanes.crossing.all_gather_in_place(recv, wave)
                for wave in travelling
                if any(map(length, wave))
            ]
            held = [[blocks.part(rank, at, width) for rank in ranks] for ranks in arriving]
            flying.append((requests, share(team, recv, held, entry.targets)))
            yield from _land(flying, _ROUNDS_AHEAD)
        yield from _land(flying)
        yield team.meet()

    def _gather_here(
        self, recv: HostArray, here: Sequence[slice], entry: Entry, offset_bytes: int
    ) -> Steps:
        """Copy parts of the blocks of this node's ranks, of which `recv` has this rank's."""
        team = self._team
        if min(entry.sources) < 0:
            yield from share(team, recv, [[part] for part in here], [-1] * team.size)
            return
        for member, part in enumerate(here):
            if member != team.rank:
                begin = entry.sources[member] + offset_bytes
                block = recv[part]
                block[...] = team.view(member, begin, block.nbytes, block.dtype)

    def _broadcast(self, buffer: HostArray, root: int) -> Steps:
        """On the root's node all read the root's array; each worker sends a part on its lane."""
        team, lanes = self._team, self._lanes
        what = operation_number(Operation.BROADCAST, buffer, root=root)
        entry = yield from self._enter(what, self._place(buffer))
        home = lanes.node_of(root)
        flying: _Flying = deque()
        for chunk in self._chunks(buffer):
            parts = self._parts(chunk, buffer.itemsize)
            then: Iterable[Request] = ()
            if lanes.node == home:
                whole = [[chunk] if rank == root else [] for rank in lanes.here]
                yield from share(team, buffer, whole, entry.sources)
            else:
                then = share(team, buffer, parts, entry.sources)
            own = buffer[parts[team.rank][0]]
            flying.append(([lanes.crossing.broadcast(own, home)] if own.size else [], then))
            yield from _land(flying, _ROUNDS_AHEAD)
        yield from _land(flying)
        yield team.meet()

    def _all_to_all(
        self,
        send: HostArray,
        recv: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
    ) -> Steps:
        """Blocks of other nodes go by MPI, while those of this one are read."""
        team, here = self._team, self._lanes.here
        # The sizes of the arrays may differ over the ranks; those of the blocks are compared.
        what = operation_number(Operation.ALL_TO_ALL, send[:0])
        outgoing, incoming = _Blocks(send_counts), _Blocks(recv_counts)
        counts = [send_counts[rank] for rank in here] + [recv_counts[rank] for rank in here]
        entry = yield from self._enter(what, self._place(send), counts=counts)
        sent = agreed_counts(entry.counts, here)
        request = self._crossing.all_to_all_but(send, recv, send_counts, recv_counts, set(here))
        targets = [recv[incoming.whole(rank)] for rank in here]
        if min(entry.sources) >= 0:
            starts = [outgoing.whole(rank).start for rank in here]
            entry = yield from self._enter(what, self._place(send), counts=starts * 2)
            for member, target in enumerate(targets):
                at = entry.sources[member] + entry.counts[member][team.rank] * target.itemsize
                target[...] = team.view(member, at, target.nbytes, target.dtype)
        else:
            # Each begins with the rank after it, so that not all read from the same at once.
            orders = [[*range(m + 1, team.size), *range(m + 1)] for m in range(team.size)]
            streams = [
                [(sent[m][to], targets[m] if to == team.rank else None) for to in orders[m]]
                for m in range(team.size)
            ]
            pieces = [send[outgoing.whole(here[to])] for to in orders[team.rank]]
            yield from pass_on(team, pieces, streams, send.dtype)
        yield request
        yield team.meet()

    def _exchange_regions(
        self,
        source: HostArray | None,
        target: HostArray | None,
        regions: Regions,
        max_bytes: int,
    ) -> Steps:
        """Blocks of this node are read where they lie, while those of others come by messages."""
        team = self._team
        boxes = () if source is None else copied_boxes(regions, source.shape)
        offer = self._copies.offer(source, boxes)
        offer.fill()
        entry = yield from self._enter(EXCHANGE, offer.at, descriptor(source, target))
        check_dtypes(dict(enumerate(entry.targets)))
        blocks = blocks_of_node(team, entry, self._lanes.here, source, target)
        yield MessageExchange(self._crossing, source, target, regions, blocks, max_bytes)
        yield team.meet()

    # -- helpers -----------------------------------------------------------------------

    def _enter(
        self,
        what: int,
        source_at: int,
        target_at: int = NOT_READ,
        counts: Sequence[int] | None = None,
    ) -> Steps:
        """Meet the ranks of this node; those of other nodes do not know of a mismatch here."""
        return enter(self._team, what, source_at, target_at, counts=counts, on_all=False)

    def _place(self, array: HostArray) -> int:
        """Return where an array begins in this rank's arena; of an empty one nothing is read."""
        return self._team.find(array) if array.size else NOT_READ

    def _round(self, array: HostArray) -> int:
        """Return how many elements of an array a worker sends in a round."""
        return _ROUND_STAGES * self._team.stage_bytes // array.itemsize

    def _chunks(self, array: HostArray) -> list[slice]:
        """Cut an array into what travels on all lanes together in a round."""
        return chunks_of(array.size, self._round(array) * self._lanes.workers)

    def _parts(self, chunk: slice, itemsize: int) -> list[list[slice]]:
        """Return which part of a chunk each rank of this node carries: none if on no lane."""
        workers = self._lanes.workers
        parts = [part_of(length(chunk), itemsize, place, workers) for place in range(workers)]
        nothing = [[slice(0, 0)]] * (self._team.size - workers)
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
        if rank == NOBODY:
            return slice(0, 0)
        end = self._starts[rank + 1]
        start = min(self._starts[rank] + at, end)
        return slice(start, min(start + width, end))


def _land(flying: _Flying, most: int = 0) -> Steps:
    """Wait until no more than so many rounds are on their way, and share what has come."""
    while len(flying) > most:
        requests, then = flying.popleft()
        yield from requests
        yield from then
