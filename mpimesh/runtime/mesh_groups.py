"""The groups of a live mesh: finding them by name, and making more."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from mpimesh.arguments import as_flag, shown
from mpimesh.errors import ClosedError, GroupError, RankError, UnknownNameError, on_all_ranks
from mpimesh.mesh import WORLD, DeviceQueries, GroupBackend, GroupSpec, NamesLike
from mpimesh.mesh.dims import parse_names
from mpimesh.runtime.agreement import agreed, exchange
from mpimesh.runtime.context import MeshContext
from mpimesh.runtime.group import ProcessGroup
from mpimesh.runtime.live_groups import LiveGroups

__all__ = ["MeshGroups"]

_FORCED = (GroupBackend.MPI, GroupBackend.NODE_SHARED, GroupBackend.NCCL)


class MeshGroups(DeviceQueries):
    """The groups of a mesh: their names, makers and queries."""

    _closed: bool
    _context: MeshContext
    _groups: LiveGroups | None

    def group(self, name: NamesLike = WORLD) -> ProcessGroup:
        """Return a group: ``"world"``, a dim's name, or one that was added. Local.

        Raises:
            UnknownNameError: If there is no such group; says which there are.
            ClosedError: If the mesh is closed.
            RankError: If this rank is not in the mesh.
        """
        groups = self._live("use a group of")
        if not isinstance(name, str | Sequence):
            raise UnknownNameError(f"a group is asked for by its name, a text; got {shown(name)}")
        key = name if isinstance(name, str) else ",".join(parse_names(name))
        found = groups.get(key)
        if found is None:
            raise UnknownNameError(
                f"Group {key!r} not found; there are {', '.join(groups.names)}; "
                "make more with add_group, which is collective"
            )
        return found

    def get_group(self, name: str) -> ProcessGroup | None:
        """Return the group called `name`, None if there is none. Local."""
        return None if self._groups is None else self._groups.get(name)

    @property
    def group_names(self) -> list[str]:
        """Names of all groups, in the order of their making, the same on every rank."""
        return [] if self._groups is None else self._groups.names

    def in_group(self, name: str) -> bool:
        """Tell whether this rank is in a group; False if there is none of that name."""
        group = self.get_group(name)
        return group is not None and group.rank is not None

    def group_rank(self, name: str) -> int | None:
        """Return this rank's place in a group; None for a non-member or an unknown group."""
        group = self.get_group(name)
        return None if group is None else group.rank

    def add_group(
        self,
        name: str,
        ranks: Sequence[int] | None = None,
        *,
        dims: NamesLike | None = None,
        backend: GroupBackend | str | None = None,
        apart: bool = False,
    ) -> ProcessGroup:
        """Make a group of listed ranks, or one for each line of ranks along several dims.

        Collective over the mesh, with the same arguments on all ranks, members or not.

        Args:
            name: A new name.
            ranks: The members, counted in `comm`; their order is the group's.
            dims: Instead of `ranks`: the group that each rank is in along these dims.
            backend: Who is to move the bytes, and nobody else: ``"mpi"``, ``"node_shared"`` (host
                memory; the ranks must share a node) or ``"nccl"`` (device memory; what lies on
                the host goes as it would without). If None, the fastest of all that the ranks
                have, for each operation and size; :meth:`ProcessGroup.algorithms` tells.
            apart: Give listed ranks an order of operations of their own, even if another group
                has the same ranks: for collectives that may be under way when those ranks meet
                otherwise. It takes a communicator more.

        Returns:
            The group. On a rank that is no member, only its description can be used.

        Raises:
            GroupError: On every rank, if the name is taken, `ranks` has none or one twice, or the
                backend is one that these ranks do not have; the message says why.
            RankError: On every rank, if a rank is not in the mesh.
            MismatchError: On every rank, if the arguments differ.
        """
        groups = self._live("add a group to")
        groups.settle("add_group")
        found = agreed(
            self._context.world.progress,
            groups.communicator,
            "add_group",
            lambda: (
                self._checked_spec(groups, name, ranks, dims, apart),
                _checked_backend(groups, name, backend),
            ),
            lambda found: f"{name!r}: {found}{', apart' if apart else ''}",
        )
        spec, forced = found
        if isinstance(spec, GroupSpec):
            group = groups.add_ranks(spec, custom=True, forced=forced, apart=apart)
        else:
            group = groups.add_dims(name, spec, custom=True, forced=forced)
        if forced is not None:
            self._check_way(groups, group, forced)
        return group

    def _check_way(self, groups: LiveGroups, group: ProcessGroup, forced: GroupBackend) -> None:
        """Collective: take a new group back if its bytes cannot go the way that it asks for."""
        why_not = groups.why_not(group.name)
        progress = self._context.world.progress
        reasons = exchange(progress, groups.communicator, why_not, what="add_group")
        found = [(rank, reason) for rank, reason in enumerate(reasons) if reason]
        if found:
            groups.drop(group.name)
            rank, reason = found[0]
            raise on_all_ranks(
                GroupError(
                    f"group {group.name!r} cannot be moved by {forced}: rank {rank} says: {reason}"
                )
            )

    def _refuse_closed(self, action: str) -> None:
        if self._closed or self._context.forked:
            why = self._context.why_closed if self._context.forked else "it is closed"
            raise ClosedError(f"rank {self._context.rank} cannot {action} this mesh: {why}")

    def _live(self, action: str) -> LiveGroups:
        self._refuse_closed(action)
        if self._groups is None:
            raise RankError(
                f"rank {self._context.rank} cannot {action} mesh {self.dims_text}: "
                "it is not one of its ranks"
            )
        return self._groups

    def _checked_spec(
        self,
        groups: LiveGroups,
        name: str,
        ranks: Sequence[int] | None,
        dims: NamesLike | None,
        apart: bool,
    ) -> GroupSpec | tuple[str, ...]:
        if not isinstance(name, str):
            raise GroupError(f"the name of a group must be a text, got {shown(name)}")
        apart = as_flag(apart, "apart", GroupError)
        if (ranks is None) == (dims is None):
            raise GroupError(f"add_group({name!r}) takes ranks or dims, one of them")
        if apart and ranks is None:
            raise GroupError(f"add_group({name!r}) takes ranks, not dims, to set them apart")
        groups.check_name(name)
        if ranks is None:
            chosen = parse_names(() if dims is None else dims)
            self.num_groups(chosen)  # refuses unknown dims
            return chosen
        spec = GroupSpec(name, ranks, groups.backend)
        for rank in spec.ranks:
            if rank not in self.ids:
                raise RankError(
                    f"Rank {rank} out of bounds for group {name!r}: the mesh has ranks "
                    f"{list(self.ids)[:16]}"
                )
        return spec


def _checked_backend(
    groups: LiveGroups, name: str, backend: GroupBackend | str | None
) -> GroupBackend | None:
    """Return the backend that is asked for, if it is one that such groups can have."""
    if backend is None:
        return None
    on_threads = groups.backend is GroupBackend.VIRTUAL
    known = (GroupBackend.VIRTUAL,) if on_threads else _FORCED
    asked = None
    with suppress(GroupError):  # it names all backends, also those that no such group has
        asked = backend if isinstance(backend, GroupBackend) else GroupBackend.parse(backend)
    if asked not in known:
        can = ", ".join(map(str, known))
        raise GroupError(
            f"group {name!r} asks for backend {shown(str(backend))}, but what can be asked for on "
            f"this mesh is {can}; leave backend= out for the fastest way"
        )
    if on_threads:
        return None
    if asked is GroupBackend.NCCL and "cupy" not in sys.modules:
        raise GroupError(
            f"group {name!r} asks for backend nccl, which is CuPy's, and CuPy is not imported: "
            "import cupy first, or install it: pip install cupy-cuda13x (for a GPU driver before "
            "580, cupy-cuda12x); without a GPU leave backend= out"
        )
    return asked
