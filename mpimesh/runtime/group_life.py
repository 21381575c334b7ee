"""The use of a group until it is closed, and its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

from mpimesh.errors import ClosedError, GroupError, RankError
from mpimesh.runtime.context import MeshContext
from mpimesh.runtime.plan import Plan
from mpimesh.transport import Communicator

__all__ = ["GroupLife"]


class GroupLife:
    """A group from its making to its end.

    Attributes:
        drop: Closes the group; None for one of the mesh's own.
    """

    name: str
    ranks: Sequence[int]
    rank: int | None
    drop: Callable[[Any], None] | None
    _closed: bool
    _communicator: Communicator | None
    _context: MeshContext
    _plans: dict[object, Plan]

    @property
    def communicator(self) -> Communicator:
        """The transport of the group, for code that moves flat buffers itself.

        Raises:
            RankError: If this rank is not a member.
            ClosedError: If the group or the mesh is closed.
        """
        if self._communicator is None or self._context.closed:
            self._refuse("use the communicator")
        return self._communicator

    @property
    def closed(self) -> bool:
        """True once the group, or its mesh, is closed."""
        return self._closed or self._context.closed

    def close(self) -> None:
        """Drop a group that was made by :meth:`DeviceMesh.add_group`.

        Collective over its ranks; a rank that is no member may call it, too, and forgets the name.
        A second call does nothing, nor does one on a closed mesh. The communicator is given back
        unless another group has the same. The name can be used again when all ranks of the group
        have closed it; of groups along dims, all ranks of the mesh.

        As a context manager a group closes at the end of the block. After an error it stays open
        until its mesh closes, because the other ranks may be elsewhere.

        Raises:
            GroupError: If it is the mesh's own: the world, or that of a dim or a topology.
            UnresolvedError: On every rank of the group, naming the operations, if any of them has
                results of it that are not resolved. It stays open, so that they can be.
            MismatchError: On every rank of the group, with ``MPIMESH_CHECKS`` on, if a message was
                sent that nobody has received; and if the ranks close different groups.

        Cost:
            Two all-gathers among its ranks, and the end of an MPI communicator.

        Example:
            >>> with mm.DeviceMesh("dp=-1") as mesh:
            ...     with mesh.add_group("first", [0]) as first:
            ...         if first.rank is not None:
            ...             print(first.all_reduce(np.ones(2)).resolve())
            ...     print(first.closed, mesh.group_names)
            [1. 1.]
            True ['world', 'dp']
        """
        if self._closed or self._context.closed:
            return
        if self.drop is None:
            raise GroupError(
                f"rank {self._context.rank} cannot close group {self.name!r}, which is the mesh's "
                "own: only what add_group made can be closed, and mesh.close() closes all"
            )
        self.drop(self)

    def shut(self) -> None:
        """Let nothing start any more. Local."""
        self._closed = True
        self._communicator = self.drop = None
        self._plans.clear()

    def __enter__(self) -> Self:
        """Return the group."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the group; after an error leave that to its mesh.

        Closing is collective: with the other ranks elsewhere, it would wait for them for ever.
        """
        if error is None:
            self.close()

    def member(self, action: str) -> int:
        """Return this rank's place in the group, or refuse `action`."""
        if self.rank is None or self._communicator is None or self._context.closed:
            self._refuse(action)
        return self.rank

    def _refuse(self, action: str) -> NoReturn:
        if self._context.closed:
            raise ClosedError(
                f"rank {self._context.rank} cannot {action} on group {self.name!r}: "
                f"{self._context.why_closed}"
            )
        if self._closed:
            raise ClosedError(
                f"rank {self._context.rank} cannot {action} on group {self.name!r}: the group is "
                "closed; make another with mesh.add_group, which is collective"
            )
        raise RankError(
            f"rank {self._context.rank} cannot {action} on group {self.name!r}: it is not one of "
            f"its ranks {list(self.ranks[:16])}"
        )
