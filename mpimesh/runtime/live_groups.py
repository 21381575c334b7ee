"""The groups of a live mesh, and the communicators behind them.

An MPI has as few as 2,046 communicators, so one is made for each *set* of ranks
and shared by all names for it: a dim that spans the whole mesh uses the world's,
a dim of one rank needs none. Whether a set exists already is decided by
arithmetic that every rank does alike, because making one is collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpimesh.comm import Communicator
from mpimesh.errors import GroupError
from mpimesh.mesh import WORLD, GroupBackend, GroupSpec, Mesh
from mpimesh.runtime.agreement import exchange
from mpimesh.runtime.call import Call
from mpimesh.runtime.context import MeshContext
from mpimesh.runtime.deadlock import Mail
from mpimesh.runtime.ending import part_together
from mpimesh.runtime.group import ProcessGroup
from mpimesh.runtime.world import solo_communicator

__all__ = ["LiveGroups"]


@dataclass(slots=True, eq=False)
class _Family:
    """Communicators that were made together, of which this rank has at most one.

    Attributes:
        ranks: The ranks of the listed group, or of the one along dims that this rank is in.
        communicator: This rank's; None if it is in none.
        mesh: Of groups along dims, the mesh that they lie in; None for a listed group.
        dims: The dims along which they run.
        owned: Whether the communicators are to be freed.
        forced: The way that its bytes have to go; None leaves that to the communicator. A family
            with one is not shared with other groups of the same ranks.
        why_not: Why they cannot, as far as this rank knows.
        apart: Whether its operations have an order of their own: it is not shared, either.
        freed: Whether this rank has given its communicator back.
        broken: Whether some ranks have, as all know: it is not shared any more, either.
    """

    ranks: tuple[int, ...]
    communicator: Communicator | None
    mesh: Mesh | None = None
    dims: tuple[str, ...] = ()
    owned: bool = True
    forced: GroupBackend | None = None
    why_not: str = ""
    apart: bool = False
    freed: bool = False
    broken: bool = False

    @property
    def shared(self) -> bool:
        """True if other groups of the same ranks may use it: the same answer on every rank."""
        return self.forced is None and not self.apart and not self.broken

    def has(self, ranks: tuple[int, ...]) -> bool:
        """Tell whether it has a group of just these ranks: the same answer on every rank."""
        if not self.shared:
            return False
        if self.mesh is None:
            return self.ranks == ranks
        return tuple(self.mesh.group_ranks(ranks[0], self.dims)) == ranks

    def lies_along(self, mesh: Mesh, dims: tuple[str, ...]) -> bool:
        """Tell whether its groups are those of `mesh` along `dims`: the same answer everywhere.

        A listed group may be the group along `dims` for its own ranks and for no others, so
        it counts only if there is no other group along `dims`.
        """
        if not self.shared:
            return False
        if self.mesh is None:
            return self.ranks == tuple(mesh.group_ranks(mesh.ids[0], dims)) and (
                len(self.ranks) == mesh.size
            )
        return self.mesh == mesh and _long(mesh, self.dims) == _long(mesh, dims)


@dataclass(frozen=True, slots=True)
class _Custom:
    """The request of a user for a group, by which it can be made again.

    Attributes:
        family: Its communicators.
        ranks: The ranks of a listed group; None for one along dims.
        mesh: The mesh that `dims` are of.
        dims: The dims of a group along dims.
    """

    family: _Family
    ranks: Sequence[int] | None = None
    mesh: Mesh | None = None
    dims: tuple[str, ...] = ()


def _long(mesh: Mesh, dims: tuple[str, ...]) -> list[str]:
    """Leave dims of size 1 out: they make no difference to a group."""
    return [dim for dim in dims if mesh.dim_size(dim) > 1]


def _forced(family: _Family) -> _Family:
    """Let the bytes of a new family go the way that it asks for."""
    # NCCL moves what lies on devices, and is asked for there.
    if family.forced not in (None, GroupBackend.NCCL) and family.communicator is not None:
        family.why_not = family.communicator.force(str(family.forced))
    return family


class LiveGroups:
    """The groups of one mesh on one rank, in the order of their making.

    Args:
        mesh: The mesh.
        communicator: Its ranks, in the order of their offsets; the table owns it.
        context: What the groups share.
    """

    def __init__(self, mesh: Mesh, communicator: Communicator, context: MeshContext) -> None:
        self._mesh = mesh
        self._context = context
        self._communicator = communicator
        self._families = [_Family(tuple(mesh.ids), communicator)]
        self._groups: dict[str, ProcessGroup] = {}
        # Those that this rank has closed stay here until all have, as `settle` finds out.
        self._custom: dict[str, _Custom] = {}
        self._keep(WORLD, mesh.ids, communicator, self._families[0])

    # -- look-ups: local -----------------------------------------------------------

    def __iter__(self) -> Iterator[ProcessGroup]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    def get(self, name: str) -> ProcessGroup | None:
        """Return the group called `name`, if there is one."""
        return self._groups.get(name) if isinstance(name, str) else None

    @property
    def backend(self) -> GroupBackend:
        """The backend that moves these groups' bytes."""
        return GroupBackend.MPI if self._communicator.kind == "mpi" else GroupBackend.VIRTUAL

    @property
    def communicator(self) -> Communicator:
        """The ranks of the mesh, in the order of their offsets."""
        return self._communicator

    @property
    def custom(self) -> list[str]:
        """Names of the groups that the user made, the same on every rank."""
        return list(self._custom)

    def started(self) -> dict[str, int]:
        """Return how many collectives this rank has started on each of its groups."""
        counts = {group.name: group._core.started for group in self._groups.values()}
        return {name: count for name, count in counts.items() if count}

    def mails(self) -> list[tuple[tuple[int, ...], str, Mail]]:
        """Return ranks, name and messages of each communicator; none without checks."""
        return [
            (family.ranks, one.name, one.mail)
            for family in self._families
            if (one := family.communicator) is not None and one.mail is not None
        ]

    @property
    def names(self) -> list[str]:
        """Names of all groups, in the order of their making."""
        return list(self._groups)

    # -- making groups: collective over the mesh -------------------------------------

    def add_dims(
        self,
        name: str,
        dims: tuple[str, ...],
        *,
        custom: bool = False,
        forced: GroupBackend | None = None,
    ) -> ProcessGroup:
        """Make the groups along `dims`; `name` becomes the one that this rank is in.

        Args:
            name: A new name.
            dims: The dims.
            custom: Whether the user made it, so that :meth:`rebuild` keeps it.
            forced: The way that its bytes have to go.
        """
        return self._add_lines(name, self._mesh, dims, custom=custom, forced=forced)

    def add_ranks(
        self,
        spec: GroupSpec,
        *,
        custom: bool = False,
        forced: GroupBackend | None = None,
        apart: bool = False,
    ) -> ProcessGroup:
        """Make one group of listed ranks, which keep their order."""
        self.check_name(spec.name)
        ranks = tuple(spec.ranks)
        family = None
        if forced is None and not apart:
            family = next((family for family in self._families if family.has(ranks)), None)
        if len(ranks) == 1:
            family = _Family(ranks, solo_communicator(), owned=False)
        elif family is None:
            place = spec.group_rank(self._context.rank)
            communicator = self._communicator.split(None if place is None else 0, place or 0)
            family = _forced(_Family(ranks, communicator, forced=forced, apart=apart))
            self._families.append(family)
        communicator = family.communicator if self._context.rank in ranks else None
        asked = _Custom(family, spec.ranks) if custom else None
        return self._keep(spec.name, spec.ranks, communicator, family, asked)

    def _add_lines(
        self,
        name: str,
        mesh: Mesh,
        dims: tuple[str, ...],
        *,
        custom: bool,
        forced: GroupBackend | None = None,
    ) -> ProcessGroup:
        """Make the groups of `mesh` along `dims`."""
        self.check_name(name)
        rank = self._context.rank
        ranks = mesh.group_ranks(rank, dims)
        family = None
        if forced is None:
            family = next((one for one in self._families if one.lies_along(mesh, dims)), None)
        if len(ranks) == 1:
            family = _Family(tuple(ranks), solo_communicator(), mesh, dims, owned=False)
        elif family is None:
            communicator = self._communicator.split(
                mesh.group_index(rank, dims), mesh.place_in_group(rank, dims)
            )
            family = _forced(_Family(tuple(ranks), communicator, mesh, dims, forced=forced))
            self._families.append(family)
        asked = _Custom(family, None, mesh, dims) if custom else None
        return self._keep(name, ranks, family.communicator, family, asked)

    def add_custom_of(self, other: LiveGroups) -> None:
        """Make the groups that the user made in a mesh of the same ranks."""
        for name, made in other._custom.items():
            forced = made.family.forced
            if made.mesh is not None:
                self._add_lines(name, made.mesh, made.dims, custom=True, forced=forced)
            elif made.ranks is not None:
                spec = GroupSpec(name, made.ranks, self.backend)
                self.add_ranks(spec, custom=True, forced=forced, apart=made.family.apart)

    def rebuild(self, mesh: Mesh) -> LiveGroups:
        """Return a table for another mesh over the same ranks, with the user's own groups.

        The world's communicator and those of the user's groups move over.
        """
        table = LiveGroups(mesh, self._communicator, self._context)
        for name, made in self._custom.items():
            family = made.family
            # The world's has a place in every table already.
            if family is not self._families[0] and family not in table._families:
                table._families.append(family)
            table._custom[name] = made
            if name in self._groups:
                table._groups[name] = group = self._groups[name]
                group._core.drop = table.close
        return table

    def free(self, kept_by: LiveGroups | None = None) -> None:
        """Collective: free the communicators, except those that another table uses."""
        kept = [] if kept_by is None else [id(f.communicator) for f in kept_by._families]
        # In the order of their making, which is the same on all ranks.
        for family in reversed(self._families):
            communicator = family.communicator
            if family.owned and communicator is not None and id(communicator) not in kept:
                self._context.free(communicator)

    def why_not(self, name: str) -> str:
        """Return why the bytes of a custom group cannot go the way that it asked for. Local."""
        return self._custom[name].family.why_not

    # -- dropping groups -------------------------------------------------------------

    def close(self, group: ProcessGroup) -> None:
        """Drop a group of the user's. Collective over its ranks; a non-member forgets the name."""
        made = self._custom[group.name]
        family = made.family
        communicator = family.communicator
        if group.rank is not None and communicator is not None:
            others = [
                one
                for one in self._groups.values()
                if one is not group and one.rank is not None and one.communicator is communicator
            ]
            last = family.owned and not others
            unended = part_together(group, communicator, self._context, last=last)
            if last:
                progress = self._context.world.progress
                with progress.watched(Call("close", group.name), communicator):
                    self._context.free(communicator, unended=unended)
                family.communicator, family.freed = None, True
            elif family.owned and communicator.name == self._context.full_name(group.name):
                # Another group may get the name, and its communicator.
                self._context.rename(communicator, others[0].name)
        group._core.shut()
        del self._groups[group.name]

    def settle(self, action: str) -> None:
        """Collective: forget the groups that all their ranks have closed.

        Ranks that are not in a group do not know what its members have done. From here on all
        tables are alike.

        Args:
            action: What the user has called.

        Cost:
            Two small all-gathers, if the user has made groups.
        """
        names, families = list(self._custom), self._families
        if not names:
            return
        groups = [self._groups.get(name) for name in names]
        flags = [group is not None and group.rank is not None for group in groups]
        flags += [family.freed for family in families]
        flags += [family.communicator is not None for family in families]
        progress, call = self._context.world.progress, Call(action, WORLD)
        rows = exchange(progress, self._communicator, flags, what=call)
        found = map(any, zip(*rows, strict=True))
        for name, group in zip(names, groups, strict=True):
            if not next(found):  # no rank has it any more
                del self._custom[name]
                if group is not None:
                    group._core.shut()
                    del self._groups[name]
        for family in families:
            family.broken = next(found)
        self._families = [family for family in families if next(found)]

    def drop(self, name: str) -> None:
        """Take back a group that was made last, with a way forced on it. Collective."""
        family = self._custom.pop(name).family
        self._groups.pop(name)._core.shut()
        if family in self._families:
            self._families.remove(family)
            if family.communicator is not None:
                # Nothing was started on it yet.
                self._context.free(family.communicator, unended=False)

    # -- helpers ---------------------------------------------------------------------

    def check_name(self, name: str) -> None:
        """Refuse a name that a group has, be it on other ranks only. Local, alike on all ranks.

        Raises:
            GroupError: If one has.
        """
        if name in self._groups or name in self._custom:
            raise GroupError(f"there is already a group called {name!r}; choose another name")

    def _keep(
        self,
        name: str,
        ranks: Sequence[int],
        communicator: Communicator | None,
        family: _Family,
        asked: _Custom | None = None,
    ) -> ProcessGroup:
        if communicator is not None and not communicator.name and communicator.size > 1:
            self._context.adopt(communicator, name)
        forced = family.forced
        group = ProcessGroup(
            name,
            ranks,
            communicator,
            self._context,
            forced or self.backend,
            prefer="" if forced is None else forced.value,
        )
        self._groups[name] = group
        if asked is not None:
            self._custom[name] = asked
            group._core.drop = self.close
        return group
