"""Arrays of the callers of collectives: where their bytes lie, and their cut into blocks.

The transports move flat blocks that lie one after the other. Along axis 0 (or any axis with only
ones before it) the blocks of a C-contiguous array already do; along another axis they are copied
together before and apart after.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mpimesh.arguments import shown
from mpimesh.arrays import (
    Array,
    HostArray,
    is_cupy,
    namespace,
    refuse_masked,
    refuse_objects,
    to_numpy,
)
from mpimesh.comm import Communicator, Steps
from mpimesh.errors import AxisError, AxisTypeError, DTypeError, MpimeshError, ShapeError
from mpimesh.runtime.agreement import compare
from mpimesh.runtime.call import Call
from mpimesh.runtime.world import current_world

__all__ = [
    "AgreedSizes",
    "Blocks",
    "check_output",
    "check_sizes",
    "compare_blocks",
    "host_array",
    "normal_axis",
    "output_array",
    "split_array",
]


def host_array(x: Array) -> HostArray:
    """Return `x` as a NumPy array; CuPy arrays are copied to the host.

    Raises:
        DTypeError: If `x` holds Python objects, has a mask, or is memory of a device that mpimesh
            cannot read.
        ShapeError: If `x` is a list that is no array, such as one with rows of unequal length.
    """
    if x is None:
        raise ShapeError(
            "None given instead of an array: every rank passes one, unless root= names the rank "
            "that alone has it"
        )
    if type(x) is np.ndarray:
        host: HostArray = x
    elif is_cupy(x):
        host = to_numpy(x)
    elif hasattr(x, "__cuda_array_interface__"):
        raise DTypeError(
            f"an array of {type(x).__module__}.{type(x).__qualname__} lies on a device; mpimesh "
            "reads CuPy's arrays there: pass cupy.asarray(x), or a copy on the host"
        )
    else:
        refuse_masked(x)
        try:
            host = np.asarray(x)
        except MpimeshError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:  # the last one of PyTorch
            raise ShapeError(f"{type(x).__name__} given, which is no array: {error}") from None
    refuse_objects(host.dtype)
    return host


def split_array(x: Array) -> HostArray:
    """Return `x` as :func:`host_array` does, to be split: but CuPy's is refused.

    Raises:
        DTypeError: If it is CuPy's: its copy would be the host's without a word.
    """
    if is_cupy(x):
        raise DTypeError(
            f"split arrays lie in host memory, got a CuPy array of shape {x.shape} and dtype "
            f"{x.dtype} on GPU {x.device.id}: give its copy, cupy.asnumpy(x). Operations of a "
            "group, such as group.all_reduce(x), move device memory as it is"
        )
    return host_array(x)


def check_output(out: Any) -> None:
    """Check that `out` is an array that can be written, each element for itself.

    Raises:
        DTypeError: If it is no array, or has a mask.
        ShapeError: If it is read-only, or elements share memory.
    """
    refuse_masked(out)
    if not isinstance(out, np.ndarray) and not is_cupy(out):
        raise DTypeError(f"out must be a NumPy or CuPy array, got {type(out).__name__}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        holder = current_world().locks.holder(out)
        cure = "pass an array that can be written" if holder is None else "resolve that first"
        why = "" if holder is None else f" while {holder} uses it"
        raise ShapeError(f"out is read-only{why}; {cure}")
    if not out.flags.c_contiguous and _overlaps(out):
        raise ShapeError(
            f"out has elements that share memory, by its strides {out.strides} and shape "
            f"{out.shape}; pass an array where each has its own"
        )


def output_array(out: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Check an array that is to hold a result.

    Raises:
        ShapeError: If its shape is not `shape`, it is read-only, or elements share memory.
        DTypeError: If it is no array, or its dtype is not `dtype`.
    """
    if type(out) is not np.ndarray or not (flags := out.flags).writeable or not flags.c_contiguous:
        check_output(out)
    if out.shape != shape:
        raise ShapeError(f"out has shape {out.shape}, but the result has shape {shape}")
    if out.dtype != dtype:
        raise DTypeError(f"out has dtype {out.dtype}, but the result has dtype {dtype}")


def _overlaps(out: Array) -> bool:
    """Tell whether two elements may share memory: axes whose steps do not pass the inner ones."""
    end = out.dtype.itemsize
    axes = zip(out.strides, out.shape, strict=True)
    for stride, length in sorted((abs(stride), length) for stride, length in axes if length != 1):
        if not length:
            return False
        if stride < end:
            return True
        end += stride * (length - 1)
    return False


# -- blocks along an axis ------------------------------------------------------------------------


class MissingAxisError(AxisError, np.exceptions.AxisError):
    """An axis that an array does not have, as NumPy's own error and mpimesh's."""


def normal_axis(axis: Any, ndim: int, what: str = "axis") -> int:
    """Return `axis` counted from the front.

    Raises:
        MissingAxisError: If an array of `ndim` axes has no such axis.
        AxisTypeError: If `axis` is no whole number.
    """
    try:
        place = operator.index(axis)
    except TypeError:
        raise AxisTypeError(f"{what} must be a whole number, got {axis!r}") from None
    if not -ndim <= place < ndim:
        raise MissingAxisError(f"{what} {place} does not exist in an array with {ndim} axes")
    return place % ndim


class AgreedSizes(tuple[int, ...]):
    """Sizes of blocks that all ranks have worked out alike, so that nobody need compare them."""

    __slots__ = ()


class Blocks:
    """The cut of an array of `shape` into blocks along `axis`.

    Args:
        shape: The whole array's shape.
        axis: The axis that is cut, counted from the front.
        sizes: The blocks' sizes along `axis`; they must add up to ``shape[axis]``.
    """

    __slots__ = ("axis", "counts", "in_order", "shape", "sizes", "slices")

    def __init__(self, shape: Sequence[int], axis: int, sizes: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.axis = axis
        self.sizes = tuple(sizes)
        rest = math.prod(shape[:axis]) * math.prod(shape[axis + 1 :])
        self.counts = [size * rest for size in self.sizes]
        self.in_order = math.prod(shape[:axis]) == 1
        ends = accumulate(self.sizes)
        before = (slice(None),) * axis
        self.slices = [
            (*before, slice(end - size, end)) for size, end in zip(self.sizes, ends, strict=True)
        ]

    @classmethod
    def of_whole(
        cls, shape: Sequence[int], axis: int, parts: int, sizes: Sequence[int] | None
    ) -> Blocks:
        """Cut an array of `shape` into `parts` blocks: of `sizes`, or equal ones.

        Raises:
            ShapeError: If the sizes do not fit, or equal ones do not exist.
        """
        total = shape[axis]
        if sizes is None:
            if total % parts:
                raise ShapeError(
                    f"axis {axis} of shape {tuple(shape)} does not divide into {parts} equal "
                    f"blocks; give sizes= with {parts} sizes that add up to {total}"
                )
            return cls(shape, axis, [total // parts] * parts)
        sizes = check_sizes(sizes, parts)
        if sum(sizes) != total:
            raise ShapeError(
                f"sizes {sizes} add up to {sum(sizes)}, but axis {axis} of shape "
                f"{tuple(shape)} has {total}"
            )
        return cls(shape, axis, sizes)

    @classmethod
    def of_mine(
        cls, shape: Sequence[int], axis: int, rank: int, parts: int, sizes: Sequence[int] | None
    ) -> Blocks:
        """The whole in which this rank's block has `shape`.

        Raises:
            ShapeError: If `shape` is not what `sizes` say of this rank.
        """
        sizes = [shape[axis]] * parts if sizes is None else check_sizes(sizes, parts)
        if sizes[rank] != shape[axis]:
            raise ShapeError(
                f"sizes {sizes} give rank {rank} a block of {sizes[rank]} along axis {axis}, "
                f"but its array has shape {tuple(shape)}"
            )
        whole = (*shape[:axis], sum(sizes), *shape[axis + 1 :])
        return cls(whole, axis, sizes)

    def answered(self, rank: int, axis: int, sizes: Sequence[int] | None) -> Blocks:
        """Return the blocks that come to `rank` for its block of each, joined along `axis`.

        Args:
            rank: Who sends these blocks.
            axis: The axis along which what comes is joined.
            sizes: Theirs along `axis`; if None, that of this rank's own block.

        Raises:
            ShapeError: If they are not one for each rank, or not what it sends itself.
        """
        parts, own = len(self.sizes), self.block_shape(rank)
        sizes = [own[axis]] * parts if sizes is None else check_sizes(sizes, parts)
        if sizes[rank] != own[axis]:
            raise ShapeError(
                f"rank {rank} sends itself a block of shape {own}, but recv_sizes {sizes} say "
                f"that it is {sizes[rank]} along axis {axis}"
            )
        return Blocks((*own[:axis], sum(sizes), *own[axis + 1 :]), axis, sizes)

    def block_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of one block."""
        return (*self.shape[: self.axis], self.sizes[rank], *self.shape[self.axis + 1 :])

    def pack(self, whole: Array) -> Array:
        """Return the blocks of `whole` one after the other, flat; a view where they lie so."""
        if self.in_order and whole.flags.c_contiguous:
            return whole.reshape(-1)
        packed = namespace(whole).empty(whole.size, whole.dtype)
        for count, end, part in zip(self.counts, accumulate(self.counts), self.slices, strict=True):
            block = whole[part]
            packed[end - count : end].reshape(block.shape)[...] = block
        return packed

    def unpack(self, packed: Array, whole: Array) -> None:
        """Put flat blocks that lie one after the other into their places in `whole`."""
        for count, end, part in zip(self.counts, accumulate(self.counts), self.slices, strict=True):
            target = whole[part]
            target[...] = packed[end - count : end].reshape(target.shape)


def check_sizes(sizes: Sequence[int], parts: int) -> list[int]:
    """Return block sizes as plain numbers, of whatever type and in whatever sequence they came.

    Raises:
        ShapeError: If there is not one size for each rank, or one is negative or no whole number.
    """
    try:
        plain = [operator.index(size) for size in sizes]
    except TypeError:
        plain = []
    if len(plain) != parts or any(size < 0 for size in plain):
        raise ShapeError(
            f"sizes must hold one size of at least 0 for each of the {parts} ranks of the group, "
            f"got {shown(sizes)}"
        )
    return plain


def compare_blocks(
    communicator: Communicator, call: Call, outgoing: Blocks, incoming: Blocks
) -> Steps:
    """Compare what the ranks of an all-to-all send each other with what they expect.

    The blocks differ from rank to rank, so no fingerprint tells whether they fit. MPI cuts a
    block that is larger than expected, or leaves the end of the result as it was.

    Raises:
        MismatchError: On every rank alike, if any has another.

    Cost:
        An all-to-all of shapes and an all-reduce of 8 bytes.
    """
    size, ndim = communicator.size, len(outgoing.shape)
    ranks = range(size)
    sent = np.array([outgoing.block_shape(dest) for dest in ranks], np.int64)
    expected = np.array([incoming.block_shape(source) for source in ranks], np.int64)
    came = np.empty_like(sent)
    counts = [ndim] * size
    yield communicator.all_to_all(sent.reshape(-1), came.reshape(-1), counts, counts)
    wrong = np.flatnonzero((came != expected).any(axis=1)).tolist()
    most_wrong = np.array([len(wrong)])
    yield communicator.all_reduce(None, most_wrong, "max")
    if not most_wrong[0]:
        return
    note = "; ".join(
        f"expects a block of shape {tuple(expected[source].tolist())} from rank {source}, "
        f"which sends {tuple(came[source].tolist())}"
        for source in wrong[:2]
    )
    yield from compare(communicator, call, "blocks", note=note)
