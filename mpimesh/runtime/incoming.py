"""Bytes that go out and come in, and how those that came become the result.

Everything here is done by the library, NumPy or CuPy, that the bytes belong to while they
are moved. Only the last step may cross from the host to a device or back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from mpimesh.arrays import Array, DType, moved, namespace
from mpimesh.runtime.blocks import Blocks
from mpimesh.runtime.group_core import GroupCore
from mpimesh.runtime.operands import output_array

__all__ = ["Incoming", "apart", "at_least_1d", "broadcast_buffer", "byte_counts", "flat_bytes"]


class Incoming:
    """The bytes that come in, and how they become the result.

    Args:
        group: Gives memory.
        of_caller: The library whose array the caller gets.
        blocks: What comes in.
        dtype: Of its elements.
        out: The caller's array for the result.
        library: The library whose memory the bytes come into.

    Attributes:
        buffer: Flat bytes to receive into.
        value: The result, if it needs no more work.
        finish: The work it needs, if any.
    """

    __slots__ = ("buffer", "finish", "value")

    def __init__(
        self,
        group: GroupCore,
        of_caller: ModuleType,
        blocks: Blocks,
        dtype: DType,
        out: Array | None,
        library: ModuleType,
    ) -> None:
        if out is not None:
            output_array(out, blocks.shape, dtype)
        self.finish: Callable[[], Any] | None = None
        target = _target(group, blocks.shape, dtype, out, library)
        self.value: Any = target
        if blocks.in_order and (target is out or (out is None and of_caller is library)):
            self.buffer = target.reshape(-1).view(np.uint8)
            return
        packed = group.empty((target.size,), dtype, library)
        self.buffer = packed.view(np.uint8)

        def finish() -> Any:
            blocks.unpack(packed, target)
            return _given(target, out, of_caller)

        self.finish = finish


def flat_bytes(data: Array) -> Array:
    """Return an array's elements in C order as flat bytes; a view where they lie so."""
    return namespace(data).ascontiguousarray(data).reshape(-1).view(np.uint8)


def at_least_1d(data: Array) -> Array:
    """Return `data`, a 0-d array as one of shape (1,)."""
    return data if data.ndim else data.reshape(1)


def apart(send: Array, receive: Incoming | None) -> Array:
    """Return `send`, or a copy of it where what comes in would be written over it."""
    if receive is None or not namespace(send).may_share_memory(send, receive.buffer):
        return send
    return send.copy()


def byte_counts(blocks: Blocks, dtype: DType) -> list[int]:
    """Return the bytes of each block."""
    return [count * dtype.itemsize for count in blocks.counts]


def broadcast_buffer(
    group: GroupCore,
    of_caller: ModuleType,
    kind: tuple[Sequence[int], DType],
    out: Array | None,
    library: ModuleType,
    *,
    source: Array | None,
) -> tuple[Array, Any, Callable[[], Any] | None]:
    """Return the bytes to send or receive, and how they become the result.

    Args:
        group: Gives memory.
        of_caller: The library whose array the caller gets.
        kind: Shape and dtype.
        out: The caller's array for the result.
        library: The library whose memory is sent and received.
        source: On the root, its array there.
    """
    shape, dtype = tuple(kind[0]), kind[1]
    if out is not None:
        output_array(out, shape, dtype)
    target = _target(group, shape, dtype, out, library)
    if source is not None and target is not source:
        target[...] = source
    buffer = target.reshape(-1).view(np.uint8)
    if target is out or (out is None and of_caller is library):
        return buffer, target, None
    return buffer, None, lambda: _given(target, out, of_caller)


def _target(
    group: GroupCore,
    shape: tuple[int, ...],
    dtype: DType,
    out: Array | None,
    library: ModuleType,
) -> Array:
    """Return `out` where bytes can come straight into it, else memory of its own."""
    if out is not None and namespace(out) is library and out.flags.c_contiguous:
        return out
    return group.empty(shape, dtype, library)


def _given(target: Array, out: Array | None, of_caller: ModuleType) -> Array:
    """Return a finished result as the caller asked for it."""
    if out is None:
        return moved(target, of_caller)
    if out is not target:
        out[...] = moved(target, namespace(out))
    return out
