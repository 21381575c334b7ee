"""The groups of a live mesh, and the communicators behind them.

An MPI has as few as 2,046 communicators, so one is made for each *set* of ranks
and shared by all names for it: a dim that spans the whole mesh uses the world's,
a dim of one rank needs none. Whether a set exists already is decided by
arithmetic that every rank does alike, because making one is collective.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpimesh.arguments import as_flag, shown
from mpimesh.comm import Communicator
from mpimesh.core.call import Ledger
from mpimesh.errors import GroupError, MismatchError, RankError, UnresolvedError, on_all_ranks
from mpimesh.mesh import WORLD, GroupSpec, Mesh, NamesLike
from mpimesh.mesh.dims import parse_names
from mpimesh.mesh.topology import check_group_name
from mpimesh.runtime.agreement import AgreeingRanks, agree, agree_alike
from mpimesh.runtime.call import Call
from mpimesh.runtime.deadlock import Mail
from mpimesh.runtime.group import Backend, ProcessGroup
from mpimesh.runtime.world import MeshContext, solo_communicator

__all__ = ["LiveGroups", "refuse_unfinished"]

_FORCED: tuple[Backend, ...] = ("mpi", "node_shared", "nccl")


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
    forced: Backend | None = None
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
            return self.ranks == tuple(mesh.group_ranks(int(mesh.ids[0]), dims)) and (
                len(self.ranks) == mesh.size
            )
        return self.mesh == mesh and _long(mesh, self.dims) == _long(mesh, dims)


class _Custom(NamedTuple):
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


class LiveGroups:
    """The groups of one mesh on one rank, in the order of their making.

    Args:
        mesh: The mesh.
        communicator: Its ranks, in the order of their offsets; the table owns it.
        context: What the groups share.

    Attributes:
        communicator: The ranks of the mesh, in the order of their offsets.
    """

    def __init__(self, mesh: Mesh, communicator: Communicator, context: MeshContext) -> None:
        self._mesh = mesh
        self._context = context
        self.communicator = communicator
        self._families = [_Family(tuple(mesh.ids.tolist()), communicator)]
        self._groups: dict[str, ProcessGroup] = {}
        # Those that this rank has closed stay here until all have, as `settle` finds out.
        self._custom: dict[str, _Custom] = {}
        self._keep(WORLD, mesh.ids.tolist(), communicator, self._families[0])

    # -- look-ups: local -----------------------------------------------------------

    def __iter__(self) -> Iterator[ProcessGroup]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    def get(self, name: str) -> ProcessGroup | None:
        """Return the group called `name`, if there is one."""
        return self._groups.get(name) if isinstance(name, str) else None

    @property
    def backend(self) -> Backend:
        """The backend that moves these groups' bytes."""
        return "mpi" if self.communicator.kind == "mpi" else "virtual"

    @property
    def custom(self) -> list[str]:
        """Names of the groups that the user made, the same on every rank."""
        return list(self._custom)

    def started(self) -> dict[str, int]:
        """Return how many collectives this rank has started on each of its groups."""
        counts = {group.name: group._core.started for group in self._groups.values()}
        return {name: count for name, count in counts.items() if count}

    def mails(self) -> Mails:
        """Return the messages of each communicator; nothing without checks."""
        return [
            (family.ranks, one.name, one.mail)
            for family in self._families
            if (one := self._ledger_of(family)) is not None and one.mail is not None
        ]

    def ledgers(self) -> list[Ledger]:
        """Return those of this rank's communicators."""
        return [one for each in self._families if (one := self._ledger_of(each)) is not None]

    @property
    def names(self) -> list[str]:
        """Names of all groups, in the order of their making."""
        return list(self._groups)

    # -- making groups: collective over the mesh -------------------------------------

    def add(
        self,
        name: str,
        ranks: Sequence[int] | None,
        *,
        dims: NamesLike | None,
        backend: Backend | None,
        apart: bool,
    ) -> ProcessGroup:
        """Make a group of the user's. See :meth:`DeviceMesh.add_group`."""
        self.settle("add_group")
        spec, forced = agree_alike(
            self,
            "add_group",
            lambda: (
                self._checked_spec(name, ranks, dims, apart),
                self._checked_backend(name, backend),
            ),
            lambda found: f"{name!r}: {found}{', apart' if apart else ''}",
        )
        if isinstance(spec, GroupSpec):
            group = self.add_ranks(spec, custom=True, forced=forced, apart=apart)
        else:
            group = self.add_dims(name, spec, custom=True, forced=forced)
        if forced is not None:
            self._check_way(group, forced)
        return group

    def add_dims(
        self,
        name: str,
        dims: tuple[str, ...],
        *,
        mesh: Mesh | None = None,
        custom: bool = False,
        forced: Backend | None = None,
    ) -> ProcessGroup:
        """Make the groups along `dims`; `name` becomes the one that this rank is in.

        Args:
            name: A new name.
            dims: The dims.
            mesh: What they are dims of; the table's mesh if None.
            custom: Whether the user made it, so that :meth:`rebuild` keeps it.
            forced: The way that its bytes have to go.
        """
        self.check_name(name)
        grid, rank = self._mesh if mesh is None else mesh, self._context.rank
        ranks = grid.group_ranks(rank, dims)
        family = self._family(
            _Family(tuple(ranks), None, grid, dims, forced=forced),
            lambda known: known.lies_along(grid, dims),
            grid.group_index(rank, dims),
            grid.place_in_group(rank, dims),
        )
        asked = _Custom(family, None, grid, dims) if custom else None
        return self._keep(name, ranks, family.communicator, family, asked)

    def add_ranks(
        self,
        spec: GroupSpec,
        *,
        custom: bool = False,
        forced: Backend | None = None,
        apart: bool = False,
    ) -> ProcessGroup:
        """Make one group of listed ranks, which keep their order."""
        self.check_name(spec.name)
        ranks = tuple(spec.ranks)
        place = spec.group_rank(self._context.rank)
        family = self._family(
            _Family(ranks, None, forced=forced, apart=apart),
            lambda known: known.has(ranks),
            None if place is None else 0,
            place or 0,
        )
        communicator = None if place is None else family.communicator
        asked = _Custom(family, spec.ranks) if custom else None
        return self._keep(spec.name, spec.ranks, communicator, family, asked)

    def _family(
        self, fresh: _Family, fits: Callable[[_Family], bool], color: int | None, key: int
    ) -> _Family:
        """Return a family that `fits`, or `fresh` with communicators of its own."""
        if len(fresh.ranks) == 1:
            return _Family(fresh.ranks, solo_communicator(), fresh.mesh, fresh.dims, owned=False)
        known = next((one for one in self._families if fits(one)), None) if fresh.shared else None
        if known is not None:
            return known
        fresh.communicator = self.communicator.split(color, key)
        # NCCL moves what lies on devices, and is asked for there.
        if fresh.forced not in (None, "nccl") and fresh.communicator is not None:
            fresh.why_not = fresh.communicator.force(fresh.forced)
        self._families.append(fresh)
        return fresh

    def add_custom_of(self, other: LiveGroups) -> None:
        """Make the groups that the user made in a mesh of the same ranks."""
        for name, made in other._custom.items():
            forced = made.family.forced
            if made.mesh is not None:
                self.add_dims(name, made.dims, mesh=made.mesh, custom=True, forced=forced)
            elif made.ranks is not None:
                spec = GroupSpec(name, made.ranks)
                self.add_ranks(spec, custom=True, forced=forced, apart=made.family.apart)

    def rebuild(self, mesh: Mesh) -> LiveGroups:
        """Return a table for another mesh over the same ranks, with the user's own groups.

        The world's communicator and those of the user's groups move over.
        """
        table = LiveGroups(mesh, self.communicator, self._context)
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

    # -- dropping groups -------------------------------------------------------------

    def close(self, group: ProcessGroup) -> None:
        """Drop a group of the user's. Collective over its ranks; a non-member forgets the name."""
        context, family = self._context, self._custom[group.name].family
        communicator, ledger = family.communicator, self._ledger_of(family)
        if group.rank is not None and communicator is not None and ledger is not None:
            others = [
                one
                for one in self._groups.values()
                if one is not group and one.rank is not None and one.communicator is communicator
            ]
            last = family.owned and not others
            calls = context.open_work.unresolved(group._core)
            mail = ledger.mail if last else None
            unended = refuse_unfinished(
                group,
                Call("close", group.name),
                f"group {group.name!r} cannot be closed",
                group.ranks,
                calls,
                unended=context.unended,
                unread=ledger.unread,
                mails=[] if mail is None else [(tuple(group.ranks), ledger.name, mail)],
            )
            if last:
                # The communicator is kept for what nobody receives any more, not the mesh.
                with context.progress.watched(Call("close", group.name), communicator):
                    context.free(communicator, unended=unended)
                family.communicator, family.freed = None, True
            elif family.owned and ledger.name == context.full_name(group.name):
                # Another group may get the name, and its communicator.
                ledger.name = context.full_name(others[0].name)
        group._core.shut()
        del self._groups[group.name]

    def settle(self, action: str) -> None:
        """Collective: forget the groups that all their ranks have closed.

        Ranks that are not in a group do not know what its members have done. From here on all
        tables are alike.

        Args:
            action: What the user has called.

        Cost:
            One all-reduce of 40 bytes, if the user has made groups and no rank has closed one.
        """
        if not self._custom:
            return
        rank, families = self._context.rank, self._families
        closed = [
            name
            for name, made in self._custom.items()
            if name not in self._groups and (made.ranks is None or rank in made.ranks)
        ]
        freed = [place for place, family in enumerate(families) if family.freed]
        rows = agree(self, Call(action, WORLD), [closed, freed])
        closings = Counter(name for names, _ in rows for name in names)
        frees = Counter(place for _, places in rows for place in places)
        for name, made in list(self._custom.items()):
            if closings[name] == len(rows if made.ranks is None else made.ranks):
                del self._custom[name]
                group = self._groups.pop(name, None)  # a rank that is no member may have it yet
                if group is not None:
                    group._core.shut()
        for place, family in enumerate(families):
            family.broken = place in frees
        self._families = [
            family
            for place, family in enumerate(families)
            if frees[place] < len(rows if family.mesh is not None else family.ranks)
        ]

    # -- helpers ---------------------------------------------------------------------

    def _ledger_of(self, family: _Family) -> Ledger | None:
        """Return the ledger of this rank's communicator in a family; None if it has none."""
        communicator = family.communicator
        return None if communicator is None else self._context.progress.ledger_of(communicator)

    def check_name(self, name: str) -> None:
        """Refuse a name that a group has, be it on other ranks only. Local, alike on all ranks.

        Raises:
            GroupError: If one has.
        """
        if name in self._groups or name in self._custom:
            raise GroupError(f"there is already a group called {name!r}; choose another name")

    def _check_way(self, group: ProcessGroup, forced: Backend) -> None:
        """Collective: take a new group back if its bytes cannot go the way that it asks for."""
        family = self._custom[group.name].family
        reasons = agree(self, "add_group", family.why_not)
        found = [(rank, reason) for rank, reason in enumerate(reasons) if reason]
        if not found:
            return
        del self._custom[group.name], self._groups[group.name]
        group._core.shut()
        if family in self._families:
            self._families.remove(family)
            if family.communicator is not None:
                # Nothing was started on it yet.
                self._context.free(family.communicator, unended=False)
        rank, reason = found[0]
        raise on_all_ranks(
            GroupError(
                f"group {group.name!r} cannot be moved by {forced}: rank {rank} says: {reason}"
            )
        )

    def _checked_spec(
        self, name: str, ranks: Sequence[int] | None, dims: NamesLike | None, apart: bool
    ) -> GroupSpec | tuple[str, ...]:
        check_group_name(name)
        apart = as_flag(apart, "apart", GroupError)
        if (ranks is None) == (dims is None):
            raise GroupError(f"add_group({name!r}) takes ranks or dims, one of them")
        if apart and ranks is None:
            raise GroupError(f"add_group({name!r}) takes ranks, not dims, to set them apart")
        self.check_name(name)
        if ranks is None:
            chosen = parse_names(() if dims is None else dims)
            self._mesh.num_groups(chosen)  # refuses unknown dims
            return chosen
        spec = GroupSpec(name, ranks)
        for rank in spec.ranks:
            if not self._mesh.contains_rank(rank):
                raise RankError(
                    f"Rank {rank} out of bounds for group {name!r}: the mesh has ranks "
                    f"{self._mesh.ids[:16].tolist()}"
                )
        return spec

    def _checked_backend(self, name: str, backend: str | None) -> Backend | None:
        """Return the backend that is asked for, if it is one that such groups can have."""
        if backend is None:
            return None
        on_threads = self.backend == "virtual"
        known: tuple[Backend, ...] = ("virtual",) if on_threads else _FORCED
        asked = next((one for one in known if isinstance(backend, str) and one == backend), None)
        if asked is None:
            raise GroupError(
                f"group {name!r} asks for backend {shown(backend)}, but what can be asked for "
                f"on this mesh is {', '.join(known)}; leave backend= out for the fastest way"
            )
        if on_threads:
            return None
        if asked == "nccl" and "cupy" not in sys.modules:
            raise GroupError(
                f"group {name!r} asks for backend nccl, which is CuPy's, and CuPy is not imported: "
                "import cupy first, or install it: pip install cupy-cuda13x (for a GPU driver "
                "before 580, cupy-cuda12x); without a GPU leave backend= out"
            )
        return asked

    def _keep(
        self,
        name: str,
        ranks: Sequence[int],
        communicator: Communicator | None,
        family: _Family,
        asked: _Custom | None = None,
    ) -> ProcessGroup:
        ledger = None
        if communicator is not None:
            ledger = self._context.adopt(communicator, name)
        forced = family.forced
        group = ProcessGroup(
            name,
            ranks,
            ledger,
            self._context,
            forced or self.backend,
            prefer=forced or "",
        )
        self._groups[name] = group
        if asked is not None:
            self._custom[name] = asked
            group._core.drop = self.close
        return group


# -- the end of groups and meshes: together, and with nothing left that was started ----------------


Mails = Sequence[tuple[tuple[int, ...], str, Mail]]
"""Ranks, name and messages of communicators."""


def refuse_unfinished(
    ranks: AgreeingRanks,
    call: Call,
    refused: str,
    members: Sequence[int],
    unresolved: list[str],
    *,
    unended: bool,
    unread: int,
    mails: Mails,
    ends: Sequence[Ledger] = (),
) -> bool:
    """Raise on all ranks if any has open work, or a message was sent that nobody has received.

    Collective.

    Args:
        ranks: The ranks.
        call: What they do.
        refused: What cannot be done then, as a sentence.
        members: Their numbers in the mesh.
        unresolved: The calls whose results this rank has not taken.
        unended: Whether something may be under way that this rank does not wait for any more.
        unread: Messages that it has sent, less those that it has begun to receive.
        mails: The communicators of which all messages must have been received.
        ends: See :func:`~mpimesh.runtime.agreement.agree`.

    Returns:
        Whether something may yet be under way, alike on all ranks: what one keeps, the others must
        not use for something else.

    Raises:
        UnresolvedError: On every rank, if any has open work.
        MismatchError: On every rank, if a message was not received.
    """
    rows = agree(ranks, call, [unresolved, unended, unread], ends=ends)
    open_work = "\n".join(
        f"  rank {rank}: {text}"
        for rank, (texts, *_) in zip(members, rows, strict=True)
        for text in texts[:8]
    )
    if open_work:
        raise on_all_ranks(
            UnresolvedError(
                f"{refused}: these operations were started and never resolved; "
                f"keep what they return and call resolve() on it before:\n{open_work}"
            )
        )
    if mails:
        me = members[ranks.communicator.rank]
        _refuse_unreceived(refused, agree(ranks, call, _message_counts(mails, me)))
    return any(one for _, one, _ in rows) or sum(number for *_, number in rows) != 0


def _message_counts(mails: Mails, rank: int) -> list[Any]:
    """Return what this rank has sent and received, as :func:`_refuse_unreceived` takes it."""
    sent, received = [], []
    for ranks, name, mail in mails:
        sent += [
            [[name, rank, ranks[peer], tag], count, str(mail.calls[peer, tag])]
            for (peer, tag), count in mail.sent.items()
        ]
        received += [
            [[name, ranks[peer], rank, tag], count] for (peer, tag), count in mail.received.items()
        ]
    return [sent, received]


def _refuse_unreceived(refused: str, everyone: Sequence[Sequence[Any]]) -> None:
    """Raise if a message was sent that nobody has received.

    Args:
        refused: What cannot be done, as a sentence.
        everyone: What :func:`_message_counts` gives on each rank.

    Raises:
        MismatchError: On every rank.
    """
    taken = {tuple(key): count for _, received in everyone for key, count in received}
    rows = "\n".join(
        f"  {count - taken.get(tuple(key), 0)} of {count} from rank {key[1]} to rank {key[2]}, "
        f"the last by {text}"
        for sends, _ in everyone
        for key, count, text in sends
        if taken.get(tuple(key), 0) < count
    )
    if rows:
        raise on_all_ranks(
            MismatchError(
                f"{refused}: these messages were sent, and nobody has called "
                f"recv() for them, with the same tag on the same group:\n{rows}"
            )
        )
