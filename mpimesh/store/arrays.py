"""Arrays in files of several formats: each rank reads and writes its own boxes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

from mpimesh.arguments import as_shape, rank_names, ranks_by_value, shown
from mpimesh.arrays import Array, DType, HostArray, array_shape
from mpimesh.dtensor import DTensor
from mpimesh.dtensor.consistency import compare_call, next_number, number_text, numbered
from mpimesh.dtensor.defaults import as_live
from mpimesh.dtensor.redistribute import redistribution
from mpimesh.errors import (
    ClosedError,
    DTypeError,
    IndexOutOfRangeError,
    LayoutError,
    MismatchError,
    NoRuleError,
    ShapeError,
    StoreError,
    on_all_ranks,
)
from mpimesh.layout import Layout, Partial, PlacementLike, Replicate, Shard
from mpimesh.layout.boxes import Box, extent, local_box, view, volume, whole
from mpimesh.layout.keys import read_key
from mpimesh.mesh import Mesh
from mpimesh.runtime import DeviceMesh
from mpimesh.runtime.call import Call
from mpimesh.runtime.group_core import GroupCore
from mpimesh.runtime.operands import host_array
from mpimesh.store.array_formats import FORMATS, ArrayFile, Format
from mpimesh.store.drafts import array_draft
from mpimesh.store.files import (
    agreeing,
    as_store_error,
    check_mesh,
    publish,
)
from mpimesh.store.grids import chunks_of, cut, grid_tiles

__all__ = ["OpenedArray", "open_array", "save_array"]

SLAB_BYTES = 4 << 20
"""Bytes of an array that are carried to the ranks that write them at a time."""

_SHORT_BYTES = 4096
"""Boxes whose elements lie in shorter rows are carried to another rank before they are written."""

_FREE_BYTES = 64 << 10
"""Arrays up to this size are written as they lie."""


def open_array(
    path: str | os.PathLike[str],
    mesh: DeviceMesh | None = None,
    *,
    mode: str = "r",
    format: str | None = None,  # noqa: A002 - as in other libraries
    dataset: str | None = None,
) -> OpenedArray:
    """Open an array in a .npy, Zarr or HDF5 file, of which each rank reads what it needs.

    Collective over the mesh; without a mesh it needs no MPI. Errors are raised on every rank.

    Args:
        path: The file; of Zarr the folder of the array.
        mesh: The mesh of the split arrays that are read; None to read NumPy arrays.
        mode: ``"r"`` to read, ``"r+"`` to write into it, too.
        format: ``"npy"``, ``"zarr"`` or ``"hdf5"``; by default the path's end says it.
        dataset: The name of a dataset, of HDF5 only.

    Raises:
        StoreError: If it cannot be opened.
        DamagedError: If it is cut off, or something else.
        DTypeError: If it holds Python objects; they are never read.
        MissingPackageError: If the format's library is not installed.

    Example:
        >>> with mm.open_array("x.npy", mesh) as a:
        ...     x = a.read("dp=S0")
    """
    live = None if mesh is None else as_live(mesh)
    file: ArrayFile | None = None
    try:
        with _alike(live, "open_array", f"open {path}", reading=True) as facts:
            place = _path(path)
            kind = _format_of(place, format, dataset=dataset)
            if mode not in ("r", "r+"):
                raise StoreError(f'an array is opened in mode "r" or "r+", got {shown(mode)}')
            if not place.exists():
                raise StoreError(f"cannot open {place}: there is no such file")
            file = kind.open(place, mode, dataset)
            facts.append([str(place), mode, format, dataset, file.shape, str(file.dtype)])
        return OpenedArray(place, file, live, mode)
    except BaseException:
        if file is not None:
            file.close()
        raise


def save_array(
    path: str | os.PathLike[str],
    x: Array,
    *,
    mesh: DeviceMesh | None = None,
    format: str | None = None,  # noqa: A002 - as in other libraries
    dataset: str | None = None,
    chunks: Sequence[int] | None = None,
) -> None:
    """Write an array to a .npy, Zarr or HDF5 file: all ranks together, each element once.

    Collective over the mesh; ranks that it leaves out do nothing. Whoever opens the file finds all
    of it, or the one before: it is written under another name, and renamed when it is on the disk.
    After an error, which is raised on every rank, the one before is there.

    Args:
        path: The file; of Zarr the folder of the array.
        x: A split array, in any layout; or NumPy's, the same on all ranks of the mesh.
        mesh: For an array of NumPy the ranks that write it; None for this process alone.
        format: ``"npy"``, ``"zarr"`` or ``"hdf5"``; by default the path's end says it.
        dataset: The name of the dataset, of HDF5 only. Others in the file stay: it is copied.
        chunks: The extent of chunks, of Zarr and HDF5. By default those of Zarr fit the blocks,
            and HDF5's dataset has none, so that all ranks can write it.

    Raises:
        StoreError: If it cannot be written.
        DTypeError: If the format does not have the dtype.
        MissingPackageError: If the format's library is not installed.

    Cost:
        Ranks write what they have. Where blocks are in short pieces in the file, or two ranks have
        parts of a chunk, 4 MiB at a time are carried to the ranks that write them.

    Example:
        >>> mm.save_array("x.npy", x)
    """
    if mesh is None and not isinstance(x, DTensor):
        check_mesh(mesh, f"write {path}")
    live = x.mesh if isinstance(x, DTensor) else None if mesh is None else as_live(mesh)
    if live is not None and not live.contains_rank(live.rank):
        return
    extents = None
    with _alike(live, "save_array", f"write {path}") as facts:
        place = _path(path).absolute()
        kind = _format_of(place, format, dataset=dataset, chunks=chunks)
        if mesh is not None and live is not mesh:
            raise LayoutError("x is on another mesh than mesh; leave mesh out")
        values = x if isinstance(x, DTensor) else host_array(x)
        shape, dtype = values.shape, values.dtype
        if chunks is not None:
            extents = _chunks(chunks, shape)
        elif kind.name == "zarr":
            extents = chunks_of(shape, _holders_of(values), dtype.itemsize)
        text = values.layout.text + number_text(values) if isinstance(values, DTensor) else ""
        facts.append([str(place), format, dataset, shape, str(dtype), text, extents])
    if live is not None and isinstance(values, np.ndarray):
        compare_call(live, "save_array", (values,))
        values = DTensor._of_block(live, Layout.replicated(live), shape, dtype, values)
    core, part = _core(live), None
    with ExitStack() as stack:
        with agreeing(core, "save_array", f"write {place}") as names:
            if core is None or core.rank == 0:
                _check_place(place, kind)
                part = stack.enter_context(array_draft(place, kind.suffixes[0]))
                kind.create(part, place, shape, dtype, dataset, extents)
                names.append(str(part))
        with agreeing(core, "save_array", f"write {place}"):
            file = kind.open(Path(names[0]), "r+", dataset)
            stack.callback(file.close)
        _write_region(file, Region.of((), shape), values, place)
        with agreeing(core, "save_array", f"write {place}"):
            if part is not None:
                publish(part, place)
                kind.remove(part)  # what was there before, if that is a folder


class OpenedArray:
    """An array in a file, which :func:`open_array` opens. A context manager, which closes it."""

    def __init__(self, path: Path, file: ArrayFile, mesh: DeviceMesh | None, mode: str) -> None:
        self._path, self._file, self._mesh, self._mode = path, file, mesh, mode
        self._is_open = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self._file.shape

    @property
    def dtype(self) -> DType:
        """The dtype of what is read, with this machine's order of bytes."""
        return self._file.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._file.shape)

    @property
    def read_bytes(self) -> int:
        """Bytes of elements that this rank has read of the file.

        Of .npy files they are those of what was asked for, and of gaps that lie within a page of
        4096 bytes with it; of other formats the bytes of the elements that were asked for.
        """
        return self._file.read_bytes

    def __getitem__(self, index: Any) -> HostArray:
        """Return a part as a NumPy array: local, on any rank. Numbers and slices are taken."""
        region = Region.of(index, self._opened.shape)
        try:
            array_shape(region.shape, self.dtype)
            out = np.empty(region.shape, self.dtype)
            self._read(region.ranges, region.widened(out))
        except Exception as error:
            raise as_store_error(error, f"read {self._path}", reading=True) from error
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> HostArray:
        """Return the whole as a NumPy array: local, on the rank that asks."""
        return self[...].astype(dtype or self.dtype, copy=False)

    def read(self, placements: PlacementLike | None = None, *, index: Any = ...) -> Any:
        """Read it, or a part, as a split array: each rank its own block. Collective.

        Errors are raised on every rank.

        Args:
            placements: As for :class:`Layout`; None for the whole on every rank. Without a mesh
                there are none, and a NumPy array is returned.
            index: The part: numbers and slices.

        Raises:
            LayoutError: If the placements do not fit the part.
            DamagedError: If the file was cut off.
            StoreError: If it cannot be read.
        """
        mesh = self._mesh
        if mesh is None:
            if placements is not None:
                raise LayoutError(
                    f"{self._path} was opened without a mesh, and is read as a NumPy array; for "
                    "placements: mm.open_array(path, mesh)"
                )
            return self[index]
        number = next_number(mesh)
        with _alike(mesh, "read", f"read {self._path}", reading=True) as facts:
            region = Region.of(index, self._opened.shape)
            goal = Layout.replicated(mesh) if placements is None else Layout(mesh, placements)
            rows = [[row.start, row.stop, row.step] for row in region.ranges]
            facts.append([str(self._path), goal.text, rows])
            made = numbered(self._block(region, goal), number)
        if made.is_member and goal.partial_op:
            return made.redistribute(goal.placement)
        return made

    def _block(self, region: Region, goal: Layout) -> DTensor:
        """Return the tensor of this rank's block, with copies where summands are wanted."""
        live = as_live(self._mesh)
        copies = [Replicate() if isinstance(one, Partial) else one for one in goal.placement]
        layout = Layout(live, copies)
        layout.tiling(region.shape)  # refuses what does not fit
        if not live.contains_rank(live.rank):
            return DTensor(live, goal, region.shape, self.dtype, None)
        box = layout.box(region.shape, live.rank)
        array_shape(extent(box), self.dtype)
        block = live.shared_empty(extent(box), self.dtype)
        self._read(region.inside(box), region.widened(block))
        return DTensor._of_block(live, layout, region.shape, self.dtype, block)

    def write(self, x: Array, *, index: Any = ...) -> None:
        """Write an array in place, or into a part. Collective over the mesh.

        Errors are raised on every rank; what was there may be overwritten in part then, which
        :func:`save_array` never does.

        Args:
            x: A split array on the mesh, in any layout; or NumPy's, the same on all ranks. It has
                the shape of the part, and the dtype of the file.
            index: The part: numbers and slices of step 1.

        Raises:
            StoreError: If the array was not opened in mode "r+", or cannot be written.
            ShapeError: If `x` has another shape.
            DTypeError: If `x` has another dtype.
        """
        mesh = self._mesh
        if mesh is not None and not mesh.contains_rank(mesh.rank):
            return
        with _alike(mesh, "write", f"write {self._path}") as facts:
            region = Region.of(index, self._opened.shape)
            values = self._checked_values(x, region)
            text = values.layout.text + number_text(values) if isinstance(values, DTensor) else ""
            rows = [[row.start, row.stop] for row in region.ranges]
            facts.append([str(self._path), text, rows])
        _write_region(self._opened, region, values, self._path)

    def _checked_values(self, x: Array, region: Region) -> DTensor | HostArray:
        if self._mode != "r+":
            raise StoreError(f'{self._path} was opened to be read; to write: mode="r+"')
        if any(row.step != 1 for row in region.ranges):
            raise IndexOutOfRangeError("arrays are written into slices of step 1")
        if isinstance(x, DTensor) and x.mesh is not self._mesh:
            raise LayoutError(f"{self._path} was opened with another mesh than that of {x!r}")
        values = x if isinstance(x, DTensor) else host_array(x)
        if values.shape != region.shape:
            raise ShapeError(
                f"what is written into a part of shape {region.shape} has that shape, got "
                f"{values.shape}"
            )
        if values.dtype.newbyteorder("=") != self.dtype:
            raise DTypeError(
                f"{self._path} has dtype {self.dtype}, got an array of {values.dtype}: write "
                "x.astype(...)"
            )
        if self._mesh is not None and isinstance(values, np.ndarray):
            layout = Layout.replicated(self._mesh)
            return DTensor._of_block(self._mesh, layout, values.shape, values.dtype, values)
        return values

    def close(self) -> None:
        """Close the file. Local; again it does nothing."""
        if self._is_open:
            self._is_open = False
            self._file.close()

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *problem: object) -> None:
        """Close the file."""
        self.close()

    def __repr__(self) -> str:
        return f"OpenedArray({str(self._path)!r}, shape={self.shape}, dtype={self.dtype})"

    @property
    def _opened(self) -> ArrayFile:
        if not self._is_open:
            raise ClosedError(f"{self._path} is closed")
        return self._file

    def _read(self, ranges: tuple[range, ...], out: HostArray) -> None:
        """Read elements along ranges that may fall."""
        rows = []
        for axis, row in enumerate(ranges):
            if len(row) == 1:
                row = range(row[0], row[0] + 1)
            elif len(row) and row.step < 0:
                row, out = row[::-1], np.flip(out, axis)
            rows.append(row)
        self._opened.read(tuple(rows), out)


# -- parts of arrays, and writing them -------------------------------------------------------------


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


def _write_region(file: ArrayFile, region: Region, values: DTensor | HostArray, path: Path) -> None:
    """Write into a part of an open file, and have it on the disk. Collective over the mesh.

    Raises:
        StoreError: On every rank, if any could not write.
    """
    live = values.mesh if isinstance(values, DTensor) else None
    if isinstance(values, DTensor) and not _lies_well(file, region, values):
        pieces = _carried(file, region, values)
    else:
        pieces = _as_it_lies(file, region, values)
    problem: Exception | None = None
    with ExitStack() as stack:
        for box, part in pieces:
            if problem is None:  # a rank that cannot write goes on to carry what others need
                try:
                    file.write(box, region.widened(part))
                except Exception as error:
                    problem = error
                    if live is not None:
                        stack.enter_context(live.group()._core.progress.keeping(error))
        with agreeing(_core(live), "write", f"write {path}"):
            if problem is not None:
                raise problem
            # One writer's file is one file: other ranks have nothing of it to bring on the disk.
            if not (file.one_writer and live and live.rank != live.group().ranks[0]):
                file.sync()


def _holders_of(values: DTensor | HostArray) -> dict[Box, tuple[int, ...]]:
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
    for box in map(region.box, _holders_of(values)):
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
    holders = _holders_of(values).get(block, ())
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


# -- arguments, and what all ranks have alike ------------------------------------------------------


def _core(mesh: DeviceMesh | None) -> GroupCore | None:
    """Return the ranks that work together; None for one alone, or outside of the mesh."""
    return None if mesh is None or not mesh.contains_rank(mesh.rank) else mesh.group()._core


@contextmanager
def _alike(
    mesh: DeviceMesh | None, name: str, doing: str, *, reading: bool = False
) -> Iterator[list[Any]]:
    """Raise on every rank if the block fails on any, or what it appends to the list differs."""
    core = _core(mesh)
    what = name if core is None else Call(name, core.name)
    with agreeing(core, what, doing, reading=reading) as rows:
        yield rows
    columns = [list(map(str, column)) for column in zip(*rows, strict=True)]
    other = [column for column in columns if len({*column}) > 1]
    if other:
        texts = ranks_by_value(enumerate(", ".join(row) for row in zip(*other, strict=True)))
        found = "; ".join(f"{rank_names(ranks)}: {shown(text)}" for text, ranks in texts.items())
        raise on_all_ranks(MismatchError(f"{name} is called alike on all ranks, but got {found}"))


def _path(path: object) -> Path:
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        raise StoreError(f"the path of an array is a text or a Path, got {shown(path)}")
    return Path(text)


def _format_of(path: Path, name: str | None, **options: object) -> Format:
    """Return the format of a path.

    Raises:
        StoreError: If there is none, or it has not an option that was given.
    """
    names = {kind.name: kind for kind in FORMATS}
    ends = {suffix: kind for kind in FORMATS for suffix in kind.suffixes}
    kind = ends.get(path.suffix.lower()) if name is None else names.get(str(name))
    if kind is None:
        raise StoreError(
            f"arrays are in files that end with {', '.join(ends)}, or of a format= of "
            f"{', '.join(names)}; got {str(path)!r}, format {shown(name)}"
        )
    for option, value in options.items():
        if value is not None and option not in kind.options:
            raise StoreError(f"{option}= is not for {kind.name} files; got {shown(value)}")
    return kind


def _chunks(chunks: object, shape: tuple[int, ...]) -> tuple[int, ...]:
    found = as_shape(chunks)
    if len(found) != len(shape) or 0 in found:
        raise ShapeError(
            f"chunks has a length above 0 for each axis of an array of shape {shape}, got {found}"
        )
    return found


def _check_place(path: Path, kind: Format) -> None:
    """Refuse a place for an array where something else is.

    Raises:
        StoreError: If so, or there is no folder for it.
    """
    if not path.parent.is_dir():
        raise StoreError(f"cannot write {path}: there is no folder {path.parent}")
    if path.is_symlink():
        raise StoreError(
            f"cannot write {path}: it is a link to {path.readlink()}, which would be replaced; "
            "give the path of that, or remove the link"
        )
    if path.exists():
        problem = kind.problem_of(path)
        if problem:
            raise StoreError(f"cannot write {path}: {problem}; give another path, or move it away")
