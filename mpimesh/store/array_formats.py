"""Formats of arrays in files: .npy, HDF5 by h5py, Zarr by zarr-python 3; and grids of boxes.

A .npy file, and a dataset of HDF5 without chunks and filters, is one run of bytes, of which all
ranks read and write their boxes; that needs no HDF5 with MPI. Of other datasets of HDF5 one rank
writes. Of Zarr each chunk is a file.
"""

from __future__ import annotations

import ast
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpimesh.arguments import as_shape, shown
from mpimesh.arrays import DType, HostArray, refuse_objects
from mpimesh.arrays.dtypes import dtype_to_json
from mpimesh.errors import DamagedError, DTypeError, StoreError
from mpimesh.layout.boxes import (
    Box,
    extent,
    flat_runs,
    global_box,
    local_box,
    slices,
    tiles,
    view,
    volume,
)
from mpimesh.store.files import remove, sync, write_at
from mpimesh.store.grids import grid_tiles

__all__ = ["FORMATS", "ArrayFile", "FlatArray", "Format"]

PIECE_BYTES = 4 << 20
"""Most memory for values on their way between a file and an array that lies otherwise."""

_PAGE_BYTES = 4096
"""Bytes that a system reads together at least."""

_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 10_000
"""As :func:`numpy.load`: longer ones can crash Python's parser."""

_METADATA_BYTES = 64 << 10
"""Bytes that HDF5 may write beside elements at a time."""

Shape = tuple[int, ...]


class ArrayFile:
    """An array in a file, as a rank has it open. Local.

    Args:
        path: Its name.
        shape: The array's shape.
        dtype: The dtype of the file's elements.
        grain: The extent of the boxes that only one rank may write at a time; None for elements.

    Attributes:
        dtype: The dtype with this machine's order of bytes.
        fortran: Whether the first axis is the innermost in the file.
        one_writer: Whether only one rank may write at all.
        read_bytes: Bytes of elements that were read; of :class:`FlatArray` with those of gaps.
    """

    fortran = False
    one_writer = False

    def __init__(self, path: Path, shape: Shape, dtype: DType, grain: Shape | None = None) -> None:
        self.shape, self.dtype = shape, dtype.newbyteorder("=")
        self.grain = grain or (1,) * len(shape)
        self.read_bytes = 0
        self._path = path

    def read(self, ranges: tuple[range, ...], out: HostArray) -> None:
        """Read elements into an array of their extent.

        Args:
            ranges: The indices along each axis, rising.
            out: Where they go.

        Raises:
            DamagedError: If the file ends before.
        """
        if out.size:
            with self._source() as source:
                if any(row.step > 1 for row in ranges):
                    out[...] = source[tuple(slice(row.start, row.stop, row.step) for row in ranges)]
                else:
                    box = _enclosing(ranges)
                    for tile in grid_tiles(box, self.grain, PIECE_BYTES // out.dtype.itemsize):
                        view(out, local_box(tile, box))[...] = source[slices(tile)]
        self.read_bytes += out.nbytes

    def _source(self) -> AbstractContextManager[Any]:
        """Return an array that is indexed as NumPy's, for a ``with`` block."""
        raise NotImplementedError

    def run_bytes(self, box: Box) -> int:
        """Return the bytes that elements of a box have in a row in the file: any number."""
        return 1 << 62

    def write(self, box: Box, values: HostArray) -> None:
        """Write the values of a box, of its extent."""
        raise NotImplementedError

    def sync(self) -> None:
        """Have what was written on the disk."""
        sync(self._path)

    def close(self) -> None:
        """Close the file, if it is open between calls."""


class FlatArray(ArrayFile):
    """An array in one run of a file, in C or Fortran order.

    Args:
        number: The open file, which is closed with this.
        path: Its name, for messages.
        offset: Where the first element lies.
        shape: The array's shape.
        dtype: The dtype of the file's elements.
        fortran: Whether the first axis is the innermost.

    Raises:
        DTypeError: If elements are Python objects, or have no bytes.
        DamagedError: If the file is too short.
    """

    def __init__(
        self,
        number: int,
        path: Path,
        offset: int,
        shape: Shape,
        dtype: DType,
        *,
        fortran: bool = False,
    ) -> None:
        refuse_objects(dtype)
        if not dtype.itemsize:
            raise DTypeError(f"elements of {path} are of dtype {dtype}, which has no bytes")
        needed, size = offset + prod(shape) * dtype.itemsize, os.fstat(number).st_size
        if needed > size:
            raise DamagedError(
                f"{path} has {size} bytes, but its array of shape {shown(shape)} and {dtype} "
                f"ends at byte {needed}: it was cut off, or its header is damaged"
            )
        super().__init__(path, shape, dtype)
        self.fortran = fortran
        self._number, self._offset, self._dtype = number, offset, dtype
        self._stored = shape[::-1] if fortran else shape

    def read(self, ranges: tuple[range, ...], out: HostArray) -> None:
        """Read elements into an array of their extent: those of its box, and gaps within pages."""
        if out.size:
            self._read(*((ranges[::-1], out.T) if self.fortran else (ranges, out)))

    def _read(self, ranges: tuple[range, ...], out: HostArray) -> None:
        box = _enclosing(ranges)
        wide = self._widened(box)
        same = out.dtype == self._dtype and out.flags.c_contiguous
        if same and wide == box and extent(box) == out.shape:
            self.fill(box, out)
            return
        for axis, row in enumerate(ranges):
            stride = prod(self._stored[axis + 1 :]) * self._dtype.itemsize
            if row.step > 1 and row.step * stride > _PAGE_BYTES:
                at: tuple[Any, ...] = (slice(None),) * axis
                for place, index in enumerate(row):
                    alone = range(index, index + 1)
                    self._read(
                        (*ranges[:axis], alone, *ranges[axis + 1 :]),
                        out[(*at, slice(place, place + 1))],
                    )
                return
        stretch = -(-volume(wide) // out.size)
        for tile in tiles(out.shape, max(1, PIECE_BYTES // (self._dtype.itemsize * stretch))):
            rows = tuple(row[a:b] for row, (a, b) in zip(ranges, tile, strict=True))
            box = _enclosing(rows)
            wide = self._widened(box)
            piece = np.empty(extent(wide), self._dtype)
            self.fill(wide, piece)
            steps: tuple[Any, ...] = (*[slice(None, None, row.step) for row in rows], ...)
            view(out, tile)[...] = view(piece, local_box(box, wide))[steps]

    def _widened(self, box: Box) -> Box:
        """Return a box with the inner axes whole whose rows are shorter than a page."""
        stride = self._dtype.itemsize
        found = list(box)
        for axis in range(len(box) - 1, 0, -1):
            stride *= self._stored[axis]
            if stride > _PAGE_BYTES:
                break
            found[axis] = (0, self._stored[axis])
        return tuple(found)

    def fill(self, box: Box, out: HostArray) -> None:
        """Read a box of the file into an array of its extent, which is C-contiguous."""
        memory, at = _memory(out), 0
        for start, stop in flat_runs(box, self._stored):
            offset = self._offset + start * self._dtype.itemsize
            end = at + (stop - start) * self._dtype.itemsize
            while at < end:
                count = os.preadv(self._number, [memory[at:end]], offset)
                if not count:
                    raise DamagedError(f"{self._path} ends at byte {offset}: it was cut off")
                at, offset = at + count, offset + count
                self.read_bytes += count

    def run_bytes(self, box: Box) -> int:
        """Return the bytes that elements of a box have in a row in the file."""
        box = box[::-1] if self.fortran else box
        start, stop = next(flat_runs(box, self._stored), (0, 0))
        return (stop - start) * self._dtype.itemsize

    def write(self, box: Box, values: HostArray) -> None:
        """Write the values of a box, of its extent."""
        if not values.size:
            return
        if self.fortran:
            box, values = box[::-1], values.T
        if values.flags.c_contiguous and values.dtype == self._dtype:
            self._put(box, values)
            return
        for tile in tiles(values.shape, max(1, PIECE_BYTES // self._dtype.itemsize)):
            piece = np.empty(extent(tile), self._dtype)
            piece[...] = view(values, tile)
            self._put(global_box(tile, box), piece)

    def _put(self, box: Box, values: HostArray) -> None:
        memory, at = _memory(values), 0
        for start, stop in flat_runs(box, self._stored):
            end = at + (stop - start) * self._dtype.itemsize
            write_at(self._number, memory[at:end], self._offset + start * self._dtype.itemsize)
            at = end

    def sync(self) -> None:
        """Have what was written on the disk."""
        os.fsync(self._number)

    def close(self) -> None:
        """Close the file."""
        os.close(self._number)


def open_file(path: Path, mode: str) -> int:
    """Open an ordinary file for reading, or for writing too, by its number.

    Raises:
        StoreError: If it is no ordinary file.
    """
    if path.exists() and not path.is_file():
        raise StoreError(f"cannot open {path}: it is no ordinary file")
    return os.open(path, os.O_RDWR if mode == "r+" else os.O_RDONLY)


def _enclosing(ranges: Sequence[range]) -> Box:
    return tuple([(row.start, row[-1] + 1) for row in ranges])


def _memory(array: HostArray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


# -- .npy ------------------------------------------------------------------------------------------


def _open_npy(path: Path, mode: str, dataset: str | None) -> FlatArray:
    """Open the array of a .npy file.

    Raises:
        DamagedError: If it is no .npy file, or cut off.
        DTypeError: If it holds Python objects, which only pickle could read.
    """
    number = open_file(path, mode)
    try:
        offset, shape, dtype, fortran = _read_header(number, path)
        return FlatArray(number, path, offset, shape, dtype, fortran=fortran)
    except BaseException:
        os.close(number)
        raise


def _create_npy(
    path: Path, old: Path, shape: Shape, dtype: DType, dataset: str | None, chunks: Shape | None
) -> None:
    """Make a .npy file with the header of an array in C order, of its size, without values.

    Raises:
        DTypeError: If the format does not have the dtype.
    """
    header = _header(shape, dtype)
    with path.open("xb") as file:
        file.write(header)
        file.truncate(len(header) + prod(shape) * dtype.itemsize)


def _header(shape: Shape, dtype: DType) -> bytes:
    descr = dtype_to_json(dtype)
    if isinstance(descr, dict) or np.lib.format.descr_to_dtype(descr) != dtype:
        raise DTypeError(
            f".npy files have no dtype {dtype}: save x.astype(np.float32), or its bytes, as of "
            f"DTensor.from_local(x.local.view(np.uint{8 * dtype.itemsize}), ...)"
        )
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    if len(text) > _LONGEST_HEADER - 64:
        raise DTypeError(f"a .npy header of {len(text)} bytes is more than NumPy reads: {dtype}")
    # Version 3 is for names of fields that are not of Latin letters, and gives the length 4 bytes.
    version, coding, width = (1, "latin1", 2) if text.isascii() else (3, "utf8", 4)
    row = text.encode(coding)
    head = len(_MAGIC) + 2 + width
    row = row.ljust(-(-(head + len(row) + 1) // 64) * 64 - head - 1) + b"\n"
    return _MAGIC + bytes([version, 0]) + len(row).to_bytes(width, "little") + row


def _read_header(number: int, path: Path) -> tuple[int, Shape, DType, bool]:
    head = os.pread(number, len(_MAGIC) + 6, 0)
    version = head[len(_MAGIC)] if len(head) == len(_MAGIC) + 6 else 0
    if not head.startswith(_MAGIC) or version not in (1, 2, 3):
        raise DamagedError(f"{path} is no .npy file: it begins with {head[:8]!r}")
    width = 2 if version == 1 else 4
    start = len(_MAGIC) + 2
    length = int.from_bytes(head[start : start + width], "little")
    start += width
    if length > _LONGEST_HEADER:
        raise DamagedError(f"the header of {path} claims {length} bytes; {_LONGEST_HEADER} at most")
    row = os.pread(number, length, start)
    try:
        if len(row) < length:
            raise ValueError("it was cut off")
        text = row.decode("utf8" if version == 3 else "latin1")
        facts = ast.literal_eval(text.strip())
        shape, fortran = facts["shape"], facts["fortran_order"]
        dtype = np.lib.format.descr_to_dtype(facts["descr"])
        lengths_fit = all(type(one) is int and one >= 0 for one in shape)
        as_shape(shape)  # refuses lengths that no address can count to
        if type(shape) is not tuple or type(fortran) is not bool or not lengths_fit:
            raise ValueError("shape or fortran_order are none")
        if len(facts) != 3 or not isinstance(dtype, np.dtype) or dtype.subdtype is not None:
            raise ValueError("it says something else, too")
    except Exception as error:  # whatever a parser of any text may raise
        raise DamagedError(f"the header of {path} is damaged: {shown(error)}") from None
    if len(shape) > 64:
        raise DamagedError(f"the header of {path} claims {len(shape)} axes; 64 at most")
    return start + length, shape, dtype, fortran


# -- HDF5 ------------------------------------------------------------------------------------------


class Hdf5Array(ArrayFile):
    """A dataset that HDF5 reads and writes, opened for each call: a writer must be alone."""

    one_writer = True

    def __init__(self, path: Path, name: str, dataset: Any) -> None:
        super().__init__(path, dataset.shape, dataset.dtype, dataset.chunks)
        self._name = name

    @contextmanager
    def _source(self) -> Iterator[Any]:
        import h5py

        with h5py.File(self._path, "r") as file:
            yield file[self._name]

    def write(self, box: Box, values: HostArray) -> None:
        """Write the values of a box."""
        import h5py

        if values.size:
            cells = [
                -(-stop // step) * step - start // step * step
                for (start, stop), step in zip(box, self.grain, strict=True)
            ]
            _check_room(self._path, prod(cells) * self.dtype.itemsize)
            with h5py.File(self._path, "r+") as file:
                file[self._name][slices(box)] = values


def _open_hdf5(path: Path, mode: str, dataset: str | None) -> ArrayFile:
    """Open a dataset of an HDF5 file.

    Raises:
        StoreError: If there is no such dataset.
        DTypeError: If NumPy has no dtype for it without Python objects.
    """
    import h5py

    os.close(open_file(path, mode))  # refuses what is no file, or may not be written
    with h5py.File(path, "r") as file:
        name = _name(dataset)
        if not isinstance(file.get(name), h5py.Dataset):
            names: list[str] = []
            file.visititems(
                lambda key, one: names.append(key) if isinstance(one, h5py.Dataset) else None
            )
            raise StoreError(f"{path} has no dataset {name!r}; it has {names[:16]}")
        found = file[name]
        if found.shape is None:
            raise StoreError(f"dataset {name!r} of {path} is empty: it has no shape")
        refuse_objects(found.dtype)
        offset = _offset(file, found)
        if offset is None:
            return Hdf5Array(path, name, found)
        shape, dtype = found.shape, found.dtype
    number = open_file(path, mode)
    try:
        return FlatArray(number, path, offset, shape, dtype)
    except BaseException:
        os.close(number)
        raise


def _offset(file: Any, dataset: Any) -> int | None:
    """Return where a dataset lies in its file, if as NumPy would have it; None if not."""
    import h5py

    plain = dataset.chunks is None and not dataset.external and not dataset.is_virtual
    plain = plain and not file.userblock_size and file.driver == "sec2"
    same = h5py.h5t.py_create(dataset.dtype, logical=True).equal(dataset.id.get_type())
    if not plain or not same or dataset.file.filename != file.filename:
        return None
    if not dataset.size:
        return 0
    where: int | None = dataset.id.get_offset()
    return where


def _create_hdf5(
    path: Path, old: Path, shape: Shape, dtype: DType, dataset: str | None, chunks: Shape | None
) -> None:
    """Make an HDF5 file with a dataset without values, and with all that an old file has beside.

    Raises:
        StoreError: If the old file has a group of that name.
        DTypeError: If HDF5 does not have the dtype.
    """
    import h5py

    name = _name(dataset)
    try:
        same = h5py.h5t.py_create(dtype, logical=True).dtype == dtype
    except TypeError:
        same = False
    if not same or dtype.hasobject:
        raise DTypeError(f"HDF5 has no dtype {dtype}; save x.astype(...) of another one")
    if old.exists() and old.stat().st_size:
        shutil.copyfile(old, path)
    _check_room(path.parent, 0)
    with h5py.File(path, "a") as file:
        if isinstance(file.get(name), h5py.Group):
            raise StoreError(f"cannot write dataset {name!r} of {old}: it is a group there")
        if name in file:
            del file[name]
        if chunks is not None:  # HDF5 has none that are larger than the array
            chunks = tuple(map(min, chunks, shape)) if 0 not in shape else None
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        if chunks is None and 0 not in shape:
            properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        file.create_dataset(name, shape, dtype, chunks=chunks, dcpl=properties)


def _check_room(path: Path, nbytes: int) -> None:
    """Refuse to write on a full disk: HDF5's library crashes there when it closes the file."""
    disk = os.statvfs(path)
    if disk.f_bavail * disk.f_frsize < nbytes + _METADATA_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _name(dataset: str | None) -> str:
    if not isinstance(dataset, str) or not dataset.strip("/") or "\0" in dataset:
        raise StoreError(
            f'an HDF5 file needs the name of a dataset, dataset="x", without zero bytes; got '
            f"{dataset!r}"
        )
    return dataset


# -- Zarr ------------------------------------------------------------------------------------------


class ZarrArray(ArrayFile):
    """An open array of Zarr."""

    def __init__(self, path: Path, array: Any) -> None:
        grain = tuple(array.shards or array.chunks)
        super().__init__(path, tuple(array.shape), array.dtype, grain)
        self._array = array
        self._written: set[str] = set()

    def _source(self) -> AbstractContextManager[Any]:
        return nullcontext(self._array)

    def write(self, box: Box, values: HostArray) -> None:
        """Write the values of a box. No other rank may write into its chunks meanwhile."""
        # Chunk by chunk: after an error zarr would go on with others, and nobody could wait for it.
        for tile in grid_tiles(box, self.grain, 1):
            self._array[slices(tile)] = view(values, local_box(tile, box))
            cell = tuple(start // step for (start, _), step in zip(tile, self.grain, strict=True))
            self._written.add(self._array.metadata.encode_chunk_key(cell))

    def sync(self) -> None:
        """Have the chunks that were written here on the disk, and their folders."""
        folders = {self._path}
        for key in self._written:
            file = self._path / key
            with suppress(FileNotFoundError):  # of a chunk that is left out
                sync(file)
            folders.update(folder for folder in file.parents if self._path in folder.parents)
        for folder in folders:
            with suppress(FileNotFoundError):
                sync(folder)
        self._written.clear()


def _open_zarr(path: Path, mode: str, dataset: str | None) -> ZarrArray:
    """Open the array of a folder.

    Raises:
        DTypeError: If NumPy has no dtype for it without Python objects.
    """
    import zarr

    array = zarr.open_array(zarr.storage.LocalStore(path), mode=mode)
    if hasattr(array, "with_config"):  # from 3.1 on
        # A chunk of nothing but zeros is left out otherwise, and with it which are negative.
        array = array.with_config({"write_empty_chunks": True})
    if not isinstance(array.dtype, np.dtype):
        raise DTypeError(f"NumPy has no dtype for the elements of {path}")
    refuse_objects(array.dtype)
    return ZarrArray(path, array)


def _create_zarr(
    path: Path, old: Path, shape: Shape, dtype: DType, dataset: str | None, chunks: Shape | None
) -> None:
    """Make the folder of an array without values.

    Raises:
        DTypeError: If Zarr's third version has no such dtype.
    """
    import zarr

    problem = DTypeError(
        f"Zarr has no dtype {dtype} in its third version; save x.astype(...) of another one, such "
        "as np.float32"
    )
    if dtype.kind not in "biufcmM":
        raise problem
    try:
        zarr.create_array(zarr.storage.MemoryStore(), shape=(), dtype=dtype)
    except (TypeError, ValueError):
        raise problem from None
    zarr.create_array(
        zarr.storage.LocalStore(path), shape=shape, dtype=dtype, chunks=chunks or "auto"
    )
    sync(path / "zarr.json")


_ZARR_METADATA = ("zarr.json", ".zarray", ".zattrs")


def _zarr_files(path: Path) -> list[Path]:
    """Return the files and folders of an array of Zarr, the inner ones first, zarr.json last.

    So one that is removed is an array until the end.

    Raises:
        StoreError: If it is none, or there is something else in its folder.
    """
    import zarr

    try:
        array = zarr.open_array(zarr.storage.LocalStore(path), mode="r")
    except Exception as error:  # whatever a parser of any text may raise
        raise StoreError("what is there is no array of Zarr") from error
    found = sorted(path.rglob("*"), reverse=True)
    for one in found:
        key = one.relative_to(path).as_posix()
        cell = tuple(map(int, re.findall(r"\d+", key)))[: array.ndim]
        is_own = key in _ZARR_METADATA
        if not is_own and len(cell) == array.ndim:
            is_own = array.metadata.encode_chunk_key(cell) == key
        if one.is_symlink() or not (is_own if one.is_file() else re.fullmatch(r"c?/?[\d/]*", key)):
            raise StoreError(f"{key} in it is not of an array of Zarr")
    return sorted(found, key=lambda one: one.name in _ZARR_METADATA)


def _no_zarr(path: Path) -> str:
    try:
        _zarr_files(path)
    except StoreError as error:
        return str(error)
    return ""


_ZARR_PARTIAL = re.compile(r"(zarr|\d+)\.[0-9a-f]{32}\.partial")
"""The name that zarr-python gives a file while it writes it."""


def _remove_zarr(path: Path) -> None:
    """Remove an array of Zarr, if there is nothing but that, whole or as a kill has left it."""
    with suppress(OSError):
        for one in path.rglob("*.partial"):
            if _ZARR_PARTIAL.fullmatch(one.name) and one.is_file() and not one.is_symlink():
                one.unlink()
        inner = _zarr_files(path) if next(path.iterdir(), None) else []
        for one in [*inner, path]:
            one.rmdir() if one.is_dir() else one.unlink()


def _no_npy(path: Path) -> str:
    if not path.is_file():
        return "what is there is no ordinary file"
    with path.open("rb") as file:
        head = file.read(len(_MAGIC))
    return "" if head in (b"", _MAGIC) else "what is there is no .npy file"


def _no_hdf5(path: Path) -> str:
    import h5py

    if not path.is_file():
        return "what is there is no ordinary file"
    return "" if h5py.is_hdf5(path) or not path.stat().st_size else "what is there is no HDF5 file"


# -- the formats -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Format:
    """A format of files.

    Attributes:
        name: Its name, which is that of its extra of mpimesh, too.
        suffixes: The ends of names of its files.
        open: Opens an array of a path, in a mode, of a dataset.
        create: Makes a file for an array, without values: with a path, that of the old file,
            shape, dtype, dataset and chunks.
        problem_of: Tells why what is at a path cannot be replaced; "" if it can.
        remove: Removes an array that was replaced, or was not finished.
        options: What may be chosen beside.
    """

    name: str
    suffixes: tuple[str, ...]
    open: Callable[[Path, str, str | None], ArrayFile]
    create: Callable[[Path, Path, Shape, DType, str | None, Shape | None], None]
    problem_of: Callable[[Path], str]
    options: tuple[str, ...]
    remove: Callable[[Path], None] = remove


FORMATS = (
    Format("npy", (".npy",), _open_npy, _create_npy, _no_npy, ()),
    Format("zarr", (".zarr",), _open_zarr, _create_zarr, _no_zarr, ("chunks",), _remove_zarr),
    Format("hdf5", (".h5", ".hdf5"), _open_hdf5, _create_hdf5, _no_hdf5, ("dataset", "chunks")),
)
