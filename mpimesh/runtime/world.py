"""State that each rank has once, or once for each mesh: unfinished operations, memory for results.

A rank is a process under MPI and a thread under :func:`run_virtual`. This module
holds the only state that is not owned by a mesh, and for the reason that MPI's
own state is one per process, too: whoever waits has to move along everything
that the rank has started, on whichever mesh.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from weakref import WeakSet

from mpimesh.arguments import as_flag, as_function, as_int, shown
from mpimesh.arrays import HostArray, aligned_bytes
from mpimesh.arrays.memory import POOLED_FROM_BYTES, ArrayPool
from mpimesh.comm import Communicator, VirtualWorld, run_steps, virtual_communicators
from mpimesh.core.call import Ledger
from mpimesh.core.node import MOST_RANKS
from mpimesh.errors import (
    ClosedError,
    MeshError,
    MpimeshError,
    RankError,
    on_all_ranks,
)
from mpimesh.layout import DEFAULT_LINK_COSTS, LinkCosts
from mpimesh.mesh import WORLD, Device, find_devices
from mpimesh.runtime.agreement import announce
from mpimesh.runtime.call import Call, call_site, site_text
from mpimesh.runtime.control import ControlChannels
from mpimesh.runtime.deadlock import Mail, Waiting, deadlock_text, find_deadlock
from mpimesh.runtime.failure import end_together, is_born_too_late, limited_start
from mpimesh.runtime.launch import Launch, check_world
from mpimesh.runtime.progress import InputLocks, Progress, put_before
from mpimesh.runtime.traffic import Traffic
from mpimesh.runtime.watchdog import Watchdog, join_virtual_ranks
from mpimesh.runtime.work import OpenWork
from mpimesh.settings import Settings
from mpimesh.trace import NULL_TRACER, Tracer

if TYPE_CHECKING:
    from mpimesh.comm.arena import Arena, Node

__all__ = [
    "MeshContext",
    "World",
    "current_world",
    "exit_all",
    "run_virtual",
    "solo_communicator",
    "world_of",
]

R = TypeVar("R")

_POOLED_BYTES = 512 << 20
"""Most memory for results that is kept for those to come."""


class Hardware:
    """The devices of this process, looked for once: drivers answer slowly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # virtual ranks ask at once
        self._devices: tuple[Device, ...] = ()

    def devices(self) -> tuple[Device, ...]:
        """Return them. Local."""
        with self._lock:
            self._devices = self._devices or find_devices()
            return self._devices


@dataclass(slots=True, eq=False, weakref_slot=True)
class World:
    """The state of one rank, whatever meshes it makes.

    Attributes:
        virtual: The communicator of all virtual ranks; None in a process of its own.
        progress: The unfinished operations of this rank.
        pool: Memory for results.
        locks: Inputs of operations under way.
        abandoned: Operations that ended by an error on this rank: MPI may still use their buffers.
        channels: Those to the other ranks of the job; None until it makes a mesh in an MPI world of
            more than one rank.
        node: The memory that it shares with the ranks of its node; None until it makes a mesh in
            an MPI world.
        threads_may_fail: Whether an exception in a thread leaves the job alone, because
            somebody else, such as a test runner, answers for it.
        hardware: The devices of this process, for all virtual ranks together.
    """

    virtual: Communicator | None = None
    progress: Progress = field(default_factory=Progress)
    pool: ArrayPool = field(
        default_factory=lambda: ArrayPool(least_bytes=POOLED_FROM_BYTES, limit_bytes=_POOLED_BYTES)
    )
    locks: InputLocks = field(default_factory=InputLocks)
    abandoned: list[object] = field(default_factory=list)
    channels: ControlChannels | None = None
    node: Node | None = None
    threads_may_fail: bool = False
    hardware: Hardware = field(default_factory=Hardware)

    def open_communicator(self, comm: Any, settings: Settings) -> Communicator:
        """Collective: return a new communicator of the ranks of `comm`, None for all ranks.

        Raises:
            LaunchError: If MPI sees one rank where the launcher started several.
            ClosedError: In a forked child of a process that has started MPI.
        """
        of_job = comm is None
        if comm is None:
            comm = self.virtual
        if isinstance(comm, Communicator):
            _check_place(comm, "comm")
        else:
            if comm is not None and not hasattr(comm, "Get_rank"):
                mine = isinstance(getattr(comm, "comm", None), Communicator)
                mine = mine or isinstance(getattr(comm, "communicator", None), Communicator)
                cure = "; a mesh has one as mesh.comm, a group as group.communicator" * mine
                raise MeshError(
                    "comm must be an intracommunicator of mpi4py, an mpimesh.comm.Communicator "
                    f"(of a class of your own, too), or None for all ranks, got {shown(comm)}{cure}"
                )
            if is_born_too_late():
                raise ClosedError(
                    "MPI was started in the parent process, and a forked child cannot use it; "
                    "start children before MPI, or by spawn"
                )
            # Before anything can go wrong: from here on, a failure of one rank ends the job.
            self._watch(settings)
            comm = _mpi_communicator(comm)
        if comm.kind == "mpi" and self.node is None:
            # What each rank does alone comes before all wait: MPI's own calls, which come after
            # that, take processor time while they wait. Imported late: virtual ranks do without.
            from mpimesh.comm.arena import Node
            from mpimesh.comm.routed import routed  # noqa: F401

            self.node = Node()
        # Making one waits inside the transport, where nothing else moves. A rank that is still in
        # an operation, and needs this rank for it, comes first.
        ledger, number, look = self.progress.ledger_of(comm), 0, None
        among = ledger.name
        steps = run_steps(comm.barrier)
        if of_job:
            among = "the job"
            self.progress.counts[among] = number = self.progress.counts.get(among, 0) + 1
        elif among:
            number, steps, look = announce(ledger, "DeviceMesh", steps)
        what = "the other ranks, to make a mesh"
        barrier = self.progress.stage(comm, steps)
        self.progress.wait(comm, barrier, what=what, number=number, among=among, look=look)
        with self.progress.watched(Call("DeviceMesh", WORLD), comm):
            duplicate = self._duplicate(comm, settings)
        counts = self.progress.counts
        counts["meshes"] = number = counts.get("meshes", 0) + 1
        mesh = ""
        if self.channels is not None:
            mesh = self.channels.register_mesh(duplicate)
            self.channels.processes.await_witness()
        open_ledger(self.progress, duplicate, settings, mesh or f"mesh {number}", "everyone")
        return duplicate

    def _duplicate(self, comm: Communicator, settings: Settings) -> Communicator:
        """Collective: return a new communicator of the same ranks."""
        if self.channels is not None:
            # Before what may hang: from here on the ranks can ask each other what they are doing.
            self.channels.connect(comm)
        duplicate = comm.split(0, comm.rank)
        if self.channels is not None and self.node is not None:
            self.channels.watch(self.node)
        if duplicate is None:
            raise RankError("a rank got no communicator for a group that it is in")
        if not isinstance(duplicate, Communicator):
            raise MeshError(
                f"split of {type(comm).__name__} must return a Communicator on a rank with a "
                f"color, got {shown(duplicate)} on rank {comm.rank}"
            )
        _check_place(duplicate, f"what split of {type(comm).__name__} returns")
        if (duplicate.rank, duplicate.size) != (comm.rank, comm.size):
            raise MeshError(
                f"split of {type(comm).__name__} with one color and key=rank must keep all ranks "
                f"in their order, but rank {comm.rank} of {comm.size} became rank "
                f"{duplicate.rank} of {duplicate.size}"
            )
        duplicate.engine = self.progress
        duplicate.belong_to(f"the mesh made at {site_text(call_site())}")
        if duplicate.kind != "mpi":
            return duplicate
        # Imported late: importing them starts MPI.
        from mpimesh.comm.mpi import MPICommunicator
        from mpimesh.comm.routed import routed

        if not isinstance(duplicate, MPICommunicator) or self.node is None:
            return duplicate
        return routed(duplicate, self.node, self.progress, settings.node_shared)

    @property
    def arena(self) -> Arena | None:
        """The memory that ranks of the node can reach; None if there is none."""
        return None if self.node is None else self.node.arena

    def shared_bytes(self, nbytes: int) -> HostArray:
        """Return bytes that other ranks of the node can reach, or ordinary ones. Local."""
        shared = None if self.arena is None else self.arena.empty(nbytes)
        return aligned_bytes(nbytes) if shared is None else shared

    def is_shared(self, x: HostArray) -> bool:
        """Tell whether other ranks of the node can reach an array where it lies. Local."""
        return self.arena is not None and x.flags.c_contiguous and self.arena.find(x) >= 0

    def trim(self) -> None:
        """Give the pages of shared memory back that are kept for arrays to come. Local."""
        if self.arena is not None:
            self.arena.trim()

    def size_of(self, comm: Any) -> int:
        """Return the number of ranks that :meth:`open_communicator` would give. Local."""
        if comm is None and self.virtual is not None:
            return self.virtual.size
        if comm is None:
            mpi = _load_mpi()
            return 1 if mpi is None else int(mpi.COMM_WORLD.size)
        return int(comm.size)

    def _watch(self, settings: Settings) -> None:
        with limited_start(settings.timeout_s):
            mpi = _load_mpi()
        if self.channels is None and mpi is not None and mpi.COMM_WORLD.size > 1:
            channels = ControlChannels()
            Watchdog(self.progress, channels, settings, lambda: self.threads_may_fail)
            self.channels = channels


# -- the state of a mesh ---------------------------------------------------------------------------


@dataclass(slots=True, eq=False, weakref_slot=True)
class MeshContext:
    """The state of a mesh that its groups work on: communicators, operations, memory.

    Attributes:
        world: What the rank has once.
        settings: Read from the environment when the mesh was made.
        communicator: The communicator of all ranks, those among them that the mesh leaves out.
        rank: This rank in `communicator`.
        open_work: Started and not yet resolved.
        forked: It is that of the parent process: here, in a forked child, nobody may use it.
        unended: Whether something may be under way that no rank waits for any more.
        before_close: Called, once, before the communicators of the mesh go: collective, and alike
            on all its ranks.
        traffic: What this rank has handed to the transport.
        tracer: Where events go.
        links: Speeds of bytes from rank to rank, the same on all ranks.
    """

    world: World
    settings: Settings
    communicator: Communicator
    rank: int = field(init=False)
    open_work: OpenWork = field(default_factory=OpenWork)
    forked: bool = False
    unended: bool = False
    before_close: list[Callable[[], None]] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    tracer: Tracer = NULL_TRACER
    links: LinkCosts = DEFAULT_LINK_COSTS

    def __post_init__(self) -> None:
        """Remember the mesh, so that a forked child lets go of it."""
        self.rank = self.communicator.rank
        _OF_THIS_PROCESS.add(self)

    @property
    def closed(self) -> bool:
        """No operation may start or be waited for any more."""
        return self.open_work.closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        self.open_work.closed = closed

    @property
    def progress(self) -> Progress:
        """The unfinished operations of this rank."""
        return self.world.progress

    @property
    def ledger(self) -> Ledger:
        """That of the communicator of all ranks."""
        return self.progress.ledger_of(self.communicator)

    @property
    def name(self) -> str:
        """What the ranks of the mesh call it, alike on all of them."""
        return self.ledger.mesh

    @property
    def unread(self) -> int:
        """Messages that this rank has sent, less those that it has begun to receive."""
        mesh, ledgers = self.name, self.progress.ledgers.values()
        return sum(one.unread for one in ledgers if one.mesh == mesh)

    # -- communicators -----------------------------------------------------------------------

    def adopt(self, communicator: Communicator, name: str) -> Ledger:
        """Take a communicator of the mesh in, and return its ledger.

        Args:
            communicator: The communicator; of one rank, it has no ledger that is looked for.
            name: What all its ranks call it; it keeps the name that it has.
        """
        ledger = self.progress.ledger_of(communicator)
        if ledger.name or communicator.size == 1:
            return ledger
        return open_ledger(self.progress, communicator, self.settings, self.name, name)

    def full_name(self, name: str) -> str:
        """Return what a communicator is called of which the mesh's name is `name`. Local."""
        return f"{self.name}/{name}"

    def free(self, communicator: Communicator, *, unended: bool | None = None) -> None:
        """Give a communicator of the mesh back. Collective over it.

        Args:
            communicator: The communicator.
            unended: Whether something may be under way on it; None for what is known of the mesh.
        """
        self.progress.ledgers.pop(id(communicator), None)
        if self.unended if unended is None else unended:
            communicator.abandon()
        else:
            communicator.free()

    def give_back(self) -> None:
        """Give the communicator of all ranks back, the last one. Collective over it."""
        name = self.name
        self.free(self.communicator)
        if self.world.channels is not None:
            self.world.channels.forget_mesh(name)

    def leave(self, error: BaseException) -> None:
        """Stop using the mesh on this rank alone, by an error that may yet be caught."""
        self.closed = True
        name, ledgers = self.name, self.progress.ledgers
        for key in [key for key, one in ledgers.items() if one.mesh == name]:
            del ledgers[key]
        if self.world.channels is not None:
            self.world.channels.leave_mesh(name, error)

    @property
    def why_closed(self) -> str:
        """Why nothing may start."""
        if self.forked:
            return (
                "its mesh is that of the parent process, and a forked child has no part in it; "
                "start children before MPI, or by spawn"
            )
        return "its mesh is closed"


def open_ledger(
    progress: Progress, communicator: Communicator, settings: Settings, mesh: str, name: str
) -> Ledger:
    """Open the ledger of a communicator, by which this rank's starts on it are counted. Local."""
    communicator.engine = progress
    ranks = tuple(getattr(communicator, "world_ranks", ()))
    mail = Mail() if settings.checks else None
    ledger = Ledger(communicator, mesh, f"{mesh}/{name}", ranks, mail)
    progress.ledgers[id(communicator)] = ledger
    return ledger


_OF_THIS_PROCESS: WeakSet[MeshContext] = WeakSet()


def _let_go() -> None:
    """Close all meshes in a forked child: a message from there would be taken for the parent's."""
    for context in list(_OF_THIS_PROCESS):
        context.closed = context.forked = True
        for work in context.open_work.all():
            # To test its request would take messages that are the parent's.
            why = f"rank {context.rank} cannot wait for {work._call}: {context.why_closed}"
            work._error, work._resolved = ClosedError(why), True


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_let_go)


# -- the communicator of a mesh --------------------------------------------------------------------


def _check_place(comm: Communicator, what: str) -> None:
    """Refuse a communicator whose rank and size are not those of a rank."""
    place = [getattr(comm, name, None) for name in ("rank", "size")]
    rank, size = (one if isinstance(one, int) else -1 for one in place)
    if not 0 <= rank < size:
        raise MeshError(
            f"{what} must have a whole number `size` from 1 on and a `rank` from 0 to size - 1, "
            f"but {type(comm).__name__} has rank {shown(place[0])} and size {shown(place[1])}: "
            "set both in its __init__"
        )


def _mpi_communicator(comm: Any) -> Communicator:
    """Return `comm` itself for the transport; nothing is made, and it stays the caller's."""
    mpi = _load_mpi()
    if mpi is None:
        return solo_communicator()
    # Imported late: importing it starts MPI.
    from mpimesh.comm.mpi import MPICommunicator

    if comm is None:
        comm = mpi.COMM_WORLD
        check_world(Launch.detect(), comm.size, mpi.get_vendor()[0])
    if not isinstance(comm, mpi.Intracomm):
        raise RankError(
            f"comm must be an mpi4py intracommunicator or an mpimesh communicator, got {comm!r}"
        )
    if comm == mpi.COMM_NULL:
        raise RankError(
            "comm is MPI.COMM_NULL: this rank was left out when the communicator was made, or it "
            "was freed; make the mesh on the ranks that have one"
        )
    return MPICommunicator(comm)


def _load_mpi() -> Any:
    """Return `mpi4py.MPI`, or None where no MPI library is installed and none was expected."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        check_world(Launch.detect(), 1, "", reason=str(error))
        return None
    return MPI


def _circle(worlds: Sequence[World]) -> str:
    """Return in words which virtual ranks wait for each other; empty if that is not known."""
    waits = {rank: one.progress.current for rank, one in enumerate(worlds)}
    states = {
        rank: state
        for rank, wait in waits.items()
        if wait is not None and (state := Waiting.of(wait, worlds[rank].progress)) is not None
    }
    cycle = find_deadlock(states, states)
    return deadlock_text(states, cycle) if cycle else ""


def solo_communicator() -> Communicator:
    """Return a communicator of this rank alone, which needs no MPI."""
    return virtual_communicators(VirtualWorld(1))[0]


# One per process, because MPI is; made on first use, so that importing starts nothing.
_of_process = World()
_of_thread = threading.local()


def current_world() -> World:
    """Return the world of the calling rank. Local."""
    world = getattr(_of_thread, "world", None)
    return world if isinstance(world, World) else _of_process


def world_of(comm: Any) -> World:
    """Return the world of the calling rank, which is to make a mesh on `comm`. Local.

    The ranks of a communicator of the user's own may be threads of one process: then each has a
    world of its own.
    """
    world = current_world()
    own = isinstance(comm, Communicator) and comm.kind != "mpi"
    if own and world is _of_process and threading.current_thread() is not threading.main_thread():
        world = _of_thread.world = World()
    return world


def run_virtual(
    size: int,
    function: Callable[..., R],
    *arguments: Any,
    rendezvous: bool = False,
    **options: Any,
) -> list[R]:
    """Run `function` on `size` virtual ranks: threads of this process, no MPI needed.

    A :class:`~mpimesh.DeviceMesh` made inside sees a world of `size` ranks, and
    everything else works as under mpiexec. Where MPI would hang for ever because
    all ranks wait for each other, this raises.

    Args:
        size: How many ranks.
        function: Called on every rank.
        arguments: Its arguments.
        rendezvous: Let every send wait for its receive, as MPI may: shows programs
            that lean on MPI's buffering.
        options: Its keyword arguments.

    Returns:
        What `function` returned on rank 0, 1, ...

    Raises:
        DeadlockError: If all ranks wait and none can go on; says what each waits for.
        CollectiveTimeoutError: If a rank waits longer than ``MPIMESH_TIMEOUT_S``; says what each
            does. A rank that does not wait cannot be ended, and goes on as a daemon thread.
        Exception: The first exception of any rank, with the rank noted.
    """
    size = as_int(size, "size", RankError, least=1)
    if size > MOST_RANKS:
        raise RankError(
            f"size must be at most {MOST_RANKS}, the most ranks that share memory, got {size}"
        )
    as_function(function, "function", RankError)
    rendezvous = as_flag(rendezvous, "rendezvous", RankError)
    settings = Settings.from_environment()
    world = VirtualWorld(size, rendezvous=rendezvous, circle=lambda: _circle(worlds))
    communicators = virtual_communicators(world)
    results: list[Any] = [None] * size

    hardware = Hardware()
    worlds = [World(communicator, hardware=hardware) for communicator in communicators]
    for one, engine in zip(worlds, world.engines, strict=True):
        one.progress.core = engine

    def main(rank: int) -> None:
        _of_thread.world = worlds[rank]
        world.enter(rank)
        try:
            results[rank] = function(*arguments, **options)
        except BaseException as error:
            if world.failure is None:
                for other in worlds:
                    kept = other.progress.kept  # once: that rank goes on
                    if kept is not None:
                        put_before(error, kept.error)
            world.fail(rank, error)
        finally:
            world.leave(rank)

    if settings.record_dir:
        from mpimesh.runtime.flight import Recorder  # late: most jobs have none

        for rank, one in enumerate(worlds):
            one.progress.recorder = Recorder(settings.record_dir, rank, size)
    threads = [
        threading.Thread(target=main, args=(rank,), name=f"virtual rank {rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    ranks = [(one.progress, thread) for one, thread in zip(worlds, threads, strict=True)]
    try:
        join_virtual_ranks(world, ranks, settings.timeout_s)
    except BaseException as interrupt:  # such as Ctrl-C, which Python gives to the main thread only
        world.fail(-1, interrupt)
        raise
    for recorder in [one.progress.recorder for one in worlds if one.progress.recorder]:
        recorder.finish(failed=world.failure is not None)
    if world.failure is not None:
        rank, error = world.failure
        if rank >= 0 and not (isinstance(error, MpimeshError) and error.agreed):
            error.add_note(f"raised on virtual rank {rank} of {size}")
        raise error
    return results


def exit_all(exit_code: int) -> NoReturn:
    """End all ranks with `exit_code`, for example to ask the batch system for a requeue.

    Collective over all ranks of the job. An aborted job loses its exit code under some
    launchers (137 under `srun` with MPICH): here the ranks wait for each other, finalize MPI,
    and end with the code that was asked for. Exit functions (:mod:`atexit`) run and the
    standard streams are written out, but nothing is unwound: close meshes and files before.

    On virtual ranks, and in a forked child, which is no rank, it raises SystemExit.

    Raises:
        MeshError: On every rank, if `exit_code` is no whole number from 0 to 255, of which an
            exit code consists. It is a `ValueError`.
    """
    try:
        exit_code = as_int(exit_code, "exit_all: exit_code", least=0)
        if exit_code > 255:
            raise MeshError(f"exit_all: exit_code must be at most 255, got {exit_code}")
    except MeshError as error:
        raise on_all_ranks(error) from None
    if current_world().virtual is not None:
        raise SystemExit(exit_code)
    end_together(exit_code)
