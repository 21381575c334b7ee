"""Collectives that make one value of the values of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mpimesh.arrays import (
    Array,
    DType,
    HostArray,
    ReduceOp,
    as_reduce_op,
    is_cupy,
    moved,
    namespace,
    wire_dtype,
)
from mpimesh.runtime.blocks import Blocks, normal_axis
from mpimesh.runtime.group_core import GroupCore, collective
from mpimesh.runtime.handle import CollectiveTensor
from mpimesh.runtime.operands import check_output, output_array
from mpimesh.runtime.operation import Operation
from mpimesh.runtime.straight import Straight, even_blocks, is_first
from mpimesh.runtime.traffic import all_reduced, uniform

__all__ = ["Reductions"]

_wire_dtype = lru_cache(maxsize=256)(wire_dtype)

_AS_IT_IS = frozenset(
    (np.dtype(kind), str(op.value))
    for kind in "fdilqILQ"
    for op in (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX)
)
"""The pairs of dtype and reduction that the transports know as they are."""


class Reductions(Straight):
    """``all_reduce``, ``reduce`` and ``reduce_scatter`` of a group."""

    def all_reduce(
        self,
        x: Array,
        op: ReduceOp | str = "sum",
        *,
        out: Array | None = None,
        label: str | None = None,
    ) -> CollectiveTensor:
        """Reduce `x` element by element over all ranks of the group; every rank gets the result.

        Collective: every rank of the group calls it, in the same order among all
        collectives on the group. Returns at once; do not write `x` or read `out`
        before :meth:`CollectiveTensor.resolve`.

        Its adjoint is itself: the gradient of an all-reduce by sum is the
        all-reduce by sum of the gradients, and so for mean.

        Shapes:
            x: any, the same on every rank; 0-d and empty arrays too.
            result: the shape of `x`.

        Args:
            x: This rank's array, NumPy or CuPy, of any memory order and stride.
            op: ``"sum"``, ``"mean"``, ``"prod"``, ``"min"`` or ``"max"``; "mean" is the sum
                divided by the group's size. "min" and "max" of values with NaN are NaN, as
                NumPy's, with the same bits on all ranks.
            out: Array for the result; may be `x` itself. New if None.
            label: The caller's name for this call, compared when ``MPIMESH_CHECKS`` is on.

        Returns:
            A handle; ``resolve()`` gives the array.

        Raises:
            DTypeError: If the dtype cannot be reduced by `op`; see
                :mod:`mpimesh.arrays.reduction`.
            ShapeError: If `out` does not fit.

        Cost:
            MPI's: about ``2 log2(n) * latency_s + 2 nbytes / bytes_per_s`` seconds for n ranks.
        """
        # The common cases by the shortest way: nothing to convert, check or queue. It is why
        # a small all-reduce costs a few microseconds more than MPI's own, not fifteen.
        context = self._context
        communicator = self._communicator
        if (
            context.direct
            and type(x) is np.ndarray
            and (out is None or out is x)
            and communicator is not None
            and isinstance(op, str)
            and (((dtype := x.dtype), op) in _AS_IT_IS or (op == "mean" and self._averages(x)))
            and _is_plain(x)
            and context.world.progress.idle
            and (out is None or x.flags.writeable)
        ):
            flat, shape = x.reshape(-1), x.shape
            call = self._called(communicator, "all_reduce", op, shape, dtype, label, shape)
            if call is None:
                return self._all_reduce(x, op, out=out, label=label)
            if out is None:
                value = context.world.pool.empty(shape, dtype)
                request = communicator.all_reduce(flat, value.reshape(-1), op)
            else:
                value = x
                request = communicator.all_reduce(None, flat, op)
            nbytes = x.nbytes
            operation = Operation(self, call, request, None, None, value)
            return self.own(operation, nbytes, (all_reduced, nbytes))
        return self._all_reduce(x, op, out=out, label=label)

    @collective
    def _all_reduce(
        self, x: Array, op: ReduceOp | str, *, out: Array | None, label: str | None
    ) -> CollectiveTensor:
        """All-reduce in general: any dtype, memory order and output."""
        data = self.operand(x)
        op = as_reduce_op(op)
        wire = _wire_dtype(data.dtype, op)
        send = _wire_copy(data, wire)
        moved_as, left_to_do = _TRANSPORT_OPS[op], op
        if op is ReduceOp.MEAN and self._averages(send):
            moved_as, left_to_do = "mean", ReduceOp.SUM
        send, recv, finish, value = _prepare(x, send, data.dtype, left_to_do, out, self, data.shape)
        # In place, MPI needs no second buffer.
        source = None if send is recv else send
        return self._launch(
            "all_reduce",
            lambda: self.side(namespace(recv)).all_reduce(source, recv, moved_as),
            rule=op,
            data=data,
            out=out,
            label=label,
            compared=data.shape,
            value=value,
            finish=finish,
            lock=x,
            receives=(all_reduced, data.nbytes),
        )

    def _averages(self, x: Array) -> bool:
        """Tell whether the transport divides a mean itself, while it is in cache."""
        return (
            x.dtype.char in "fd"
            and x.dtype.isnative
            and namespace(x) is np
            and self._communicator is not None
            and self._communicator.averages(x.nbytes)
        )

    @collective
    def reduce(
        self,
        x: Array,
        op: ReduceOp | str = "sum",
        *,
        root: int = 0,
        out: Array | None = None,
        label: str | None = None,
    ) -> CollectiveTensor:
        """Reduce `x` element by element over all ranks; only `root` gets the result.

        Collective, as :meth:`all_reduce`.

        Args:
            x: This rank's array.
            op: As in :meth:`all_reduce`.
            root: The receiving rank, counted in the group.
            out: Array for the result on `root`, ignored elsewhere. New if None.
            label: The caller's name for this call.

        Returns:
            A handle; ``resolve()`` gives the array on `root` and None elsewhere.

        Raises:
            RankError: If `root` is not a rank of the group.
            DTypeError: If the dtype cannot be reduced by `op`.
            ShapeError: If `out` does not fit.
        """
        root = self.check_rank(root, "root")
        data = self.operand(x)
        op = as_reduce_op(op)
        wire = _wire_dtype(data.dtype, op)
        at_root = self.rank == root
        if out is not None:
            check_output(out)  # everywhere, so that all ranks refuse what is no array
        send = _wire_copy(data, wire)
        recv: Array | None = None
        finish = value = None
        if at_root:
            send, recv, finish, value = _prepare(x, send, data.dtype, op, out, self, data.shape)
            if send is recv:  # MPI's rooted reduction has no in-place form on one side only
                send = recv.copy()
        return self._launch(
            "reduce",
            lambda: self.side(namespace(send)).reduce(send, recv, _TRANSPORT_OPS[op], root),
            rule=f"{op}, root {root}",
            data=data,
            out=out,
            label=label,
            compared=data.shape,
            value=value,
            finish=finish,
            lock=x,
            receives=(uniform, data.nbytes) if at_root else None,
        )

    def reduce_scatter(
        self,
        x: Array,
        op: ReduceOp | str = "sum",
        *,
        axis: int = 0,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str | None = None,
    ) -> CollectiveTensor:
        """Reduce `x` over all ranks and give each rank one block of the result along `axis`.

        Collective, as :meth:`all_reduce`.

        Shapes, with r this rank's place in the group:
            x: (..., sum(sizes), ...), the same on every rank.
            result: (..., sizes[r], ...). A size may be 0.

        Args:
            x: This rank's array, at least 1-d.
            op: As in :meth:`all_reduce`.
            axis: The axis that is cut.
            sizes: Block size of each rank along `axis`, in group order; equal blocks if None.
            out: Array for the result. New if None.
            label: The caller's name for this call.

        Returns:
            A handle; ``resolve()`` gives this rank's block.

        Raises:
            ShapeError: If `x` does not fall into such blocks, or `out` does not fit.
            DTypeError: If the dtype cannot be reduced by `op`.
        """
        transport = self._straight_to(x) if sizes is None and is_first(axis) else None
        if (
            transport is not None
            and isinstance(op, str)
            and (x.dtype, op) in _AS_IT_IS
            and x.flags.aligned
            and x.shape[0] % self.size == 0
        ):
            length = x.shape[0] // self.size
            value = self._straight_result(x, (length, *x.shape[1:]), out)
            if value is not None:
                counts = [x.size // self.size] * self.size
                rule = f"{op}, {even_blocks(length, self.size)}"
                call = self._called(
                    transport, "reduce_scatter", rule, x.shape, x.dtype, label, x.shape
                )
                if call is not None:
                    request = transport.reduce_scatter(x.reshape(-1), value.reshape(-1), counts, op)
                    operation = Operation(self, call, request, None, None, value)
                    return self.own(operation, x.nbytes, (uniform, value.nbytes))
        return self._reduce_scatter(x, op, axis=axis, sizes=sizes, out=out, label=label)

    @collective
    def _reduce_scatter(
        self,
        x: Array,
        op: ReduceOp | str,
        *,
        axis: int,
        sizes: Sequence[int] | None,
        out: Array | None,
        label: str | None,
    ) -> CollectiveTensor:
        """Reduce-scatter in general."""
        rank = self._member("reduce_scatter")
        data = self.operand(x)
        op = as_reduce_op(op)
        wire = _wire_dtype(data.dtype, op)
        axis = normal_axis(axis, data.ndim)
        blocks = Blocks.of_whole(data.shape, axis, self.size, sizes)
        plain = data.dtype == wire and _is_aligned(data)
        send = blocks.pack(data if plain else data.astype(wire))
        shape = blocks.block_shape(rank)
        send, recv, finish, value = _prepare(x, send, data.dtype, op, out, self, shape)
        if send is recv:  # as for a rooted reduction
            send = recv.copy()
        return self._launch(
            "reduce_scatter",
            lambda: self.side(namespace(send)).reduce_scatter(
                send, recv, blocks.counts, _TRANSPORT_OPS[op]
            ),
            rule=f"{op}, axis {axis}, sizes {list(blocks.sizes)}",
            data=data,
            out=out,
            label=label,
            compared=data.shape,
            value=value,
            finish=finish,
            lock=x,
            receives=(uniform, blocks.counts[rank] * data.dtype.itemsize),
        )


# A mean is a sum to the transports, divided here.
_TRANSPORT_OPS = {op: "sum" if op is ReduceOp.MEAN else op.value for op in ReduceOp}


def _wire_copy(data: Array, wire: DType) -> Array:
    """Return `data` flat, contiguous, aligned and of dtype `wire`; itself where it is so."""
    if data.dtype == wire and data.flags.c_contiguous and _is_aligned(data):
        return data.reshape(-1)
    return data.astype(wire, order="C").reshape(-1)


def _is_plain(x: HostArray) -> bool:
    """Tell whether the transports can reduce the memory of `x` as it lies."""
    flags = x.flags
    return flags.c_contiguous and flags.aligned


def _is_aligned(x: Array) -> bool:
    """Tell whether each element of `x` starts where its type may; all of CuPy's do."""
    return is_cupy(x) or bool(x.flags.aligned)


def _prepare(
    x: Array,
    send: Array,
    dtype: DType,
    op: ReduceOp,
    out: Array | None,
    group: GroupCore,
    shape: tuple[int, ...],
) -> tuple[Array, Array, Callable[[], Any] | None, Any]:
    """Return the flat buffers to send and receive, and how they become the result.

    Args:
        x: The caller's array.
        send: Its values, flat and in the dtype in which they are reduced, where they are
            reduced: on its device or on the host.
        dtype: Its dtype, which is the result's.
        op: The reduction.
        out: The caller's array for the result.
        group: Gives memory for the result.
        shape: The result's shape.
    """
    if out is not None:
        output_array(out, shape, dtype)
    wire = send.dtype
    direct = dtype == wire
    library, of_caller = namespace(send), namespace(x)
    in_place = out is not None and direct and namespace(out) is library
    if out is not None and in_place and out.flags.c_contiguous and _is_aligned(out):
        target = out
        recv = out.reshape(-1)
        if out is x:
            send = recv
        elif library.may_share_memory(send, recv):
            send = send.copy()
    else:
        target = group.empty(shape, wire, library)
        recv = target.reshape(-1)
    value: Any = target if out is None else out
    if direct and value is target and op is not ReduceOp.MEAN and of_caller is library:
        return send, recv, None, value

    def finish() -> Any:
        # Overflow and NaN pass silently, as they do in the reduction itself.
        with np.errstate(all="ignore"):
            if op is ReduceOp.MEAN:
                library.divide(recv, group.size, out=recv)
            result = target if direct else target.astype(dtype)
        if out is None:
            return moved(result, of_caller)
        if out is not target:
            out[...] = moved(result, namespace(out))
        return out

    return send, recv, finish, value
