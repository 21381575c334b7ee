"""A named group of ranks and everything it can do together."""

from __future__ import annotations

import sys
from typing import NoReturn, Self, SupportsIndex

from mpimesh.arguments import as_int
from mpimesh.errors import GroupError, RankError
from mpimesh.runtime.barriers import Barriers
from mpimesh.runtime.composed import Composed
from mpimesh.runtime.messages import Messages
from mpimesh.runtime.movements import Movements
from mpimesh.runtime.once import Once
from mpimesh.runtime.reductions import Reductions
from mpimesh.runtime.rooted import Rooted
from mpimesh.runtime.world import solo_communicator
from mpimesh.transport.route import Route

__all__ = ["ProcessGroup"]


class ProcessGroup(Reductions, Movements, Rooted, Messages, Barriers, Once, Composed):
    """An ordered set of ranks with its own collectives and messages.

    Made by a :class:`~mpimesh.DeviceMesh`: one for the world, one for each dim, and more by
    :meth:`~mpimesh.DeviceMesh.add_group`. Each operation starts at once and returns a
    :class:`~mpimesh.CollectiveTensor`:

    reductions
        all_reduce, reduce, reduce_scatter
    movements
        all_gather, gather, scatter, all_to_all, broadcast
    messages
        send, recv, shift, and send_next, recv_prev and the like

    and :meth:`barrier` and :meth:`empty_once`, which wait. Ranks are counted in the group;
    `ranks` tells which they are in the mesh. :meth:`routes` tells who moves the bytes of each
    operation, and why.

    A CuPy array stays on its device: it is sent from there, and so is the result made there, on
    the stream that was current at the call. What ``resolve()`` gives is safe to use on the stream
    that is current then. The array's place decides how an operation moves its bytes, so on one
    group all ranks give arrays on the host or all on devices; with ``MPIMESH_CHECKS`` on, ranks
    that differ get a MismatchError that names them. Only where one rank's array is not the others'
    concern may they differ: in messages, shifts, scatter and broadcast with ``root=None``. An
    `out` may lie elsewhere than the input, everywhere.

    Two names for the same ranks in the same order, such as ``"world"`` and a dim that spans
    it, are one group to the transport: their operations stand in one order, and so do their
    messages.
    """

    def __repr__(self) -> str:
        """Show name, ranks and this rank's place. Local."""
        shown = ", ".join(map(str, self.ranks[:8])) + (", ..." if self.size > 8 else "")
        return f"ProcessGroup({self.name!r}, ranks=[{shown}], rank={self.rank})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: a group belongs to its mesh.

        Raises:
            GroupError: Always.
        """
        raise GroupError(
            f"{self!r} cannot be copied or pickled, for it belongs to its mesh: pass the group "
            "itself on, or its name for mesh.group(name)"
        )

    def __contains__(self, world_rank: object) -> bool:
        """Tell whether a rank of the mesh is in the group. Local."""
        return world_rank in self.ranks

    def group_rank_of(self, world_rank: int) -> int | None:
        """Return the place in this group of a rank of the mesh; None if it is not in. Local."""
        rank = as_int(world_rank, "world_rank", RankError)
        return list(self.ranks).index(rank) if rank in self.ranks else None

    def routes(self) -> tuple[Route, ...]:
        """Return how the group moves the bytes of its operations, and why. Local.

        Each route is a rule: an operation, where its arrays lie, from which size on, who moves
        them. Of arrays on a device there are routes from the first operation with one on, because
        it finds out what the ranks can do together.

        Raises:
            RankError: If this rank is not a member.
            ClosedError: If the mesh is closed.
        """
        host = tuple(self.communicator.routes())
        if not self.moves_device_memory:
            return host
        if self.size == 1:
            return (*host, Route("*", "device", 0, "copy", "the group has one rank"))
        return (*host, *self.side(sys.modules["cupy"]).routes())

    def alone(self) -> Self:
        """Return a group of this rank only, whose operations need no other rank. Local."""
        ranks, name = (self.world_rank,), f"{self.name}[{self.rank}]"
        return type(self)(name, ranks, solo_communicator(), self._context, self.backend)
