"""Broadcast and scatter in which the ranks need not know what is coming.

Shape, dtype and place of the array travel ahead, in a message of fixed size.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from mpimesh.arrays import Array, DType, HostArray, is_cupy, moved
from mpimesh.arrays.dtypes import dtype_from_json, dtype_to_json
from mpimesh.comm import Steps, run_steps
from mpimesh.errors import GroupError, MpimeshError, ShapeError, on_all_ranks
from mpimesh.runtime.call import Call
from mpimesh.runtime.operands import Blocks, check_output, check_sizes, normal_axis, output_array
from mpimesh.runtime.plan import Accounts, Prepared, receive, rule_by
from mpimesh.runtime.work import CollectiveTensor

if TYPE_CHECKING:
    from mpimesh.runtime.group_core import GroupCore

__all__ = ["broadcast", "scatter"]

# -- headers --------------------------------------------------------------------------------------

HEADER_BYTES = 1024
_FLAGS_BYTES = 3
"""Bytes for three flags: there is an array, it is CuPy's, its rank moves device memory."""


def make_header(data: Array | None, *, of_cupy: bool, takes_device: bool) -> HostArray:
    """Return shape, dtype and place of an array in a message of fixed size.

    Args:
        data: The array; None if this rank has none.
        of_cupy: Whether the caller gave it as one of CuPy, on a device.
        takes_device: Whether this rank can send and receive the memory of a device.

    Raises:
        ShapeError: If the description does not fit.
    """
    header = np.zeros(HEADER_BYTES, np.uint8)
    header[2] = takes_device
    if data is not None:
        text = json.dumps([data.shape, dtype_to_json(np.dtype(data.dtype))]).encode()
        if len(text) > HEADER_BYTES - _FLAGS_BYTES:
            raise ShapeError(
                f"shape and dtype take {len(text)} bytes as text, more than "
                f"{HEADER_BYTES - _FLAGS_BYTES}: shorten the field names of the structured dtype"
            )
        header[:2] = 1, of_cupy
        header[_FLAGS_BYTES : _FLAGS_BYTES + len(text)] = np.frombuffer(text, np.uint8)
    return header


def has_array(header: HostArray) -> bool:
    """Tell whether the rank that made `header` has an array."""
    return bool(header[0])


def takes_device(header: HostArray) -> bool:
    """Tell whether the rank that made `header` can send and receive the memory of a device."""
    return bool(header[2])


def parse_header(header: HostArray) -> tuple[tuple[int, ...], DType, bool]:
    """Return shape and dtype that a header says, and whether the array is one of CuPy."""
    shape, dtype = json.loads(bytes(header[_FLAGS_BYTES:]).rstrip(b"\0"))
    return tuple(shape), dtype_from_json(dtype), bool(header[1])


# -- operations -----------------------------------------------------------------------------------


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
    header = make_header(data, of_cupy=is_cupy(x), takes_device=group.moves_device_memory)
    arrival = group.arrival()

    def steps() -> Steps:
        table = np.empty((group.size, HEADER_BYTES), np.uint8)
        yield group.communicator.all_gather(header, table.reshape(-1), [HEADER_BYTES] * group.size)
        senders = [rank for rank, row in enumerate(table) if has_array(row)]
        if len(senders) != 1:
            raise on_all_ranks(
                GroupError(
                    "broadcast with root=None needs exactly one rank of group "
                    f"{group.name!r} to pass an array, but ranks {senders} did"
                )
            )
        root = senders[0]
        shape, dtype, of_cupy = parse_header(table[root])
        library = _library(of_cupy and all(takes_device(row) for row in table))
        if asked is not None and library is not np:
            try:
                group.algorithm_for("broadcast", 0, asked, on_device=True)
            except GroupError as error:
                raise on_all_ranks(error) from None
        misfit = _misfit(out, shape, dtype)
        recv, target, finish = receive(
            group,
            library,
            (shape, dtype),
            out if misfit is None else None,
            of_caller=_library(of_cupy),
        )
        source = None if data is None else moved(data, library)
        if source is not None and target is not source:
            target[...] = source
        if algorithm is None or library is not np:
            yield group.side(library).broadcast(recv, root)
        else:
            yield from run_steps(group.communicator.prepare("broadcast", (recv, root), algorithm))
        if root != group.rank:
            arrival.came(root, recv.nbytes, int(recv.nbytes > 0))
        if misfit is not None:
            raise misfit
        arrival.settle()
        return target if finish is None else finish()

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
    header = make_header(data, of_cupy=is_cupy(x), takes_device=False)
    arrival = group.arrival()

    def steps() -> Steps:
        yield group.communicator.broadcast(header, root)
        shape, dtype, of_cupy = parse_header(header)
        takers = np.array([int(group.moves_device_memory)])
        if of_cupy:
            yield group.communicator.all_reduce(None, takers, "min")
        library = _library(of_cupy and bool(takers[0]))
        # The same arithmetic on every rank: a misfit raises on all of them.
        blocks = Blocks.of_whole(shape, normal_axis(axis, len(shape)), group.size, sizes)
        shape = blocks.block_shape(rank)
        misfit = _misfit(out, shape, dtype)
        recv, target, finish = receive(
            group,
            library,
            (shape, dtype),
            out if misfit is None else None,
            of_caller=_library(of_cupy),
        )
        send = None
        if data is not None:
            send = blocks.pack(moved(data, library)).view(np.uint8)
            if library.may_share_memory(send, recv):
                send = send.copy()
        counts = [count * dtype.itemsize for count in blocks.counts]
        yield group.side(library).scatter(send, recv, counts, root)
        if rank != root:
            arrival.came(root, recv.nbytes, int(recv.nbytes > 0))
        if misfit is not None:
            raise misfit
        arrival.settle()
        return target if finish is None else finish()

    arrival.call = Call(
        "scatter", group.name, f"root {root}, axis {axis}, sizes {sizes}", label=label
    )
    accounts = Accounts(0 if data is None else data.nbytes)
    prepared = Prepared(accounts, steps, scope=group.scope_if_any())
    return group.submit(arrival.call, prepared, None if data is None or x is out else x)


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
