"""Arrays in files of several formats: each rank reads and writes its own boxes."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from mpimesh.arguments import as_shape, rank_names, ranks_by_value, shown
from mpimesh.arrays import Array, DType, HostArray, array_shape
from mpimesh.dtensor import DTensor
from mpimesh.dtensor.consistency import compare_call
from mpimesh.dtensor.defaults import as_live
from mpimesh.errors import (
    ClosedError,
    DTypeError,
    IndexOutOfRangeError,
    LayoutError,
    MismatchError,
    MpimeshError,
    ShapeError,
    StoreError,
    on_all_ranks,
)
from mpimesh.layout import Layout, Partial, PlacementLike, Replicate
from mpimesh.layout.boxes import extent
from mpimesh.runtime import DeviceMesh
from mpimesh.runtime.operands import host_array
from mpimesh.store.array_writes import (
    ArrayFile,
    Region,
    as_ours,
    holders_of,
    tell_all,
    write_region,
)
from mpimesh.store.files import sync, temporary_beside
from mpimesh.store.flat_arrays import create_npy, open_npy
from mpimesh.store.hdf5_arrays import create_hdf5, open_hdf5
from mpimesh.store.together import ranks_of_job
from mpimesh.store.zarr_arrays import chunks_of, create_zarr, open_zarr

__all__ = ["OpenedArray", "open_array", "save_array"]


@dataclass(frozen=True, slots=True)
class _Format:
    """A format of files.

    Attributes:
        name: Its name, which is that of its extra of mpimesh, too.
        suffixes: The ends of names of its files.
        open: Opens an array of a path, in a mode, of a dataset.
        create: Makes a file for an array, without values: with a path, that of the old file,
            shape, dtype, dataset and chunks.
        options: What may be chosen beside.
        is_folder: Whether a path is a folder.
    """

    name: str
    suffixes: tuple[str, ...]
    open: Callable[[Path, str, str | None], ArrayFile]
    create: Callable[..., None]
    options: tuple[str, ...]
    is_folder: bool = False


_FORMATS = (
    _Format("npy", (".npy",), open_npy, create_npy, ()),
    _Format("zarr", (".zarr",), open_zarr, create_zarr, ("chunks",), is_folder=True),
    _Format("hdf5", (".h5", ".hdf5"), open_hdf5, create_hdf5, ("dataset", "chunks")),
)


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
    problem: MpimeshError | None = None
    place, file = Path(), None
    live = None if mesh is None else as_live(mesh)
    try:
        place = _path(path)
        kind = _format_of(place, format, dataset=dataset)
        if mode not in ("r", "r+"):
            raise StoreError(f'an array is opened in mode "r" or "r+", got {shown(mode)}')
        if not place.exists():
            raise StoreError(f"cannot open {place}: there is no such file")
        file = kind.open(place, mode, dataset)
    except Exception as error:
        problem = as_ours(error, "open", place, reading=True)
    facts = None if file is None else [file.shape, str(file.dtype)]
    try:
        _agree(live, "open_array", [str(place), mode, format, dataset, facts], problem)
    except BaseException:
        if file is not None:
            file.close()
        raise
    if file is None:  # without a mesh, the problem was raised
        raise StoreError(f"cannot open {place}")
    return OpenedArray(place, file, live, mode)


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
    count = ranks_of_job()
    if mesh is None and not isinstance(x, DTensor) and count > 1:
        raise StoreError(
            f"an array of NumPy does not say which of the {count} ranks of this job write it "
            "together: give mesh="
        )
    live = x.mesh if isinstance(x, DTensor) else None if mesh is None else as_live(mesh)
    if live is not None and not live.contains_rank(live.rank):
        return
    problem: MpimeshError | None = None
    place, facts, extents, kind = Path(), None, None, _FORMATS[0]
    try:
        place = _path(path)
        kind = _format_of(place, format, dataset=dataset, chunks=chunks)
        if mesh is not None and live is not mesh:
            raise LayoutError("x is on another mesh than mesh; leave mesh out")
        values = x if isinstance(x, DTensor) else host_array(x)
        shape, dtype = values.shape, values.dtype
        boxes = holders_of(values)
        extents = None if chunks is None else _chunks(chunks, shape)
        if extents is None and kind.name == "zarr":
            extents = chunks_of(shape, boxes, dtype.itemsize)
        text = values.layout.text if isinstance(values, DTensor) else ""
        facts = [shape, str(dtype), text, extents]
    except Exception as error:
        problem = as_ours(error, "write", place)
    _agree(live, "save_array", [str(place), format, dataset, facts], problem)
    if live is not None and isinstance(values, np.ndarray):
        compare_call(live, "save_array", (values,))
        values = DTensor._of_block(live, Layout.replicated(live), shape, dtype, values)
    is_first = live is None or live.rank == live.group().ranks[0]
    part = ""
    try:
        if is_first:
            try:
                place = _checked(place, kind)
                part = str(temporary_beside(place))
                kind.create(Path(part), place, shape, dtype, dataset=dataset, chunks=extents)
            except Exception as error:
                problem = as_ours(error, "write", place)
        name = Path(tell_all(live, "save_array", part, problem)[0])
        file = None
        try:
            file = kind.open(name, "r+", dataset)
        except Exception as error:
            problem = as_ours(error, "write", place)
        try:
            tell_all(live, "save_array", None, problem)
            if file is not None:
                write_region(file, Region.of((), shape), values, place)
        finally:
            if file is not None:
                file.close()
        if is_first:
            try:
                _publish(name, place)
            except Exception as error:
                problem = as_ours(error, "write", place)
        tell_all(live, "save_array", None, problem)
    finally:
        if is_first and part:
            _discard(Path(part))


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
            raise as_ours(error, "read", self._path, reading=True) from error
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
        mesh, problem, made = self._mesh, None, None
        if mesh is None:
            if placements is not None:
                raise LayoutError(
                    f"{self._path} was opened without a mesh, and is read as a NumPy array; for "
                    "placements: mm.open_array(path, mesh)"
                )
            return self[index]
        goal, facts = Layout.replicated(mesh), None
        try:
            region = Region.of(index, self._opened.shape)
            goal = goal if placements is None else Layout(mesh, placements)
            facts = [goal.text, [[row.start, row.stop, row.step] for row in region.ranges]]
            made = self._block(region, goal)
        except Exception as error:
            problem = as_ours(error, "read", self._path, reading=True)
        if not mesh.contains_rank(mesh.rank):
            if problem is not None:
                raise problem
            return made
        _agree(mesh, "read", [str(self._path), facts], problem)
        return made.redistribute(goal.placement) if made is not None and goal.partial_op else made

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
        mesh, problem, facts, values, region = self._mesh, None, None, x, None
        if mesh is not None and not mesh.contains_rank(mesh.rank):
            return
        try:
            region = Region.of(index, self._opened.shape)
            values = self._checked_values(x, region)
            text = values.layout.text if isinstance(values, DTensor) else ""
            facts = [text, [[row.start, row.stop] for row in region.ranges]]
        except Exception as error:
            problem = as_ours(error, "write", self._path)
        _agree(mesh, "write", [str(self._path), facts], problem)
        if region is not None:
            write_region(self._file, region, values, self._path)

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


# -- files and folders -----------------------------------------------------------------------------


def _checked(path: Path, kind: _Format) -> Path:
    """Return where a file is to be: of a symbolic link, where it leads to.

    Raises:
        StoreError: If something else is there, or no folder for it.
    """
    path = path.resolve()
    if not path.parent.is_dir():
        raise StoreError(f"cannot write {path}: there is no folder {path.parent}")
    if kind.is_folder and path.exists() and not _is_zarr(path):
        raise StoreError(f"cannot write {path}: what is there is no array of Zarr")
    if not kind.is_folder and path.exists() and not path.is_file():
        raise StoreError(f"cannot write {path}: what is there is no ordinary file")
    return path


def _is_zarr(path: Path) -> bool:
    return (path / ".zarray").is_file() or (
        (path / "zarr.json").is_file() and b'"array"' in (path / "zarr.json").read_bytes()
    )


def _publish(part: Path, path: Path) -> None:
    """Give a file or folder that is written its name, in place of the one before."""
    sync(part)
    if part.is_dir() and path.exists():
        _exchange(part, path)
    else:
        part.replace(path)
    sync(path.parent)


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def _exchange(one: Path, other: Path) -> None:
    """Give two folders each other's name, at once where the system can, else one by one."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    if rename is not None and not rename(
        _AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE
    ):
        return
    aside = temporary_beside(other)
    other.replace(aside)
    one.replace(other)
    aside.replace(one)


def _discard(part: Path) -> None:
    """Remove what was written, or what it has replaced."""
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        with suppress(OSError):
            part.unlink(missing_ok=True)


# -- arguments and errors --------------------------------------------------------------------------


def _path(path: object) -> Path:
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        raise StoreError(f"the path of an array is a text or a Path, got {shown(path)}")
    return Path(text)


def _format_of(path: Path, name: str | None, **options: object) -> _Format:
    """Return the format of a path.

    Raises:
        StoreError: If there is none, or it has not an option that was given.
    """
    names = {kind.name: kind for kind in _FORMATS}
    ends = {suffix: kind for kind in _FORMATS for suffix in kind.suffixes}
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


def _agree(mesh: DeviceMesh | None, name: str, fact: Any, problem: MpimeshError | None) -> None:
    """Raise on every rank if any has a problem, or brings something else than the others."""
    facts = tell_all(mesh, name, fact, problem)
    texts = ranks_by_value(enumerate(map(str, facts)))
    if len(texts) > 1:
        rows = "; ".join(f"{rank_names(ranks)}: {shown(text)}" for text, ranks in texts.items())
        raise on_all_ranks(MismatchError(f"{name} is called alike on all ranks, but got {rows}"))
