"""Arrays in HDF5 files, by h5py.

Where a dataset lies in one run of its file, without filters, all ranks read and write their boxes
of it there, which needs no HDF5 with MPI. Of others, which have chunks, one rank writes.
"""

from __future__ import annotations

import errno
import os
import shutil
from math import prod
from pathlib import Path
from typing import Any

from mpimesh.arrays import DType, HostArray, refuse_objects
from mpimesh.errors import DTypeError, StoreError
from mpimesh.layout.boxes import Box, slices
from mpimesh.store.files import sync
from mpimesh.store.flat_arrays import FlatArray, open_file, read_in_tiles

__all__ = ["create_hdf5", "open_hdf5"]


_METADATA_BYTES = 64 << 10
"""Bytes that HDF5 may write beside elements at a time."""


class Hdf5Array:
    """A dataset that HDF5 reads and writes, opened for each call: a writer must be alone. Local.

    Attributes are those of :class:`FlatArray`; `read_bytes` counts elements, not what is read of
    the file for them.
    """

    one_writer = True
    fortran = False

    def __init__(self, path: Path, name: str, dataset: Any) -> None:
        self._path, self._name = path, name
        self.shape: tuple[int, ...] = dataset.shape
        self.dtype: DType = dataset.dtype.newbyteorder("=")
        self.grain: tuple[int, ...] = dataset.chunks or (1,) * len(self.shape)
        self.read_bytes = 0

    def read(self, ranges: tuple[range, ...], out: HostArray) -> None:
        """Read elements into an array of their extent."""
        import h5py

        with h5py.File(self._path, "r") as file:
            read_in_tiles(file[self._name], ranges, out, self.grain)
        self.read_bytes += out.nbytes

    def run_bytes(self, box: Box) -> int:
        """Return the bytes that elements of a box have in a row: as many as may be."""
        return 1 << 62

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

    def sync(self) -> None:
        """Have what was written on the disk."""
        sync(self._path)

    def close(self) -> None:
        """Do nothing: no file is open between calls."""


def open_hdf5(path: Path, mode: str, dataset: str | None = None) -> FlatArray | Hdf5Array:
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


def create_hdf5(
    path: Path,
    old: Path,
    shape: tuple[int, ...],
    dtype: DType,
    *,
    dataset: str | None = None,
    chunks: tuple[int, ...] | None = None,
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
    if old.exists():
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
    if not isinstance(dataset, str) or not dataset.strip("/"):
        raise StoreError(f'an HDF5 file needs the name of a dataset, dataset="x"; got {dataset!r}')
    return dataset
