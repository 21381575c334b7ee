"""Parts of arrays in files, and how ranks that have them otherwise write them together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mpimesh.arguments import shown
from mpimesh.arrays import DType, HostArray
from mpimesh.dtensor import DTensor
from mpimesh.dtensor.consistency import gather_facts
from mpimesh.dtensor.redistribute import redistribution
from mpimesh.errors import (
    DamagedError,
    IndexOutOfRangeError,
    MissingPackageError,
    MpimeshError,
    NoRuleError,
    StoreError,
)
from mpimesh.layout import Layout, Shard
from mpimesh.layout.boxes import Box, local_box, view, volume, whole
from mpimesh.layout.keys import read_key
from mpimesh.mesh import Mesh
from mpimesh.runtime import DeviceMesh
from mpimesh.store.flat_arrays import cut, grid_tiles

__all__ = ["ArrayFile", "Region", "as_ours", "holders_of", "tell_all", "write_region"]

SLAB_BYTES = 4 << 20
"""Bytes of an array that are carried to the ranks that write them at a time."""

_SHORT_BYTES = 4096
"""Boxes whose elements lie in shorter rows are carried to another rank before they are written."""

_FREE_BYTES = 64 << 10
"""Arrays up to this size are written as they lie."""


class ArrayFile(Protocol):
    """An array of some format, as a rank has it open; see :class:`FlatArray`."""

    shape: tuple[int, ...]
    dtype: DType
    grain: tuple[int, ...]
    fortran: bool
    read_bytes: int

    @property
    def one_writer(self) -> bool:
        """True if only one rank may write at all."""

    def read(self, ranges: tuple[range, ...], out: HostArray) -> None:
        """Read elements into an array of their extent."""

    def run_bytes(self, box: Box) -> int:
        """Return the bytes that elements of a box have in a row in the file."""

    def write(self, box: Box, values: HostArray) -> None:
        """Write the values of a box, of its extent."""

    def sync(self) -> None:
        """Have what was written on the disk."""

    def close(self) -> None:
        """Close the file."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of an array, and the axes that it has: a number drops its axis.

    Attributes:
        ranges: The indices along each axis of the array.
        dropped: The axes that the part has not.
    """

    ranges: tuple[range, ...]
    dropped: tuple[int, ...]

    @classmethod
    def of(cls, index: Any, shape: tuple[int, ...]) -> Region:
        """Read an index.

        Raises:
            IndexOutOfRangeError: If it does not fit, or has arrays or new axes.
        """
        try:
            key = read_key(index, shape)
        except NoRuleError as error:
            raise IndexOutOfRangeError(str(error)) from None
        if key.arrays or key.new:
            raise IndexOutOfRangeError(
                f"a part of an array in a file is made of numbers and slices, got {shown(index)}; "
                "read it first"
            )
        return cls(key.picks, key.single)

    @property
    def kept(self) -> tuple[int, ...]:
        """The axes that the part has."""
        return tuple(axis for axis in range(len(self.ranges)) if axis not in self.dropped)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(len(self.ranges[axis]) for axis in self.kept)

    def inside(self, box: Box) -> tuple[range, ...]:
        """Return the indices, along each axis of the array, of a box of the part."""
        rows = list(self.ranges)
        for axis, (start, stop) in zip(self.kept, box, strict=True):
            rows[axis] = rows[axis][start:stop]
        return tuple(rows)

    def box(self, box: Box) -> Box:
        """Return a box of the part as one of the array; all steps are 1."""
        return tuple((row.start, row.stop) for row in self.inside(box))

    def back(self, box: Box) -> Box:
        """Return a box of the array as one of the part."""
        rows = [self.ranges[axis].start for axis in self.kept]
        edges = [box[axis] for axis in self.kept]
        return tuple((a - first, b - first) for (a, b), first in zip(edges, rows, strict=True))

    def widened(self, values: HostArray) -> HostArray:
        """Return a view with an axis of length 1 for each that was dropped."""
        return np.expand_dims(values, self.dropped) if self.dropped else values


# -- writing ---------------------------------------------------------------------------------------


def write_region(file: ArrayFile, region: Region, values: DTensor | HostArray, path: Path) -> None:
    """Write into a part of an open file, and have it on the disk. Collective over the mesh.

    Raises:
        StoreError: On every rank, if any could not write.
    """
    live = values.mesh if isinstance(values, DTensor) else None
    if isinstance(values, DTensor) and not _lies_well(file, region, values):
        pieces = _carried(file, region, values)
    else:
        pieces = _as_it_lies(file, region, values)
    problem: MpimeshError | None = None
    for box, part in pieces:
        if problem is None:  # a rank that cannot write goes on to carry what others need
            try:
                file.write(box, region.widened(part))
            except Exception as error:
                problem = as_ours(error, "write", path)
    # One writer's file is one file, and other ranks have nothing of it to bring on the disk.
    if problem is None and not (file.one_writer and live and live.rank != live.group().ranks[0]):
        try:
            file.sync()
        except Exception as error:
            problem = as_ours(error, "write", path)
    tell_all(live, "write", None, problem)


def holders_of(values: DTensor | HostArray) -> dict[Box, tuple[int, ...]]:
    """Return the ranks that have each box of an array; NumPy's is one that a rank 0 has."""
    if isinstance(values, DTensor):
        return values.layout.holders(values.shape)
    return {whole(values.shape): (0,)}


def _lies_well(file: ArrayFile, region: Region, values: DTensor) -> bool:
    """Tell whether ranks can write what they have: in long rows, and no two into one chunk."""
    if values.layout.partial_op:
        return False
    if values.mesh.size == 1:
        return True
    if file.one_writer:
        return False
    all_of_it = region.box(whole(region.shape))
    for box in map(region.box, holders_of(values)):
        for (start, stop), (first, last), step in zip(box, all_of_it, file.grain, strict=True):
            if (start % step and start != first) or (stop % step and stop != last):
                return False
        if file.run_bytes(box) < _SHORT_BYTES and values.nbytes > _FREE_BYTES:
            return False
    return True


def _as_it_lies(
    file: ArrayFile, region: Region, values: DTensor | HostArray
) -> Iterator[tuple[Box, HostArray]]:
    """Yield what this rank writes of its block, with its box; copies are shared out."""
    if not isinstance(values, DTensor):
        yield region.box(whole(values.shape)), values
        return
    rank, shape = values.mesh.rank, values.shape
    block = values.layout.box(shape, rank)
    holders = holders_of(values).get(block, ())
    if not holders:
        return
    box, number = region.box(block), holders.index(rank)
    axis, edges = cut(box, file.grain, len(holders), fortran=file.fortran)
    if axis >= 0:
        box = (*box[:axis], (edges[number], edges[number + 1]), *box[axis + 1 :])
    elif number:
        return
    yield box, view(values.local, local_box(region.back(box), block))


def _carried(file: ArrayFile, region: Region, values: DTensor) -> Iterator[tuple[Box, HostArray]]:
    """Yield what this rank writes, with its box, after it was carried here slab by slab.

    Collective: all ranks take the same steps.
    """
    mesh = values.mesh
    ranks = list(mesh.group().ranks)
    most = SLAB_BYTES // values.itemsize
    everything = region.box(whole(region.shape))
    tiles = grid_tiles(everything, file.grain, most, fortran=file.fortran)
    for number, tile in enumerate(tiles):
        inner = region.back(tile)
        part = values if tile == everything else values[tuple(slice(*edges) for edges in inner)]
        axis, edges = cut(tile, file.grain, len(ranks), fortran=file.fortran)
        if file.one_writer or axis < 0:
            writer = ranks[0 if file.one_writer else number % len(ranks)]
            target, box = Layout(Mesh((), [writer]), ()), tile if mesh.rank == writer else None
        else:
            place = ranks.index(mesh.rank)
            sizes = [b - a for a, b in pairwise(edges)]
            row = Mesh([("writer", len(ranks))], ranks)
            target = Layout(row, [Shard.of_sizes(region.kept.index(axis), sizes)])
            box = (*tile[:axis], (edges[place], edges[place + 1]), *tile[axis + 1 :])
        moving = redistribution(mesh, part.layout, mesh, target, part.shape, part.dtype)
        block = moving.start(mesh, part.local, lambda block: block).resolve()
        if box is not None and volume(box):
            yield box, block


# -- errors ---------------------------------------------------------------------------------------


def as_ours(error: Exception, doing: str, path: Path, *, reading: bool = False) -> MpimeshError:
    """Return an error as one of mpimesh's."""
    if isinstance(error, MpimeshError):
        return error
    what = f"cannot {doing} {path}: "
    if isinstance(error, ImportError):
        extra = "zarr" if "zarr" in str(error) else "hdf5"
        return MissingPackageError(f"{what}{error}; install mpimesh[{extra}]")
    if isinstance(error, MemoryError):
        return StoreError(f"{what}there is not enough memory")
    if isinstance(error, OSError) and (error.errno or not reading):
        return StoreError(f"{what}{error.strerror or shown(error)}")
    if reading:
        return DamagedError(f"{what}it is damaged, or of another format: {shown(error)}")
    return StoreError(f"{what}{shown(error)}")


def tell_all(
    mesh: DeviceMesh | None, name: str, fact: Any, problem: MpimeshError | None
) -> list[Any]:
    """Return what each rank brings, or raise on every rank the problem of any."""
    if mesh is None or not mesh.contains_rank(mesh.rank):
        if problem is not None:
            raise problem
        return [fact]
    return gather_facts(mesh, name, fact, problem)
