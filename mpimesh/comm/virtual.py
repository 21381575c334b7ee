"""Ranks that are threads of one process: the whole of mpimesh without MPI.

A :class:`VirtualWorld` holds n ranks. Their collectives go by a window of :mod:`mpimesh.core`, as
those of the processes of a node do, and so do their messages: all arrays of the process are memory
that they share. Splits are records under one lock. Who waits sleeps at its rank's door, and since
the world sees every rank it also sees when all of them sleep and nothing can change any more: then
it says what each one waits for, and raises, instead of hanging as MPI would.

With ``rendezvous=True`` a send is done only when its receive has begun, as MPI
is free to do for any message. Programs that lean on MPI's buffering deadlock
there, and so show it.

Why no sleep is missed: a rank takes its bell before it looks whether it is done, then asks those
that it lacks to ring and looks once more. Whatever moves later rings, as does every split, so the
bell has changed or the rank wakes up. And if all ranks that still run have done so, and no bell has
rung since, none can move. A rank does so when all its threads do that are known: its own, and those
that have waited before.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from mpimesh.arrays.memory import zero_pages
from mpimesh.arrays.namespace import HostArray
from mpimesh.comm.algorithms import Algorithms
from mpimesh.comm.base import NodeCommunicator
from mpimesh.comm.engine import Steps
from mpimesh.comm.requests import Condition, RecvRequest, Request
from mpimesh.core.mail import Mail, slot_bytes
from mpimesh.core.node import DOOR_BYTES, LANE_BYTES, Door, Engine, Window
from mpimesh.errors import DeadlockError, RemoteError, on_all_ranks

__all__ = ["VirtualCommunicator", "VirtualWorld", "virtual_communicators"]

_POLL_INTERVAL_S = 50e-6
"""Sleep of a rank that waits for a device and not for another rank."""
_LONGEST_SLEEP_S = 3600.0


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
        # Reentrant: who finds a deadlock may have it told by all.
        self.lock = threading.RLock()
        self.doors = [Door(row) for row in zero_pages(size, DOOR_BYTES)]
        self.engines = [Engine(door, is_thread=True) for door in self.doors]
        self.failure: tuple[int, BaseException] | None = None
        self._stirred = [False] * size
        # Of each rank its own thread, once it has entered, and others of it that have waited.
        self._threads: list[set[threading.Thread]] = [set() for _ in range(size)]
        self._asleep: dict[threading.Thread, tuple[int, int, object]] = {}
        self._running = set(range(size))

    def enter(self, rank: int) -> None:
        """Let the calling thread be that of `rank`: while it works, the rank does not wait."""
        self._threads[rank].add(threading.current_thread())

    def ring(self) -> None:
        """Let all ranks look again; called after every change of what is in no window."""
        for door in self.doors:
            door.ring()

    def stir(self, rank: int) -> None:
        """Let the wait of `rank` that is about to sleep look again soon: a device moves, unseen."""
        self._stirred[rank] = True

    def fail(self, rank: int, error: BaseException) -> None:
        """End the waits of all ranks because `rank` ended with `error`."""
        with self.lock:
            if self.failure is None:
                self.failure = (rank, error)
        self.ring()

    def leave(self, rank: int) -> None:
        """Take a rank out that has returned; whoever waits for it now waits in vain."""
        with self.lock:
            self._running.discard(rank)
        self.ring()

    def sleep(
        self,
        rank: int,
        ready: Callable[[], bool],
        until_s: float,
        what: object,
        idle: Callable[[], None] | None,
    ) -> bool:
        """Wait on `rank` for `ready`; False once the clock is past `until_s`."""
        engine = self.engines[rank]
        while True:
            bell = engine.bell()
            self._stirred[rank] = False
            if ready():  # first: what is here is here, whoever has failed since
                return True
            self._raise_failure(rank)
            if idle is not None:
                idle()
            left_s = min(until_s - time.monotonic(), _LONGEST_SLEEP_S)
            if left_s <= 0:
                return False
            if self._stirred[rank]:
                engine.sleep(bell, min(left_s, _POLL_INTERVAL_S))
            elif until_s < float("inf"):
                engine.sleep(bell, left_s)
            elif not engine.sleep(bell, 0):  # it has looked once more, and will be rung
                thread = threading.current_thread()
                try:
                    with self.lock:
                        self._threads[rank].add(thread)
                        self._asleep[thread] = rank, bell, what
                        self._raise_deadlock()
                    engine.sleep(bell, left_s)
                finally:
                    with self.lock:
                        self._asleep.pop(thread, None)

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
        if len(self._asleep) < len(self._running):
            return
        # No bell has rung since any of them looked, and all of them sleep: none ever will.
        stuck = {
            thread: (rank, what)
            for thread, (rank, bell, what) in self._asleep.items()
            if self.engines[rank].bell() == bell
        }
        for rank in self._running:
            # A thread that computes, or waits elsewhere, may yet send what the others wait for.
            alive = {thread for thread in self._threads[rank] if thread.is_alive()}
            if not alive or not alive <= stuck.keys():
                return
        waits = sorted(stuck.values(), key=lambda wait: wait[0])
        rows = "\n".join(f"  rank {rank} waits in {what}" for rank, what in waits)
        gone = sorted(set(range(self.size)) - self._running)
        left = f"\n  returned already: ranks {gone}" if gone else ""
        circle = self._circle()
        text = f"all virtual ranks wait and none can go on:\n{rows}{left}"
        error = on_all_ranks(DeadlockError(f"{text}\n{circle}" if circle else text))
        self.failure = (-1, error)
        self.ring()
        raise error


class VirtualCommunicator(NodeCommunicator):
    """One thread's view of a set of virtual ranks."""

    kind = "virtual"
    window: Window
    node_mail: Mail

    def __init__(self, world: VirtualWorld, context: _Context, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.world_ranks = context.world_ranks
        self.size = len(self.world_ranks)
        self._context = context
        self.window = context.window(world.engines[self.world_ranks[rank]], rank)
        if self.size > 1:
            self.node, self.node_ranks = self.window, range(self.size)
        self.node_mail = context.mail(self.window, world.rendezvous)
        self._splits = 0

    def algorithms(self) -> Algorithms:
        """Return the table by which it moves host memory. Local."""
        return Algorithms.only("node", "in the memory of the process, whose threads the ranks are")

    # -- memory that all ranks have ------------------------------------------------

    def offer_once(self, nbytes: int, turn: int = 0) -> tuple[int, int, HostArray | None]:
        """Offer an array of this process for all ranks: they are its threads."""
        source, context = turn % self.size, self._context
        if source != self.rank:
            return source, -1, None
        memory: HostArray = np.empty(nbytes, np.uint8)
        with self.world.lock:
            place = context.num_offers = context.num_offers + 1
            context.offers[place] = memory
        return source, place, memory

    def take_once(self, source: int, place: int, nbytes: int) -> HostArray:
        """Return the array that another rank has offered."""
        with self.world.lock:
            memory: HostArray = self._context.offers[place][:]
        return memory

    def release_once(self, memory: HostArray) -> None:
        """Keep no more what no other rank reads."""
        context = self._context
        with self.world.lock:
            for place, one in [*context.offers.items()]:
                if np.may_share_memory(one, memory):
                    del context.offers[place]

    # -- messages ----------------------------------------------------------------

    def isend(self, buffer: HostArray, dest: int, tag: int) -> Request:
        """Send `buffer`."""
        return self.node_mail.send(buffer, dest, tag)

    def irecv(self, buffer: HostArray, source: int, tag: int) -> RecvRequest:
        """Receive into `buffer`."""
        return self.node_mail.receive(buffer, source, tag)

    def probe(self, tag: int) -> tuple[int, int] | None:
        """Return (source, bytes) of a message with `tag` that waits to be received."""
        return self.node_mail.probe(tag)

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
        return self.world.sleep(self.world_ranks[self.rank], ready, until_s, what, idle)

    def stir(self) -> None:
        """Let a wait of this rank look again soon."""
        self.world.stir(self.world_ranks[self.rank])

    def split(self, color: int | None, key: int) -> VirtualCommunicator | None:
        """Make one communicator for each color."""
        split = self._join(None if color is None else (color, key))
        self.wait(lambda: split.done, what="split")
        return self._part(split, color)

    def idup(self) -> Steps:
        """Make a communicator of the same ranks without waiting; the steps' value."""
        split = self._join((0, self.rank))
        yield Condition(lambda: split.done)
        return self._part(split, 0)

    def _join(self, mine: tuple[int, int] | None) -> _Split:
        """Bring this rank's color and key; the last rank to come makes the parts."""
        context = self._context
        with self.world.lock:
            self._splits += 1
            split = context.splits.setdefault(self._splits, _Split())
            split.joined[self.rank] = mine
            if is_last := len(split.joined) == self.size:
                del context.splits[self._splits]
                split.make(self.world, self.world_ranks)
        if is_last:  # before, nobody has news
            self.world.ring()
        return split

    def _part(self, split: _Split, color: int | None) -> VirtualCommunicator | None:
        if color is None:
            return None
        context, members = split.parts[color]
        part = VirtualCommunicator(self.world, context, members.index(self.rank))
        part.engine = self.engine
        return part

    def free(self) -> None:
        """Give back what moves device memory, and the window; contexts go with their last user."""
        self._give_back(unended=False)

    def abandon(self) -> None:
        """Do as :meth:`free`, but keep memory of devices that may be in use."""
        self._give_back(unended=True)

    def _give_back(self, *, unended: bool) -> None:
        self.free_device(unended=unended)
        # Else another rank may yet read an array that they keep.
        if self.node_mail.idle and self.window.idle:
            self.node_mail.close()
            self.window.close()

    def abort(self, code: int) -> None:
        """End the waits of all ranks."""
        rank = self.world_ranks[self.rank]
        self.world.fail(rank, SystemExit(code))


def virtual_communicators(world: VirtualWorld) -> list[VirtualCommunicator]:
    """Return the communicator of all ranks of `world`, as each of them sees it."""
    ranks = tuple(range(world.size))
    context = _Context(world, ranks)
    return [VirtualCommunicator(world, context, rank) for rank in ranks]


class _Context:
    """The state that the ranks of one communicator share.

    Attributes:
        world_ranks: The ranks, in their order, as the world counts them.
        splits: Those that some ranks have joined and others have not, by number.
        offers: The arrays that ranks have offered to all, by number.
        num_offers: How many there have been.
    """

    def __init__(self, world: VirtualWorld, world_ranks: tuple[int, ...]) -> None:
        size = len(world_ranks)
        self.world_ranks = world_ranks
        self.splits: dict[int, _Split] = {}
        self.offers: dict[int, HostArray] = {}
        self.num_offers = 0
        self._lanes = zero_pages(size, LANE_BYTES)
        self._slots = zero_pages(size, slot_bytes(size))
        self._doors = [world.doors[rank] for rank in world_ranks]
        self._rings: list[HostArray] = []  # which others read as long as they like

    def window(self, engine: Engine, rank: int) -> Window:
        """Return the ranks as `rank` starts operations among them."""
        lanes = self._lanes
        return Window(engine, rank, lanes, [0] * len(lanes), self._doors, is_threads=True)

    def mail(self, window: Window, rendezvous: bool) -> Mail:
        """Return the messages of a rank, whose window this is."""
        slots, size = self._slots, window.size
        return Mail(window, slots, [0] * size, range(size), size, None, self._rings, rendezvous)


class _Split:
    """One split of the ranks of a communicator.

    Attributes:
        joined: The color and key of each rank that has joined; None for one that is in no part.
        parts: The context and the members of each color, once all have joined.
        done: Whether they have.
    """

    def __init__(self) -> None:
        self.joined: dict[int, tuple[int, int] | None] = {}
        self.parts: dict[int, tuple[_Context, tuple[int, ...]]] = {}
        self.done = False

    def make(self, world: VirtualWorld, world_ranks: tuple[int, ...]) -> None:
        """Make the parts of all colors; `world_ranks` are those that are split."""
        members: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for rank, mine in sorted(self.joined.items()):
            if mine is not None:
                color, key = mine
                members[color].append((key, rank))
        for color, ranks in members.items():
            part = tuple(rank for _, rank in sorted(ranks))
            self.parts[color] = _Context(world, tuple(world_ranks[rank] for rank in part)), part
        self.done = True
