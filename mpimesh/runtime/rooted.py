"""Broadcast and scatter in which the ranks need not know what is coming.

The head of an envelope travels ahead, as in messages, in a row of fixed size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from mpimesh.arrays import Array, DType, HostArray, is_cupy, moved
from mpimesh.comm import Steps, run_steps
from mpimesh.errors import DTypeError, GroupError, MpimeshError, ShapeError, on_all_ranks
from mpimesh.runtime.call import Call
from mpimesh.runtime.messages import Envelope, open_head, seal_head
from mpimesh.runtime.operands import Blocks, check_output, check_sizes, normal_axis, output_array
from mpimesh.runtime.plan import Accounts, Prepared, receive, rule_by
from mpimesh.runtime.traffic import Arrival
from mpimesh.runtime.work import CollectiveTensor

if TYPE_CHECKING:
    from mpimesh.runtime.group_core import GroupCore

__all__ = ["broadcast", "scatter"]

_ROW_BYTES = 1024
_HAS_ARRAY, _TAKES_DEVICE, _HEAD = range(3)
"""Places in a row: of the flag that its rank has an array, of the flag that it can send and receive
the memory of a device, and of the head."""
_ARRAY, _REFUSED = 1, 2
"""What it says of an array: that its head follows, or why it has none."""


def _row(data: Array | None, *, of_cupy: bool, takes_device: bool) -> HostArray:
    """Return what a rank tells the others: of its array, if it has one, and of itself.

    Args:
        data: The array.
        of_cupy: Whether the caller gave it as one of CuPy, on a device.
        takes_device: Whether this rank can send and receive the memory of a device.
    """
    row = np.zeros(_ROW_BYTES, np.uint8)
    row[_TAKES_DEVICE] = takes_device
    if data is not None:
        dtype, most = np.dtype(data.dtype), _ROW_BYTES - _HEAD
        try:
            head = seal_head(data.shape, dtype, "", on_device=of_cupy, most_bytes=most)
            row[_HAS_ARRAY] = _ARRAY
        except DTypeError as error:
            # The others wait for the head: they are told why there is none.
            head = np.frombuffer(str(error).encode(errors="backslashreplace")[:most], np.uint8)
            row[_HAS_ARRAY] = _REFUSED
        row[_HEAD : _HEAD + head.size] = head
    return row


def _array_of(row: HostArray, root: int) -> Envelope:
    """Return what the row of the root says of its array.

    Raises:
        DTypeError: On all ranks, if its dtype cannot be described.
    """
    if row[_HAS_ARRAY] == _REFUSED:
        text = row[_HEAD:].tobytes().rstrip(b"\0").decode(errors="replace")
        raise on_all_ranks(DTypeError(f"rank {root}: {text}"))
    return open_head(row[_HEAD:])[0]


def broadcast(
    group: GroupCore,
    x: Array | None,
    root: int | None,
    out: Array | None,
    label: str | None,
    algorithm: str | None,
) -> CollectiveTensor:
    """Start a broadcast from the one rank that has an array; see :meth:`ProcessGroup.broadcast`."""
    rank = group.member("broadcast")
    if root is not None:
        root = group.check_rank(root, "root")
        raise ShapeError(
            f"broadcast with root={root} needs an array of the root's shape and dtype on every "
            f"rank, rank {rank} passed None; use root=None to let the ranks find both"
        )
    data = None if x is None else group.operand(x)
    if out is not None:
        check_output(out)
    asked = algorithm
    algorithm = group.algorithm_for("broadcast", 0, asked)
    row = _row(data, of_cupy=is_cupy(x), takes_device=group.moves_device_memory)
    arrival = group.arrival()

    def steps() -> Steps:
        table = np.empty((group.size, _ROW_BYTES), np.uint8)
        yield group.communicator.all_gather(row, table.reshape(-1), [_ROW_BYTES] * group.size)
        senders = np.flatnonzero(table[:, _HAS_ARRAY]).tolist()
        if len(senders) != 1:
            raise on_all_ranks(
                GroupError(
                    "broadcast with root=None needs exactly one rank of group "
                    f"{group.name!r} to pass an array, but ranks {senders} did"
                )
            )
        root = senders[0]
        array = _array_of(table[root], root)
        library = _library(array.on_device and bool(table[:, _TAKES_DEVICE].all()))
        if asked is not None and library is not np:
            try:
                group.algorithm_for("broadcast", 0, asked, on_device=True)
            except GroupError as error:
                raise on_all_ranks(error) from None

        def move(recv: Array, target: Array) -> Steps:
            source = None if data is None else moved(data, library)
            if source is not None and target is not source:
                target[...] = source
            if algorithm is None or library is not np:
                yield group.side(library).broadcast(recv, root)
            else:
                begin = group.communicator.prepare("broadcast", (recv, root), algorithm)
                yield from run_steps(begin)

        return (yield from _result(group, arrival, root, array, array.shape, library, out, move))

    arrival.call = Call("broadcast", group.name, rule_by("root None", algorithm), label=label)
    accounts = Accounts(0 if data is None else data.nbytes)
    prepared = Prepared(accounts, steps, scope=group.scope_if_any())
    return group.submit(arrival.call, prepared, None if x is out else x)


def scatter(
    group: GroupCore,
    x: Array | None,
    *,
    root: int,
    axis: int,
    sizes: Sequence[int] | None,
    out: Array | None,
    label: str | None,
) -> CollectiveTensor:
    """Start a scatter; see :meth:`ProcessGroup.scatter`."""
    rank = group.member("scatter")
    root = group.check_rank(root, "root")
    if out is not None:
        check_output(out)
    data = group.operand(x) if rank == root and x is not None else None
    if rank == root and data is None:
        raise ShapeError(f"scatter needs an array on its root, rank {root} passed None")
    sizes = None if sizes is None else check_sizes(sizes, group.size)
    row = _row(data, of_cupy=is_cupy(x), takes_device=False)
    arrival = group.arrival()

    def steps() -> Steps:
        yield group.communicator.broadcast(row, root)
        array = _array_of(row, root)
        takers = np.array([int(group.moves_device_memory)])
        if array.on_device:
            yield group.communicator.all_reduce(None, takers, "min")
        library = _library(array.on_device and bool(takers[0]))
        # The same arithmetic on every rank: a misfit raises on all of them.
        blocks = Blocks.of_whole(
            array.shape, normal_axis(axis, len(array.shape)), group.size, sizes
        )
        counts = [count * array.dtype.itemsize for count in blocks.counts]

        def move(recv: Array, target: Array) -> Steps:
            send = None
            if data is not None:
                send = blocks.pack(moved(data, library)).view(np.uint8)
                if library.may_share_memory(send, recv):
                    send = send.copy()
            yield group.side(library).scatter(send, recv, counts, root)

        shape = blocks.block_shape(rank)
        return (yield from _result(group, arrival, root, array, shape, library, out, move))

    arrival.call = Call(
        "scatter", group.name, f"root {root}, axis {axis}, sizes {sizes}", label=label
    )
    accounts = Accounts(0 if data is None else data.nbytes)
    prepared = Prepared(accounts, steps, scope=group.scope_if_any())
    return group.submit(arrival.call, prepared, None if data is None or x is out else x)


def _result(
    group: GroupCore,
    arrival: Arrival,
    root: int,
    array: Envelope,
    shape: tuple[int, ...],
    library: ModuleType,
    out: Array | None,
    move: Callable[[Array, Array], Steps],
) -> Steps:
    """Receive this rank's part of an array; the steps' value is the result.

    Args:
        group: The ranks.
        arrival: Counts what comes.
        root: Who has the array.
        array: What the root said of it.
        shape: That of this rank's part.
        library: The library whose memory bytes come into.
        out: The caller's array for the result.
        move: Moves the bytes: into a flat buffer, which becomes an array of `shape`.
    """
    misfit = _misfit(out, shape, array.dtype)
    recv, target, finish = receive(
        group,
        library,
        (shape, array.dtype),
        out if misfit is None else None,
        of_caller=_library(array.on_device),
    )
    yield from move(recv, target)
    if root != group.rank:
        arrival.came(root, recv.nbytes, int(recv.nbytes > 0))
    if misfit is not None:
        raise misfit
    arrival.settle()
    return target if finish is None else finish()


def _library(of_cupy: bool) -> ModuleType:
    """Return CuPy if it is asked for and in use on this rank, else NumPy."""
    return sys.modules.get("cupy", np) if of_cupy else np


def _misfit(out: Array | None, shape: tuple[int, ...], dtype: DType) -> MpimeshError | None:
    """Return what is wrong with `out`.

    Its shape is known only when the exchange has begun, and from then on a rank has to take
    part to the end: one that left would meet the others' next collective in the wrong one.
    """
    try:
        if out is not None:
            output_array(out, shape, dtype)
    except MpimeshError as error:
        return error
    return None
