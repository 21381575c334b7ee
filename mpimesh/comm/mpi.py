"""The communicator that moves host memory by MPI.

Two kinds of MPI are met. From version 4 on, counts are as large as memory.
Before that they are C ints, and whatever has more than `limit` elements goes in
pieces: reductions and broadcasts as a row of smaller ones, everything with
blocks (whose displacements would overflow too) as messages between pairs. Tests
run the whole suite with a limit of 7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

from mpimesh.arrays.memory import zero_pages
from mpimesh.arrays.namespace import HostArray
from mpimesh.comm.base import Communicator
from mpimesh.comm.engine import Moved, ProgressEngine, Steps, poll
from mpimesh.comm.regions import FUNCTIONS
from mpimesh.comm.requests import (
    MAX_USER_TAG,
    WHOLE_MESSAGE_BYTES,
    Condition,
    Receive,
    RecvRequest,
    Request,
    all_done,
    block_slices,
    chunk_slices,
    cut,
)
from mpimesh.core.mail import Mail, slot_bytes
from mpimesh.core.node import DOOR_BYTES, LANE_BYTES, Door, Engine, Window
from mpimesh.errors import TransportError

__all__ = ["MPICommunicator"]

_PAIRWISE_TAG = MAX_USER_TAG + 1
_MPI_OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
_SATURATES = "Open MPI" in MPI.Get_library_version()
"""Its vector code sums whole numbers of 8 and 16 bits with saturation: 200 + 100 is 255."""
_AS_NUMPY = {op: _MPI_OPS[op] for op in ("sum", "prod") if op == "prod" or not _SATURATES}
"""What MPI does as NumPy does, whatever the dtype."""
_LARGEST_COUNT_BEFORE_MPI_4 = 1 << 30

_OWNERS: dict[int, str] = {}
"""What each communicator is for that was split and not freed, by its handle in MPI."""


class MPICommunicator(Communicator):
    """Ranks of an MPI intracommunicator, which this object owns.

    Args:
        comm: The communicator; :meth:`free` frees it.
        limit: Most elements in one MPI call; 0 for what this MPI can do.
        order: The chain of another object for the same MPI communicator, on which its collectives
            queue while one goes alone.

    Attributes:
        doors: For each rank its door, or None if it is on another node; empty if none is known.
    """

    kind = "mpi"
    engine: ProgressEngine
    doors: Sequence[Door | None] = ()

    def __init__(self, comm: MPI.Intracomm, *, limit: int = 0, order: object = None) -> None:
        self._comm = comm
        self.engine = ProgressEngine()
        self._order = order or object()
        self._freed = False
        self._chunk_setting = limit
        before_4 = MPI.VERSION < 4
        self._limit = limit or (_LARGEST_COUNT_BEFORE_MPI_4 if before_4 else 1 << 62)
        self._message_limit = max(self._limit, WHOLE_MESSAGE_BYTES)
        self._large_blocks_in_pairs = bool(limit) or before_4
        self.rank = comm.rank
        self.size = comm.size

    @classmethod
    def duplicate(cls, comm: MPI.Intracomm, *, limit: int = 0) -> MPICommunicator:
        """Collective: make a communicator of the same ranks whose messages are apart."""
        return cls(comm.Dup(), limit=limit)

    @property
    def native(self) -> MPI.Intracomm:
        """The mpi4py communicator, for calls of your own."""
        return self._comm

    @cached_property
    def world_ranks(self) -> Sequence[int]:
        """The number in MPI's world of each rank; -1 for one that is of another world."""
        group, world = self._comm.Get_group(), MPI.COMM_WORLD.Get_group()
        ranks = group.Translate_ranks(None, world)
        group.Free()
        world.Free()
        return [-1 if rank == MPI.UNDEFINED else rank for rank in ranks]

    # -- collectives -------------------------------------------------------------

    def all_reduce(self, send: HostArray | None, recv: HostArray, op: str) -> Request:
        """Reduce over all ranks into `recv` on each."""
        if recv.size <= self._limit:
            function = _AS_NUMPY.get(op)
            if function is None:
                function = _as_numpy(op, recv.dtype.char)
            source = MPI.IN_PLACE if send is None else send
            if self._is_busy():
                return self._start("all_reduce", self._comm.Iallreduce, source, recv, function)
            try:
                request = self._comm.Iallreduce(source, recv, function)
            except MPI.Exception as error:
                _fail("all_reduce", error)
            return _request_of(request, (send, recv))
        pieces = chunk_slices(recv.size, self._limit)
        return all_done(
            *(self.all_reduce(None if send is None else send[p], recv[p], op) for p in pieces)
        )

    def reduce(self, send: HostArray, recv: HostArray | None, op: str, root: int) -> Request:
        """Reduce over all ranks into `recv` on `root`."""
        if send.size <= self._limit:
            return self._start("reduce", self._comm.Ireduce, send, recv, _function(op, send), root)
        pieces = chunk_slices(send.size, self._limit)
        return all_done(
            *(self.reduce(send[p], None if recv is None else recv[p], op, root) for p in pieces)
        )

    def reduce_scatter(
        self, send: HostArray, recv: HostArray, counts: Sequence[int], op: str
    ) -> Request:
        """Reduce `send`; rank r gets block r."""
        if send.size <= self._limit:
            function = _function(op, send)
            if not recv.size:  # where MPICH refuses the address of `send`, too
                recv = np.empty(0, recv.dtype)
            return self._start(
                "reduce_scatter", self._comm.Ireduce_scatter, send, recv, counts, function
            )
        return all_done(
            *(
                self.reduce(send[block], recv if root == self.rank else None, op, root)
                for root, block in enumerate(block_slices(counts))
            )
        )

    def all_gather(self, send: HostArray, recv: HostArray, counts: Sequence[int]) -> Request:
        """Lay the ranks' `send` one after the other in `recv`."""
        if recv.size > self._limit:
            return self._exchange([send] * self.size, cut(recv, counts))
        if len(set(counts)) == 1:
            return self._start("all_gather", self._comm.Iallgather, send, recv)
        return self._start("all_gather", self._comm.Iallgatherv, send, [recv, counts])

    def gather(
        self, send: HostArray, recv: HostArray | None, counts: Sequence[int], root: int
    ) -> Request:
        """Lay the ranks' `send` one after the other in `recv` of `root`."""
        if sum(counts) > self._limit:
            incoming = [] if recv is None else cut(recv, counts)
            return self._exchange(self._only(root, send), incoming)
        target = None if recv is None else [recv, counts]
        return self._start("gather", self._comm.Igatherv, send, target, root)

    def scatter(
        self, send: HostArray | None, recv: HostArray, counts: Sequence[int], root: int
    ) -> Request:
        """Rank r gets block r of root's `send`."""
        if sum(counts) > self._limit:
            outgoing = [] if send is None else cut(send, counts)
            return self._exchange(outgoing, self._only(root, recv))
        source = None if send is None else [send, counts]
        return self._start("scatter", self._comm.Iscatterv, source, recv, root)

    def all_to_all(
        self,
        send: HostArray,
        recv: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
    ) -> Request:
        """Block d of `send` goes to rank d; block s of `recv` comes from rank s."""
        # The own block stays out of MPI, as messages to oneself do.
        cut(recv, recv_counts)[self.rank][...] = cut(send, send_counts)[self.rank]
        return self.all_to_all_but(send, recv, send_counts, recv_counts, {self.rank})

    def broadcast(self, buffer: HostArray, root: int) -> Request:
        """Copy `buffer` of `root` into `buffer` of every rank."""
        if buffer.size <= self._limit:
            return self._start("broadcast", self._comm.Ibcast, buffer, root)
        return all_done(
            *(self.broadcast(buffer[p], root) for p in chunk_slices(buffer.size, self._limit))
        )

    def barrier(self) -> Request:
        """Done once every rank has started it."""
        return self._start("barrier", self._comm.Ibarrier)

    # -- between nodes -------------------------------------------------------------

    def all_to_all_but(
        self,
        send: HostArray,
        recv: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        apart: Collection[int],
    ) -> Request:
        """As :meth:`all_to_all`, but leave out the blocks from and to the ranks in `apart`.

        If a rank is in another's `apart`, that one is in its.
        """
        if self._large_blocks_in_pairs:
            # A rank knows its own counts only, so no rule on them could be agreed.
            outgoing, incoming = cut(send, send_counts), cut(recv, recv_counts)
            for rank in apart:
                outgoing[rank] = incoming[rank] = send[:0]
            return self._exchange(outgoing, incoming)
        sent, received = (_places_but(counts, apart) for counts in (send_counts, recv_counts))
        return self._start("all_to_all", self._comm.Ialltoallv, [send, sent], [recv, received])

    # -- messages ----------------------------------------------------------------

    def isend(self, buffer: HostArray, dest: int, tag: int) -> Request:
        """Send `buffer`."""
        mail = self._mail_with(dest)
        if mail is not None and isinstance(buffer, np.ndarray):  # MPI may be given device memory
            return mail.send(buffer, dest, tag)
        if buffer.size <= self._message_limit:
            request = _begin("send", self._comm.Isend, buffer, dest, tag)
            door = self.doors[dest] if self.doors else None
            if door is not None:
                door.ring()
            return request
        pieces = chunk_slices(buffer.size, self._message_limit)
        return all_done(*(self.isend(buffer[p], dest, tag) for p in pieces))

    def irecv(self, buffer: HostArray, source: int, tag: int) -> RecvRequest:
        """Receive into `buffer`."""
        mail = self._mail_with(source)
        if mail is not None and isinstance(buffer, np.ndarray):
            return mail.receive(buffer, source, tag)
        if buffer.size <= self._message_limit:
            try:
                request = self._comm.Irecv(buffer, source, tag)
            except MPI.Exception as error:
                _fail("receive", error)
            return _receive_of(request, buffer, self.doors[source] if self.doors else None)
        pieces = chunk_slices(buffer.size, self._message_limit)
        parts = [self.irecv(buffer[p], source, tag) for p in pieces]

        def cancel() -> bool:
            taken_back = [part.cancel() for part in parts]
            return all(taken_back)

        is_here = all_done(*parts).test
        return Receive(is_here, lambda: sum(part.received_bytes() for part in parts), cancel)

    def probe(self, tag: int) -> tuple[int, int] | None:
        """Return (source, bytes) of a message with `tag` that waits to be received."""
        near = (self.node_mail or self._own_mail).probe(tag)
        if near is not None or (self.node_mail is not None and not self.nodes):
            return near
        status = MPI.Status()
        if not self._comm.Iprobe(MPI.ANY_SOURCE, tag, status):
            return None
        return status.Get_source(), status.Get_count(MPI.BYTE)

    def _mail_with(self, rank: int) -> Mail | None:
        """Return what moves messages to and from a rank in memory; None if MPI does."""
        mail = self.node_mail
        if mail is not None and mail.reaches(rank):
            return mail
        return self._own_mail if rank == self.rank else None

    @cached_property
    def _own_mail(self) -> Mail:
        """The messages of this rank to itself, where it shares no memory with others.

        MPICH copies 8 KiB of one in a test: 16 MiB take 2,055 tests.
        """
        door = Door(np.zeros(DOOR_BYTES, np.uint8))
        memory = zero_pages(1, LANE_BYTES + slot_bytes(1))
        window = Window(Engine(door), 0, memory, [0], [door], is_threads=True)
        return Mail(window, memory, [LANE_BYTES], [self.rank], self.size, None, [])

    # -- life --------------------------------------------------------------------

    def wait(
        self,
        ready: Callable[[], bool],
        timeout_s: float | None = None,
        *,
        what: object = "",
        idle: Callable[[], None] | None = None,
    ) -> bool:
        """Call `ready` until it is True, with naps."""
        return poll(ready, timeout_s, idle, self.engine)

    def split(self, color: int | None, key: int) -> MPICommunicator | None:
        """Make one communicator for each color."""
        owner = _OWNERS.get(MPI._handleof(self._comm), "")
        try:
            part: Any = self._comm.Split(MPI.UNDEFINED if color is None else color, key)
        except MPI.Exception as error:
            _fail("split", error, _advice(error))
        if part == MPI.COMM_NULL:
            return None
        _OWNERS[MPI._handleof(part)] = owner
        communicator = self._wrap(part)
        communicator.engine = self.engine
        return communicator

    def idup(self) -> Steps:
        """Make a communicator of the same ranks without waiting; the steps' value.

        Collectives that are started meanwhile wait for it: Open MPI 5.0.11 makes the duplicate by
        collectives of its own, which each rank starts when MPI has time, and which met others.
        """

        def copying() -> Steps:
            try:
                copy, request = self._comm.Idup()
            except MPI.Exception as error:
                _fail("duplicate", error)
            yield _request_of(request, copy)
            # Before that not even the rank may be asked for.
            return MPICommunicator(copy, limit=self._chunk_setting)

        copied = self.engine.stage(self._order, copying())
        yield copied
        duplicate: MPICommunicator = copied.value
        duplicate.engine = self.engine
        return duplicate

    def _wrap(self, comm: MPI.Intracomm) -> MPICommunicator:
        """Return a communicator of this class for `comm`. Collective over `comm`."""
        return MPICommunicator(comm, limit=self._chunk_setting)

    def belong_to(self, owner: str) -> None:
        """Note whose it is, for when MPI has no more communicators."""
        _OWNERS[MPI._handleof(self._comm)] = owner

    def free(self) -> None:
        """Give the MPI communicator back."""
        self._give_back(unended=False)

    def abandon(self) -> None:
        """Keep the MPI communicator, in which messages may be on their way."""
        self._give_back(unended=True)

    def _give_back(self, *, unended: bool) -> None:
        if not self._freed and not MPI.Is_finalized():
            self._freed = True
            self.free_device(unended=unended)
            if "_own_mail" in self.__dict__:
                self._own_mail.close()
            if unended:
                _OWNERS[MPI._handleof(self._comm)] = "closed meshes whose operations did not end"
            else:
                poll(self._is_free)
                _OWNERS.pop(MPI._handleof(self._comm), None)
                self._comm.Free()

    def abort(self, code: int) -> None:
        """End all ranks of the job."""
        MPI.COMM_WORLD.Abort(code)

    # -- helpers -----------------------------------------------------------------

    def _start(self, name: str, function: Callable[..., MPI.Request], *arguments: Any) -> Request:
        """Start a collective in its turn."""
        if not self._is_busy():
            return _begin(name, function, *arguments)
        queued = _Queued(self.engine, self._order, partial(_begin, name, function, *arguments))
        return Condition(queued.begin().is_done)

    def _is_busy(self) -> bool:
        """Tell whether collectives must queue behind one that goes alone."""
        engine = self.engine
        return bool(engine.tails) and engine.busy(self._order)

    def _is_free(self) -> bool:
        self.engine.advance()
        return not self._is_busy()

    def _only(self, root: int, block: HostArray) -> list[HostArray]:
        """One block for each rank, empty but for `root`."""
        return [block if rank == root else block[:0] for rank in range(self.size)]

    def _exchange(self, outgoing: list[HostArray], incoming: list[HostArray]) -> Request:
        """Send block d to rank d and receive block s from rank s; empty blocks stay at home."""
        # Step k talks to the rank k places on, so that no rank is everybody's first.
        order = [(self.rank + step) % self.size for step in range(self.size)]
        requests: list[Request] = [
            self.irecv(incoming[peer], peer, _PAIRWISE_TAG)
            for peer in order
            if incoming and incoming[peer].size
        ]
        requests += [
            self.isend(outgoing[peer], peer, _PAIRWISE_TAG)
            for peer in order
            if outgoing and outgoing[peer].size
        ]
        return all_done(*requests)


class _Queued(Moved):
    """A collective that starts in its turn; again, if a signal handler ends the start."""

    __slots__ = ("_request", "_start")

    def __init__(
        self, engine: ProgressEngine, chain: Hashable, start: Callable[[], Request]
    ) -> None:
        super().__init__(engine, chain)
        self._start = start
        self._request: Request | None = None

    def _move(self) -> bool:
        self._request = self._start()
        return True

    def is_done(self) -> bool:
        """Tell whether it has started, and is done."""
        return self.test() and self._request is not None and self._request.test()


def _function(op: str, array: HostArray) -> MPI.Op:
    """Return what reduces arrays of one dtype by `op`."""
    return _AS_NUMPY.get(op) or _as_numpy(op, array.dtype.char)


@lru_cache
def _as_numpy(op: str, char: str) -> MPI.Op:
    """Return MPI's operation for numbers of one dtype, or NumPy's where MPI's gives something else.

    MPI's minimum and maximum of floats lose NaN on some ranks and not on others. Which of two NaN,
    or of 0.0 and -0.0, comes out of NumPy's depends on their order. So MPI must not exchange the
    operands: then the result has the same bits on all ranks. A signal handler that raises while MPI
    calls back ends the job.

    Args:
        op: The reduction.
        char: The dtype's.
    """
    dtype = np.dtype(char)
    short = _SATURATES and op == "sum" and dtype.kind in "iu" and dtype.itemsize < 4
    if not short and (op not in ("min", "max") or dtype.kind != "f"):
        return _MPI_OPS[op]
    function = FUNCTIONS[op]

    def combine(first: Any, second: Any, _: MPI.Datatype) -> None:
        target = np.frombuffer(second, dtype)
        function(np.frombuffer(first, dtype), target, out=target)

    return MPI.Op.Create(combine, commute=short)


def _places_but(counts: Sequence[int], apart: Collection[int]) -> tuple[list[int], list[int]]:
    """Return counts and displacements of blocks, with counts of 0 for the ranks in `apart`."""
    starts = list(accumulate(counts, initial=0))[:-1]
    return [0 if rank in apart else count for rank, count in enumerate(counts)], starts


def _advice(error: MPI.Exception) -> str:
    """Return who holds communicators, if MPI has no more: MPICH has 2,048."""
    if "communicators" not in error.Get_error_string():
        return ""
    counts = Counter(_OWNERS.values())
    owners = ", ".join(f"{count} by {owner or 'no mesh'}" for owner, count in counts.most_common(4))
    return (
        f"; {len(_OWNERS)} are open on this rank: {owners}; an MPI has few of them: close() meshes "
        "that are not used any more, or make them in a with statement"
    )


def _begin(name: str, function: Callable[..., MPI.Request], *arguments: Any) -> Request:
    """Start an operation of MPI at once."""
    try:
        return _request_of(function(*arguments), arguments)
    except MPI.Exception as error:
        _fail(name, error)


def _request_of(request: MPI.Request, buffers: object) -> Condition:
    """Return one request of MPI, with the buffers that it works on."""

    def test() -> bool:
        try:
            return request.Test()
        except MPI.Exception as error:
            _fail("an operation under way", error)

    return Condition(test, buffers)


def _receive_of(request: MPI.Request, buffer: HostArray, door: Door | None) -> Receive:
    """Return one receive of MPI, which knows afterwards how much came."""
    status = MPI.Status()

    def test() -> bool:
        # A finished request is REQUEST_NULL, whose test would overwrite the status.
        if request == MPI.REQUEST_NULL:
            return True
        try:
            done = request.Test(status)
        except MPI.Exception as error:
            _fail("receive", error)
        if done and door is not None:
            door.ring()  # the sender may wait for a large message to be taken
        return done

    def cancel() -> bool:
        if request == MPI.REQUEST_NULL:
            return False
        request.Cancel()
        poll(test)
        return status.Is_cancelled()

    return Receive(test, lambda: status.Get_count(MPI.BYTE), cancel, buffer)


def _fail(name: str, error: MPI.Exception, advice: str = "") -> NoReturn:
    """Raise an error of MPI as one of the transport, with what to do where that is known."""
    raise TransportError(
        f"MPI refused or failed in {name} on rank {MPI.COMM_WORLD.rank}: "
        f"{error.Get_error_string()}{advice}"
    ) from error
