"""The communicator that takes the fastest way for each collective.

It is MPI's, and knows besides which of its ranks share a node. Making one is collective, and that
is when the ranks tell each other where their memory is, try to open it, and agree on whether all of
them could, and on the table of algorithms (`algorithms.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from inspect import signature
from typing import Any, Concatenate, ParamSpec

import numpy as np
from mpi4py import MPI

from mpimesh.arrays.namespace import HostArray
from mpimesh.comm.algorithms import NEVER, OPERATIONS, Algorithms, Sizes, Ways
from mpimesh.comm.arena import Node, bell_of
from mpimesh.comm.engine import ProgressEngine, Steps, poll
from mpimesh.comm.lending import Lending
from mpimesh.comm.mpi import MPICommunicator
from mpimesh.comm.over_nodes import OverNodes, Rails
from mpimesh.comm.requests import Request
from mpimesh.comm.shared_collectives import SharedCollectives
from mpimesh.comm.shared_window import CELL_BYTES, STAGE_BYTES, SharedWindow, areas_bytes
from mpimesh.comm.signatures import BOARD_BYTES, Signatures
from mpimesh.comm.tuner import KeptSizes, measure
from mpimesh.errors import TransportError
from mpimesh.layout.boxes import Regions
from mpimesh.settings import Settings

__all__ = ["RoutedCommunicator", "open_node", "routed"]

P = ParamSpec("P")

_LEAVE_TOGETHER_S = 2.0
_BY_MPI = Ways("mpi", "mpi")
_LARGE = 1 << 61
_ASKED_FOR = {
    "mpi": _BY_MPI,
    "slots": Ways("slots", "slots"),
    "in_place": Ways("mpi", "in_place"),
    "chunks": Ways("chunks", "chunks"),
    "two_levels": Ways("two_levels", "two_levels"),
}
"""What a caller may ask for, where these ranks have it."""
_SIZED_BY_RESULT = ("all_reduce", "all_gather")

_POKE_TAG = 32766
_PAGE_BYTES = 4096
_SMALLEST_STAGE_LINES = 64
_CORE_NUMBERS, _CORE_BITS = 16, 62


def _by_table(
    method: Callable[Concatenate[MPICommunicator, P], Request],
) -> Callable[Concatenate[RoutedCommunicator, P], Request]:
    """Return a collective of MPI's as one that goes by the table of algorithms."""
    name, parameters = method.__name__, signature(method)
    has_ways = name in OPERATIONS

    @wraps(method)
    def start(ranks: RoutedCommunicator, /, *args: P.args, **named: P.kwargs) -> Request:
        arguments: tuple[Any, ...] = args
        if named:
            arguments = parameters.bind(ranks, *args, **named).args[1:]
        shared = ranks._shared
        if shared is None:
            return getattr(ranks._plain, name)(*arguments)  # type: ignore[no-any-return]
        ways = ranks._ways_of(name, arguments) if has_ways else _BY_MPI
        if ways == _BY_MPI:
            return ranks.engine.begin_decided(shared, getattr(ranks._plain, name), *arguments)
        return shared.start(name, ways, *arguments)

    return start


class RoutedCommunicator(MPICommunicator):
    """Ranks of an MPI communicator, of which those on one node share memory.

    Args:
        comm: The communicator, which becomes this object's.
        node: The memory of this process, and what it sees of others.
        engine: Moves operations of several steps along.
        sizes: From which sizes on operations go through shared memory.
        limit: As for :class:`MPICommunicator`. With a limit, the stage is as small as it can be.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        node: Node,
        engine: ProgressEngine,
        sizes: KeptSizes,
        *,
        limit: int = 0,
    ) -> None:
        super().__init__(comm, limit=limit)
        self.engine = engine
        # What has begun in turn must not queue behind itself, so its pieces go by this one.
        self._plain = MPICommunicator(comm, limit=limit, order=self._order)
        self._plain.engine = engine
        self._node = node
        self._sizes = sizes
        self._rail: MPICommunicator | None = None
        self._shared: SharedCollectives | OverNodes | None = None
        self._kept: HostArray | None = None
        self._once: list[HostArray] = []
        self._window: SharedWindow | None = None
        self._neighbours: list[int] = []
        self._several_nodes = False
        self._why = "a rank alone"
        table = self._join() if self.size > 1 else None
        self._algorithms = table or Algorithms.only("mpi", self._why or "no other way has it")

    def force(self, way: str) -> str:
        """Move host memory by ``"mpi"`` or ``"node_shared"`` alone; return why not, if so."""
        if way == "mpi":
            self._algorithms = Algorithms.only("mpi", "asked for")
            self._shared = self.lending = None
            return ""
        if way != "node_shared":
            return f"these ranks have 'mpi' and 'node_shared', not {way!r}"
        if self._window is None:
            return self._why
        if self._several_nodes:
            return "its ranks are on several nodes"
        self._algorithms = Sizes.everything("asked for").on_one_node(_most_slot_bytes(self._window))
        return ""

    def algorithms(self) -> Algorithms:
        """Return the table by which it moves host memory. Local."""
        return self._algorithms

    def _join(self) -> Algorithms | None:
        """Collective: set shared memory up, and agree on the table; None if there is none."""
        small, engine, arena = bool(self._chunk_setting), self.engine, self._node.arena
        nodes = self._open_memory(small=small)
        window, several = self._window, len(nodes) > 1
        self._several_nodes = several
        if several:
            node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
            self.nodes = tuple(node_of[rank] for rank in range(self.size))
        if window is None:
            return None
        engine.bell = None if arena is None else arena.bell
        bells = dict(zip(self._neighbours, window.bells, strict=False))
        self.bells = self._plain.bells = [bells.get(rank) for rank in range(self.size)]
        shared = self._shared = (
            self._over_nodes(window, nodes)
            if several
            else SharedCollectives(window, engine, self._plain)
        )
        most = _most_slot_bytes(window)
        if small and self._sizes.mode != "always":
            # With tiny chunks everything is slow: there nothing is measured.
            sizes = Sizes.unmeasured(several_nodes=several)
        else:
            sizes = self._sizes.agreed(
                self._plain,
                len(nodes),
                lambda: measure(self._plain, shared, engine, None if several else arena, most),
            )
        return sizes.on_several_nodes() if several else sizes.on_one_node(most)

    def _open_memory(self, *, small: bool) -> list[list[int]]:
        """Collective: find out which ranks share a node, and open their memory.

        Args:
            small: Whether the stage is to be as small as it can be, for tests.

        Returns:
            The ranks of each node, in order.

        Cost:
            An all-gather of 184 bytes, and an all-reduce of 8.
        """
        comm, size, arena = self._comm, self.size, self._node.arena
        # The ranks must have the same number to move arrays through shared memory; 0 moves none.
        agreeing = self._sizes.number
        stage_bytes = _SMALLEST_STAGE_LINES * size if small else STAGE_BYTES
        stage_at = -(-(BOARD_BYTES + CELL_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
        kept, at = None, -1
        if arena is not None:
            # Of which only what is touched costs memory.
            kept = arena.empty(stage_at + (areas_bytes(stage_bytes, size) if agreeing else 0))
            if kept is not None:
                kept[:stage_at] = 0
                at = arena.find(kept)
        mine = np.array([*_own_cores(), *self._node.address, at, agreeing], np.int64)
        rows = np.empty((size, mine.size), np.int64)
        poll(comm.Iallgather(mine, rows).Test)
        table = rows[:, _CORE_NUMBERS:]
        keys: list[int] = table[:, 0].tolist()
        nodes = [[r for r in range(size) if keys[r] == key] for key in dict.fromkeys(keys)]
        members = self._neighbours = next(ranks for ranks in nodes if self.rank in ranks)
        cores = np.bitwise_or.reduce(rows[members, :_CORE_NUMBERS])
        self.engine.share_cores(len(members), sum(int(bits).bit_count() for bits in cores))
        # From here to the reduction the table decides, which all ranks have alike.
        refused = ""
        if not table[:, -1].all():
            refused = "switched off by MPIMESH_NODE_SHARED=never"
        elif len(nodes) == size:
            refused = "each rank is alone on its node"
        elif len(set(table[:, -1].tolist())) > 1:
            refused = "the ranks have measured or set different sizes"
        self._why = refused
        if len(nodes) == size:
            return nodes
        memories: list[HostArray] = []
        why_not = self._node.why_not or "no memory is left for others to read"
        if kept is not None:
            try:
                memories = [self._node.open(tuple(table[rank, :-2].tolist())) for rank in members]
            except TransportError as error:
                why_not = str(error)
        could = np.array([len(memories)], np.int64)
        poll(comm.Iallreduce(MPI.IN_PLACE, could, MPI.MIN).Test)
        if arena is None or not could[0]:
            if memories:
                why_not = "another rank cannot open its neighbours' memory"
            self._why = refused or why_not
            return nodes
        self._kept = kept
        place, starts = members.index(self.rank), table[members, -2].tolist()
        if len(members) > 1:
            boards = [m[at : at + BOARD_BYTES] for m, at in zip(memories, starts, strict=True)]
            self.signatures = Signatures(place, members, boards)
        if not refused:
            window = self._window = SharedWindow(
                place,
                memories,
                [at + BOARD_BYTES for at in starts],
                [at + stage_at for at in starts],
                arena,
                lambda: comm.Iprobe(MPI.ANY_SOURCE, _POKE_TAG),
                stage_bytes=stage_bytes,
                bells=[bell_of(memory) for memory in memories],
            )
            self.lending = Lending(arena, dict(zip(members, memories, strict=True)), window.fence)
        return nodes

    def _over_nodes(self, window: SharedWindow, nodes: Sequence[Sequence[int]]) -> OverNodes:
        """Collective: make the rails."""
        rails = Rails(nodes, self.rank)
        self._rail = rails.connect(self._comm, limit=self._chunk_setting)
        return OverNodes(window, self.engine, self._plain, rails)

    def offer_once(self, nbytes: int, turn: int = 0) -> tuple[int, int, HostArray | None]:
        """Offer memory of one rank's arena for an array that the ranks of the node have once."""
        window, arena = self._window, self._node.arena
        if window is None:
            return self.rank, -1, None
        member = turn % len(self._neighbours)
        source = self._neighbours[member]
        memory = None if window.rank != member or arena is None else arena.empty(nbytes)
        if memory is None or arena is None:
            return source, -1, None
        self._once.append(memory)  # others read it
        return source, arena.find(memory), memory

    def take_once(self, source: int, place: int, nbytes: int) -> HostArray:
        """Return the memory that another rank of this node has offered."""
        if self._window is None:
            return super().take_once(source, place, nbytes)
        member = self._neighbours.index(source)
        return self._window.view(member, place, nbytes, np.dtype(np.uint8))

    def release_once(self, memory: HostArray) -> None:
        """Keep no more what no other rank reads."""
        self._once = [one for one in self._once if not np.may_share_memory(one, memory)]

    def averages(self, nbytes: int) -> bool:
        """Tell whether all-reduce of such an array knows ``"mean"``: on one node, it may."""
        return not self._several_nodes and self._ways("all_reduce", nbytes) != _BY_MPI

    def prepare(
        self, name: str, arguments: tuple[Any, ...], algorithm: str | None = None
    ) -> Callable[[], Request | Steps]:
        """Return what starts a collective or an exchange of these arrays, as often as wanted."""
        shared = self._shared
        if shared is None:
            return self._plain.prepare(name, arguments, algorithm)
        if name == "exchange_regions":
            return shared.regions.prepare(*arguments, often=True)
        if name in OPERATIONS:
            ways = (
                self._ways_of(name, arguments) if algorithm is None else _ASKED_FOR.get(algorithm)
            )
            if ways is not None:
                # Nothing of no bytes is shared.
                if ways == _BY_MPI or not arguments[name in _SIZED_BY_RESULT].nbytes:
                    begin = getattr(self._plain, name)
                    return partial(self.engine.begin_decided, shared, begin, *arguments)
                return shared.prepare(name, ways, *arguments)
        return super().prepare(name, arguments, algorithm)

    def most_bytes_by(self, name: str, algorithm: str) -> int:
        """Return the largest array that collective `name` can move by `algorithm`. Local."""
        if algorithm not in _ASKED_FOR or algorithm == "mpi":
            return super().most_bytes_by(name, algorithm)
        has_levels = isinstance(self._shared, OverNodes)
        if self._window is None or self._shared is None or name not in OPERATIONS:
            return -1
        if has_levels != (algorithm == "two_levels"):
            return -1
        if algorithm == "slots":
            return _most_slot_bytes(self._window) if name == "all_reduce" else -1
        return NEVER

    def _ways_of(self, name: str, arguments: tuple[Any, ...]) -> Ways:
        """Return the ways of a collective with these arguments."""
        if name == "all_to_all":
            # The ranks know only their own sizes. Whether these are large enough they tell each
            # other; nothing else hangs on them.
            largest, own = self._ways(name, _LARGE), self._ways(name, arguments[0].nbytes)
            return largest if own == largest else Ways(largest.host, "not offered")
        return self._ways(name, arguments[name in _SIZED_BY_RESULT].nbytes)

    def _ways(self, operation: str, nbytes: int) -> Ways:
        return self._algorithms.ways(operation, nbytes) if self._shared is not None else _BY_MPI

    # -- collectives -------------------------------------------------------------------

    all_reduce = _by_table(MPICommunicator.all_reduce)
    reduce = _by_table(MPICommunicator.reduce)
    reduce_scatter = _by_table(MPICommunicator.reduce_scatter)
    all_gather = _by_table(MPICommunicator.all_gather)
    gather = _by_table(MPICommunicator.gather)
    scatter = _by_table(MPICommunicator.scatter)
    all_to_all = _by_table(MPICommunicator.all_to_all)
    broadcast = _by_table(MPICommunicator.broadcast)
    barrier = _by_table(MPICommunicator.barrier)

    def exchange_regions(
        self,
        source: HostArray | None,
        target: HostArray | None,
        regions: Regions,
        *,
        max_bytes: int = 0,
    ) -> Request | Steps:
        """Copy or reduce boxes of the ranks' blocks into boxes of each rank's target."""
        if self._shared is None:
            return super().exchange_regions(source, target, regions, max_bytes=max_bytes)
        return self._shared.regions.prepare(source, target, regions, max_bytes)()

    # -- life --------------------------------------------------------------------------

    def free(self) -> None:
        """Give the MPI communicator and the memory back, unless somebody may still use them."""
        if self._freed or MPI.Is_finalized():
            return
        if self.signatures is not None:
            self.signatures.close()
        if self._kept is not None:
            # What was given up by an error must not go on in memory that is used again.
            if self._window is not None:
                self._window.closed = True
            if self.unended or not poll(self._plain.barrier().test, _LEAVE_TOGETHER_S):
                # A rank may yet look at this one's counter, or read what it has offered; and the
                # barrier goes on, which Open MPI does not survive on a communicator it has freed.
                copies = () if self._shared is None else self._shared.regions.copies.memories
                for memory in (self._kept, *self._once, *copies):
                    self._node.keep(memory)
                self._freed = True
        if self.lending is not None:
            self.lending.close(self._node.keep)
        self._shared = self._kept = self._window = self.lending = None
        self._once.clear()
        if self._freed:
            self.free_device()
        elif self._rail is not None:
            self._rail.unended = self.unended
            self._rail.free()
        super().free()

    def _wrap(self, comm: MPI.Intracomm) -> RoutedCommunicator:
        return RoutedCommunicator(
            comm, self._node, self.engine, self._sizes, limit=self._chunk_setting
        )


def _most_slot_bytes(window: SharedWindow) -> int:
    """Return the largest array that goes through slots as a whole."""
    # Every rank reads all, so the more ranks, the sooner other ways win.
    return 2 * window.stage_bytes // max(2, window.size)


def open_node(settings: Settings) -> Node:
    """Return the memory of this process, for the ranks of its node. Local."""
    part = MPI.COMM_WORLD.rank // settings.node_ranks if settings.node_ranks else 0
    return Node(part)


def routed(
    communicator: MPICommunicator, node: Node, engine: ProgressEngine, settings: Settings
) -> RoutedCommunicator:
    """Collective: return a communicator for the same MPI communicator, which it takes over."""
    if isinstance(communicator, RoutedCommunicator):
        return communicator
    sizes = _sizes_of(settings.node_shared)
    return RoutedCommunicator(
        communicator.native, node, engine, sizes, limit=settings.chunk_elements
    )


_sizes_of = cache(KeptSizes.of_machine)
"""By the setting ``MPIMESH_NODE_SHARED``; neither the machine nor the MPI of a process changes."""


def _own_cores() -> list[int]:
    """Return the cores that this process may run on, a bit for each."""
    available = getattr(os, "sched_getaffinity", None)
    cores = range(os.cpu_count() or 1) if available is None else available(0)
    numbers = [0] * _CORE_NUMBERS
    for core in cores:
        place, bit = divmod(core % (_CORE_NUMBERS * _CORE_BITS), _CORE_BITS)
        numbers[place] |= 1 << bit
    return numbers
