"""Queries of TensorFlow's spelling of a layout: shards, their order, and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpimesh.arguments import as_int, as_shape
from mpimesh.errors import LayoutError
from mpimesh.layout.axis_specs import MATCH, UNSHARDED
from mpimesh.mesh import Mesh

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["AxisShards", "axis_number"]


class AxisShards:
    """Questions that `specs` and `mesh` alone answer. Blocks are equal, so shapes must divide.

    What needs the shards raises `LayoutError` while an axis is ``"match"``, which says nothing of
    its own; see :meth:`AxisLayout.matching`.
    """

    __slots__ = ()

    specs: tuple[str, ...]
    mesh: Mesh

    @property
    def sharding_specs(self) -> list[str]:
        """The specs of the axes."""
        return list(self.specs)

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.specs)

    @property
    def shape(self) -> list[int]:
        """The number of shards along each axis; -1 for ``"match"``."""
        return [self.num_shards(axis) for axis in range(self.rank)]

    @property
    def type(self) -> str:
        """``"STATIC"``, or ``"SINGLE_DEVICE"`` on a mesh that is one device."""
        return "SINGLE_DEVICE" if self.is_single_device() else "STATIC"

    def num_shards(self, axis: int) -> int:
        """Return into how many shards `axis` is split; -1 for ``"match"``.

        Raises:
            LayoutError: If there is no such axis.
        """
        spec = self.specs[axis_number(axis, self.rank)]
        if spec in (UNSHARDED, MATCH):
            return 1 if spec == UNSHARDED else -1
        return self.mesh.dim_size(spec)

    def is_fully_replicated(self) -> bool:
        """Tell whether every rank has the whole array: each axis has one shard."""
        return all(shards == 1 for shards in self._shards())

    def is_batch_parallel(self) -> bool:
        """Tell whether no axis but the first has several shards."""
        return all(shards == 1 for shards in self._shards()[1:])

    def is_single_device(self) -> bool:
        """Tell whether the mesh is one device, without dims."""
        return self.mesh.is_single_device()

    # -- shards ----------------------------------------------------------------------

    def offset_to_shard(self) -> list[tuple[int, ...]]:
        """Return which shard each place of the mesh has: a table of its size.

        Returns:
            For each offset of the mesh the index of its shard along each axis.
        """
        numbers = [
            None if spec == UNSHARDED else self.mesh.dim_names.index(spec) for spec in self._known()
        ]
        return [
            tuple(0 if number is None else coords[number] for number in numbers)
            for coords in np.ndindex(*self.mesh.shape())
        ]

    def offset_tuple_to_global_index(self, offset_tuple: Sequence[int]) -> int:
        """Return the row-major number of the shard that has this index along each axis.

        Raises:
            LayoutError: If there is no such shard.
        """
        shards = self._shards()
        place = tuple(
            as_int(index, "the index of a shard", LayoutError, least=0) for index in offset_tuple
        )
        if len(place) != self.rank or any(k >= n for k, n in zip(place, shards, strict=True)):
            raise LayoutError(f"there is no shard {place} among {shards} shards along the axes")
        number = 0
        for index, count in zip(place, shards, strict=True):
            number = number * count + index
        return number

    def unravel(self, unpacked_tensors: Sequence[Any]) -> npt.NDArray[Any]:
        """Arrange one block for each place of the mesh as the shards of the array.

        Of several copies the last one is taken.

        Shapes:
            result: :attr:`shape`, of objects.

        Raises:
            LayoutError: If they are not as many as the mesh has places.
        """
        if len(unpacked_tensors) != self.mesh.size:
            raise LayoutError(
                f"unravel takes one block for each of {self.mesh.size} places of mesh "
                f"{self.mesh.dims_text or '()'}, got {len(unpacked_tensors)}"
            )
        shards = np.empty(self._shards(), dtype=object)
        for block, place in zip(unpacked_tensors, self.offset_to_shard(), strict=True):
            shards[place] = block
        return shards

    def global_shape_from_local_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the array whose blocks have `local_shape`.

        Raises:
            LayoutError: If it has another number of axes.
        """
        lengths = self._fitting(local_shape)
        return tuple(n * shards for n, shards in zip(lengths, self._shards(), strict=True))

    def local_shape_from_global_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the blocks of an array of `global_shape`.

        Raises:
            LayoutError: If it has another number of axes, or an axis is not divisible by its
                shards. :meth:`Layout.local_shape` knows uneven blocks, too.
        """
        lengths = self._fitting(global_shape)
        for axis, (length, shards) in enumerate(zip(lengths, self._shards(), strict=True)):
            if length % shards:
                raise LayoutError(
                    f"{self.sharding_specs} requires dimension {axis} to be divisible by its "
                    f"{shards} shards along mesh dim {self.specs[axis]}, but the shape is "
                    f"{lengths}; Layout.local_shape(shape, rank) gives uneven blocks"
                )
        return tuple(n // shards for n, shards in zip(lengths, self._shards(), strict=True))

    # -- inside ----------------------------------------------------------------------

    def _known(self) -> tuple[str, ...]:
        if MATCH in self.specs:
            raise LayoutError(
                f"{self.sharding_specs} says 'match', so its shards are not known; say which "
                "array's with matching(other)"
            )
        return self.specs

    def _shards(self) -> list[int]:
        self._known()
        return self.shape

    def _fitting(self, shape: Sequence[int]) -> tuple[int, ...]:
        lengths = as_shape(shape, LayoutError)
        if len(lengths) != self.rank:
            raise LayoutError(
                f"{self.sharding_specs} is for {self.rank} axes, but the shape is {lengths}"
            )
        return lengths


def axis_number(axis: int, rank: int) -> int:
    """Return `axis`, which must be one of `rank` axes, counted from 0."""
    number = as_int(axis, "an axis", LayoutError, least=0)
    if number >= rank:
        raise LayoutError(f"there is no axis {number} in an array of {rank} axes")
    return number
