"""The communicator that takes the fastest way for each collective.

It is MPI's, and knows besides which of its ranks share a node. Making one is
collective, and that is when the ranks tell each other where their memory is, try
to open it, and agree on whether all of them could.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpimesh.arrays.types import HostArray
from mpimesh.layout.regions import Regions
from mpimesh.transport.base import Request
from mpimesh.transport.calibration import measure, measure_nodes, two_levels
from mpimesh.transport.choice import NEVER, NUMBERS, OPERATIONS, Choice
from mpimesh.transport.choices import Choices
from mpimesh.transport.crossing import Crossing
from mpimesh.transport.engine import Engine, Steps
from mpimesh.transport.joining import find_neighbours
from mpimesh.transport.lanes import Lanes
from mpimesh.transport.mpi import MPICommunicator
from mpimesh.transport.node import Node
from mpimesh.transport.node_shared import NodeShared, later
from mpimesh.transport.over_nodes import OverNodes
from mpimesh.transport.route import Route
from mpimesh.transport.team import Team
from mpimesh.transport.waiting import poll

__all__ = ["RoutedCommunicator"]

_LEAVE_TOGETHER_S = 2.0
_UNMEASURED_FROM = 64 * 1024
_UNMEASURED = "faster on machines seen so far"


class RoutedCommunicator(MPICommunicator):
    """Ranks of an MPI communicator, of which those on one node share memory.

    Args:
        comm: The communicator, which becomes this object's.
        node: The memory of this process, and what it sees of others.
        engine: Moves operations of several steps along.
        choices: From which sizes on operations go through shared memory.
        limit: As for :class:`MPICommunicator`. With a limit, the stage is as small as it can be.
    """

    def __init__(
        self, comm: MPI.Intracomm, node: Node, engine: Engine, choices: Choices, *, limit: int = 0
    ) -> None:
        super().__init__(comm, limit=limit)
        self._engine = self.engine = engine
        # What has begun in turn must not queue behind itself, so its pieces go by this one.
        self._plain = MPICommunicator(comm, limit=limit, order=self._order)
        self._node = node
        self._choices = choices
        self._choice: Choice | None = None
        self._lane: Crossing | None = None
        self._shared: NodeShared | OverNodes | None = None
        self._kept: HostArray | None = None
        self._once: list[HostArray] = []
        self._team: Team | None = None
        self._neighbours: list[int] = []
        self._several_nodes = False
        self._reads_regions = True
        self._why = "a rank alone"
        from_bytes = dict.fromkeys(OPERATIONS, NEVER)
        if self.size > 1:
            from_bytes |= self._join()
        self._use(from_bytes)

    def _use(self, from_bytes: Mapping[str, int]) -> None:
        # One attribute each: looked up with every collective.
        self._all_reduce_from = from_bytes["all_reduce"]
        self._reduce_scatter_from = from_bytes["reduce_scatter"]
        self._all_gather_from = from_bytes["all_gather"]
        self._broadcast_from = from_bytes["broadcast"]
        self._all_to_all_from = from_bytes["all_to_all"]

    def force(self, way: str) -> str:
        """Move host memory by ``"mpi"`` or ``"node_shared"`` alone; return why not, if so."""
        if way == "mpi":
            self._use(dict.fromkeys(OPERATIONS, NEVER))
            self._why = "asked for"
            self._reads_regions = False
            self.lending = None
            return ""
        if way != "node_shared":
            return f"these ranks have 'mpi' and 'node_shared', not {way!r}"
        if self._shared is None:
            return self._why
        if isinstance(self._shared, OverNodes):
            return "its ranks are on several nodes"
        self._choice = Choice.everything("asked for")
        self._shared.use(self._choice)
        self._use(self._choice.from_bytes())
        return ""

    def _join(self) -> dict[str, int]:
        """Collective: set shared memory up, and return from which sizes on it is used."""
        small = bool(self._chunk_setting)
        found = find_neighbours(self._comm, self._node, self._choices.number, small)
        self._why, self._kept = found.why_not, found.kept
        self._several_nodes = len(found.nodes) > 1
        if self._several_nodes:
            node_of = {rank: node for node, ranks in enumerate(found.nodes) for rank in ranks}
            self.nodes = tuple(node_of[rank] for rank in range(self.size))
        self._neighbours = next(ranks for ranks in found.nodes if self.rank in ranks)
        self._engine.share_cores(len(self._neighbours), found.cores)
        self.signatures = found.signatures
        if found.team is None:
            return {}
        self.lending = found.team.lending(self._neighbours)
        self._team = found.team
        self._engine.bell = None if self._node.arena is None else self._node.arena.bell
        bells = dict(zip(self._neighbours, found.team.bells, strict=False))
        self.bells = [bells.get(rank) for rank in range(self.size)]
        if self._several_nodes:
            self._shared, choice = self._join_nodes(found.team, found.nodes)
        else:
            self._shared = NodeShared(found.team, self._engine, self._plain)
            choice = self._agreed_choice(self._shared)
            self._shared.use(choice)
        self._choice = choice
        return choice.from_bytes()

    def _join_nodes(self, team: Team, nodes: Sequence[Sequence[int]]) -> tuple[OverNodes, Choice]:
        """Collective: make the lanes, and find out from which sizes on they are worth it."""
        lanes = Lanes(nodes, self.rank)
        lane = team.rank if team.rank < lanes.workers else MPI.UNDEFINED
        comm: Any = self._comm.Split(lane, lanes.node)
        if comm != MPI.COMM_NULL:
            self._lane = lanes.crossing = Crossing(comm, limit=self._chunk_setting)
        crossing = Crossing(self._comm, limit=self._chunk_setting, order=self._order)
        shared = OverNodes(team, self._engine, crossing, lanes)
        if self._chunk_setting and self._choices.mode != "always":
            # In an all-to-all the ranks know only their own sizes: they could not agree on one.
            sizes = [NEVER if name == "all_to_all" else _UNMEASURED_FROM for name in OPERATIONS]
            return shared, two_levels(sizes, _UNMEASURED)
        choice = self._agreed(
            len(lanes.nodes),
            lambda: measure_nodes(self._comm, self._plain, shared, self._engine),
        )
        return shared, two_levels(choice.sizes, choice.why) if not choice.staged else choice

    def _agreed_choice(self, shared: NodeShared) -> Choice:
        """Collective: return from which sizes on the ranks of one node share memory.

        With tiny chunks everything is slow: there nothing is measured.
        """
        arena = self._node.arena
        unmeasured = Choice([_UNMEASURED_FROM] * len(OPERATIONS), _UNMEASURED)
        if arena is None or (self._chunk_setting and self._choices.mode != "always"):
            return unmeasured
        return self._agreed(
            1, lambda: measure(self._comm, self._plain, shared, arena, self._engine)
        )

    def _agreed(self, nodes: int, measured: Callable[[], Choice]) -> Choice:
        """Collective: return what rank 0 knows, or what all measure if it knows nothing."""
        ranks = self.size
        known = self._choices.of_ranks(ranks, nodes)
        if self._choices.mode == "always" and known is not None:
            return known
        numbers = np.zeros(NUMBERS, np.int64)
        if self.rank == 0 and known is not None:
            numbers[...] = known.numbers
        poll(self._comm.Ibcast(numbers, 0).Test)
        new = not numbers.all()
        if new:
            numbers[...] = measured().numbers
        return self._choices.learn(
            ranks,
            numbers.tolist(),
            nodes=nodes,
            measured=new,
            keep=self.rank == 0 and known is None,
        )

    def routes(self) -> Sequence[Route]:
        """Return how it moves host memory, and why. Local."""
        shared, choice = self._shared, self._choice
        if shared is None or choice is None or self._all_reduce_from == NEVER:
            return (Route("*", "host", 0, "mpi", self._why or "no other way has it"),)
        why = choice.why
        if self._several_nodes:
            why = f"inside nodes in shared memory, between them by MPI; {why}"
        sizes = {
            "all_reduce": self._all_reduce_from,
            "reduce_scatter": self._reduce_scatter_from,
            "all_gather": self._all_gather_from,
            "broadcast": self._broadcast_from,
            "all_to_all": self._all_to_all_from,
        }
        routes = [
            Route(name, "shared", size, "node_shared", why)
            for name, size in sizes.items()
            if size < NEVER
        ]
        if choice.staged:
            # What each does with an array that is not in shared memory.
            routes += [
                Route(name, "host", size, "node_shared", why)
                for name, size in sizes.items()
                if size < NEVER
            ]
        elif isinstance(shared, NodeShared) and choice.staged_from <= shared.most_staged_bytes:
            routes.append(Route("all_reduce", "host", choice.staged_from, "node_shared", why))
            past = shared.most_staged_bytes + 1
            if choice.chunks_from > past:
                slower = "the stage would be slower than messages"
                routes.append(Route("all_reduce", "host", past, "mpi", slower))
        if not choice.staged and choice.chunks_from < NEVER:
            routes.append(Route("all_reduce", "host", choice.chunks_from, "node_shared", why))
        smaller = any(route.from_bytes > 1 for route in routes)
        what = "smaller arrays, and all other operations" if smaller else "all other operations"
        return (*routes, Route("*", "host", 0, "mpi", what))

    def offer_once(self, nbytes: int) -> int:
        """Return where memory for all ranks of the node begins in this rank's arena."""
        arena = self._node.arena
        if self._team is None or self._team.rank or arena is None:
            return -1
        memory = arena.empty(nbytes)
        if memory is None:
            return -1
        self._once.append(memory)  # as long as there is this communicator: others read it
        return arena.find(memory)

    def take_once(self, places: Sequence[int], nbytes: int) -> tuple[HostArray, bool] | None:
        """Return the memory that the first rank of this node has offered."""
        if self._team is None:
            return None
        at = places[self._neighbours[0]]
        if at < 0:
            return None
        if self._team.rank == 0:
            return self._once[-1], True  # its own, which lives as long as the array
        return self._team.view(0, at, nbytes, np.dtype(np.uint8)), False

    def averages(self, nbytes: int) -> bool:
        """Tell whether all-reduce of such an array knows ``"mean"``: on one node, it does."""
        return nbytes >= self._all_reduce_from and not self._several_nodes

    # -- collectives -------------------------------------------------------------------

    def all_reduce(self, send: HostArray | None, recv: HostArray, op: str) -> Request:
        """Reduce over all ranks into `recv` on each."""
        shared = self._shared
        if shared is None:
            return self._plain.all_reduce(send, recv, op)
        if recv.nbytes >= self._all_reduce_from:
            return shared.all_reduce(send, recv, op)
        if not shared.busy:  # the shortest way for the smallest arrays
            return self._plain.all_reduce(send, recv, op)
        return self._in_turn(self._plain.all_reduce, send, recv, op)

    def reduce(self, send: HostArray, recv: HostArray | None, op: str, root: int) -> Request:
        """Reduce over all ranks into `recv` on `root`."""
        return self._in_turn(self._plain.reduce, send, recv, op, root)

    def reduce_scatter(
        self, send: HostArray, recv: HostArray, counts: Sequence[int], op: str
    ) -> Request:
        """Reduce `send`; rank r gets block r."""
        if self._shared is not None and send.nbytes >= self._reduce_scatter_from:
            return self._shared.reduce_scatter(send, recv, counts, op)
        return self._in_turn(self._plain.reduce_scatter, send, recv, counts, op)

    def all_gather(self, send: HostArray, recv: HostArray, counts: Sequence[int]) -> Request:
        """Lay the ranks' `send` one after the other in `recv`."""
        if self._shared is not None and recv.nbytes >= self._all_gather_from:
            return self._shared.all_gather(send, recv, counts)
        return self._in_turn(self._plain.all_gather, send, recv, counts)

    def gather(
        self, send: HostArray, recv: HostArray | None, counts: Sequence[int], root: int
    ) -> Request:
        """Lay the ranks' `send` one after the other in `recv` of `root`."""
        return self._in_turn(self._plain.gather, send, recv, counts, root)

    def scatter(
        self, send: HostArray | None, recv: HostArray, counts: Sequence[int], root: int
    ) -> Request:
        """Rank r gets block r of root's `send`."""
        return self._in_turn(self._plain.scatter, send, recv, counts, root)

    def all_to_all(
        self,
        send: HostArray,
        recv: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
    ) -> Request:
        """Block d of `send` goes to rank d; block s of `recv` comes from rank s."""
        # The ranks know only their own sizes: whether these are large enough they tell each other.
        if self._shared is not None and self._all_to_all_from < NEVER:
            return self._shared.all_to_all(send, recv, send_counts, recv_counts)
        return self._in_turn(self._plain.all_to_all, send, recv, send_counts, recv_counts)

    def broadcast(self, buffer: HostArray, root: int) -> Request:
        """Copy `buffer` of `root` into `buffer` of every rank."""
        if self._shared is not None and buffer.nbytes >= self._broadcast_from:
            return self._shared.broadcast(buffer, root)
        return self._in_turn(self._plain.broadcast, buffer, root)

    def exchange_regions(
        self,
        source: HostArray | None,
        target: HostArray | None,
        regions: Regions,
        *,
        max_bytes: int = 0,
    ) -> Request | Steps:
        """Copy or reduce boxes of the ranks' blocks into boxes of each rank's target."""
        if self._shared is None or not self._reads_regions:
            return super().exchange_regions(source, target, regions, max_bytes=max_bytes)
        return self._shared.exchange_regions(source, target, regions, max_bytes)

    def barrier(self) -> Request:
        """Done once every rank has started it."""
        return self._in_turn(self._plain.barrier)

    def _in_turn(self, begin: Callable[..., Request], *arguments: Any) -> Request:
        """Begin a collective of MPI's, once none in shared memory is unfinished.

        Such a one may yet turn to MPI, when it finds ordinary arrays, on one rank earlier than on
        another; but MPI's collectives must begin in the same order on all.
        """
        shared = self._shared
        if shared is None or not shared.busy:
            return begin(*arguments)
        return self._engine.stage(shared, later(begin, *arguments))

    # -- life --------------------------------------------------------------------------

    def free(self) -> None:
        """Give the MPI communicator and the memory back, unless somebody may still use them."""
        if self._freed or MPI.Is_finalized():
            return
        if self.signatures is not None:
            self.signatures.close()
        if self._kept is not None:
            # What was given up by an error must not go on in memory that is used again.
            if self._shared is not None:
                self._shared.close()
            if self.unended or not poll(self._plain.barrier().test, _LEAVE_TOGETHER_S):
                # A rank may yet look at this one's counter, or read what it has offered; and the
                # barrier goes on, which Open MPI does not survive on a communicator it has freed.
                shared = self._shared
                copies = shared.read_copies if isinstance(shared, NodeShared) else ()
                for memory in (self._kept, *self._once, *copies):
                    self._node.keep(memory)
                self._freed = True
        if self.lending is not None:
            self.lending.close(self._node.keep)
        self._shared = self._kept = self._team = self.lending = None
        self._once.clear()
        if self._freed:
            self.free_device()
        elif self._lane is not None:
            self._lane.unended = self.unended
            self._lane.free()
        super().free()

    def _wrap(self, comm: MPI.Intracomm) -> RoutedCommunicator:
        return RoutedCommunicator(
            comm, self._node, self._engine, self._choices, limit=self._chunk_setting
        )
