"""Creation of split arrays: from whole ones, from callbacks, from ranges, from random numbers.

Ranges, the unit matrix and random numbers depend on the place in the whole array alone: they are
the same on any mesh and in any layout, to the bit, and no rank needs another to make its block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np

from mpimesh.arguments import MOST, as_flag, as_function, as_int, as_real, as_shape, shown
from mpimesh.arrays import DType, DTypeLike, HostArray, aligned_empty, array_shape, refuse_objects
from mpimesh.arrays.dtypes import as_dtype, dtype_from_json, dtype_to_json, is_half
from mpimesh.arrays.random_bits import key_of
from mpimesh.arrays.random_numbers import (
    bernoulli_block,
    exponential_block,
    integers_block,
    normal_block,
    permutation,
    uniform_block,
)
from mpimesh.dtensor.consistency import (
    agreed_dtype,
    call_compared,
    compare_call,
    compare_copies,
    gather_facts,
    next_number,
    numbered,
)
from mpimesh.dtensor.defaults import as_live
from mpimesh.dtensor.dtensor import DTensor
from mpimesh.dtensor.redistribute import redistribution
from mpimesh.errors import (
    ArrayValueError,
    DTypeError,
    LayoutError,
    MismatchError,
    RankError,
    ShapeError,
    tell_elsewhere,
)
from mpimesh.layout import Box, Layout, Partial, PlacementLike, Replicate
from mpimesh.layout.boxes import extent, slices
from mpimesh.mesh import Mesh
from mpimesh.runtime import DeviceMesh
from mpimesh.runtime.operands import split_array

__all__ = [
    "Random",
    "arange",
    "distribute",
    "empty",
    "eye",
    "from_callback",
    "full",
    "linspace",
    "made_of_blocks",
    "ones",
    "zeros",
]

Shape: TypeAlias = tuple[int, ...]


def distribute(
    x: Any, mesh: DeviceMesh, placements: PlacementLike, *, root: int | None = None
) -> DTensor:
    """Split an array over a mesh.

    Collective over the mesh. Ranks that it leaves out may call it without `root`, and get a tensor
    without block; with `root` they would not learn the shape.

    Args:
        x: The whole array: the same on every rank, which then moves nothing; or on `root` only,
            where the others give None.
        mesh: The mesh.
        placements: As for :class:`Layout`.
        root: The rank that has the array; None if all have it.

    Raises:
        LayoutError: If the placements do not fit.
        DTypeError: If `x` holds Python objects, or is an array of CuPy: split arrays lie in host
            memory.
        RankError: If `root` is not in the mesh, or this rank is not, where there is a `root`.

    Example:
        >>> with mm.DeviceMesh("dp=2,tp=2") as mesh:
        ...     x = mm.distribute(np.arange(12).reshape(4, 3), mesh, "dp=S0, tp=R")
        ...     print(mesh.rank, x.local.tolist())  # rank 3
        3 [[6, 7, 8], [9, 10, 11]]

    Cost:
        Nothing moves if all have it; else every rank gets its block from `root`.
    """
    layout = Layout(as_live(mesh), placements)
    if root is None:
        mine = split_array(x)
        block = mine if _is_member(mesh) else None
        number = compare_call(mesh, "distribute", (mine, layout.text))
        source = DTensor(mesh, Layout.replicated(layout.mesh), mine.shape, mine.dtype, block)
        return numbered(source.redistribute(placements), number)
    root = as_int(root, "root", RankError)
    layout.mesh.offset_of(root)  # refuses one that is not there
    if not _is_member(mesh):
        raise RankError(
            f"rank {mesh.rank} is not in mesh {mesh.dims_text}, so it does not learn what rank "
            f"{root} has; there mm.empty(shape, mesh, placements, dtype=...) makes the tensor, "
            "without block"
        )
    number = next_number(mesh)
    whole, shape, dtype = _facts_of(mesh, x, root)
    one = Layout(Mesh((), [root]), ())
    moving = redistribution(mesh, one, mesh, layout, shape, dtype)
    block = moving.start(mesh, whole, lambda block: block).resolve()
    return numbered(DTensor(mesh, layout, shape, dtype, block), number)


def from_callback(
    shape: Sequence[int] | int,
    mesh: DeviceMesh,
    placements: PlacementLike,
    callback: Callable[[tuple[slice, ...]], Any],
    *,
    dtype: DTypeLike | None = None,
) -> DTensor:
    """Make a split array of what `callback` gives for each rank's part.

    Local with `dtype`; without, collective over the mesh: the ranks agree on one.

    Each rank asks for its own block only, so an array in a file is read once in all::

        file = np.load("x.npy", mmap_mode="r")
        x = mm.from_callback(file.shape, mesh, "dp=S0", lambda index: file[index])

    Args:
        shape: The global shape.
        mesh: The mesh.
        placements: As for :class:`Layout`, without `Partial`.
        callback: Gets a tuple of slices, one for each axis, and gives that part.
        dtype: The dtype; None for that of the parts.

    Raises:
        LayoutError: If the placements do not fit.
        MismatchError: On every rank, without `dtype`, if the parts are of several.
        ShapeError: If the callback gives a part of another shape; without `dtype` on every rank.
    """
    layout = Layout(as_live(mesh), placements)
    callback = as_function(callback, "callback", LayoutError)
    if layout.partial_op:
        raise LayoutError(f"a callback gives values, not summands; got placements {layout.text}")

    def block_of(box: Box) -> HostArray:
        index = slices(box)
        found = split_array(callback(index))
        if found.shape != extent(box):
            raise ShapeError(
                f"the callback gave shape {found.shape} for {index} on rank {mesh.rank}, which is "
                f"of shape {extent(box)}"
            )
        return found

    sizes = shape_of_lengths(shape)
    number = compare_call(mesh, "from_callback", (sizes, layout.text, dtype))
    if dtype is not None or not _is_member(mesh):
        made = made_of_blocks(sizes, mesh, layout, block_of, dtype)
        if made.is_member:
            compare_copies(made.local, mesh, layout, "from_callback")
        return numbered(made, number)
    problem: ShapeError | None = None
    try:
        mine = block_of(layout.box(sizes, mesh.rank))
    except ShapeError as error:
        mine, problem = np.empty(0), error
    kind = agreed_dtype(mine, mesh, "from_callback", problem)
    made = made_of_blocks(sizes, mesh, layout, lambda box: mine, kind)
    compare_copies(made.local, mesh, layout, "from_callback")
    return numbered(made, number)


def full(
    shape: Sequence[int] | int,
    value: Any,
    mesh: DeviceMesh,
    placements: PlacementLike,
    *,
    dtype: DTypeLike | None = None,
) -> DTensor:
    """Return an array with `value` everywhere, as :func:`numpy.full`. Local.

    Args:
        shape: Lengths of the axes of the whole array; a number for one axis.
        value: A number, or an array that fits `shape` by broadcasting.
        mesh: The mesh that has the array.
        placements: One for each dim of the mesh, or such as ``"dp=S0, tp=R"``.
        dtype: That of the values; if None that of `value`.

    Raises:
        ShapeError: If `value` does not fit `shape` and `dtype`.
    """
    layout, sizes = Layout(as_live(mesh), placements), shape_of_lengths(shape)
    found = split_array(value)
    kind = found.dtype if dtype is None else as_dtype(dtype)
    refuse_objects(kind)
    try:
        whole = np.broadcast_to(found.astype(kind), sizes)  # a view, however large
    except (TypeError, ValueError) as error:
        raise ShapeError(
            f"value, of shape {found.shape} and {found.dtype}, does not fit an array of shape "
            f"{sizes} and {kind}: {error}"
        ) from None
    return call_compared(
        mesh,
        "full",
        (sizes, found, layout.text, kind),
        lambda: with_summands(sizes, mesh, layout, lambda box: whole[slices(box)], kind),
    )


def zeros(
    shape: Sequence[int] | int,
    mesh: DeviceMesh,
    placements: PlacementLike,
    *,
    dtype: DTypeLike = float,
) -> DTensor:
    """Return an array of zeros. Local; arguments as of :func:`full`."""
    return full(shape, np.zeros((), as_dtype(dtype))[()], mesh, placements, dtype=dtype)


def ones(
    shape: Sequence[int] | int,
    mesh: DeviceMesh,
    placements: PlacementLike,
    *,
    dtype: DTypeLike = float,
) -> DTensor:
    """Return an array of ones. Local; arguments as of :func:`full`."""
    return full(shape, 1, mesh, placements, dtype=dtype)


def empty(
    shape: Sequence[int] | int,
    mesh: DeviceMesh,
    placements: PlacementLike,
    *,
    dtype: DTypeLike = float,
) -> DTensor:
    """Return an array of any values, without writing to it. Local; arguments as of :func:`full`."""
    layout = Layout(as_live(mesh), placements)
    lengths = shape_of_lengths(shape)
    dtype = as_dtype(dtype)
    number = compare_call(mesh, "empty", (lengths, layout.text, dtype))
    block = None
    if _is_member(mesh):
        block = mesh.shared_empty(layout.local_shape(lengths, mesh.rank), dtype)
    return numbered(DTensor(mesh, layout, lengths, dtype, block), number)


def made_of_blocks(
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    layout: Layout,
    block_of: Callable[[Box], HostArray],
    dtype: DTypeLike | None = None,
) -> DTensor:
    """Return the tensor whose block is what `block_of` gives for this rank's box. Local."""
    kind = None if dtype is None else as_dtype(dtype)
    if not _is_member(mesh):
        layout.tiling(shape)
        if kind is None:
            raise LayoutError(f"rank {mesh.rank} is not in the mesh and reads nothing: give dtype=")
        return DTensor(mesh, layout, shape, kind, None)
    box = layout.box(shape, mesh.rank)
    # Before memory is taken: a block may have more bytes than an address can count.
    array_shape(extent(box), np.uint8 if kind is None else kind)
    values = block_of(box)
    block = mesh.shared_empty(values.shape, values.dtype if kind is None else kind)
    block[...] = values
    return DTensor(mesh, layout, shape, block.dtype, block)


def with_summands(
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    layout: Layout,
    block_of: Callable[[Box], HostArray],
    dtype: Any,
) -> DTensor:
    """Return the tensor with the values of a block for each box, or of summands of it. Local."""
    values = [Replicate() if isinstance(spec, Partial) else spec for spec in layout.placement]
    made = made_of_blocks(shape, mesh, Layout(mesh, values), block_of, dtype)
    # Of copies summands are made without any message.
    return made.redistribute(layout.placement) if layout.partial_op else made


def shape_of_lengths(shape: Sequence[int] | int) -> Shape:
    """Return a shape, also of one length, as NumPy takes it.

    Raises:
        ShapeError: If it is none, or larger than any array.
    """
    lengths = as_shape(shape, one=True)
    if prod(filter(None, lengths)) > MOST:
        raise ShapeError(
            f"an array of shape {shown(lengths)} has more elements than an address can count"
        )
    return lengths


def _is_member(mesh: DeviceMesh) -> bool:
    return mesh.contains_rank(mesh.rank)


def _facts_of(mesh: DeviceMesh, x: Any, root: int) -> tuple[HostArray | None, Shape, DType]:
    """Collective: return the array of `root` there, and its shape and dtype everywhere."""
    whole: HostArray | None = None
    failed: Exception | None = None
    facts: list[Any] = [root]
    if mesh.rank == root:
        try:
            whole = split_array(x)
            facts += [whole.shape, dtype_to_json(whole.dtype), ""]
        except Exception as error:
            failed = error
            facts += [(), "", f"{type(error).__name__}: {error}"]
    with mesh.group()._core.progress.keeping(failed):
        found, ranks = gather_facts(mesh, "distribute", facts), list(mesh.group().ranks)
    roots = [theirs for theirs, *_ in found]
    if set(roots) != {root}:
        raise MismatchError.everywhere(
            "distribute needs the same root on all ranks of the mesh, got "
            + ", ".join(f"{one} on rank {rank}" for rank, one in zip(ranks, roots, strict=True))
        )
    _, shape, descr, problem = found[ranks.index(root)]
    if problem:
        raise DTypeError.everywhere(f"rank {root} has no array to distribute: {problem}")
    return whole, tuple(shape), dtype_from_json(descr)


def arange(
    start: Any,
    stop: Any = None,
    step: Any = 1,
    *,
    mesh: DeviceMesh,
    placements: PlacementLike,
    dtype: DTypeLike | None = None,
) -> DTensor:
    """Return numbers from `start` up to, and without, `stop`, as :func:`numpy.arange`. Local.

    The others of its arguments are as of :func:`full`.

    Raises:
        ArrayValueError: If `step` is 0.
    """
    if stop is None:
        start, stop = 0, start
    for what, value in (("start", start), ("stop", stop), ("step", step)):
        as_real(value, f"{what} of arange", ArrayValueError)
    if step == 0:
        raise ArrayValueError(f"step must not be 0 in arange({start}, {stop}, {step})")
    if dtype is None:  # NumPy's, of which an empty range shows what the types make of it
        kinds = [one.dtype.type if hasattr(one, "dtype") else type(one) for one in (start, stop)]
        dtype = np.arange(kinds[0](0), kinds[1](0), step).dtype
    kind = _numbers(dtype)
    shape = shape_of_lengths(max(0, math.ceil((stop - start) / step)))

    def block(box: Box) -> HostArray:
        return _arange_block(start, step, shape[0], box[0], kind)

    return _made(shape, mesh, placements, block, kind, "arange", (start, stop, step))


def linspace(
    start: float,
    stop: float,
    num: int = 50,
    *,
    mesh: DeviceMesh,
    placements: PlacementLike,
    endpoint: bool = True,
    dtype: DTypeLike | None = None,
) -> DTensor:
    """Return `num` numbers from `start` to `stop`, as :func:`numpy.linspace`. Local.

    The last one is `stop` if it is an `endpoint`. The others of its arguments are as of
    :func:`full`; without a `dtype` it is that of `start` and `stop`, float64 of Python's numbers.
    """
    _number(start, "start"), _number(stop, "stop")
    working = np.result_type(start, stop, 1.0)
    shape = shape_of_lengths((as_int(num, "num", ArrayValueError, least=0),))
    endpoint = as_flag(endpoint, "endpoint", ArrayValueError)
    kind = _numbers(working if dtype is None else dtype)
    ends = working.type(start), working.type(stop)

    def block(box: Box) -> HostArray:
        return _linspace_block(*ends, shape[0], box[0], kind, endpoint=endpoint)

    arguments = (start, stop, num, endpoint)
    return _made(shape, mesh, placements, block, kind, "linspace", arguments)


def eye(
    rows: int,
    columns: int | None = None,
    *,
    mesh: DeviceMesh,
    placements: PlacementLike,
    k: int = 0,
    dtype: DTypeLike = float,
) -> DTensor:
    """Return a matrix with ones on diagonal `k`, as :func:`numpy.eye`. Local.

    It has `rows` and `columns`. The others of its arguments are as of :func:`full`.
    """
    rows = as_int(rows, "rows", ArrayValueError, least=0)
    columns = rows if columns is None else as_int(columns, "columns", ArrayValueError, least=0)
    k = as_int(k, "k", ArrayValueError)
    shape, kind = shape_of_lengths((rows, columns)), as_dtype(dtype)

    def block(box: Box) -> HostArray:
        (top, bottom), (left, right) = box
        return np.eye(bottom - top, right - left, k + top - left, kind)

    return _made(shape, mesh, placements, block, kind, "eye", (k,))


_RUN = 1 << 16
"""Elements of a range at a time: what is computed in another type than the block's stays small."""


def _arange_block(
    start: float, step: float, length: int, part: tuple[int, int], dtype: DType
) -> HostArray:
    """Return a part of the numbers ``start, start + step, ...``, as `numpy.arange` has them.

    As there, the first two are `start` and ``start + step``, rounded to `dtype`, and their
    difference decides on all others: ``first + i * difference``, half types in float32.
    Integers wrap around past the dtype's end.
    """
    low, high = part
    block = aligned_empty(high - low, dtype)
    first = np.zeros(2, dtype)
    try:
        for index in range(min(2, length)):
            first[index] = start + step if index else start
    except OverflowError:
        raise ArrayValueError(
            f"{dtype} cannot hold the first numbers of a range from {start} by {step}"
        ) from None
    working = dtype.newbyteorder("=")
    if dtype.kind in "iu":
        working = np.dtype(np.uint64)  # wraps around, and so does what is cut off it
    elif is_half(dtype):
        working = np.dtype(np.float32)
    begin, following = first.astype(working)
    with np.errstate(over="ignore"):
        difference = following - begin
    for at in range(low, high, _RUN):
        values = np.arange(at, min(at + _RUN, high)).astype(working)
        values *= difference
        values += begin
        values = values.view(np.int64) if dtype.kind == "i" else values
        block[at - low : at - low + len(values)] = values
    # These two exactly: differences are rounded, and 0 + -0.0 is 0.0.
    for index in range(low, min(high, 2)):
        block[index - low] = first[index]
    return block


def _linspace_block(
    first: Any, last: Any, length: int, part: tuple[int, int], dtype: DType, *, endpoint: bool
) -> HostArray:
    """Return a part of numbers evenly spread over [first, last], as `numpy.linspace` has them.

    Computed in the dtype of both, ``first + i * step``, the last one being `last` itself, and
    rounded to `dtype`; down to whole numbers where that is a dtype of integers.
    """
    low, high = part
    block = aligned_empty(high - low, dtype)
    span = last - first
    parts = length - 1 if endpoint else length
    step = span / parts if parts > 0 else span
    for at in range(low, high, _RUN):
        values = np.arange(at, min(at + _RUN, high)).astype(first.dtype)
        if parts > 0 and step == 0:  # the span is so small that its parts are not
            values /= parts
            values *= span
        else:
            values *= step
        values += first
        if endpoint and length > 1 and at + len(values) == length:
            values[-1] = last
        values = np.floor(values) if dtype.kind in "iu" else values
        block[at - low : at - low + len(values)] = values
    return block


def _numbers(dtype: DTypeLike) -> DType:
    """Return `dtype` if it is one of integers or floats."""
    kind = as_dtype(dtype)
    if kind.kind not in "iuf" and not is_half(kind):
        raise DTypeError(f"a range has a dtype of integers or floats, got {kind}")
    return kind


class Random:
    """Random split arrays, the same on every mesh and in every layout for the same seed.

    Each call draws from a stream of its own: the first call after the same seed gives the same
    array, whatever its layout. All ranks make the same calls. Their `shape`, `mesh`, `placements`
    and `dtype` are as of :func:`full`.

    Args:
        seed: A whole number that is not negative.

    Raises:
        ArrayValueError: If it is anything else.

    Example:
        >>> rng = mm.Random(7)
        >>> noise = rng.normal((4, 3), mesh, "dp=S0")

    Cost:
        Nothing moves. About twice the time of NumPy's own for normal and integer values.
    """

    __slots__ = ("_calls", "seed")

    def __init__(self, seed: int = 0) -> None:
        key_of(seed)  # refuses what is no seed
        self.seed = seed
        self._calls = 0

    def uniform(
        self,
        shape: Sequence[int] | int,
        mesh: DeviceMesh,
        placements: PlacementLike,
        *,
        low: float = 0.0,
        high: float = 1.0,
        dtype: DTypeLike = float,
    ) -> DTensor:
        """Return values evenly spread from `low` up to, and without, `high`. Local."""
        low, high = _number(low, "low"), _number(high, "high")
        return self._draw(uniform_block, (low, high), shape, mesh, placements, dtype)

    def normal(
        self,
        shape: Sequence[int] | int,
        mesh: DeviceMesh,
        placements: PlacementLike,
        *,
        loc: float = 0.0,
        scale: float = 1.0,
        dtype: DTypeLike = float,
    ) -> DTensor:
        """Return values of the normal distribution of mean `loc` and deviation `scale`. Local."""
        options = {"loc": _number(loc, "loc"), "scale": _number(scale, "scale")}
        return self._draw(normal_block, (), shape, mesh, placements, dtype, **options)

    def exponential(
        self,
        shape: Sequence[int] | int,
        mesh: DeviceMesh,
        placements: PlacementLike,
        *,
        scale: float = 1.0,
        dtype: DTypeLike = float,
    ) -> DTensor:
        """Return values of the exponential distribution of mean `scale`. Local."""
        scale = _number(scale, "scale")
        return self._draw(exponential_block, (), shape, mesh, placements, dtype, scale=scale)

    def integers(
        self,
        low: int,
        high: int,
        shape: Sequence[int] | int,
        mesh: DeviceMesh,
        placements: PlacementLike,
        *,
        endpoint: bool = False,
        dtype: DTypeLike = np.int64,
    ) -> DTensor:
        """Return whole numbers from `low` up to `high`, all as likely. Local.

        `high` itself is one of them only if it is an `endpoint`.
        """
        low, high = as_int(low, "low", ArrayValueError), as_int(high, "high", ArrayValueError)
        endpoint = as_flag(endpoint, "endpoint", ArrayValueError)
        return self._draw(
            integers_block, (low, high), shape, mesh, placements, dtype, endpoint=endpoint
        )

    def bernoulli(
        self,
        p: float,
        shape: Sequence[int] | int,
        mesh: DeviceMesh,
        placements: PlacementLike,
        *,
        dtype: DTypeLike = bool,
    ) -> DTensor:
        """Return True with probability `p`, else False. Local."""
        p = _number(p, "p")
        return self._draw(bernoulli_block, (p,), shape, mesh, placements, dtype)

    def permutation(self, n: int) -> HostArray:
        """Return the numbers 0 to n-1 in random order: NumPy's own array, alike on all ranks."""
        n = as_int(n, "n", ArrayValueError, least=0)
        array_shape(n, np.int64)  # refuses what has more bytes than there are addresses
        order: HostArray = permutation(self._next_key(), n)
        return order

    def _next_key(self) -> int:
        self._calls += 1
        return key_of(self.seed, self._calls)

    def _draw(
        self,
        block_of: Callable[..., Any],
        parameters: tuple[Any, ...],
        shape: Sequence[int] | int,
        mesh: DeviceMesh,
        placements: PlacementLike,
        dtype: Any,
        **options: Any,
    ) -> DTensor:
        sizes, kind = shape_of_lengths(shape), as_dtype(dtype)
        key = self._next_key()

        def block(box: Box) -> HostArray:
            values: HostArray = block_of(key, *parameters, sizes, box, kind, **options)
            return values

        name = block_of.__name__.removesuffix("_block")
        call = f"Random({self.seed}).{name}, draw {self._calls}"
        return _made(sizes, mesh, placements, block, kind, call, (*parameters, options))

    def __repr__(self) -> str:
        return f"Random({self.seed}), {self._calls} drawn"


_PERMUTED = "permutation(n) gives indices in random order, as in x[order[:k]]"
tell_elsewhere(
    Random,
    {
        "standard_normal": "use normal()",
        "randn": "use normal()",
        "random": "use uniform()",
        "rand": "use uniform()",
        "randint": "use integers()",
        "standard_exponential": "use exponential()",
        "binomial": "bernoulli(p, ...) draws one trial each",
        **dict.fromkeys(("choice", "shuffle", "permuted"), _PERMUTED),
    },
)


def _number(value: float, what: str) -> float:
    return as_real(value, what, ArrayValueError, finite=False, nan=True)


def _made(
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    placements: PlacementLike,
    block: Callable[[Box], Any],
    dtype: Any,
    call: str,
    arguments: tuple[Any, ...],
) -> DTensor:
    """Return what `block` gives for this rank's part; `call` with its `arguments` is checked."""
    layout = Layout(as_live(mesh), placements)
    return call_compared(
        mesh,
        call,
        (*arguments, shape, np.dtype(dtype), layout.text),
        lambda: with_summands(shape, mesh, layout, block, dtype),
    )
