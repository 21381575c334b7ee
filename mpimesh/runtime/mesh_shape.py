"""The shape of a live mesh: its dims and the groups that follow from them, and how they change."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from math import prod
from typing import Any

from mpimesh.comm import Communicator
from mpimesh.errors import (
    GroupError,
    MeshError,
    RankError,
    WorldSizeError,
    on_all_ranks,
)
from mpimesh.mesh import WORLD, DimsLike, GroupSpec, Mesh, MeshTopology
from mpimesh.mesh.dims import parse_dims
from mpimesh.runtime.agreement import agree, agreed, exchange
from mpimesh.runtime.call import Call
from mpimesh.runtime.ending import counts, refuse_unreceived, refuse_unresolved
from mpimesh.runtime.live_groups import LiveGroups
from mpimesh.runtime.mesh_devices import MeshDevices
from mpimesh.runtime.work import OpenWork

__all__ = ["MeshShape", "as_mesh"]


class MeshShape(MeshDevices):
    """Makes and remakes the groups of a mesh, always on all its ranks together.

    Attributes:
        mesh: The mesh as a value, with this rank as its local one.
        value: The same without, so that it is equal on all ranks.
        layout_cache: Layouts, and ways between them, of the mesh as it is.
    """

    mesh: Mesh
    value: Mesh
    layout_cache: dict[Hashable, Any]

    def reshape(self, dims: DimsLike | Mesh | MeshTopology) -> None:
        """Arrange the same ranks in other dims.

        Collective over the mesh. The groups of the old dims go and those of the new ones come;
        groups made by :meth:`add_group` stay. If the new dims do not fit, nothing changes.

        Raises:
            WorldSizeError: On every rank, if `dims` do not fit the ranks of the mesh.
            UnresolvedError: On every rank, if any has results that are not resolved.
            GroupError: On every rank, if a group added by the user has the name of a new dim or
                of a group of the new topology.
            MismatchError: On every rank, if the ranks ask for different dims.
        """
        groups = self._live("reshape")
        groups.settle("reshape")
        mesh, topology = agreed(
            self._progress,
            groups.communicator,
            "reshape",
            lambda: self._fitting(groups, dims),
            lambda made: f"{made[0]}, {made[1]}",
        )
        self._refuse_unresolved("reshape", "reshaped")
        fresh = groups.rebuild(mesh)
        self._settle(mesh, topology)
        self._add_own_groups(fresh)
        groups.free(kept_by=fresh)
        self._groups = fresh

    def set_comm(self, comm: Any) -> None:
        """Move the mesh, with all its groups, to another communicator of the same ranks.

        Collective over both. Take the groups anew afterwards: the old ones are closed.

        Raises:
            RankError: On every rank, if the size or any rank differs.
            UnresolvedError: On every rank, if any has results that are not resolved.
        """
        groups = self._live("set the communicator of")
        groups.settle("set_comm")
        self._refuse_unresolved("set_comm", "moved")
        context = self._context
        control = context.world.open_communicator(comm, context.settings)
        ranks = exchange(
            self._progress,
            self._control,
            [control.rank, control.size],
            what=Call("set_comm", WORLD),
        )
        if ranks != [[rank, self._control.size] for rank in range(self._control.size)]:
            control.free()
            raise on_all_ranks(
                RankError(
                    f"the mesh's ranks 0 to {self._control.size - 1} must be the same in the new "
                    f"communicator, but are there (rank, size) {ranks}"
                )
            )
        self._context = replace(context, open_work=OpenWork(), unended=False, unread=0)
        fresh = self._make_groups(control)
        if fresh is not None:
            fresh.add_custom_of(groups)
        context.closed = True
        groups.free()
        context.give_back(self._control)
        self._control, self._groups = control, fresh

    def _settle(self, mesh: Mesh, topology: MeshTopology | None) -> None:
        """Take over the fields that the queries read."""
        rank = self._control.rank
        local = [rank] if mesh.contains_rank(rank) else []
        given = mesh.global_names
        names = [given[mesh.offset_of(one)] if given else self._device_name(one) for one in local]
        self.mesh = mesh.with_local(local, names)
        self.value = mesh.with_local(())
        self.layout_cache = {}
        self._topology = topology
        self.name = mesh.name
        self.dims = mesh.dims
        self.ids = mesh.ids
        self.local_ids = self.mesh.local_ids
        self.local_names = self.mesh.local_names
        self.global_names = self.mesh.global_names

    def to_string(self) -> str:
        """Write the text form of :attr:`mesh`, as :meth:`Mesh.to_string` does. Local."""
        return self.mesh.to_string()

    def as_proto(self) -> dict[str, Any]:
        """Write the fields of :attr:`mesh` as a record, as :meth:`Mesh.as_proto` does. Local."""
        return self.mesh.as_proto()

    def _fitting(
        self, groups: LiveGroups, dims: DimsLike | Mesh | MeshTopology
    ) -> tuple[Mesh, MeshTopology | None]:
        """Return the mesh that `dims` describe, if this one can become it."""
        mesh, topology = as_mesh(dims, self._control.size, self.name)
        names = [*mesh.dim_names]
        if topology is not None:
            names += [name for name, _ in topology.group_plan(self._control.size)]
        taken = sorted(set(names) & set(groups.custom))
        if set(mesh.ids) != set(self.ids) or taken:
            raise GroupError(
                f"reshape keeps the ranks and the added groups: ranks {list(mesh.ids)[:16]} "
                f"against {list(self.ids)[:16]}, names in use {taken}"
            )
        return mesh, topology

    def _make_groups(self, control: Communicator) -> LiveGroups | None:
        """Collective: make the groups of the world, the dims and the topology."""
        context, counts = self._context, self._progress.counts
        counts["meshes"] = counts.get("meshes", 0) + 1
        context.name = control.family or f"mesh {counts['meshes']}"
        context.adopt(control, "everyone")
        place = self.offset_of(control.rank) if self.contains_rank(control.rank) else None
        members = control.split(None if place is None else 0, place or 0)
        if members is None:
            return None
        groups = LiveGroups(self.mesh, members, self._context)
        self._add_own_groups(groups)
        guard = self._context.world.channels
        if guard is not None:
            guard.count_by(control, lambda: {} if self._groups is None else self._groups.started())
        return groups

    def _add_own_groups(self, groups: LiveGroups) -> None:
        for dim in self.dim_names:
            groups.add_dims(dim, (dim,))
        if self._topology is not None:
            for name, ranks in self._topology.group_plan(self._control.size):
                groups.add_ranks(GroupSpec(name, ranks, groups.backend))

    def _refuse_unresolved(self, action: str, done: str, *, leaving: bool = False) -> None:
        """Raise on all ranks if any has open operations: `action` is not `done` then.

        Args:
            action: What was asked for.
            done: The same, as something done.
            leaving: Whether all leave by an error, after which messages may not be received.
        """
        call = Call(action, WORLD)
        if self._context.settings.checks and self._groups is not None:
            # Found here, a rank that goes on while the others stop gets an answer.
            agree(self._progress, self._groups.communicator, call)
        mine = [str(work._call) for work in self._context.open_work.all()]
        told = self._everyone([mine, self._context.unended, self._context.unread], call)
        # On all ranks alike: what one keeps, the others must not use for something else.
        self._context.unended = any(unended for _, unended, _ in told)
        everyone = [texts for texts, _, _ in told]
        if not any(everyone):
            # A message that nobody has received would be the first of another mesh.
            self._context.unended |= sum(unread for _, _, unread in told) != 0
            if not leaving:
                self._refuse_unreceived(call, done)
            return
        refuse_unresolved(f"the mesh cannot be {done}", everyone)

    def _refuse_unreceived(self, call: Call, done: str) -> None:
        """With checks on, raise on all ranks if a message was sent that nobody has received."""
        if not self._context.settings.checks:
            return
        mails = [] if self._groups is None else self._groups.mails()
        mails.append((tuple(range(self._control.size)), self._control.name, self._control.mail))
        rank = self._control.rank
        refuse_unreceived(f"the mesh cannot be {done}", self._everyone(counts(mails, rank), call))


def as_mesh(
    dims: DimsLike | Mesh | MeshTopology, world_size: int, name: str
) -> tuple[Mesh, MeshTopology | None]:
    """Return the mesh that `dims` describe in a world of `world_size` ranks.

    Raises:
        WorldSizeError: If they do not fit; for one rank it says how to start more.
    """
    try:
        return _as_mesh(dims, world_size, name)
    except WorldSizeError as error:
        if world_size > 1:
            raise
        # Most often the program was started as any other Python program.
        command = f"mpiexec -n {_ranks_for(dims)} python program.py"
        raise WorldSizeError(f"{error}; for more ranks: {command}") from None


def _ranks_for(dims: DimsLike | Mesh | MeshTopology) -> int:
    """Return a number of ranks that `dims` fit; 4 where any does, or none can be told."""
    if isinstance(dims, Mesh):
        return dims.size
    try:
        sizes = [size for _, size in parse_dims(dims)]  # type: ignore[arg-type]
    except MeshError:
        return 4
    fixed = prod(size for size in sizes if size != -1)
    return fixed * -(-4 // fixed) if -1 in sizes else fixed


def _as_mesh(
    dims: DimsLike | Mesh | MeshTopology, world_size: int, name: str
) -> tuple[Mesh, MeshTopology | None]:
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
        mesh = dims.with_local(())  # which ids are local differs from rank to rank
    else:
        mesh = Mesh(dims, world_size=world_size, name=name)
    if mesh.contains_dim(WORLD):
        raise GroupError(f"no dim may be called {WORLD!r}: that is the group of all ranks")
    return mesh, topology
