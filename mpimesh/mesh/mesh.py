"""`Mesh`: named dims over ranks, as an immutable value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from zlib import crc32

import numpy as np

from mpimesh.arguments import as_flag, as_int, as_items
from mpimesh.errors import MeshError, RankError, WorldSizeError
from mpimesh.mesh.dims import (
    DimsLike,
    MeshDimension,
    NamesLike,
    check_dim_name,
    check_world_size,
    default_names,
    dim_numbers,
    dims_text,
    fit_dims,
    parse_dims,
    parse_names,
    world_size_error,
)
from mpimesh.mesh.ids import (
    DeviceIds,
    ListedIds,
    RankGroups,
    StridedIds,
    coords_of_rank,
    make_ids,
    ravel,
    split_ids,
    unravel,
)
from mpimesh.trace import html

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Mesh", "MeshLike"]

_SHOWN_IDS = 32
"""Most ids that repr writes out one by one."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Mesh:
    """Named dims over ranks, row-major: the last dim is the fastest.

    A value: equal if all its fields are, hashable, picklable, and never in touch
    with other ranks. Its repr is the constructor call, but for more than 32 ids
    without strides.

    Two words for a place: an *offset*, ``0 <= offset < size``, counts the places in
    row-major order; a *rank* is what stands there. Methods take ranks, and raise
    `RankError` for one that is not in the mesh.

    Ranks that follow strides (every mesh made without `ids`, and every slice of
    one) are kept as arithmetic: a mesh of a million ranks costs what one of four does.

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
        ids: Its ranks, a lazy sequence in row-major order.
    """

    name: str
    dims: tuple[MeshDimension, ...]
    ids: DeviceIds

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
            grid: DeviceIds = StridedIds.row_major([size for _, size in pairs])
        else:
            given: Any = ids
            if not isinstance(given, Sequence | np.ndarray):
                ids = as_items(given, "ids")
            if any(size == -1 for _, size in pairs):
                pairs = fit_dims(pairs, np.size(ids) if isinstance(ids, np.ndarray) else len(ids))
            grid = make_ids([size for _, size in pairs], ids)
        for field, value in (("name", _checked_name(name)), ("dims", pairs), ("ids", grid)):
            object.__setattr__(self, field, value)
        if ids is not None and world_size is not None:
            self.check_world(world_size, partial=True, ranks_per_node=ranks_per_node)

    # -- other ways to make one ------------------------------------------------

    @classmethod
    def parse(cls, text: str, *, world_size: int | None = None, name: str = "") -> Mesh:
        """Read ``"dp=2,pp=2"``, or ``"dp=-1,pp=2"`` where `world_size` is given."""
        if not isinstance(text, str):
            raise MeshError(f"mesh dims must be a text like 'dp=2,pp=2', got {text!r}")
        return cls(text, world_size=world_size, name=name)

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
        """
        shape = as_items(shape, "shape")
        names = default_names(len(shape)) if dim_names is None else parse_names(dim_names)
        if len(names) != len(shape):
            raise MeshError(f"shape {shape} has {len(shape)} dims, but the names are {names}")
        return cls(list(zip(names, shape, strict=True)), ids, name=name)

    # -- other meshes from this one --------------------------------------------

    def submesh(self, dims: NamesLike, /, **fixed: int) -> Mesh:
        """Return the mesh over `dims` at given coordinates of all other dims.

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
        return self._derived([self.dims[k] for k in kept], [(k,) for k in kept], self._fixed(fixed))

    def submesh_of(self, rank: int, dims: NamesLike) -> Mesh:
        """Return the mesh over `dims` that `rank` is in."""
        kept = dim_numbers(self.dims, dims)
        coords = [0 if k in kept else index for k, index in enumerate(self.coords_of(rank))]
        return self._derived([self.dims[k] for k in kept], [(k,) for k in kept], coords)

    def flatten(self, dims: NamesLike, name: str) -> Mesh:
        """Return the same ranks with `dims` made into one dim called `name`.

        The new dim stands where the first of `dims` in this mesh stood, and runs
        through them row-major in the order they are named.
        """
        joined = dim_numbers(self.dims, dims)
        if not joined:
            raise MeshError("flatten makes one dim of several: dims names none")
        runs: list[tuple[int, ...]] = []
        pairs: list[MeshDimension] = []
        for k, dim in enumerate(self.dims):
            if k == min(joined):
                size = prod(self.dims[j].size for j in joined)
                pairs.append(MeshDimension(check_dim_name(name), size))
                runs.append(joined)
            elif k not in joined:
                pairs.append(dim)
                runs.append((k,))
        return self._derived(pairs, runs, [0] * self.ndim)

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
        ids = split_ids(self.ids, number, [size for _, size in parts])
        return self._like([*self.dims[:number], *parts, *self.dims[number + 1 :]], ids)

    def _derived(
        self,
        dims: Sequence[MeshDimension],
        runs: Sequence[Sequence[int]],
        coords: Sequence[int],
    ) -> Mesh:
        return self._like(dims, self.ids.view(runs, coords))

    def _like(self, dims: Sequence[MeshDimension], ids: DeviceIds) -> Mesh:
        """Return a mesh over some of this mesh's ranks."""
        return Mesh(dims, ids)

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
        return rank in self.ids

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of `rank`."""
        return coords_of_rank(self.ids, as_int(rank, "a rank"))

    def coord_of(self, rank: int, dim: str) -> int:
        """Return the coordinate of `rank` along `dim`."""
        return self.coords_of(rank)[self._number(dim)]

    def offset_of(self, rank: int) -> int:
        """Return the offset of `rank`."""
        return ravel(self.coords_of(rank), self.shape)

    def rank_of(self, offset: int) -> int:
        """Return the rank at `offset`, which must be in range."""
        if not 0 <= as_int(offset, "an offset") < self.size:
            raise RankError(f"offset {offset} is outside of mesh {self.dims_text}")
        return self.ids.at(unravel(offset, self.shape))

    def rank_at(self, /, *coords: int, **by_dim: int) -> int:
        """Return the rank at coordinates: all in order, or all by their dims' names.

        Raises:
            MeshError: If one is missing, or outside of its dim.
            UnknownNameError: If there is no such dim.
        """
        if (coords and by_dim) or len(coords or by_dim) != self.ndim:
            raise MeshError(
                f"rank_at takes one coordinate for each dim of mesh {self.dims_text}, in order or "
                f"by name, got {(*coords, *by_dim.items())}"
            )
        return self.ids.at(self._fixed(by_dim or dict(zip(self.dim_names, coords, strict=True))))

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
        return self.ids.at(coords)

    # -- groups of ranks -------------------------------------------------------

    def groups(self, dims: NamesLike) -> RankGroups:
        """Return all groups of ranks that differ only along `dims`, as a lazy sequence.

        Reducing over dim ``x`` means: over each of ``groups("x")``.

        Args:
            dims: One or more dims, ``"dp"``, ``"dp,tp"`` or a sequence of names. Their
                order is the order of the ranks in a group: last one fastest.
        """
        return RankGroups(self.ids, dim_numbers(self.dims, dims))

    def num_groups(self, dims: NamesLike) -> int:
        """Return the number of groups along `dims`."""
        return len(self.groups(dims))

    def group_index(self, rank: int, dims: NamesLike) -> int:
        """Return which of ``groups(dims)`` holds `rank`."""
        return self.groups(dims).index_of(as_int(rank, "a rank"))

    def group_ranks(self, rank: int, dims: NamesLike) -> Sequence[int]:
        """Return the ranks of the group along `dims` that `rank` is in, in group order.

        Returns:
            A range where the ranks are equally spaced, else a lazy sequence.
        """
        return self.groups(dims).of(as_int(rank, "a rank"))

    def place_in_group(self, rank: int, dims: NamesLike) -> int:
        """Return the place of `rank` in its group along `dims`."""
        return self.groups(dims).place_of(as_int(rank, "a rank"))

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
        if self.ids.largest >= world_size:
            raise WorldSizeError(
                f"mesh {self.dims_text or '()'} has rank {self.ids.largest}, but the world has "
                f"{world_size} ranks, 0..{world_size - 1}"
            )

    # -- text ------------------------------------------------------------------

    def __repr__(self) -> str:
        parts = [repr(self.dims_text) if self.dims else "()"]
        if self.ids.as_range() != range(self.size):
            parts.append(f"ids={self._ids_text()}")
        if self.name:
            parts.append(f"name={self.name!r}")
        return f"Mesh({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """Show the ranks in a grid, in notebooks."""
        return html.paragraph(repr(self)) + html.rank_grid(self.dims, list(self.ids))

    def _ids_text(self) -> str:
        plain = self.ids.as_range()
        if plain is not None:
            return repr(plain)
        if self.size <= _SHOWN_IDS:
            return repr(list(self.ids))
        if isinstance(self.ids, ListedIds):
            # The sum tells two long meshes apart where their reprs are compared over ranks.
            return f"<{self.size} listed ids, crc32 {crc32(self.ids.array().tobytes()):08x}>"
        return repr(self.ids)

    # -- inside ----------------------------------------------------------------

    def _number(self, dim: str) -> int:
        return dim_numbers(self.dims, (dim,))[0]

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


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or "|" in name or not name.isprintable():
        raise MeshError(f"a mesh's name must be printable text without '|', got {name!r}")
    return name


class _LiveMesh(Protocol):
    """A mesh of ranks that talk to each other: it has a :class:`Mesh`, alike on all of them."""

    @property
    def value(self) -> Mesh: ...


MeshLike: TypeAlias = Mesh | _LiveMesh
"""A mesh as a value, or a live one."""
