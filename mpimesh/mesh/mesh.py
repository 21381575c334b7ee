"""`Mesh`: named dims over ranks, as an immutable value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from zlib import crc32

import numpy as np

from mpimesh.arguments import as_flag, as_int, as_items
from mpimesh.errors import MeshError, RankError, WorldSizeError
from mpimesh.mesh.dims import (
    MAX_RANKS,
    DimsLike,
    MeshDimension,
    NamesLike,
    check_dim_name,
    check_world_size,
    dim_numbers,
    dims_text,
    fit_dims,
    parse_dims,
    parse_names,
    world_size_error,
)

if TYPE_CHECKING:
    import numpy.typing as npt

Ranks: TypeAlias = "npt.NDArray[np.int64]"

__all__ = ["Mesh", "MeshLike"]

_SHOWN_IDS = 32
"""Most ids that repr writes out one by one."""


@dataclass(frozen=True, slots=True, init=False, repr=False, eq=False)
class Mesh:
    """Named dims over ranks, row-major: the last dim is the fastest.

    A value: equal if all its fields are, hashable, picklable, and never in touch
    with other ranks. Its repr is the constructor call, but for more than 32 ids
    that are not equally spaced.

    Two words for a place: an *offset*, ``0 <= offset < size``, counts the places in
    row-major order; a *rank* is what stands there. Methods take ranks, and raise
    `RankError` for one that is not in the mesh.

    Args:
        dims: ``"dp=2,pp=2"``, a mapping, or (name, size) pairs, slowest first. One
            size may be -1 where the number of ranks is known from `world_size` or
            `ids`. Empty pairs make a mesh of one rank.
        ids: The rank at each place in row-major order: any distinct ranks, also as
            a range. None means ``0 .. size-1``.
        world_size: Number of ranks of the world. Without `ids` the mesh must have
            exactly so many; with `ids` they must all be below it.
        ranks_per_node: Only for the text of the `WorldSizeError`.
        name: Name of the mesh, part of its value.

    Raises:
        MeshError: If names, sizes, ids or devices break a rule.
        WorldSizeError: If the mesh does not fit `world_size`. The text has the shape,
            the product, the world size and meshes that fit.

    Attributes:
        name: Name of the mesh.
        dims: Its (name, size) pairs.
        ids: Its ranks in row-major order, a read-only array of int64: 8 MB for a million.
    """

    name: str
    dims: tuple[MeshDimension, ...]
    ids: Ranks
    _range: range | None = field(repr=False)
    """The ranks where they are equally spaced upwards."""
    _order: npt.NDArray[np.intp] | None = field(repr=False)
    """The offsets of the ranks from the smallest up; None beside a range."""
    _hash: int = field(repr=False)

    def __init__(
        self,
        dims: DimsLike,
        ids: Sequence[int] | npt.NDArray[np.integer] | None = None,
        *,
        world_size: int | None = None,
        ranks_per_node: int | None = None,
        name: str = "",
    ) -> None:
        pairs = parse_dims(dims)
        if ranks_per_node is not None:
            as_int(ranks_per_node, "ranks_per_node", least=1)
        if ids is None:
            pairs = fit_dims(pairs, world_size, ranks_per_node=ranks_per_node)
            ranks: range | Ranks = range(prod(size for _, size in pairs))
        else:
            ranks = _checked_ids(ids)
            if any(size == -1 for _, size in pairs):
                pairs = fit_dims(pairs, len(ranks))
            if len(ranks) != prod(size for _, size in pairs):
                raise MeshError(
                    f"The number of device ids must match the product of the shape, {len(ranks)} "
                    f"vs. {prod(size for _, size in pairs)}"
                )
        self._set(_checked_name(name), pairs, ranks)
        if ids is not None and world_size is not None:
            self.check_world(world_size, partial=True, ranks_per_node=ranks_per_node)

    def _set(self, name: str, dims: tuple[MeshDimension, ...], ranks: range | Ranks) -> None:
        """Set the fields, with what finds a rank's offset."""
        spaced = ranks if isinstance(ranks, range) else _as_range(ranks)
        order = None
        if isinstance(ranks, range):
            ids = np.arange(ranks.start, ranks.stop, ranks.step, dtype=np.int64)
        else:
            ids = np.ascontiguousarray(ranks).reshape(-1)
        if spaced is None:
            order = np.argsort(ids, kind="stable")
            ranked = ids[order]
            twice = np.flatnonzero(ranked[1:] == ranked[:-1])
            if twice.size:
                raise MeshError(f"device id {ranked[twice[0]]} is given twice")
            order.flags.writeable = False
        ids.flags.writeable = False
        # Meshes are keys of many caches.
        places = spaced if spaced is not None else crc32(ids.data)
        fields = {
            "name": name,
            "dims": dims,
            "ids": ids,
            "_range": spaced,
            "_order": order,
            "_hash": hash((name, dims, places)),
        }
        for key, value in fields.items():
            object.__setattr__(self, key, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self is other or (
            (self._hash, self.name, self.dims) == (other._hash, other.name, other.dims)
            and np.array_equal(self.ids, other.ids)
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        ids = self.ids if self._range is None else self._range
        return partial(Mesh, name=self.name), (self.dims, ids)

    # -- other ways to make one ------------------------------------------------

    @classmethod
    def from_ids(
        cls,
        shape: Sequence[int],
        ids: Sequence[int] | npt.NDArray[np.integer],
        *,
        dim_names: Sequence[str] | None = None,
        name: str = "",
    ) -> Mesh:
        """Make a mesh of a shape and its ranks in row-major order.

        Args:
            shape: Sizes of the dims.
            ids: Any distinct ranks, also as a range.
            dim_names: Names of the dims; ``d0, d1, ...`` if None.
            name: Name of the mesh.

        Raises:
            MeshError: As of the class, and if there is not one name for each size.
        """
        shape = as_items(shape, "shape")
        names = tuple(f"d{k}" for k in range(len(shape)))
        names = names if dim_names is None else parse_names(dim_names)
        if len(names) != len(shape):
            raise MeshError(f"shape {shape} has {len(shape)} dims, but the names are {names}")
        return cls(list(zip(names, shape, strict=True)), ids, name=name)

    # -- other meshes from this one --------------------------------------------

    def submesh(self, dims: NamesLike, /, **fixed: int) -> Mesh:
        """Return the mesh over `dims`, with all other dims `fixed` at a coordinate.

        ``mesh.submesh("dp", pp=0, tp=1)``. The dims come in the order of `dims`, so
        naming all of them permutes the mesh.

        Raises:
            UnknownNameError: If there is no such dim.
            MeshError: If a dim is named twice, has no coordinate, or one out of range.
        """
        kept = dim_numbers(self.dims, dims)
        left_out = {dim.name for k, dim in enumerate(self.dims) if k not in kept}
        if left_out != set(fixed):
            raise MeshError(
                f"submesh {','.join(parse_names(dims))} of mesh {self.dims_text} needs coordinates "
                f"for exactly {sorted(left_out)}, got {sorted(fixed)}"
            )
        return self._view([self.dims[k] for k in kept], kept, self._fixed(fixed))

    def submesh_of(self, rank: int, dims: NamesLike) -> Mesh:
        """Return the mesh over `dims` that `rank` is in."""
        kept = dim_numbers(self.dims, dims)
        coords = [0 if k in kept else index for k, index in enumerate(self.coords_of(rank))]
        return self._view([self.dims[k] for k in kept], kept, coords)

    def flatten(self, dims: NamesLike, name: str) -> Mesh:
        """Return the same ranks with `dims` made into one dim called `name`.

        The new dim stands where the first of `dims` in this mesh stood, and runs
        through them row-major in the order they are named.

        Raises:
            UnknownNameError: If there is no such dim.
            MeshError: If `dims` names none, or one twice, or the mesh has a dim called `name`.
        """
        joined = dim_numbers(self.dims, dims)
        if not joined:
            raise MeshError("flatten makes one dim of several: dims names none")
        order: list[int] = []
        pairs: list[MeshDimension] = []
        for k, dim in enumerate(self.dims):
            if k == min(joined):
                size = prod(self.dims[j].size for j in joined)
                pairs.append(MeshDimension(check_dim_name(name), size))
                order.extend(joined)
            elif k not in joined:
                pairs.append(dim)
                order.append(k)
        return self._view(pairs, order, [0] * self.ndim)

    def unflatten(self, dim: str, dims: DimsLike) -> Mesh:
        """Return the same ranks with `dim` made into several, slowest first.

        Args:
            dim: The dim to split.
            dims: As for a new mesh; one size may be -1.

        Raises:
            WorldSizeError: If the product of the new sizes is not the size of `dim`.
        """
        number = self._number(dim)
        parts = fit_dims(parse_dims(dims), self.dims[number].size)
        return Mesh([*self.dims[:number], *parts, *self.dims[number + 1 :]], self.ids)

    def _view(
        self, dims: Sequence[tuple[str, int]], order: Sequence[int], coords: Sequence[int]
    ) -> Mesh:
        """Return a mesh of `dims` over the ranks along the dims numbered `order`."""
        return Mesh(dims, self._ranks_along(order, coords))

    def _ranks_along(self, order: Sequence[int], coords: Sequence[int]) -> Ranks:
        """Return ranks along some dims, the last of `order` fastest, at `coords` of the others."""
        fixed = [k for k in range(self.ndim) if k not in order]
        grid = self.ids.reshape(self.shape).transpose([*fixed, *order])
        return np.asarray(grid[tuple(coords[k] for k in fixed)]).reshape(-1)

    # -- names and sizes -------------------------------------------------------

    @property
    def dim_names(self) -> list[str]:
        """Names of the dims, slowest first."""
        return [dim.name for dim in self.dims]

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.dims)

    @property
    def size(self) -> int:
        """Number of places: the product of the sizes."""
        return prod(dim.size for dim in self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dims, slowest first."""
        return tuple(dim.size for dim in self.dims)

    @property
    def strides(self) -> list[int]:
        """Steps in offset for one step along each dim; shape (2, 4, 2) gives [8, 2, 1]."""
        shape = self.shape
        return [prod(shape[k + 1 :]) for k in range(len(shape))]

    @property
    def dims_text(self) -> str:
        """The dims as ``dp=2,pp=2``."""
        return dims_text(self.dims)

    def __getitem__(self, dim: str) -> MeshDimension:
        return self.dims[self._number(dim)]

    def dim_size(self, dim: str) -> int:
        """Return the size of `dim`; the UnknownNameError lists the dims there are."""
        return self[dim].size

    def contains_dim(self, dim: str) -> bool:
        """Tell whether there is a dim called `dim`; also ``dim in mesh``."""
        return isinstance(dim, str) and any(dim == known.name for known in self.dims)

    def __contains__(self, dim: object) -> bool:
        return isinstance(dim, str) and self.contains_dim(dim)

    def __iter__(self) -> Iterator[str]:
        return iter(self.dim_names)

    # -- places by rank --------------------------------------------------------

    def contains_rank(self, rank: int) -> bool:
        """Tell whether `rank` is in the mesh."""
        return isinstance(rank, int | np.integer) and self._offset(int(rank)) is not None

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of `rank`."""
        return _unravel(self.offset_of(rank), self.shape)

    def coord_of(self, rank: int, dim: str) -> int:
        """Return the coordinate of `rank` along `dim`."""
        return self.coords_of(rank)[self._number(dim)]

    def offset_of(self, rank: int) -> int:
        """Return the offset of `rank`; RankError if it is not in the mesh."""
        offset = self._offset(as_int(rank, "a rank"))
        if offset is None:
            raise RankError(f"rank {rank} is not in the mesh, which has {self._known_ranks()}")
        return offset

    def rank_of(self, offset: int) -> int:
        """Return the rank at `offset`; RankError if that is out of range."""
        if not 0 <= as_int(offset, "an offset") < self.size:
            raise RankError(f"offset {offset} is outside of mesh {self.dims_text}")
        return int(self.ids[offset])

    def rank_at(self, /, *coords: int, **by_dim: int) -> int:
        """Return the rank at `coords`, one for each dim in order, or by name: `by_dim`.

        Raises:
            MeshError: If one is missing, or outside of its dim.
            UnknownNameError: If there is no such dim.
        """
        if (coords and by_dim) or len(coords or by_dim) != self.ndim:
            raise MeshError(
                f"rank_at takes one coordinate for each dim of mesh {self.dims_text}, in order or "
                f"by name, got {(*coords, *by_dim.items())}"
            )
        places = self._fixed(by_dim or dict(zip(self.dim_names, coords, strict=True)))
        return int(self.ids[_ravel(places, self.shape)])

    def neighbour(self, rank: int, dim: str, offset: int = 1, *, wrap: bool = False) -> int | None:
        """Return the rank `offset` steps from `rank` along `dim`.

        Args:
            rank: A rank of the mesh.
            dim: The dim to step along; all other coordinates stay.
            offset: Steps, negative to go back.
            wrap: Whether the last place is followed by the first.

        Returns:
            The rank, or None where the mesh ends and `wrap` is False.
        """
        coords = list(self.coords_of(rank))
        number = self._number(dim)
        place, size = coords[number] + as_int(offset, "offset"), self.dims[number].size
        if not as_flag(wrap, "wrap") and not 0 <= place < size:
            return None
        coords[number] = place % size
        return int(self.ids[_ravel(coords, self.shape)])

    # -- groups of ranks -------------------------------------------------------

    def groups(self, dims: NamesLike) -> Ranks:
        """Return all groups of ranks that differ only along `dims`, one a row.

        Reducing over dim ``x`` means: over each of ``groups("x")``.

        Args:
            dims: One or more dims, ``"dp"``, ``"dp,tp"`` or a sequence of names. Their
                order is the order of the ranks in a group: last one fastest.

        Returns:
            A read-only array of int64. Its rows are numbered row-major over the other dims, in
            the mesh's order; each rank is in one of them.
        """
        along, others = self._along(dims)
        rows = self._ranks_along([*others, *along], ()).reshape(self.num_groups(dims), -1)
        rows.flags.writeable = False
        return rows

    def num_groups(self, dims: NamesLike) -> int:
        """Return the number of groups along `dims`."""
        return prod(self.dims[k].size for k in self._along(dims)[1])

    def group_index(self, rank: int, dims: NamesLike) -> int:
        """Return which of ``groups(dims)`` holds `rank`."""
        return self._offset_along(self._along(dims)[1], rank)

    def group_ranks(self, rank: int, dims: NamesLike) -> Sequence[int]:
        """Return the ranks of the group along `dims` that `rank` is in, in group order.

        Returns:
            A range where the ranks are equally spaced upwards, else a tuple.
        """
        along, _ = self._along(dims)
        ranks = self._ranks_along(along, self.coords_of(rank))
        spaced = _as_range(ranks)
        return tuple(ranks.tolist()) if spaced is None else spaced

    def place_in_group(self, rank: int, dims: NamesLike) -> int:
        """Return the place of `rank` in its group along `dims`."""
        return self._offset_along(self._along(dims)[0], rank)

    # -- the world -------------------------------------------------------------

    def check_world(
        self, world_size: int, *, partial: bool = False, ranks_per_node: int | None = None
    ) -> None:
        """Check that the mesh fits a world of `world_size` ranks.

        Args:
            world_size: Number of ranks of the world.
            partial: Whether the mesh may leave ranks of the world out.
            ranks_per_node: Only for the error's text.

        Raises:
            WorldSizeError: If it has more ranks than the world, fewer and not
                `partial`, or a rank that is not in the world.
        """
        world_size = check_world_size(world_size)
        partial = as_flag(partial, "partial")
        if ranks_per_node is not None:
            as_int(ranks_per_node, "ranks_per_node", least=1)
        if self.size > world_size or (self.size < world_size and not partial):
            raise world_size_error(self.dims, world_size, ranks_per_node=ranks_per_node)
        largest = int(self.ids.max())
        if largest >= world_size:
            raise WorldSizeError(
                f"mesh {self.dims_text or '()'} has rank {largest}, but the world has "
                f"{world_size} ranks, 0..{world_size - 1}"
            )

    # -- text ------------------------------------------------------------------

    def __repr__(self) -> str:
        parts = [repr(self.dims_text) if self.dims else "()"]
        if self._range != range(self.size):
            parts.append(f"ids={self._ids_text()}")
        if self.name:
            parts.append(f"name={self.name!r}")
        return f"Mesh({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """Show the ranks in a grid, in notebooks."""
        from mpimesh.trace import html  # late: pictures are for notebooks

        return html.paragraph(repr(self)) + html.rank_grid(self.dims, self.ids.tolist())

    def _ids_text(self) -> str:
        if self._range is not None:
            return repr(self._range)
        if self.size <= _SHOWN_IDS:
            return repr(self.ids.tolist())
        # The sum tells two long meshes apart where their reprs are compared over ranks.
        return f"<{self.size} ids, crc32 {crc32(self.ids.data):08x}>"

    # -- inside ----------------------------------------------------------------

    def _number(self, dim: str) -> int:
        return dim_numbers(self.dims, (dim,))[0]

    def _along(self, dims: NamesLike) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers of `dims`, and those of all others."""
        along = dim_numbers(self.dims, dims)
        return along, tuple(k for k in range(self.ndim) if k not in along)

    def _offset_along(self, numbers: Sequence[int], rank: int) -> int:
        """Return the row-major offset of `rank` over some of the dims."""
        coords = self.coords_of(rank)
        return _ravel([coords[k] for k in numbers], [self.dims[k].size for k in numbers])

    def _offset(self, rank: int) -> int | None:
        """Return the offset of `rank`, None if it is not in the mesh."""
        if self._range is not None:
            return self._range.index(rank) if rank in self._range else None
        place = int(np.searchsorted(self.ids, rank, sorter=self._order))
        if self._order is None or place == self.size or self.ids[self._order[place]] != rank:
            return None
        return int(self._order[place])

    def _known_ranks(self) -> str:
        if self._range is not None and self._range.step == 1:
            return f"ranks {self._range.start}..{self._range.stop - 1}"
        few = ", ".join(map(str, self.ids[:8].tolist()))
        return f"ranks {few}, ..." if self.size > 8 else f"ranks {few}"

    def _fixed(self, by_dim: Mapping[str, int]) -> list[int]:
        """Return coordinates as in `by_dim`, and 0 for the dims it does not name."""
        coords = [0] * self.ndim
        for name, value in by_dim.items():
            number = self._number(name)
            size = self.dims[number].size
            coords[number] = as_int(value, f"the coordinate along {name!r}")
            if not 0 <= coords[number] < size:
                raise MeshError(f"coordinate {name}={value} is outside of mesh dim {name}={size}")
        return coords


def _checked_ids(ids: Any) -> range | Ranks:
    """Return ids in row-major order.

    Raises:
        MeshError: If one is no whole number, or out of range.
    """
    if isinstance(ids, range):
        if ids:
            _check_bounds(min(ids[0], ids[-1]), max(ids[0], ids[-1]))
        # Equal ranges may have other ends, which would show in the repr.
        stop = ids.start + len(ids) * ids.step
        return range(ids.start, stop, ids.step) if ids.step > 0 else np.array(ids, np.int64)
    if not isinstance(ids, np.ndarray):
        ids = np.array([as_int(one, "a device id") for one in as_items(ids, "ids")], object)
    elif not np.issubdtype(ids.dtype, np.integer):
        raise MeshError(f"device ids must be whole numbers, got an array of {ids.dtype}")
    if ids.size:
        _check_bounds(ids.min(), ids.max())
    return np.array(ids, np.int64).reshape(-1)


def _check_bounds(smallest: int, largest: int) -> None:
    if smallest < 0 or largest > MAX_RANKS:
        raise MeshError(f"device ids must be in 0..{MAX_RANKS}, got {smallest} to {largest}")


def _as_range(ranks: Ranks) -> range | None:
    """Return ranks as a range, None unless they are equally spaced upwards."""
    if not ranks.size:
        return None
    first, step = int(ranks[0]), int(ranks[1] - ranks[0]) if ranks.size > 1 else 1
    if step < 1 or not (np.diff(ranks) == step).all():
        return None
    return range(first, first + step * ranks.size, step)


def _ravel(coords: Sequence[int], shape: Sequence[int]) -> int:
    """Return the row-major offset of `coords`."""
    offset = 0
    for index, size in zip(coords, shape, strict=True):
        offset = offset * size + index
    return offset


def _unravel(offset: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinates of a row-major `offset`."""
    coords = []
    for size in reversed(shape):
        offset, index = divmod(offset, size)
        coords.append(index)
    return tuple(reversed(coords))


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or "|" in name or not name.isprintable():
        raise MeshError(f"a mesh's name must be printable text without '|', got {name!r}")
    return name


class _LiveMesh(Protocol):
    """A mesh of ranks that talk to each other: it has a :class:`Mesh`, alike on all of them."""

    @property
    def mesh(self) -> Mesh: ...


MeshLike: TypeAlias = Mesh | _LiveMesh
"""A mesh as a value, or a live one."""
