"""Collectives in which one rank gives and the others need not know what is coming."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from mpimesh.arrays import Array, DType, HostArray, is_cupy, moved, namespace
from mpimesh.errors import GroupError, MpimeshError, ShapeError, on_all_ranks
from mpimesh.runtime.arrival import Arrival
from mpimesh.runtime.blocks import Blocks, check_sizes, normal_axis
from mpimesh.runtime.group_core import collective
from mpimesh.runtime.handle import CollectiveTensor
from mpimesh.runtime.header import (
    HEADER_BYTES,
    has_array,
    make_header,
    parse_header,
    takes_device,
)
from mpimesh.runtime.incoming import Incoming, apart, broadcast_buffer, byte_counts
from mpimesh.runtime.operands import check_output, output_array
from mpimesh.runtime.operation import Operation
from mpimesh.runtime.straight import Straight, bytes_of
from mpimesh.runtime.traffic import sparse
from mpimesh.transport import Steps

__all__ = ["Rooted"]


class Rooted(Straight):
    """``broadcast`` and ``scatter`` of a group. Arrays of every dtype but objects are moved."""

    def broadcast(
        self,
        x: Array | None,
        *,
        root: int | None = 0,
        out: Array | None = None,
        label: str | None = None,
    ) -> CollectiveTensor:
        """Give every rank the array of `root`.

        Collective, as :meth:`ProcessGroup.all_gather`.

        Args:
            x: On `root`, the array. Elsewhere an array of the same shape and dtype, whose
                values do not matter. With ``root=None``, exactly one rank passes its array
                and the others None.
            root: The sending rank, counted in the group; None to find it, together with its
                shape and dtype, at the cost of one more small exchange.
            out: Array for the result; may be `x` itself. New if None.
            label: The caller's name for this call.

        Returns:
            A handle; ``resolve()`` gives the array; with ``root=None`` it lies where the root's
            does, on the host or on this rank's device.

        Raises:
            RankError: If `root` is not a rank of the group.
            ShapeError: If a rank passes no array though `root` is given, or `out` does not fit.
            GroupError: From ``resolve()`` on every rank, with ``root=None``, if not exactly one
                rank passed an array.
        """
        transport = self._straight_to(x) if out is None or out is x else None
        if transport is not None and x is not None and type(root) is int and 0 <= root < self.size:
            value = self._straight_buffer(x, out, sends=self.rank == root)
            if value is not None:
                call = self._called(
                    transport, "broadcast", f"root {root}", x.shape, x.dtype, label, x.shape
                )
                if call is not None:
                    request = transport.broadcast(bytes_of(value), root)
                    nbytes = x.nbytes if self.rank == root else 0
                    whole = (sparse, (root, x.nbytes, int(x.nbytes > 0)))
                    receives = None if self.rank == root else whole
                    operation = Operation(self, call, request, None, None, value)
                    return self.own(operation, nbytes, receives)
        return self._broadcast(x, root=root, out=out, label=label)

    def _straight_buffer(self, x: HostArray, out: Array | None, *, sends: bool) -> HostArray | None:
        """Return what a broadcast of `x` sends or receives; None if it is not to be written."""
        if out is not None:
            return x if x.flags.writeable else None
        value = self._context.world.pool.empty(x.shape, x.dtype)
        if sends:
            value[...] = x
        return value

    @collective
    def _broadcast(
        self, x: Array | None, *, root: int | None, out: Array | None, label: str | None
    ) -> CollectiveTensor:
        """Broadcast in general."""
        rank = self._member("broadcast")
        if root is None:
            return self._broadcast_from_whom(x, out, label)
        root = self.check_rank(root, "root")
        if x is None:
            raise ShapeError(
                f"broadcast with root={root} needs an array of the root's shape and dtype on every "
                f"rank, rank {rank} passed None; use root=None to let the ranks find both"
            )
        data = self.operand(x)
        buffer, value, finish = broadcast_buffer(
            self,
            namespace(x),
            (data.shape, data.dtype),
            out,
            namespace(data),
            source=data if rank == root else None,
        )
        return self._launch(
            "broadcast",
            lambda: self.side(namespace(buffer)).broadcast(buffer, root),
            rule=f"root {root}",
            data=data,
            out=out,
            label=label,
            compared=data.shape,
            value=value,
            finish=finish,
            lock=x,
            nbytes=data.nbytes if rank == root else 0,
            receives=None if rank == root else (sparse, (root, data.nbytes, int(data.nbytes > 0))),
        )

    def _broadcast_from_whom(
        self, x: Array | None, out: Array | None, label: str | None
    ) -> CollectiveTensor:
        data = None if x is None else self.operand(x)
        if out is not None:
            check_output(out)
        header = make_header(data, of_cupy=is_cupy(x), takes_device=self.moves_device_memory)

        arrival = Arrival(self._context.traffic, self._members)

        def steps() -> Steps:
            table = np.empty((self.size, HEADER_BYTES), np.uint8)
            yield self.communicator.all_gather(
                header, table.reshape(-1), [HEADER_BYTES] * self.size
            )
            senders = [rank for rank, row in enumerate(table) if has_array(row)]
            if len(senders) != 1:
                raise on_all_ranks(
                    GroupError(
                        "broadcast with root=None needs exactly one rank of group "
                        f"{self.name!r} to pass an array, but ranks {senders} did"
                    )
                )
            root = senders[0]
            shape, dtype, of_cupy = parse_header(table[root])
            library = _library(of_cupy and all(takes_device(row) for row in table))
            misfit = _misfit(out, shape, dtype)
            buffer, value, finish = broadcast_buffer(
                self,
                _library(of_cupy),
                (shape, dtype),
                out if misfit is None else None,
                library,
                source=None if data is None else moved(data, library),
            )
            yield self.side(library).broadcast(buffer, root)
            if root != self.rank:
                arrival.came(root, buffer.nbytes, int(buffer.nbytes > 0))
            if misfit is not None:
                raise misfit
            arrival.settle()
            return value if finish is None else finish()

        return self._launch(
            "broadcast",
            steps,
            rule="root None",
            scope=self.scope_if_any(),
            label=label,
            lock=None if x is out else x,
            nbytes=0 if data is None else data.nbytes,
            arrival=arrival,
        )

    @collective
    def scatter(
        self,
        x: Array | None,
        *,
        root: int = 0,
        axis: int = 0,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str | None = None,
    ) -> CollectiveTensor:
        """Cut the array of `root` along `axis` and give each rank its block.

        Collective, as :meth:`ProcessGroup.all_gather`. The root's shape and dtype travel ahead
        in one small broadcast, so the other ranks need not know them.

        Shapes, with r this rank's place in the group:
            x on root: (..., sum(sizes), ...).
            result: (..., sizes[r], ...). A size may be 0.

        Args:
            x: On `root`, the array; ignored elsewhere.
            root: The sending rank, counted in the group.
            axis: The axis that is cut.
            sizes: Block sizes along `axis`, given on every rank; equal blocks if None.
            out: Array for the result. New if None.
            label: The caller's name for this call.

        Returns:
            A handle; ``resolve()`` gives this rank's block, which lies where the root's array
            does, on the host or on this rank's device.

        Raises:
            RankError: If `root` is not a rank of the group.
            ShapeError: If the root's array does not fall into such blocks (from ``resolve()``
                on every rank), if root passes None, or if `out` does not fit (from
                ``resolve()``).
        """
        rank = self._member("scatter")
        root = self.check_rank(root, "root")
        if out is not None:
            check_output(out)
        data = self.operand(x) if rank == root and x is not None else None
        if rank == root and data is None:
            raise ShapeError(f"scatter needs an array on its root, rank {root} passed None")
        sizes = None if sizes is None else check_sizes(sizes, self.size)
        header = make_header(data, of_cupy=is_cupy(x), takes_device=False)

        arrival = Arrival(self._context.traffic, self._members)

        def steps() -> Steps:
            yield self.communicator.broadcast(header, root)
            shape, dtype, of_cupy = parse_header(header)
            takers = np.array([int(self.moves_device_memory)])
            if of_cupy:
                yield self.communicator.all_reduce(None, takers, "min")
            library = _library(of_cupy and bool(takers[0]))
            # The same arithmetic on every rank: a misfit raises on all of them.
            blocks = Blocks.of_whole(shape, normal_axis(axis, len(shape)), self.size, sizes)
            shape = blocks.block_shape(rank)
            misfit = _misfit(out, shape, dtype)
            receive = Incoming(
                self,
                _library(of_cupy),
                Blocks(shape, 0, shape[:1]),
                dtype,
                out if misfit is None else None,
                library,
            )
            packed = None
            if data is not None:
                packed = apart(blocks.pack(moved(data, library)).view(np.uint8), receive)
            yield self.side(library).scatter(
                packed, receive.buffer, byte_counts(blocks, dtype), root
            )
            if rank != root:
                arrival.came(root, receive.buffer.nbytes, int(receive.buffer.nbytes > 0))
            if misfit is not None:
                raise misfit
            arrival.settle()
            return receive.value if receive.finish is None else receive.finish()

        return self._launch(
            "scatter",
            steps,
            rule=f"root {root}, axis {axis}, sizes {sizes}",
            scope=self.scope_if_any(),
            label=label,
            lock=None if data is None or x is out else x,
            nbytes=0 if data is None else data.nbytes,
            arrival=arrival,
        )


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
