"""Collectives that join blocks of all ranks and change no value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpimesh.arrays import Array, namespace
from mpimesh.runtime.block_checks import compare_blocks
from mpimesh.runtime.blocks import Blocks, check_sizes, normal_axis
from mpimesh.runtime.group_core import collective
from mpimesh.runtime.handle import CollectiveTensor
from mpimesh.runtime.incoming import Incoming, apart, at_least_1d, byte_counts, flat_bytes
from mpimesh.runtime.operands import check_output
from mpimesh.runtime.operation import Operation
from mpimesh.runtime.straight import Straight, bytes_of, even_blocks, is_first
from mpimesh.runtime.traffic import per_rank

__all__ = ["Movements"]


class Movements(Straight):
    """``all_gather``, ``gather`` and ``all_to_all`` of a group.

    Arrays of every dtype are moved, as bytes: numbers of any width and byte order,
    structures, dates, fixed-length text. Only Python objects are refused.
    """

    def all_gather(
        self,
        x: Array,
        *,
        axis: int = 0,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str | None = None,
    ) -> CollectiveTensor:
        """Join the blocks of all ranks of this group along array axis `axis`.

        Collective: every rank of the group calls it, in the same order among all
        collectives on the group. Returns at once; do not write `x` or read `out`
        before :meth:`CollectiveTensor.resolve`.

        Shapes, with r this rank's place in the group:
            x: (..., sizes[r], ...). A size may be 0. A 0-d array counts as one of shape (1,).
            result: (..., sum(sizes), ...), the same on every rank.

        Args:
            x: This rank's block, NumPy or CuPy.
            axis: Array axis to join.
            sizes: Block size of each rank along `axis`, in group order; if None,
                all blocks have the shape of `x`.
            out: Array for the result. New if None.
            label: The caller's name for this call, compared when ``MPIMESH_CHECKS`` is on.

        Returns:
            A handle; ``resolve()`` gives the joined array.

        Raises:
            ShapeError: If `x` does not fit `sizes`, or `out` does not fit.
            DTypeError: If `x` holds Python objects.

        Cost:
            Ring: ``(n-1) * (latency_s + nbytes / (n * bytes_per_s))`` seconds for n ranks,
            with `nbytes` the bytes of the result.
        """
        transport = self._straight_to(x) if sizes is None and is_first(axis) else None
        if transport is not None:
            length, *others = x.shape
            value = self._straight_result(x, (self.size * length, *others), out)
            if value is not None:
                counts = [x.nbytes] * self.size
                rule = even_blocks(length, self.size)
                call = self._called(
                    transport, "all_gather", rule, x.shape, x.dtype, label, value.shape
                )
                if call is not None:
                    request = transport.all_gather(bytes_of(x), bytes_of(value), counts)
                    operation = Operation(self, call, request, None, None, value)
                    return self.own(operation, x.nbytes, (per_rank, tuple(counts)))
        return self._all_gather(x, axis=axis, sizes=sizes, out=out, label=label)

    @collective
    def _all_gather(
        self,
        x: Array,
        *,
        axis: int,
        sizes: Sequence[int] | None,
        out: Array | None,
        label: str | None,
    ) -> CollectiveTensor:
        """All-gather in general."""
        rank = self._member("all_gather")
        data = at_least_1d(self.operand(x))
        axis = normal_axis(axis, data.ndim)
        blocks = Blocks.of_mine(data.shape, axis, rank, self.size, sizes)
        receive = Incoming(self, namespace(x), blocks, data.dtype, out, namespace(data))
        send = apart(flat_bytes(data), receive)
        counts = byte_counts(blocks, data.dtype)
        return self._launch(
            "all_gather",
            lambda: self.side(namespace(send)).all_gather(send, receive.buffer, counts),
            rule=f"axis {axis}, sizes {list(blocks.sizes)}",
            data=data,
            out=out,
            label=label,
            compared=blocks.shape,
            value=receive.value,
            finish=receive.finish,
            lock=x,
            receives=(per_rank, tuple(counts)),
        )

    @collective
    def gather(
        self,
        x: Array,
        *,
        root: int = 0,
        axis: int = 0,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str | None = None,
    ) -> CollectiveTensor:
        """Join the blocks of all ranks along `axis`, on `root` only.

        Collective, as :meth:`all_gather`, with the same shapes.

        Args:
            x: This rank's block.
            root: The receiving rank, counted in the group.
            axis: Array axis to join.
            sizes: Block sizes along `axis`, given on every rank; equal blocks if None.
            out: Array for the result on `root`, ignored elsewhere. New if None.
            label: The caller's name for this call.

        Returns:
            A handle; ``resolve()`` gives the joined array on `root` and None elsewhere.

        Raises:
            RankError: If `root` is not a rank of the group.
            ShapeError: If `x` does not fit `sizes`, or `out` does not fit.
        """
        rank = self._member("gather")
        root = self.check_rank(root, "root")
        if out is not None:
            check_output(out)  # everywhere, so that all ranks refuse what is no array
        data = at_least_1d(self.operand(x))
        axis = normal_axis(axis, data.ndim)
        blocks = Blocks.of_mine(data.shape, axis, rank, self.size, sizes)
        receive = (
            Incoming(self, namespace(x), blocks, data.dtype, out, namespace(data))
            if rank == root
            else None
        )
        send = apart(flat_bytes(data), receive)
        counts = byte_counts(blocks, data.dtype)
        return self._launch(
            "gather",
            lambda: self.side(namespace(send)).gather(
                send, None if receive is None else receive.buffer, counts, root
            ),
            rule=f"root {root}, axis {axis}, sizes {list(blocks.sizes)}",
            data=data,
            out=out,
            label=label,
            compared=blocks.shape,
            value=None if receive is None else receive.value,
            finish=None if receive is None else receive.finish,
            lock=x,
            receives=None if receive is None else (per_rank, tuple(counts)),
        )

    def all_to_all(
        self,
        x: Array,
        *,
        split_axis: int = 0,
        concat_axis: int | None = None,
        sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str | None = None,
    ) -> CollectiveTensor:
        """Cut `x` into one block for each rank, exchange them, and join what came.

        Collective, as :meth:`all_gather`. Block d of this rank becomes block r of
        rank d, with r this rank's place in the group.

        Shapes:
            x: (..., sum(sizes), ...) along `split_axis`.
            result: if `concat_axis` is `split_axis`: (..., sum(recv_sizes), ...) along it;
                else sizes[r] along `split_axis` and sum(recv_sizes) along `concat_axis`.

        Args:
            x: This rank's array, at least 1-d.
            split_axis: The axis that is cut.
            concat_axis: The axis along which what came is joined; `split_axis` if None.
            sizes: Size of the block for each rank along `split_axis`; equal blocks if None.
            recv_sizes: Size of the block from each rank along `concat_axis`; if None, that of
                what this rank itself puts in.
            out: Array for the result. New if None.
            label: The caller's name for this call.

        Returns:
            A handle; ``resolve()`` gives the joined array.

        Raises:
            ShapeError: If `x` does not fall into such blocks, or `out` does not fit.
            MismatchError: From ``resolve()`` on every rank, with ``MPIMESH_CHECKS`` on, if a rank
                sends another a block of a shape that it does not expect.
        """
        transport = None
        if sizes is None and recv_sizes is None and is_first(split_axis):
            same = concat_axis is None or is_first(concat_axis)
            transport = self._straight_to(x) if same else None
        if transport is not None and x.shape[0] % self.size == 0:
            value = self._straight_result(x, x.shape, out)
            if value is not None:
                counts = [x.nbytes // self.size] * self.size
                rule = "split_axis 0, concat_axis 0"
                call = self._called(transport, "all_to_all", rule, x.shape, x.dtype, label, x.ndim)
                if call is not None:
                    request = transport.all_to_all(bytes_of(x), bytes_of(value), counts, counts)
                    operation = Operation(self, call, request, None, None, value)
                    return self.own(operation, x.nbytes, (per_rank, tuple(counts)))
        return self._all_to_all(
            x,
            split_axis=split_axis,
            concat_axis=concat_axis,
            sizes=sizes,
            recv_sizes=recv_sizes,
            out=out,
            label=label,
        )

    @collective
    def _all_to_all(
        self,
        x: Array,
        *,
        split_axis: int,
        concat_axis: int | None,
        sizes: Sequence[int] | None,
        recv_sizes: Sequence[int] | None,
        out: Array | None,
        label: str | None,
    ) -> CollectiveTensor:
        """All-to-all in general."""
        rank = self._member("all_to_all")
        data = self.operand(x)
        split_axis = normal_axis(split_axis, data.ndim, what="split_axis")
        concat_axis = (
            split_axis
            if concat_axis is None
            else normal_axis(concat_axis, data.ndim, what="concat_axis")
        )
        blocks = Blocks.of_whole(data.shape, split_axis, self.size, sizes)
        mine = blocks.block_shape(rank)
        if recv_sizes is None:
            recv_sizes = [mine[concat_axis]] * self.size
        recv_sizes = check_sizes(recv_sizes, self.size)
        joined = (*mine[:concat_axis], sum(recv_sizes), *mine[concat_axis + 1 :])
        incoming = Blocks(joined, concat_axis, recv_sizes)
        receive = Incoming(self, namespace(x), incoming, data.dtype, out, namespace(data))
        packed = apart(blocks.pack(data).view(np.uint8), receive)
        send_counts = byte_counts(blocks, data.dtype)
        recv_counts = byte_counts(incoming, data.dtype)
        return self._launch(
            "all_to_all",
            lambda: self.side(namespace(packed)).all_to_all(
                packed, receive.buffer, send_counts, recv_counts
            ),
            rule=f"split_axis {split_axis}, concat_axis {concat_axis}",
            data=data,
            out=out,
            label=label,
            compared=data.ndim,
            also=lambda call: compare_blocks(self.communicator, call, blocks, incoming),
            value=receive.value,
            finish=receive.finish,
            lock=x,
            receives=(per_rank, tuple(recv_counts)),
        )
