"""Layouts of arrays on meshes, as immutable values: by placements, and block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import Any

import numpy as np

from mpimesh.arguments import as_int, as_shape, ranks_text, shown
from mpimesh.errors import LayoutError, RankError
from mpimesh.layout.boxes import Box, extent, fits, volume, whole
from mpimesh.layout.placement import Partial, Placement, PlacementLike, Replicate, Shard
from mpimesh.layout.tiling import Tiling
from mpimesh.mesh import Mesh, MeshLike
from mpimesh.trace import html

__all__ = ["BoxLayout", "Layout", "as_mesh", "layout_of_runs", "same_ranks"]

_MOST_LINES = 32
_MOST_DRAWN = 4096  # ranks, each of which is asked for its block
_MOST_AXES = 64
"""Most axes of an array, in NumPy."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Layout:
    """A mesh, and the placement of an array along each of its dims.

    Several dims may split one axis: the first of them in the mesh cuts it into its blocks, the
    next one cuts each of those, and so on.

    Args:
        mesh: A :class:`~mpimesh.Mesh` or a live :class:`~mpimesh.DeviceMesh`.
        placements: One :class:`PlacementSpec` for each dim; ``"S[0], R"``; or by names,
            ``"dp=S0, tp=R"`` and mappings, which may leave out dims that replicate; or a layout
            on the same mesh, in any spelling.

    Raises:
        LayoutError: If the placements do not fit the mesh, or wait for different reductions.
        UnknownNameError: If they name a dim that the mesh does not have.

    Example:
        >>> layout = Layout(Mesh("dp=2,tp=2"), "dp=S0, tp=S1")
        >>> layout.local_shape((5, 4), rank=3), layout.global_offset((5, 4), rank=3)
        ((2, 2), (3, 2))

    Attributes:
        mesh: The mesh, as a value.
        placement: One spec for each of its dims.
        partial_op: The reduction that the array waits for; empty if it waits for none.
    """

    mesh: Mesh
    placement: Placement
    partial_op: str = field(init=False, compare=False)
    _hash: int = field(init=False, compare=False)

    def __init__(self, mesh: MeshLike, placements: PlacementLike) -> None:
        value = as_mesh(mesh)
        theirs = getattr(placements, "mesh", None)
        if theirs is not None and not same_ranks(value, as_mesh(theirs)):
            raise LayoutError(
                f"an array is to lie on {value!r}, but its layout is one on {as_mesh(theirs)!r}; "
                "say which mesh, or take layout.placement, which is of none"
            )
        placement = Placement.of(placements, value.dim_names)
        _check(value, placement)
        object.__setattr__(self, "mesh", value)
        object.__setattr__(self, "placement", placement)
        op = next((spec.op for spec in placement if isinstance(spec, Partial)), "")
        object.__setattr__(self, "partial_op", op)
        object.__setattr__(self, "_hash", hash((value, placement)))

    def __hash__(self) -> int:
        """Return a number that was worked out once: caches look layouts up with each operation."""
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        """Make it anew: hashes of text differ between processes."""
        return Layout, (self.mesh, self.placement)

    @classmethod
    def replicated(cls, mesh: MeshLike) -> Layout:
        """Return the layout with the whole array on every rank."""
        return cls(mesh, [Replicate()] * as_mesh(mesh).ndim)

    # -- blocks ----------------------------------------------------------------------

    def tiling(self, shape: Sequence[int]) -> Tiling:
        """Return the blocks of an array of `shape`.

        Raises:
            LayoutError: If the array has no such axis, or sizes do not add up to its length; or
                if `shape` is none.
        """
        return Tiling.of(self.mesh, self.placement, as_shape(shape, LayoutError))

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """Return (start, stop) along each axis of the block of `rank`.

        Args:
            shape: The array's global shape.
            rank: A rank of the mesh.

        Raises:
            LayoutError: If the layout does not fit `shape`.
            RankError: If `rank` is not in the mesh.
        """
        if type(rank) is not int:
            rank = as_int(rank, "rank", RankError)
        return _box(self, as_shape(shape, LayoutError), rank)

    def holders(self, shape: Sequence[int]) -> dict[Box, tuple[int, ...]]:
        """Return the ranks that hold each block, in the order of the first of them.

        Blocks without elements are left out. Errors as of :meth:`box`.
        """
        return _holders(self, as_shape(shape, LayoutError))

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return the shape of the block of `rank`. Errors as of :meth:`box`."""
        return extent(self.box(shape, rank))

    def global_offset(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return where the block of `rank` begins in the array. Errors as of :meth:`box`."""
        return tuple(start for start, _ in self.box(shape, rank))

    def sharding_dims(self, axis: int) -> tuple[str, ...]:
        """Return the names of the dims that split `axis`, outermost first."""
        axis = as_int(axis, "axis", LayoutError)
        return tuple(
            name
            for name, spec in zip(self.mesh.dim_names, self.placement, strict=True)
            if isinstance(spec, Shard) and spec.axis == axis
        )

    def agrees_with(self, other: Layout) -> bool:
        """Tell whether blocks are the same in both; names of meshes and devices do not count.

        Raises:
            LayoutError: If `other` is no layout.
        """
        if not isinstance(other, Layout):
            raise LayoutError(f"other must be a Layout, got {shown(other)}")
        return self.placement == other.placement and same_ranks(self.mesh, other.mesh)

    @property
    def is_replicated(self) -> bool:
        """True if every rank holds the whole array."""
        return all(isinstance(spec, Replicate) for spec in self.placement)

    # -- text ------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """The placements with the names of the dims: ``dp=S0, tp=R``."""
        return self.placement.named(self.mesh.dim_names)

    def __str__(self) -> str:
        return f"{self.text or 'R'} on {self.mesh.dims_text or '()'}"

    def __repr__(self) -> str:
        return f"Layout({self.mesh!r}, {self.text!r})"

    def _repr_html_(self) -> str:
        """Show which ranks hold which blocks, in notebooks, of an array that it cuts evenly."""
        axes = [spec.axis for spec in self.placement if isinstance(spec, Shard)]
        lengths = [1] * (max(axes, default=0) + 1)
        for spec, (_, size) in zip(self.placement, self.mesh.dims, strict=True):
            if isinstance(spec, Shard):
                lengths[spec.axis] *= size if spec.sizes is None else sum(spec.sizes)
        try:
            return self._html_of(lengths)
        except LayoutError:  # of blocks in blocks of uneven sizes
            return html.paragraph(str(self))

    def _html_of(self, shape: Sequence[int]) -> str:
        """Return a picture for notebooks: which ranks hold which block of an array of `shape`."""
        if self.mesh.size > _MOST_DRAWN:
            return html.paragraph(str(self))
        boxes = [
            (box, f"rank {ranks_text(ranks)}" if len(ranks) == 1 else f"ranks {ranks_text(ranks)}")
            for box, ranks in self.holders(shape).items()
        ]
        picture = html.blocks_svg(tuple(shape), boxes)
        if picture is None:
            lines = [
                f"[{', '.join(f'{first}:{stop}' for first, stop in box)}] {label}"
                for box, label in boxes[:_MOST_LINES]
            ]
            lines += ["..."] if len(boxes) > _MOST_LINES else []
            picture = html.preformatted("\n".join(lines))
        return html.paragraph(str(self)) + picture


@dataclass(frozen=True, slots=True)
class BoxLayout:
    """A layout of one array by its blocks, where no placement says it.

    Such as that of key heads with fewer heads than ranks: several ranks hold the same head, and
    one head more ranks than another. It answers as a :class:`Layout` does who holds what.

    Args:
        shape: The array's global shape.
        boxes: The block of each of the ranks 0, 1, and so on.

    Raises:
        LayoutError: If two blocks overlap and are not the same, or an element is in none.

    Example:
        >>> BoxLayout((4,), (((0, 2),), ((0, 2),), ((2, 4),))).holders((4,))
        {((0, 2),): (0, 1), ((2, 4),): (2,)}
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", as_shape(self.shape, LayoutError))
        different = [box for box in dict.fromkeys(self.boxes) if volume(box)]
        are_apart = all(
            any(
                stop <= first or last <= start
                for (start, stop), (first, last) in zip(a, b, strict=True)
            )
            for a, b in combinations(different, 2)
        )
        if (
            not all(fits(box, self.shape) for box in self.boxes)
            or not are_apart
            or sum(map(volume, different)) != prod(self.shape)
        ):
            raise LayoutError(
                f"blocks of an array must be alike or apart, and together all of it; got "
                f"{self.boxes} for shape {self.shape}"
            )

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """Return (start, stop) along each axis of the block of `rank`.

        Raises:
            LayoutError: If the layout is of an array of another shape.
            RankError: If there is no such rank.
        """
        if tuple(shape) != self.shape:
            raise LayoutError(f"a layout of shape {self.shape} is not one of shape {tuple(shape)}")
        if not 0 <= rank < len(self.boxes):
            raise RankError(f"rank {rank} is not one of the {len(self.boxes)} of the layout")
        return self.boxes[rank]

    @property
    def is_replicated(self) -> bool:
        """True if every rank holds the whole array."""
        return all(box == whole(self.shape) for box in self.boxes)

    def holders(self, shape: Sequence[int]) -> dict[Box, tuple[int, ...]]:
        """Return the ranks that hold each block; see :meth:`Layout.holders`."""
        return _holders(self, as_shape(shape, LayoutError))


def layout_of_runs(
    shape: Sequence[int], axis: int, runs: Sequence[tuple[int, int]]
) -> Layout | BoxLayout:
    """Return the layout of an array of `shape` on ranks that hold these runs of an axis.

    Args:
        shape: The array's global shape.
        axis: The axis that is split.
        runs: (start, stop) of the ranks 0, 1, and so on. Runs are the same or apart.

    Raises:
        LayoutError: If they are not, or not the whole axis together.

    Example:
        >>> layout_of_runs((6, 2), 0, [(0, 4), (4, 6)])
        Layout(Mesh('tp=2'), 'tp=S0(4,2)')
        >>> layout_of_runs((6,), 0, [(0, 6), (0, 6)])
        Layout(Mesh('tp=2'), 'tp=R')
    """
    mesh = Mesh([("tp", len(runs))])
    edges = [0, *(edge for run in runs for edge in run), shape[axis]]
    if all(run == (0, shape[axis]) for run in runs):
        return Layout.replicated(mesh)
    if all(stop == start for stop, start in zip(edges[::2], edges[1::2], strict=True)):
        return Layout(mesh, [Shard.of_sizes(axis, [stop - start for start, stop in runs])])
    box = whole(shape)
    return BoxLayout(tuple(shape), tuple((*box[:axis], run, *box[axis + 1 :]) for run in runs))


def as_mesh(mesh: object) -> Mesh:
    """Return the mesh as a value; that of a live mesh is the same on all ranks.

    Raises:
        LayoutError: If it is none.
    """
    if isinstance(mesh, Mesh):
        return mesh
    value = getattr(mesh, "mesh", None)
    if isinstance(value, Mesh) and hasattr(mesh, "dim_names"):  # a live mesh, not what is on one
        return value
    raise LayoutError(f"mesh must be a Mesh or a DeviceMesh, got {shown(mesh)}")


def same_ranks(one: Mesh, other: Mesh) -> bool:
    """Tell whether two meshes have the same ranks at the same places, whatever their names."""
    return one is other or (one.dims == other.dims and np.array_equal(one.ids, other.ids))


@lru_cache(maxsize=4096, typed=True)
def _box(layout: Layout, shape: tuple[int, ...], rank: int) -> Box:
    return layout.tiling(shape).box(rank)


@lru_cache(maxsize=4096, typed=True)
def _holders(layout: Layout | BoxLayout, shape: tuple[int, ...]) -> dict[Box, tuple[int, ...]]:
    ranks = range(len(layout.boxes)) if isinstance(layout, BoxLayout) else layout.mesh.ids.tolist()
    ranks_of: dict[Box, list[int]] = {}
    for rank in ranks:
        box = layout.box(shape, rank)
        if volume(box):
            ranks_of.setdefault(box, []).append(rank)
    return {box: tuple(there) for box, there in ranks_of.items()}


def _check(mesh: Mesh, placement: Placement) -> None:
    """Check what does not depend on an array's shape."""
    ops = sorted({spec.op for spec in placement if isinstance(spec, Partial)})
    if len(ops) > 1:
        raise LayoutError(
            f"all Partial dims of a layout wait for one reduction, but {placement} has "
            f"{' and '.join(ops)}: their order would change the value"
        )
    for dim, spec in zip(mesh.dims, placement, strict=True):
        if isinstance(spec, Shard) and spec.sizes is not None and len(spec.sizes) != dim.size:
            raise LayoutError(
                f"{spec!r} has {len(spec.sizes)} sizes, but mesh dim {dim} has {dim.size} ranks; "
                "give one size for each"
            )
