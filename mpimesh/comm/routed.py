"""The communicator of MPI's ranks, of which those on one node share memory.

Making one is collective: the ranks tell each other where their memory is, try to open it, and agree
on whether all of them could. Then the collectives of one node go through a window of
:mod:`mpimesh.core`, those over several nodes on two levels, or by MPI where they are small.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpimesh.arrays.namespace import HostArray
from mpimesh.comm.algorithms import Algorithms, Row
from mpimesh.comm.arena import Node, door_of
from mpimesh.comm.base import NodeCommunicator
from mpimesh.comm.engine import ProgressEngine, Steps, poll
from mpimesh.comm.lending import Lending
from mpimesh.comm.mpi import MPICommunicator
from mpimesh.comm.over_nodes import OverNodes
from mpimesh.comm.region_messages import MessageExchange
from mpimesh.comm.regions import check_contiguous, kind_of, moves_in_memory, near_and_far
from mpimesh.comm.requests import Request
from mpimesh.core.mail import Mail, slot_bytes
from mpimesh.core.node import LANE_BYTES, LANE_HEAD_BYTES, MOST_RANKS, Window, fence
from mpimesh.errors import TransportError
from mpimesh.layout.boxes import Regions

__all__ = ["RoutedCommunicator", "routed"]

_LEAVE_TOGETHER_S = 2.0
_LEVELS_FROM_BYTES = 64 * 1024

_POKE_TAG = 32766
_PAGE_BYTES = 4096
_CORE_NUMBERS, _CORE_BITS = 16, 62


class RoutedCommunicator(NodeCommunicator, MPICommunicator):
    """Ranks of an MPI communicator, of which those on one node share memory.

    Args:
        comm: The communicator, which becomes this object's.
        node: The memory of this process, and what it sees of others.
        engine: Moves operations of several steps along.
        mode: The setting ``MPIMESH_NODE_SHARED``.
        limit: As for :class:`MPICommunicator`.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        node: Node,
        engine: ProgressEngine,
        mode: str,
        *,
        limit: int = 0,
    ) -> None:
        super().__init__(comm, limit=limit)
        self.engine = engine
        # What has begun in turn must not queue behind itself, so its pieces go by this one.
        self._plain = MPICommunicator(comm, limit=limit, order=self._order)
        self._plain.engine = engine
        self._node = node
        self._mode = mode
        self._here: Window | None = None
        self._levels: OverNodes | None = None
        self._kept: HostArray | None = None
        self._once: list[HostArray] = []
        self._memories: list[HostArray] = []
        self._neighbours: list[int] = []
        self._why = "a rank alone"
        table = self._join() if self.size > 1 else None
        self._algorithms = table or Algorithms.only("mpi", self._why or "no other way has it")

    def force(self, way: str) -> str:
        """Move host memory by ``"mpi"`` or ``"node_shared"`` alone; return why not, if so."""
        if way == "mpi":
            self._algorithms = Algorithms.only("mpi", "asked for")
            self.window = self._levels = self.lending = None
            if self.node_mail is not None:
                self.node_mail.close()
            self.node_mail = self._plain.node_mail = None
            return ""
        if way != "node_shared":
            return f"these ranks have 'mpi' and 'node_shared', not {way!r}"
        if self.window is not None:
            self._algorithms = Algorithms.only("node", "asked for")
            return ""
        return self._why or "its ranks are on several nodes"

    def algorithms(self) -> Algorithms:
        """Return the table by which it moves host memory. Local."""
        return self._algorithms

    def _join(self) -> Algorithms | None:
        """Collective: set shared memory up, and return the table; None if there is none."""
        engine = self.engine
        engine.core = self._node.core
        nodes = self._open_memory()
        if len(nodes) > 1:
            node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
            self.nodes = tuple(node_of[rank] for rank in range(self.size))
        if self._here is None:
            return None
        doors = dict(zip(self._neighbours, map(door_of, self._memories), strict=True))
        self.doors = self._plain.doors = [doors.get(rank) for rank in range(self.size)]
        self._plain.node_mail, self._plain.nodes = self.node_mail, self.nodes
        if len(nodes) == 1:
            self.window = self.node = self._here
            return Algorithms.only("node", "in memory that the ranks of the node share")
        self._levels = OverNodes(self._here, nodes, self._comm, self._chunk_setting)
        from_bytes = 1 if self._mode == "always" else _LEVELS_FROM_BYTES
        why = "inside nodes in shared memory, between them by MPI"
        return Algorithms(
            [
                Row("all_reduce", "host", 0, "mpi", "smaller arrays", "several"),
                Row("all_reduce", "host", from_bytes, "two_levels", why, "several"),
                Row("*", "host", 0, "mpi", "MPI's own collective"),
            ]
        )

    def _open_memory(self) -> list[list[int]]:
        """Collective: find out which ranks share a node, and open their memory.

        Returns:
            The ranks of each node, in order.

        Cost:
            An all-gather of 184 bytes, and an all-reduce of 8.
        """
        comm, size, arena = self._comm, self.size, self._node.arena
        # The ranks must have the same number to move arrays through shared memory; 0 moves none.
        agreeing = ("never", "auto", "always").index(self._mode)
        lane_at = -(-slot_bytes(size) // _PAGE_BYTES) * _PAGE_BYTES
        kept, at = None, -1
        if arena is not None:
            # Of which only what is touched costs memory.
            kept = arena.empty(lane_at + 2 * LANE_BYTES)
            if kept is not None:
                kept[: lane_at + LANE_HEAD_BYTES] = 0
                kept[lane_at + LANE_BYTES :][:LANE_HEAD_BYTES] = 0
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
            refused = "the ranks have different settings of MPIMESH_NODE_SHARED"
        elif len(nodes) == 1 and size > MOST_RANKS:
            refused = f"a node's ranks share memory up to {MOST_RANKS}"
        self._why = refused
        if len(nodes) == size:
            return nodes
        memories: list[HostArray] = []
        why_not = self._node.why_not or "no memory is left for others to read"
        if kept is not None:
            try:
                memories = [self._node.open(tuple(table[rank, :-2].tolist())) for rank in members]
                # Its own as its arrays lie in it, not as others see it.
                memories[members.index(self.rank)] = self._node.memory
            except TransportError as error:
                why_not = str(error)
        reads = [self._node.can_read(tuple(table[rank, :-2].tolist())) for rank in members]
        could = np.array([len(memories), all(reads)], np.int64)
        poll(comm.Iallreduce(MPI.IN_PLACE, could, MPI.MIN).Test)
        core = self._node.core
        if arena is None or core is None or not could[0]:
            if memories:
                why_not = "another rank cannot open its neighbours' memory"
            self._why = refused or why_not
            return nodes
        self._kept = kept
        place, starts = members.index(self.rank), table[members, -2].tolist()
        doors = [door_of(memory) for memory in memories]
        lanes = [start + lane_at for start in starts]
        self.node_ranks = members
        if (refused or len(nodes) > 1) and 1 < len(members) <= MOST_RANKS:
            # Beside the collectives' own, in which several may be under way that go over nodes.
            compared = [lane + LANE_BYTES for lane in lanes]
            self.node = Window(core, place, memories, compared, doors, keep=kept)
        if not refused:
            self._memories = memories
            pids = table[members, 1].tolist() if could[1] else ()
            self._here = Window(core, place, memories, lanes, doors, pids, kept)
            self.node_mail = Mail(self._here, memories, starts, members, size, arena, [])
            self.lending = Lending(arena, dict(zip(members, memories, strict=True)), fence)
        return nodes

    def offer_once(self, nbytes: int, turn: int = 0) -> tuple[int, int, HostArray | None]:
        """Offer memory of one rank's arena for an array that the ranks of the node have once."""
        arena = self._node.arena
        if not self._memories:
            return self.rank, -1, None
        member = turn % len(self._neighbours)
        source = self._neighbours[member]
        memory = None if self.rank != source or arena is None else arena.empty(nbytes)
        if memory is None or arena is None:
            return source, -1, None
        self._once.append(memory)  # others read it
        return source, arena.find(memory), memory

    def take_once(self, source: int, place: int, nbytes: int) -> HostArray:
        """Return the memory that another rank of this node has offered."""
        if not self._memories:
            return super().take_once(source, place, nbytes)
        return self._memories[self._neighbours.index(source)][place : place + nbytes]

    def release_once(self, memory: HostArray) -> None:
        """Keep no more what no other rank reads."""
        self._once = [one for one in self._once if not np.may_share_memory(one, memory)]

    def prepare(
        self, name: str, arguments: tuple[Any, ...], algorithm: str | None = None
    ) -> Callable[[], Request | Steps]:
        """Return what starts a collective or an exchange of these arrays, as often as wanted."""
        if name == "exchange_regions":
            if self._levels is None or not moves_in_memory(*map(kind_of, arguments[:2])):
                return super().prepare(name, arguments)
            return self._exchange_over_nodes(*arguments)
        if self.window is not None or algorithm not in (None, "mpi", "two_levels"):
            return super().prepare(name, arguments, algorithm)
        levels = self._levels
        if levels is not None and name == "all_reduce" and algorithm != "mpi":
            nbytes = arguments[1].nbytes
            way = algorithm or self._algorithms.pick("all_reduce", "host", nbytes)
            if way == "two_levels":
                return lambda: self.engine.stage(levels, levels.all_reduce(*arguments))
        begin = getattr(self._plain, name)
        if levels is None:
            return partial(begin, *arguments)
        return partial(self.engine.begin_decided, levels, begin, *arguments)

    def has_algorithm(self, name: str, algorithm: str) -> bool:
        """Tell whether collective `name` can go by `algorithm`. Local."""
        if algorithm == "two_levels":
            return self._levels is not None and name == "all_reduce"
        return super().has_algorithm(name, algorithm)

    def _exchange_over_nodes(
        self,
        source: HostArray | None,
        target: HostArray | None,
        regions: Regions,
        max_bytes: int = 0,
    ) -> Callable[[], Request]:
        """Return what starts an exchange in the memory of each node, and then by messages."""
        levels, here, near = self._levels, self._here, self._neighbours
        check_contiguous(self.rank, source, target)
        kinds = kind_of(source), kind_of(target)
        plan = near_and_far(regions, self.rank, self.size, near, *kinds)
        dtype = next((one.dtype for one in (source, target) if one is not None), np.dtype("u1"))

        def steps() -> Steps:
            arrays = {rank: np.empty(shape, dtype) for rank, shape in plan.beside}
            beside = tuple(arrays.values())
            if here is not None:
                yield here.exchange(source, target, plan.boxes, beside).start()
            if source is not None:
                arrays[self.rank] = source
            blocks = {rank: partial(_block, array) for rank, array in arrays.items()}
            yield MessageExchange(self._plain, source, target, plan.far, blocks, max_bytes)

        return lambda: self.engine.stage(levels, steps())

    # -- life --------------------------------------------------------------------------

    def wait(
        self,
        ready: Callable[[], bool],
        timeout_s: float | None = None,
        *,
        what: object = "",
        idle: Callable[[], None] | None = None,
    ) -> bool:
        """Call `ready` until it is True, with naps, and let MPI move its own operations along."""
        if self._here is None:
            return super().wait(ready, timeout_s, what=what, idle=idle)
        comm = self._comm

        def looking() -> bool:
            if ready():
                return True
            comm.Iprobe(MPI.ANY_SOURCE, _POKE_TAG)
            return False

        return super().wait(looking, timeout_s, what=what, idle=idle)

    def _give_back(self, *, unended: bool) -> None:
        """Give the MPI communicator and the memory back, unless somebody may still use them."""
        if self._freed or MPI.Is_finalized():
            return
        if self.node is not None:
            self.node.close()
        if self._kept is not None:
            mail = self.node_mail
            if mail is not None:
                mail.close()
            # What was given up by an error must not go on in memory that is used again.
            if self._here is not None:
                self._here.close()
            if unended or not poll(self._plain.barrier().test, _LEAVE_TOGETHER_S):
                # A rank may yet look at this one's counter, or read what it has offered; and the
                # barrier goes on, which Open MPI does not survive on a communicator it has freed.
                rings = () if mail is None else mail.rings
                for memory in (self._kept, *self._once, *rings):
                    self._node.keep(memory)
                self._freed = True
            elif mail is not None:
                mail.rings.clear()  # a group, or a handle, may be kept longer
        if self.lending is not None:
            self.lending.close(self._node.keep)
        rail = None if self._levels is None else self._levels.rail
        self._levels = self._kept = None
        self._here = self.window = self.node = self.lending = None
        self.node_mail = self._plain.node_mail = None
        self._memories = []
        self._once.clear()
        if self._freed:
            self.free_device(unended=unended)
        elif rail is not None:
            rail._give_back(unended=unended)
        super()._give_back(unended=unended)

    def _wrap(self, comm: MPI.Intracomm) -> RoutedCommunicator:
        return RoutedCommunicator(
            comm, self._node, self.engine, self._mode, limit=self._chunk_setting
        )


def routed(
    communicator: MPICommunicator, node: Node, engine: ProgressEngine, mode: str, *, limit: int = 0
) -> RoutedCommunicator:
    """Collective: return a communicator for the same MPI communicator, which it takes over."""
    if isinstance(communicator, RoutedCommunicator):
        return communicator
    return RoutedCommunicator(communicator.native, node, engine, mode, limit=limit)


def _block(array: HostArray, _shape: tuple[int, ...]) -> HostArray:
    return array


def _own_cores() -> list[int]:
    """Return the cores that this process may run on, a bit for each."""
    available = getattr(os, "sched_getaffinity", None)
    cores = range(os.cpu_count() or 1) if available is None else available(0)
    numbers = [0] * _CORE_NUMBERS
    for core in cores:
        place, bit = divmod(core % (_CORE_NUMBERS * _CORE_BITS), _CORE_BITS)
        numbers[place] |= 1 << bit
    return numbers
