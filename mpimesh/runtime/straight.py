"""The shortest way into a collective: plain arrays of NumPy, nothing to convert, check or queue.

A small collective takes a few microseconds in the transport, and the general way to it 20 to 60: it
takes arrays of any layout on any device, compares and counts. Each method looks here first
whether none of that is needed.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mpimesh.arrays import Array, DType, HostArray
from mpimesh.runtime.call import Call
from mpimesh.runtime.group_core import GroupCore
from mpimesh.transport import Communicator

__all__ = ["Straight", "bytes_of", "even_blocks", "is_first"]


class Straight(GroupCore):
    """The base of the operations of a group that go straight to the transport."""

    def _straight_to(self, x: Array | None) -> Communicator | None:
        """Return the transport, if an operation on `x` may go straight to it."""
        communicator, context = self._communicator, self._context
        if (
            communicator is not None
            and type(x) is np.ndarray
            and x.flags.c_contiguous
            and x.ndim
            and not x.dtype.hasobject
            and context.direct
            and context.world.progress.idle
        ):
            return communicator
        return None

    def _straight_result(
        self, x: HostArray, shape: tuple[int, ...], out: Array | None
    ) -> HostArray | None:
        """Return the array for a result of the dtype of `x`; None if it cannot come there as it is.

        Args:
            x: What goes in, which must not be written over.
            shape: The result's.
            out: The caller's array for it.
        """
        if out is None:
            return self._context.world.pool.empty(shape, x.dtype)
        if type(out) is not np.ndarray or out.shape != shape or out.dtype != x.dtype:
            return None
        flags = out.flags
        if not (flags.c_contiguous and flags.aligned and flags.writeable):
            return None
        return None if np.may_share_memory(x, out) else out

    def _called(
        self,
        communicator: Communicator,
        name: str,
        rule: str,
        shape: tuple[int, ...],
        dtype: DType,
        label: str | None,
        compared: object,
    ) -> Call | None:
        """Return the call of an operation that is about to be started without any other step.

        None if another rank of the node has started something else in its place.
        """
        call = Call(name, self.name, rule, shape, dtype, label)
        communicator.started = call.number = number = communicator.started + 1
        call.compared = compared
        signatures = communicator.signatures
        if signatures is not None:
            word = signatures.post(number, (name, rule, compared, dtype))
            if word:
                if word < 0:
                    communicator.started = number - 1  # it is counted on the general way
                    return None
                call.word, call.signatures = word, signatures
        return call


def bytes_of(x: HostArray) -> HostArray:
    """Return a contiguous array as flat bytes."""
    return x.reshape(-1).view(np.uint8)


def is_first(axis: object) -> bool:
    """Tell whether `axis` is plainly 0; what else is meant by it the general way finds out."""
    return type(axis) is int and axis == 0


@lru_cache(maxsize=256)
def even_blocks(length: int, ranks: int) -> str:
    """Return how messages call blocks along axis 0, all of one length."""
    return f"axis 0, sizes {[length] * ranks}"
