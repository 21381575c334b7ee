"""Ranks that are threads of one process: the whole of mpimesh without MPI.

A :class:`VirtualWorld` holds n ranks. Every operation is a record under one
lock; whoever completes it moves the bytes. Waiting means sleeping on the world's
condition, and since the world sees every rank it also sees when all of them
sleep and nothing can change any more: then it says what each one waits for, and
raises, instead of hanging as MPI would.

With ``rendezvous=True`` a send is done only when its receive has begun, as MPI
is free to do for any message. Programs that lean on MPI's buffering deadlock
there, and so show it.

Collectives are plain NumPy on the buffers of all ranks, rank after rank: this is
also the readable definition of what the other transports must do, and the oracle
they are tested against.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from mpimesh.arrays.namespace import HostArray
from mpimesh.comm.base import Communicator
from mpimesh.comm.engine import Steps
from mpimesh.comm.regions import FUNCTIONS
from mpimesh.comm.requests import (
    Condition,
    Mailbox,
    RecvRequest,
    Request,
    agreed_counts,
    block_slices,
    cut,
)
from mpimesh.comm.signatures import BOARD_BYTES, Signatures
from mpimesh.errors import (
    DeadlockError,
    MismatchError,
    MpimeshError,
    RemoteError,
    TransportError,
    on_all_ranks,
)

__all__ = ["VirtualCommunicator", "VirtualWorld", "virtual_communicators"]

_POLL_INTERVAL_S = 50e-6
"""Sleep of a rank that waits for a device and not for another rank."""


class VirtualWorld:
    """The state that the ranks of one virtual job share.

    Args:
        size: How many ranks.
        rendezvous: Sends wait for their receives.
        circle: Says which ranks wait for each other, when all wait; empty if that is not known.
    """

    def __init__(
        self,
        size: int,
        *,
        rendezvous: bool = False,
        circle: Callable[[], str] = str,
    ) -> None:
        self.size = size
        self.rendezvous = rendezvous
        self._circle = circle
        # Reentrant: what a waiting rank asks for may itself start operations.
        self.changed = threading.Condition(threading.RLock())
        self.failure: tuple[int, BaseException] | None = None
        self._version = 0
        self._stirred = False
        self._asleep: dict[int, tuple[int, object]] = {}
        self._running = set(range(size))

    def note_change(self) -> None:
        """Wake whoever waits; called, with the lock held, after every change of state."""
        self._version += 1
        self.changed.notify_all()

    def stir(self) -> None:
        """Let the wait that is about to sleep look again soon: a device moves, unseen."""
        with self.changed:
            self._stirred = True

    def fail(self, rank: int, error: BaseException) -> None:
        """End the waits of all ranks because `rank` ended with `error`."""
        with self.changed:
            if self.failure is None:
                self.failure = (rank, error)
            self.note_change()

    def leave(self, rank: int) -> None:
        """Take a rank out that has returned; whoever waits for it now waits in vain."""
        with self.changed:
            self._running.discard(rank)
            self.note_change()

    def sleep(self, rank: int, ready: Callable[[], bool], until_s: float, what: object) -> bool:
        """Wait on `rank` for `ready`; False once the clock is past `until_s`."""
        with self.changed:
            while True:
                version = self._version
                self._stirred = False
                if ready():  # first: what is here is here, whoever has failed since
                    return True
                self._raise_failure(rank)
                if version != self._version:
                    continue  # `ready` itself started something: look again
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return False
                if self._stirred:
                    self.changed.wait(min(left_s, _POLL_INTERVAL_S))
                elif left_s == float("inf"):
                    self._asleep[rank] = (version, what)
                    self._raise_deadlock()
                    self.changed.wait()
                else:
                    self.changed.wait(left_s)
                self._asleep.pop(rank, None)

    def _raise_failure(self, rank: int) -> None:
        if self.failure is None or self.failure[0] == rank:
            return
        culprit, error = self.failure
        if culprit < 0:  # no rank's own, but the job's: a deadlock, or a wait that took too long
            raise type(error)(*error.args)
        raise RemoteError(
            f"virtual rank {culprit} failed while rank {rank} waited for it: "
            f"{type(error).__name__}: {error}"
        ) from error

    def _raise_deadlock(self) -> None:
        # Nothing has changed since any of them looked, and all of them sleep: nothing ever will.
        stuck = {r: what for r, (version, what) in self._asleep.items() if version == self._version}
        if not self._running <= stuck.keys():
            return
        rows = "\n".join(f"  rank {rank} waits in {what}" for rank, what in sorted(stuck.items()))
        gone = sorted(set(range(self.size)) - self._running)
        left = f"\n  returned already: ranks {gone}" if gone else ""
        circle = self._circle()
        text = f"all virtual ranks wait and none can go on:\n{rows}{left}"
        error = on_all_ranks(DeadlockError(f"{text}\n{circle}" if circle else text))
        self.failure = (-1, error)
        self.note_change()
        raise error


class VirtualCommunicator(Communicator):
    """One thread's view of a set of virtual ranks."""

    kind = "virtual"

    def __init__(
        self, world: VirtualWorld, context: _Context, rank: int, world_ranks: tuple[int, ...]
    ) -> None:
        self.world = world
        self.rank = rank
        self.size = len(world_ranks)
        self.world_ranks = world_ranks
        self._context = context
        self.signatures = context.signatures(rank, self.size)
        self._sequence = 0

    # -- collectives -------------------------------------------------------------

    def all_reduce(self, send: HostArray | None, recv: HostArray, op: str) -> Request:
        """Reduce over all ranks into `recv` on each, in rank order."""
        return self._start("all_reduce", op, recv if send is None else send, recv)

    def reduce(self, send: HostArray, recv: HostArray | None, op: str, root: int) -> Request:
        """Reduce over all ranks into `recv` on `root`."""
        return self._start("reduce", (op, root), send, recv if self.rank == root else None)

    def reduce_scatter(
        self, send: HostArray, recv: HostArray, counts: Sequence[int], op: str
    ) -> Request:
        """Reduce `send`; rank r gets block r."""
        return self._start("reduce_scatter", op, send, recv)

    def all_gather(self, send: HostArray, recv: HostArray, counts: Sequence[int]) -> Request:
        """Lay the ranks' `send` one after the other in `recv`."""
        return self._start("all_gather", None, send, recv)

    def gather(
        self, send: HostArray, recv: HostArray | None, counts: Sequence[int], root: int
    ) -> Request:
        """Lay the ranks' `send` one after the other in `recv` of `root`."""
        return self._start("gather", root, send, recv if self.rank == root else None)

    def scatter(
        self, send: HostArray | None, recv: HostArray, counts: Sequence[int], root: int
    ) -> Request:
        """Rank r gets block r of root's `send`."""
        return self._start("scatter", root, send if self.rank == root else None, recv)

    def all_to_all(
        self,
        send: HostArray,
        recv: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
    ) -> Request:
        """Block d of `send` goes to rank d; block s of `recv` comes from rank s."""
        return self._start("all_to_all", None, send, recv, [*send_counts, *recv_counts])

    def broadcast(self, buffer: HostArray, root: int) -> Request:
        """Copy `buffer` of `root` into `buffer` of every rank."""
        return self._start("broadcast", root, buffer, buffer)

    # -- memory that all ranks have ------------------------------------------------

    def offer_once(self, nbytes: int, turn: int = 0) -> tuple[int, int, HostArray | None]:
        """Offer an array of this process for all ranks: they are its threads."""
        source, context = turn % self.size, self._context
        if source != self.rank:
            return source, -1, None
        memory: HostArray = np.empty(nbytes, np.uint8)
        with self.world.changed:
            place = context.num_offers = context.num_offers + 1
            context.offers[place] = memory
        return source, place, memory

    def take_once(self, source: int, place: int, nbytes: int) -> HostArray:
        """Return the array that another rank has offered."""
        with self.world.changed:
            memory: HostArray = self._context.offers[place][:]
        return memory

    def release_once(self, memory: HostArray) -> None:
        """Keep no more what no other rank reads."""
        context = self._context
        with self.world.changed:
            for place, one in [*context.offers.items()]:
                if np.may_share_memory(one, memory):
                    del context.offers[place]

    def barrier(self) -> Request:
        """Done once every rank has started it."""
        return self._start("barrier", None, None, None)

    # -- messages ----------------------------------------------------------------

    def isend(self, buffer: HostArray, dest: int, tag: int) -> Request:
        """Send `buffer`."""
        key = (self.rank, dest, tag)
        return self._context.messages.send(key, buffer, copy=not self.world.rendezvous)

    def irecv(self, buffer: HostArray, source: int, tag: int) -> RecvRequest:
        """Receive into `buffer`."""
        return self._context.messages.receive((source, self.rank, tag), buffer)

    def probe(self, tag: int) -> tuple[int, int] | None:
        """Return (source, bytes) of a message with `tag` that waits to be received."""
        message = self._context.messages.find((r, self.rank, tag) for r in range(self.size))
        return None if message is None else (message[0][0], message[1])

    # -- life --------------------------------------------------------------------

    def wait(
        self,
        ready: Callable[[], bool],
        timeout_s: float | None = None,
        *,
        what: object = "",
        idle: Callable[[], None] | None = None,
    ) -> bool:
        """Sleep until `ready`; the world wakes the thread when something has changed."""
        until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        return self.world.sleep(self.world_ranks[self.rank], ready, until_s, what)

    def stir(self) -> None:
        """Let a wait of this rank look again soon."""
        self.world.stir()

    def split(self, color: int | None, key: int) -> VirtualCommunicator | None:
        """Make one communicator for each color."""
        collective = self._join("split", None, None, None, () if color is None else (color, key))
        self.wait(collective.is_done, what="split")
        return self._part(collective, color)

    def idup(self) -> Steps:
        """Make a communicator of the same ranks without waiting; the steps' value."""
        collective = self._join("split", None, None, None, (0, self.rank))
        yield Condition(collective.is_done)
        return self._part(collective, 0)

    def _part(self, collective: _Collective, color: int | None) -> VirtualCommunicator | None:
        if color is None:
            return None
        context, members = collective.groups[color]
        world_ranks = tuple(self.world_ranks[member] for member in members)
        part = VirtualCommunicator(self.world, context, members.index(self.rank), world_ranks)
        self.adopt(part)
        return part

    def free(self) -> None:
        """Give back what moves device memory; contexts go with their last user."""
        self.free_device()

    def abort(self, code: int) -> None:
        """End the waits of all ranks."""
        rank = self.world_ranks[self.rank]
        self.world.fail(rank, SystemExit(code))

    # -- helpers -----------------------------------------------------------------

    def _start(
        self,
        operation: str,
        rule: object,
        send: HostArray | None,
        recv: HostArray | None,
        counts: Sequence[int] = (),
    ) -> Request:
        """Join the next collective, and return its request."""
        return Condition(self._join(operation, rule, send, recv, counts).is_done)

    def _join(
        self,
        operation: str,
        rule: object,
        send: HostArray | None,
        recv: HostArray | None,
        numbers: Sequence[int] = (),
    ) -> _Collective:
        """Bring this rank's part of its next collective; the last rank to come completes it."""
        with self.world.changed:
            number = self._sequence
            self._sequence += 1
            collective = self._context.collectives.setdefault(number, _Collective())
            collective.contributions[self.rank] = _Contribution(
                operation, rule, send, recv, tuple(numbers)
            )
            if len(collective.contributions) == self.size:
                del self._context.collectives[number]
                self._complete(collective)
                self.world.note_change()
        return collective

    def _complete(self, collective: _Collective) -> None:
        """Move the bytes of a collective that all ranks have joined."""
        parts = [collective.contributions[rank] for rank in range(self.size)]
        calls = {(part.operation, part.rule) for part in parts}
        if len(calls) > 1:
            rows = "; ".join(f"rank {r}: {p.operation} {p.rule or ''}" for r, p in enumerate(parts))
            collective.error = TransportError(f"ranks met in different collectives: {rows}")
            return
        operation = parts[0].operation
        try:
            if operation == "split":
                collective.groups = _split(self.world, parts)
            else:
                _move(operation, parts)
        except MismatchError as error:
            collective.error = error
        except ValueError as error:
            collective.error = TransportError(f"{operation} over virtual ranks failed: {error}")
        collective.contributions.clear()
        collective.done = True


def virtual_communicators(world: VirtualWorld) -> list[VirtualCommunicator]:
    """Return the communicator of all ranks of `world`, as each of them sees it."""
    context = _Context(world)
    ranks = tuple(range(world.size))
    return [VirtualCommunicator(world, context, rank, ranks) for rank in ranks]


class _Context:
    """The state that the ranks of one communicator share.

    Attributes:
        messages: Their messages.
        collectives: Those that some ranks have joined and others have not, by sequence number.
        boards: The signatures that each rank has posted.
        offers: The arrays that ranks have offered to all, by number.
        num_offers: How many there have been.
    """

    def __init__(self, world: VirtualWorld) -> None:
        self.messages = Mailbox(world.changed, world.note_change)
        self.collectives: dict[int, _Collective] = {}
        self.boards: dict[int, HostArray] = {}
        self.offers: dict[int, HostArray] = {}
        self.num_offers = 0

    def signatures(self, rank: int, size: int) -> Signatures | None:
        """Return what the ranks compare with each other; None for a rank alone."""
        if size == 1:
            return None
        boards = [
            self.boards.setdefault(other, np.zeros(BOARD_BYTES, np.uint8)) for other in range(size)
        ]
        return Signatures(rank, range(size), boards, refuses=False)


@dataclass(slots=True, eq=False)
class _Collective:
    """One collective under way.

    Attributes:
        contributions: The part of each rank that has joined, until the bytes are moved.
        done: Whether all have joined and the bytes are moved.
        error: Raised on every rank, if it failed.
        groups: The context and the members of each color, after a split.
    """

    contributions: dict[int, _Contribution] = field(default_factory=dict)
    done: bool = False
    error: MpimeshError | None = None
    groups: dict[int, tuple[_Context, tuple[int, ...]]] = field(default_factory=dict)

    def is_done(self) -> bool:
        """Tell whether all ranks have joined and the bytes are moved."""
        if self.error is not None:
            error = type(self.error)(*self.error.args)
            raise on_all_ranks(error) if self.error.agreed else error
        return self.done


@dataclass(slots=True)
class _Contribution:
    """One rank's part in a collective.

    Attributes:
        operation: The collective's name.
        rule: Must be equal on all ranks: the reduction, the root.
        send: The rank's input, if it has one.
        recv: Where its output goes, if it gets one.
        numbers: In an all-to-all the elements of the block for each rank, and then of that from
            each; in a split color and key, nothing for a rank that is in no part.
    """

    operation: str
    rule: object
    send: HostArray | None
    recv: HostArray | None
    numbers: tuple[int, ...]


def _split(
    world: VirtualWorld, parts: list[_Contribution]
) -> dict[int, tuple[_Context, tuple[int, ...]]]:
    members: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank, part in enumerate(parts):
        if part.numbers:
            color, key = part.numbers
            members[color].append((key, rank))
    return {
        color: (_Context(world), tuple(rank for _, rank in sorted(ranks)))
        for color, ranks in members.items()
    }


# -- what moves ------------------------------------------------------------------------------------


def _move(operation: str, parts: Sequence[_Contribution]) -> None:
    """Move the buffers of all ranks: what they put in makes a whole, of which each gets its part.

    A barrier moves nothing: all ranks are here, which is the point.
    """
    if operation == "barrier":
        return
    make, is_cut = _WHOLES[operation]
    whole = make(parts)
    sizes = [0 if part.recv is None else part.recv.size for part in parts]
    blocks = block_slices(sizes) if is_cut else [slice(None)] * len(parts)
    for rank, (part, block) in enumerate(zip(parts, blocks, strict=True)):
        recv, got = part.recv, whole[block]
        if recv is not None and recv is not whole:
            if recv.size != got.size:  # NumPy would repeat a single element
                raise ValueError(
                    f"{got.nbytes} bytes come for rank {rank}, which has room for {recv.nbytes}: "
                    f"shape {got.shape} does not fit into shape {recv.shape}"
                )
            recv[...] = got


def _reduced(parts: Sequence[_Contribution]) -> HostArray:
    """Reduce what the ranks put in, in rank order."""
    rule = parts[0].rule
    function = FUNCTIONS[rule[0] if isinstance(rule, tuple) else str(rule)]
    inputs = [part.send for part in parts if part.send is not None]
    # The first step makes a new array, so that an output may be one of the inputs.
    # Overflow and NaN pass silently, as they do in MPI.
    with np.errstate(all="ignore"):
        return reduce(function, inputs) if len(inputs) > 1 else inputs[0].copy()


def _joined(parts: Sequence[_Contribution]) -> HostArray:
    """Lay what the ranks put in one after the other."""
    return np.concatenate([part.send for part in parts if part.send is not None])


def _exchanged(parts: Sequence[_Contribution]) -> HostArray:
    """Lay the blocks for rank 0 one after the other, then those for rank 1, and so on."""
    sends = [part.send for part in parts if part.send is not None]
    itemsize = sends[0].itemsize
    agreed_counts([[count * itemsize for count in part.numbers] for part in parts])
    rows = [cut(s, p.numbers[: len(parts)]) for s, p in zip(sends, parts, strict=True)]
    return np.concatenate([block for column in zip(*rows, strict=True) for block in column])


def _of_root(parts: Sequence[_Contribution]) -> HostArray:
    """Return what the root puts in."""
    root = parts[0].rule
    send = parts[root].send if isinstance(root, int) else None
    if send is None:
        raise ValueError(f"root {root} brought no buffer")
    return send


_WHOLES: dict[str, tuple[Callable[[Sequence[_Contribution]], HostArray], bool]] = {
    "all_reduce": (_reduced, False),
    "reduce": (_reduced, False),
    "reduce_scatter": (_reduced, True),
    "all_gather": (_joined, False),
    "gather": (_joined, False),
    "scatter": (_of_root, True),
    "all_to_all": (_exchanged, True),
    "broadcast": (_of_root, False),
}
"""For each collective, what makes the whole, and whether a rank gets a block of it or all of it."""
