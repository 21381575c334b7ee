"""Queries of named dims over ranks: sizes, places, neighbours, groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from mpimesh.arguments import as_flag, as_int
from mpimesh.errors import MeshError, RankError, WorldSizeError
from mpimesh.mesh.dims import MeshDimension, NamesLike, dim_numbers, dims_text
from mpimesh.mesh.fit import check_world_size, world_size_error
from mpimesh.mesh.ids import DeviceIds, ravel, unravel
from mpimesh.mesh.rank_groups import RankGroups, coords_of_rank

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["MeshQueries"]


class MeshQueries:
    """Questions that `dims` and `ids` alone answer. Nothing here talks to other ranks.

    Two words for a place: an *offset*, ``0 <= offset < size``, counts the places in
    row-major order; a *rank* is the device id that stands there. Methods in
    TensorFlow's names (`coords`, `device_location`, `unravel_index`) take offsets;
    all others take ranks, and raise `RankError` for one that is not in the mesh.
    """

    __slots__ = ()

    dims: tuple[MeshDimension, ...]
    ids: DeviceIds

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

    def shape(self) -> list[int]:
        """Return the sizes of the dims, slowest first."""
        return [dim.size for dim in self.dims]

    @property
    def strides(self) -> list[int]:
        """Steps in offset for one step along each dim; shape (2, 4, 2) gives [8, 2, 1]."""
        shape = self.shape()
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

    # -- places by offset, in TensorFlow's names -------------------------------

    def coords(self, offset: int) -> npt.NDArray[np.int64]:
        """Return ``(offset // strides) % shape``: an offset outside of the mesh wraps."""
        return np.array(unravel(as_int(offset, "an offset"), self.shape()), dtype=np.int64)

    def device_location(self, offset: int) -> npt.NDArray[np.int64]:
        """Return the coordinates of `offset`, which must be in range.

        Raises:
            RankError: If it is not.
        """
        if not 0 <= as_int(offset, "an offset") < self.size:
            raise RankError(f"offset {offset} is outside of mesh {self.dims_text}")
        return self.coords(offset)

    def unravel_index(self) -> dict[int, dict[str, int]]:
        """Return {offset: {dim: coordinate}} for all places: a table of `size` entries."""
        return {offset: self._named(offset) for offset in range(self.size)}

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
        return ravel(self.coords_of(rank), self.shape())

    def rank_of(self, offset: int) -> int:
        """Return the rank at `offset`, which must be in range."""
        return self.ids.at(self.device_location(offset).tolist())

    def rank_at(self, *coords: int, **by_dim: int) -> int:
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

    # -- inside ----------------------------------------------------------------

    def _number(self, dim: str) -> int:
        return dim_numbers(self.dims, (dim,))[0]

    def _named(self, offset: int) -> dict[str, int]:
        return dict(zip(self.dim_names, unravel(offset, self.shape()), strict=True))

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
