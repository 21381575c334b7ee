"""Make split arrays: out of whole ones, out of blocks, out of nothing, out of files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Any, TypeAlias

import numpy as np

from mpimesh.arrays import DType, HostArray, refuse_objects, to_numpy
from mpimesh.arrays.dtypes import dtype_from_json, dtype_to_json
from mpimesh.dtensor.blocks import agreed_dtype
from mpimesh.dtensor.carry import start_carry
from mpimesh.dtensor.telling import told_by_all
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import DTypeError, LayoutError, RankError, ShapeError, on_all_ranks
from mpimesh.layout import Layout, Partial, PlacementLike, Replicate
from mpimesh.mesh import Mesh
from mpimesh.runtime import DeviceMesh
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call
from mpimesh.runtime.digest import digest_bits

Shape: TypeAlias = tuple[int, ...]

__all__ = [
    "distribute",
    "empty",
    "from_callback",
    "full",
    "made_of_blocks",
    "ones",
    "with_summands",
    "zeros",
]


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
        DTypeError: If `x` holds Python objects.
        RankError: If `root` is not in the mesh, or this rank is not, where there is a `root`.

    Example:
        >>> with mm.DeviceMesh("dp=2,tp=2") as mesh:
        ...     x = mm.distribute(np.arange(12).reshape(4, 3), mesh, "dp=S0, tp=R")
        ...     print(mesh.rank, x.local.tolist())  # rank 3
        3 [[6, 7, 8], [9, 10, 11]]

    Cost:
        Nothing moves if all have it; else every rank gets its block from `root`.
    """
    layout = Layout(mesh, placements)
    if root is None:
        mine = _host(x)
        block = mine if _is_member(mesh) else None
        if mesh.settings.checks and block is not None:
            group, rule = mesh.group(), f"shape {mine.shape}, {mine.dtype}, values {_digest(mine)}"
            agree(group.progress, group.communicator, Call("distribute", group.name, rule))
        source = DTensor(mesh, Layout.replicated(layout.mesh), mine.shape, mine.dtype, block)
        made = source.redistribute(placements)
        return made.copy() if made is source else made
    layout.mesh.offset_of(root)  # refuses one that is not there
    if not _is_member(mesh):
        raise RankError(
            f"rank {mesh.rank} is not in mesh {mesh.dims_text}, so it does not learn what rank "
            f"{root} has; there mm.empty(shape, mesh, placements, dtype=...) makes the tensor, "
            "without block"
        )
    whole, shape, dtype = _facts_of(mesh, x, root)
    one = Layout(Mesh((), [root]), ())
    started = start_carry(mesh, one, mesh, layout, shape, dtype, whole, lambda block: block)
    return DTensor(mesh, layout, shape, dtype, started.resolve())


def from_callback(
    shape: Sequence[int] | int,
    mesh: DeviceMesh,
    placements: PlacementLike,
    callback: Callable[[tuple[slice, ...]], Any],
    *,
    dtype: Any = None,
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
        ShapeError: If the callback gives a part of another shape.
    """
    layout = Layout(mesh, placements)
    if layout.partial_op:
        raise LayoutError(f"a callback gives values, not summands; got placements {layout.text}")

    def part(index: tuple[slice, ...]) -> HostArray:
        found = _host(callback(index))
        wanted = tuple(one.stop - one.start for one in index)
        if found.shape != wanted:
            raise ShapeError(
                f"the callback gave shape {found.shape} for {index} on rank {mesh.rank}, which is "
                f"of shape {wanted}"
            )
        return found

    if dtype is not None or not _is_member(mesh):
        return made_of_blocks(shape_of_lengths(shape), mesh, layout, part, dtype)
    sizes = shape_of_lengths(shape)
    mine = part(tuple(slice(*edges) for edges in layout.box(sizes, mesh.rank)))
    kind = agreed_dtype(mine, mesh, "from_callback")
    return made_of_blocks(sizes, mesh, layout, lambda index: mine, kind)


def full(
    shape: Sequence[int] | int,
    value: Any,
    mesh: DeviceMesh,
    placements: PlacementLike,
    *,
    dtype: Any = None,
) -> DTensor:
    """Return an array with `value` everywhere, as :func:`numpy.full`. Local."""
    kind = np.asarray(value).dtype if dtype is None else np.dtype(dtype)

    sizes = shape_of_lengths(shape)
    try:
        whole = np.broadcast_to(np.asarray(value, kind), sizes)  # a view, however large
    except ValueError as error:
        raise ShapeError(
            f"a value of shape {np.shape(value)} does not fit {sizes}: {error}"
        ) from None
    return with_summands(sizes, mesh, Layout(mesh, placements), lambda index: whole[index], kind)


def zeros(
    shape: Sequence[int] | int, mesh: DeviceMesh, placements: PlacementLike, *, dtype: Any = float
) -> DTensor:
    """Return an array of zeros. Local."""
    return full(shape, 0, mesh, placements, dtype=dtype)


def ones(
    shape: Sequence[int] | int, mesh: DeviceMesh, placements: PlacementLike, *, dtype: Any = float
) -> DTensor:
    """Return an array of ones. Local."""
    return full(shape, 1, mesh, placements, dtype=dtype)


def empty(
    shape: Sequence[int] | int, mesh: DeviceMesh, placements: PlacementLike, *, dtype: Any = float
) -> DTensor:
    """Return an array whose values are whatever its memory holds. Local."""
    layout = Layout(mesh, placements)
    lengths = shape_of_lengths(shape)
    block = None
    if _is_member(mesh):
        block = mesh.shared_empty(layout.local_shape(lengths, mesh.rank), dtype)
    return DTensor(mesh, layout, lengths, dtype, block)


def made_of_blocks(
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    layout: Layout,
    part: Callable[[tuple[slice, ...]], HostArray],
    dtype: Any = None,
) -> DTensor:
    """Return the tensor whose block is what `part` gives for this rank's slices. Local."""
    kind = None if dtype is None else np.dtype(dtype)
    if not _is_member(mesh):
        layout.tiling(shape)
        if kind is None:
            raise LayoutError(f"rank {mesh.rank} is not in the mesh and reads nothing: give dtype=")
        return DTensor(mesh, layout, shape, kind, None)
    values = part(tuple(slice(start, stop) for start, stop in layout.box(shape, mesh.rank)))
    block = mesh.shared_empty(values.shape, values.dtype if kind is None else kind)
    block[...] = values
    return DTensor(mesh, layout, shape, block.dtype, block)


def with_summands(
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    layout: Layout,
    part: Callable[[tuple[slice, ...]], HostArray],
    dtype: Any,
) -> DTensor:
    """Return the tensor with the values that `part` gives, be they split into summands. Local."""
    values = [Replicate() if isinstance(spec, Partial) else spec for spec in layout.placement]
    made = made_of_blocks(shape, mesh, Layout(mesh, values), part, dtype)
    return made.redistribute(layout.placement)  # of copies summands are made without any message


def shape_of_lengths(shape: Sequence[int] | int) -> Shape:
    """Return a shape, also of one length, as NumPy takes it."""
    return tuple(shape) if isinstance(shape, Iterable) else (index(shape),)


def _host(x: Any) -> HostArray:
    host: HostArray = to_numpy(x)
    refuse_objects(host.dtype)
    return host


def _digest(x: HostArray) -> int:
    return digest_bits(np.ascontiguousarray(x).tobytes(), 63)


def _is_member(mesh: DeviceMesh) -> bool:
    return mesh.contains_rank(mesh.rank)


def _facts_of(mesh: DeviceMesh, x: Any, root: int) -> tuple[HostArray | None, Shape, DType]:
    """Collective: return the array of `root` there, and its shape and dtype everywhere."""
    whole: HostArray | None = None
    facts: list[Any] = []
    if mesh.rank == root:
        try:
            whole = _host(x)
            facts = [whole.shape, dtype_to_json(whole.dtype), ""]
        except Exception as error:
            facts = [(), "", f"{type(error).__name__}: {error}"]
    found = told_by_all(mesh, "distribute", facts)
    shape, descr, problem = found[list(mesh.group().ranks).index(root)]
    if problem:
        raise on_all_ranks(DTypeError(f"rank {root} has no array to distribute: {problem}"))
    return whole, tuple(shape), dtype_from_json(descr)
