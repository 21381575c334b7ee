"""The live part of a mesh: its groups and devices, made, remade and ended on all ranks together."""

from __future__ import annotations

import os
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from mpimesh.arguments import shown
from mpimesh.caches import Cache
from mpimesh.core.call import Ledger
from mpimesh.core.dispatch import Dispatch
from mpimesh.errors import (
    ClosedError,
    GroupError,
    MeshError,
    MismatchError,
    MpimeshError,
    RankError,
    SharedGpuWarning,
    TransportError,
    WorldSizeError,
    on_all_ranks,
)
from mpimesh.mesh import (
    WORLD,
    Device,
    DeviceTable,
    DimsLike,
    GroupSpec,
    Mesh,
    MeshTopology,
    pick_device,
    shared_gpus,
    sharing_text,
)
from mpimesh.mesh.dims import parse_dims
from mpimesh.mesh.probe import cupy_in_use, make_current
from mpimesh.runtime.agreement import agree, agree_alike
from mpimesh.runtime.call import Call, call_site, site_line
from mpimesh.runtime.group import Backend, ProcessGroup
from mpimesh.runtime.launch import Launch
from mpimesh.runtime.live_groups import LiveGroups, refuse_unfinished
from mpimesh.runtime.work import OpenWork
from mpimesh.runtime.world import MeshContext, world_of
from mpimesh.settings import Settings, unknown_variables
from mpimesh.trace import Tracer

__all__ = ["MeshArgument", "MeshCore"]

MeshArgument = DimsLike | Mesh | MeshTopology
"""A mesh as users ask for it."""

_LEAVE_TOGETHER_S = 2.0
_MOST_LAYOUTS = 1024


class MeshCore:
    """A mesh of ranks that can talk to each other, and what it has on this rank.

    A :class:`~mpimesh.DeviceMesh` has one; what mpimesh itself does on a mesh goes by it.

    Attributes:
        context: What the groups share; :meth:`set_comm` makes another.
        mesh: The mesh as a value, equal on all ranks.
        topology: The topology that it was made or reshaped from, if it was.
        groups: Its groups; None on a rank that the mesh leaves out.
        devices: The device of each rank.
        layout_cache: Layouts, and ways between them, of the mesh as it is.
        moves: What calls of ``redistribute`` do, by what the array is and the text.
        dispatch: What was decided for calls of functions of its split arrays.
        closed: Whether it was closed.
        compared: How many calls of functions of split arrays were compared on it.
    """

    mesh: Mesh
    topology: MeshTopology | None
    layout_cache: Cache[Hashable, Any]
    moves: Cache[Hashable, Any]
    compared = 0

    def __init__(self, dims: MeshArgument, comm: Any, name: str, tracer: Tracer | None) -> None:
        if tracer is not None and not isinstance(tracer, Tracer):
            raise MeshError(f"tracer must be a Tracer or None, got {shown(tracer)}")
        world = world_of(comm)
        settings = Settings.from_environment()
        control, arena = world.open_communicator(comm, settings), world.arena
        self.context = context = MeshContext(world, settings, control)
        self.dispatch = Dispatch(not settings.checks, None if arena is None else arena.pool)
        if tracer is not None:
            tracer.join(control.rank)
            context.tracer = tracer
        self.groups: LiveGroups | None = None

        def asked() -> tuple[Mesh, MeshTopology | None]:
            if control.rank == 0:
                for text in unknown_variables():
                    _warn_once(text, RuntimeWarning)  # where that is an error, all ranks raise
            return _as_mesh(dims, control.size, name)

        with context.progress.watched(Call("DeviceMesh", WORLD), control):
            try:
                mesh, topology = agree_alike(
                    context,
                    "DeviceMesh",
                    asked,
                    lambda made: f"{made[0]}, {made[1]}, {settings}",
                )
                # Before any group: what moves device memory asks which device is current.
                self.devices = RankDevices(context)
            except MpimeshError:
                context.give_back()
                raise
            self._settle(mesh, topology)
            self.groups = self._make_groups()
        self.closed = False

    # -- look-ups: local -----------------------------------------------------------------------

    def refuse_closed(self, action: str) -> None:
        """Refuse `action` on a mesh that is closed, or in a forked child.

        Raises:
            ClosedError: If it is.
        """
        if self.closed or self.context.forked:
            why = self.context.why_closed if self.context.forked else "it is closed"
            raise ClosedError(f"rank {self.context.rank} cannot {action} this mesh: {why}")

    def live(self, action: str) -> LiveGroups:
        """Return the groups for `action`.

        Raises:
            ClosedError: If the mesh is closed.
            RankError: If this rank is not in the mesh.
        """
        self.refuse_closed(action)
        if self.groups is None:
            raise RankError(
                f"rank {self.context.rank} cannot {action} mesh {self.mesh.dims_text}: "
                "it is not one of its ranks"
            )
        return self.groups

    @property
    def everyone(self) -> ProcessGroup:
        """The group of all ranks of `comm`, in their order, also those that the mesh leaves out."""
        self.refuse_closed("use a group of")
        context, control = self.context, self.context.communicator
        backend: Backend = "mpi" if control.kind == "mpi" else "virtual"
        return ProcessGroup("everyone", range(control.size), context.ledger, context, backend)

    # -- making and changing: collective -------------------------------------------------------

    def reshape(self, dims: MeshArgument) -> None:
        """Arrange the same ranks in other dims. See :meth:`DeviceMesh.reshape`."""
        groups = self.live("reshape")
        groups.settle("reshape")
        mesh, topology = agree_alike(
            groups,
            "reshape",
            lambda: self._fitting(groups, dims),
            lambda made: f"{made[0]}, {made[1]}",
        )
        self._refuse_unfinished("reshape", "reshaped")
        fresh = groups.rebuild(mesh)
        self._settle(mesh, topology)
        self._add_own_groups(fresh)
        groups.free(kept_by=fresh)
        self.groups = fresh

    def set_comm(self, comm: Any) -> None:
        """Move to another communicator of the same ranks. See :meth:`DeviceMesh.set_comm`."""
        groups = self.live("set the communicator of")
        groups.settle("set_comm")
        self._refuse_unfinished("set_comm", "moved")
        context = self.context
        control = context.world.open_communicator(comm, context.settings)
        ranks = agree(context, Call("set_comm", WORLD), [control.rank, control.size])
        size = context.communicator.size
        if ranks != [[rank, size] for rank in range(size)]:
            control.free()
            raise on_all_ranks(
                RankError(
                    f"the mesh's ranks 0 to {size - 1} must be the same in the new "
                    f"communicator, but are there (rank, size) {ranks}"
                )
            )
        self.context = replace(
            context,
            communicator=control,
            open_work=OpenWork(),
            unended=False,
        )
        fresh = self._make_groups()
        if fresh is not None:
            fresh.add_custom_of(groups)
        context.closed = True
        groups.free()
        context.give_back()
        self.groups = fresh

    def measure_links(self) -> None:
        """Measure the speeds from rank to rank. See :meth:`DeviceMesh.measure_links`."""
        from mpimesh.runtime.link_speeds import measured_links  # late: few meshes are measured

        self.refuse_closed("measure the links of")
        context = self.context
        if context.settings.checks:
            agree(context, Call("measure_links", WORLD))
        context.links = measured_links(self.everyone)
        self.layout_cache.clear()  # among it are plans
        self.moves.clear()

    def _settle(self, mesh: Mesh, topology: MeshTopology | None) -> None:
        """Take over another mesh of the ranks."""
        self.mesh = mesh
        self.layout_cache = Cache(_MOST_LAYOUTS)
        self.moves = Cache(_MOST_LAYOUTS)
        self.topology = topology

    def _fitting(self, groups: LiveGroups, dims: MeshArgument) -> tuple[Mesh, MeshTopology | None]:
        """Return the mesh that `dims` describe, if this one can become it."""
        size = self.context.communicator.size
        mesh, topology = _as_mesh(dims, size, self.mesh.name)
        names = [*mesh.dim_names]
        if topology is not None:
            names += [name for name, _ in topology.group_plan(size)]
        taken = sorted(set(names) & set(groups.custom))
        if not np.array_equal(np.sort(mesh.ids), np.sort(self.mesh.ids)) or taken:
            raise GroupError(
                f"reshape keeps the ranks and the added groups: ranks {mesh.ids[:16].tolist()} "
                f"against {self.mesh.ids[:16].tolist()}, names in use {taken}"
            )
        return mesh, topology

    def _make_groups(self) -> LiveGroups | None:
        """Collective: make the groups of the world, the dims and the topology."""
        context, control, mesh = self.context, self.context.communicator, self.mesh
        place = mesh.offset_of(control.rank) if mesh.contains_rank(control.rank) else None
        members = control.split(None if place is None else 0, place or 0)
        if members is None:
            return None
        groups = LiveGroups(mesh, members, context)
        self._add_own_groups(groups)
        channels = context.world.channels
        if channels is not None:
            channels.count_by(
                context.name, lambda: {} if self.groups is None else self.groups.started()
            )
        return groups

    def _add_own_groups(self, groups: LiveGroups) -> None:
        for dim in self.mesh.dim_names:
            groups.add_dims(dim, (dim,))
        if self.topology is not None:
            for name, ranks in self.topology.group_plan(self.context.communicator.size):
                groups.add_ranks(GroupSpec(name, ranks))

    # -- the end -------------------------------------------------------------------------------

    def close(self, *, leaving: bool = False) -> None:
        """Give all communicators back. Collective; see :meth:`DeviceMesh.close`.

        Args:
            leaving: Whether all leave by an error, after which messages may not be received.
        """
        context = self.context
        if self.closed or context.forked:
            return
        try:
            self._refuse_unfinished("close", "closed", leaving=leaving)
        except MismatchError as error:
            if not error.agreed:  # the others may be anywhere, and are not to wait for this rank
                self.leave(error)
            raise
        self.closed = context.closed = True
        self.dispatch.close()
        with context.progress.watched(Call("close", WORLD), context.communicator):
            if self.groups is not None:
                self.groups.free()
            context.give_back()

    def leave(self, error: BaseException) -> None:
        """Close the mesh after an error; one that is this rank's alone only stops using it.

        Closing is collective: with the other ranks elsewhere, it would wait for them for ever.
        """
        # The buffers of what is let go of stay: the transport may still write into them.
        for work in self.context.open_work.all():
            work._fail(ClosedError(f"{work._call}: its mesh ended by an error before"))
        if isinstance(error, MpimeshError) and error.agreed and self._all_here():
            self.close(leaving=True)
            return
        self.closed = True
        self.dispatch.close()
        self.context.leave(error)

    def _all_here(self) -> bool:
        """Tell whether all ranks leave the mesh by an error that one of its groups agrees on."""
        control = self.context.communicator
        request = control.barrier()
        what = Call("close after an error", WORLD)
        try:
            return self.context.progress.wait(
                control, request, what=what, timeout_s=_LEAVE_TOGETHER_S
            )
        except TransportError:
            return False

    def _refuse_unfinished(self, action: str, done: str, *, leaving: bool = False) -> None:
        """Raise on all ranks if any has open work, or messages that nobody has received.

        Args:
            action: What was asked for.
            done: The same, as something done.
            leaving: Whether all leave by an error, after which messages may not be received.
        """
        context, control, call = self.context, self.context.communicator, Call(action, WORLD)
        while context.before_close and not leaving:
            context.before_close.pop()()
        everyone, mails, ends = range(control.size), list[Any](), list[Ledger]()
        # A rank that goes on in a group while others stop gets an answer.
        if self.groups is not None and context.settings.checks:
            agree(self.groups, call)
            mails += self.groups.mails()
        elif self.groups is not None and not leaving:
            ends = self.groups.ledgers()
        if context.settings.checks:
            mails.append((tuple(everyone), context.ledger.name, context.ledger.mail))
        context.unended = refuse_unfinished(
            context,
            call,
            f"the mesh cannot be {done}",
            everyone,
            context.open_work.unresolved(),
            unended=context.unended,
            unread=context.unread,
            mails=[] if leaving else mails,
            ends=ends,
        )


class RankDevices:
    """The device of each rank, exchanged once when the mesh is made. Making it is collective.

    Attributes:
        table: The devices, in rank order.
        local_rank: This rank among those of its node: as the launcher says, or counted.
    """

    def __init__(self, context: MeshContext) -> None:
        self._world, self._rank = context.world, context.rank
        launch = Launch.detect()
        host = launch.node or os.uname().nodename
        if self._world.virtual is not None:
            # All are of this process, and know the same.
            self.local_rank, size = self._rank, context.communicator.size
            self.table = _table_of_threads(self._world.hardware.devices(), host, size)
        else:
            self._exchange(context, host, launch.local_rank)
        if cupy_in_use():
            make_current(self.mine)

    def _exchange(self, context: MeshContext, host: str, said: int | None) -> None:
        """Learn the devices of all ranks: in one exchange if their launcher counts those of a node.

        Args:
            context: The ranks.
            host: This rank's node.
            said: Its local rank in the launcher's word; None for none.
        """
        call, devices = Call("DeviceMesh", WORLD), self._world.hardware.devices()
        record = "" if said is None else pick_device(devices, said).to_json()
        rows = agree(context, call, [host, said, record, cupy_in_use()])
        self.local_rank = _local_rank(rows, self._rank)
        if not all(record for _, _, record, _ in rows):
            record = pick_device(devices, self.local_rank).to_json()
            rows = agree(context, call, [host, said, record, cupy_in_use()])
        # Those of a node without GPUs have the same one.
        read = {record: Device.from_json(record) for _, _, record, _ in rows}
        hosts = tuple(host for host, *_ in rows)
        self.table = DeviceTable(tuple(read[record] for _, _, record, _ in rows), hosts)
        shared = shared_gpus(self.table)
        users = [one for one in shared if sum(rows[rank][3] for rank in one.ranks) > 1]
        if users and self._rank == 0:
            _warn_once(sharing_text(users), SharedGpuWarning)

    @property
    def mine(self) -> Device:
        """The device of this rank."""
        return self.table[self._rank]

    def use(self) -> Device:
        """Make this rank's GPU current in CuPy. See :meth:`DeviceMesh.use_device`."""
        device = self.mine
        if device.backend.is_gpu:
            make_current(device)
            if self._world.virtual is None:
                # The first of those who share it warns: the others may not come here at all.
                mine = [one for one in shared_gpus(self.table) if one.ranks[0] == self._rank]
                if mine:
                    _warn_once(sharing_text(mine), SharedGpuWarning)
        return device


_WARNED = set[str]()


def _warn_once(text: str, kind: type[Warning]) -> None:
    """Warn, with the line of the call, once in a process."""
    if text not in _WARNED:
        _WARNED.add(text)
        filename, line = site_line(call_site())
        warnings.warn_explicit(text, kind, filename, line)


@lru_cache(maxsize=4)
def _table_of_threads(devices: tuple[Device, ...], host: str, size: int) -> DeviceTable:
    """Return the devices of virtual ranks, made once for all of them."""
    return DeviceTable(tuple(pick_device(devices, rank) for rank in range(size)), (host,) * size)


def _local_rank(facts: Sequence[Sequence[Any]], rank: int) -> int:
    """Return the local rank of `rank`, from the host and the launcher's word of every rank."""
    host, said, *_ = facts[rank]
    if said is not None:
        return int(said)
    return [one for one, (other, *_) in enumerate(facts) if other == host].index(rank)


# -- the mesh that is asked for ------------------------------------------------------------------


def _as_mesh(dims: MeshArgument, world_size: int, name: str) -> tuple[Mesh, MeshTopology | None]:
    """Return the mesh that `dims` describe in a world of `world_size` ranks.

    Raises:
        WorldSizeError: If they do not fit; for one rank it says how to start more.
    """
    try:
        return _read_mesh(dims, world_size, name)
    except WorldSizeError as error:
        if world_size > 1:
            raise
        # Most often the program was started as any other Python program.
        command = f"mpiexec -n {_ranks_for(dims)} python program.py"
        raise WorldSizeError(f"{error}; for more ranks: {command}") from None


def _ranks_for(dims: MeshArgument) -> int:
    """Return a number of ranks that `dims` fit; 4 where any does, or none can be told."""
    if isinstance(dims, Mesh):
        return dims.size
    try:
        sizes = [size for _, size in parse_dims(dims)]  # type: ignore[arg-type]
    except MeshError:
        return 4
    fixed = prod(size for size in sizes if size != -1)
    return fixed * -(-4 // fixed) if -1 in sizes else fixed


def _read_mesh(dims: MeshArgument, world_size: int, name: str) -> tuple[Mesh, MeshTopology | None]:
    if hasattr(dims, "Get_rank"):
        raise MeshError(
            f"the dims of a mesh come first, and {type(dims).__name__} is a communicator: "
            'DeviceMesh("dp=-1", comm)'
        )
    topology = dims if isinstance(dims, MeshTopology) else None
    if isinstance(dims, MeshTopology):
        mesh = dims.to_mesh(world_size)
    elif isinstance(dims, Mesh):
        dims.check_world(world_size, partial=True)
        mesh = dims
    else:
        mesh = Mesh(dims, world_size=world_size, name=name)
    if mesh.contains_dim(WORLD):
        raise GroupError(f"no dim may be called {WORLD!r}: that is the group of all ranks")
    return mesh, topology
