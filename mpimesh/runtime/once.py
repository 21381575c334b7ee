"""One array for all ranks of a node, instead of one for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, SupportsIndex

from mpimesh.arrays import HostArray
from mpimesh.runtime.agreement import agreed, exchange
from mpimesh.runtime.allocator import aligned_empty, array_shape
from mpimesh.runtime.call import Call
from mpimesh.runtime.group_core import GroupCore

__all__ = ["Once"]


class Once(GroupCore):
    """``empty_once`` of a group."""

    def empty_once(
        self, shape: Sequence[SupportsIndex] | SupportsIndex, dtype: Any = float
    ) -> tuple[HostArray, bool]:
        """Return an array that exists once for the ranks of the group on each node.

        For values that are the same on all ranks, such as parameters that nobody splits: they
        cost the memory of one rank. Collective, and waits.

        Example:
            >>> with mm.DeviceMesh("dp=-1") as mesh:
            ...     group = mesh.group("dp")
            ...     table, writes = group.empty_once((50, 4), "float32")
            ...     if writes:
            ...         table[...] = np.arange(200).reshape(50, 4)
            ...     group.barrier()  # from here on all ranks may read it
            ...     print(table[10])
            [40. 41. 42. 43.]

        Args:
            shape: Its shape, the same on every rank.
            dtype: Its dtype.

        Returns:
            The array, uninitialised, and whether this rank is the one of its node that writes it;
            to the others it is read-only. Ranks that cannot open each other's memory have an
            array each, and all write. Once the mesh is closed, it holds its values for the readers
            as long as the writer has it.

        Raises:
            ShapeError: On every rank, if a size is negative or no whole number.
            DTypeError: On every rank, if `dtype` holds Python objects.
            MismatchError: On every rank, if the ranks ask for different arrays.
        """
        progress, communicator = self.progress, self.communicator
        sizes, kind = agreed(
            progress,
            communicator,
            "empty_once",
            lambda: array_shape(shape, dtype),
            lambda found: f"{found[0]} {found[1]}",
        )
        nbytes = math.prod(sizes) * kind.itemsize
        offered = communicator.offer_once(nbytes)
        places = exchange(progress, communicator, offered, what=Call("empty_once", self.name))
        found = communicator.take_once(places, nbytes)
        if found is None:
            return aligned_empty(sizes, kind, self._context.world.shared_bytes), True
        memory, writes = found
        array: HostArray = memory.view(kind).reshape(sizes)
        array.flags.writeable = writes
        return array, writes
