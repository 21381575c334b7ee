"""Arrays in folders of Zarr, by zarr-python 3: each chunk is a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import gcd, prod
from pathlib import Path
from typing import Any

import numpy as np

from mpimesh.arrays import DType, HostArray, refuse_objects
from mpimesh.errors import DTypeError
from mpimesh.layout.boxes import Box, local_box, slices, view
from mpimesh.store.files import sync
from mpimesh.store.flat_arrays import grid_tiles, read_in_tiles

__all__ = ["chunks_of", "create_zarr", "open_zarr"]

_MOST_BYTES = 16 << 20
_FEWEST_BYTES = 64 << 10
"""Chunks are no smaller, but where the array is."""


class ZarrArray:
    """An open array of Zarr. Local.

    Attributes are those of :class:`FlatArray`; `read_bytes` counts elements, not what is read of
    files for them.
    """

    one_writer = False
    fortran = False

    def __init__(self, path: Path, array: Any) -> None:
        self._path, self._array = path, array
        self._written: set[str] = set()
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype: DType = array.dtype.newbyteorder("=")
        self.grain: tuple[int, ...] = tuple(array.shards or array.chunks)
        self.read_bytes = 0

    def read(self, ranges: tuple[range, ...], out: HostArray) -> None:
        """Read elements into an array of their extent."""
        read_in_tiles(self._array, ranges, out, self.grain)
        self.read_bytes += out.nbytes

    def run_bytes(self, box: Box) -> int:
        """Return the bytes that elements of a box have in a row: as many as may be."""
        return 1 << 62

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

    def close(self) -> None:
        """Do nothing: no file is open between calls."""


def open_zarr(path: Path, mode: str, dataset: str | None = None) -> ZarrArray:
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


def create_zarr(
    path: Path,
    old: Path,
    shape: tuple[int, ...],
    dtype: DType,
    *,
    dataset: str | None = None,
    chunks: tuple[int, ...] | None = None,
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


def chunks_of(shape: Sequence[int], boxes: Iterable[Box], itemsize: int) -> tuple[int, ...]:
    """Return the extent of chunks for an array that is split into boxes.

    Edges of boxes are edges of chunks, where these are not too small then; else chunks go by the
    shape alone, and boxes have to be carried to the ranks that write them.

    Example:
        >>> chunks_of((4096, 512), [((0, 2048), (0, 512)), ((2048, 4096), (0, 512))], 4)
        (2048, 512)
    """
    rows = list(boxes)
    inner = [
        {edge for box in rows for edge in box[axis]} - {0, length}
        for axis, length in enumerate(shape)
    ]
    fitting = [
        gcd(*edges) if edges else max(1, length) for edges, length in zip(inner, shape, strict=True)
    ]
    if prod(fitting) * itemsize < min(_FEWEST_BYTES, prod(shape) * itemsize // 8):
        inner, fitting = [set() for _ in shape], [max(1, length) for length in shape]
    for axis, edges in enumerate(inner):
        ratio = -(-prod(fitting) * itemsize // _MOST_BYTES)
        if ratio <= 1:
            break
        wanted = max(1, fitting[axis] // ratio)
        fitting[axis] = _divisor(fitting[axis], wanted) if edges else wanted
    return tuple(fitting)


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is not above `most`."""
    return next(one for one in range(most, 0, -1) if not number % one)
