"""Arrays that lie in files as NumPy has them in memory, such as .npy; and grids of boxes."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
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
from mpimesh.store.files import write_at

__all__ = ["FlatArray", "create_npy", "cut", "grid_tiles", "open_npy"]

PIECE_BYTES = 4 << 20
"""Most memory for values on their way between a file and an array that lies otherwise."""

_PAGE_BYTES = 4096
"""Bytes that a system reads together at least."""

_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 10_000
"""As :func:`numpy.load`: longer ones can crash Python's parser."""


class FlatArray:
    """An array in one run of a file, in C or Fortran order. Local.

    Args:
        number: The open file, which is closed with this.
        path: Its name, for messages.
        offset: Where the first element lies.
        shape: The array's shape.
        dtype: The dtype of the file's elements.
        fortran: Whether the first axis is the innermost.

    Attributes:
        dtype: The dtype with this machine's order of bytes.
        grain: The extent of the boxes that only one rank may write at a time.
        one_writer: Whether only one rank may write at all.
        read_bytes: Bytes of elements that were read from the file.

    Raises:
        DTypeError: If elements are Python objects, or have no bytes.
        DamagedError: If the file is too short.
    """

    one_writer = False

    def __init__(
        self,
        number: int,
        path: Path,
        offset: int,
        shape: tuple[int, ...],
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
        self.shape, self.dtype = shape, dtype.newbyteorder("=")
        self.grain = (1,) * len(shape)
        self.fortran = fortran
        self.read_bytes = 0
        self._number, self._path, self._offset, self._dtype = number, path, offset, dtype
        self._stored = shape[::-1] if fortran else shape

    def read(self, ranges: tuple[range, ...], out: HostArray) -> None:
        """Read elements into an array of their extent: those of its box, and gaps within pages.

        Args:
            ranges: The indices along each axis, rising.
            out: Where they go.

        Raises:
            DamagedError: If the file ends before.
        """
        if out.size:
            self._read(*((ranges[::-1], out.T) if self.fortran else (ranges, out)))

    def _read(self, ranges: tuple[range, ...], out: HostArray) -> None:
        box = _enclosing(ranges)
        wide = self._widened(box)
        same = out.dtype == self._dtype and out.flags.c_contiguous
        if same and wide == box and extent(box) == out.shape:
            self._fill(box, out)
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
            self._fill(wide, piece)
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

    def _fill(self, box: Box, out: HostArray) -> None:
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


def open_npy(path: Path, mode: str, dataset: str | None = None) -> FlatArray:
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


def create_npy(
    path: Path,
    old: Path,
    shape: tuple[int, ...],
    dtype: DType,
    *,
    dataset: str | None = None,
    chunks: tuple[int, ...] | None = None,
) -> None:
    """Make a .npy file with the header of an array in C order, of its size, without values.

    Raises:
        DTypeError: If the format does not have the dtype.
    """
    header = _header(shape, dtype)
    with path.open("xb") as file:
        file.write(header)
        file.truncate(len(header) + prod(shape) * dtype.itemsize)


def _header(shape: tuple[int, ...], dtype: DType) -> bytes:
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


def _read_header(number: int, path: Path) -> tuple[int, tuple[int, ...], DType, bool]:
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


# -- grids -----------------------------------------------------------------------------------------


def grid_tiles(
    box: Box, grain: Sequence[int], most: int, *, fortran: bool = False
) -> Iterator[Box]:
    """Cut a box at places of a grid into boxes of at most `most` elements, or of one cell.

    Args:
        box: The box.
        grain: The extent of a cell of the grid, which begins at the first element of the array.
        most: Most elements of a box of several cells.
        fortran: Whether the first axis is the innermost in memory; else the last one.
    """
    if not volume(box):
        return
    if fortran:
        for tile in grid_tiles(box[::-1], grain[::-1], most):
            yield tile[::-1]
        return
    cells = [_cells(edges, step) for edges, step in zip(box, grain, strict=True)]
    for tile in tiles([len(row) for row in cells], max(1, most // prod(grain))):
        yield tuple(
            [
                (max(start, row[a] * step), min(stop, (row[b - 1] + 1) * step))
                for (start, stop), row, step, (a, b) in zip(box, cells, grain, tile, strict=True)
            ]
        )


def cut(
    box: Box, grain: Sequence[int], parts: int, *, fortran: bool = False
) -> tuple[int, list[int]]:
    """Return the axis along which a box is cut into parts at places of a grid, and their edges.

    There is one edge more than parts, rising; parts may be empty. The axis is -1 if the box lies
    in one cell.

    Example:
        >>> cut(((0, 10), (0, 4)), (3, 1), 2)
        (0, [0, 6, 10])
    """
    cells = [_cells(edges, step) for edges, step in zip(box, grain, strict=True)]
    if max(map(len, cells), default=1) <= 1:
        return -1, []
    order = range(len(cells))[:: -1 if fortran else 1]
    longest = max(order, key=lambda axis: len(cells[axis]))
    axis = next((axis for axis in order if len(cells[axis]) >= parts), longest)
    (start, stop), row, step = box[axis], cells[axis], grain[axis]
    inner = [(row[0] + len(row) * part // parts) * step for part in range(parts)]
    return axis, [*(max(start, edge) for edge in inner), stop]


def _cells(edges: tuple[int, int], step: int) -> range:
    start, stop = edges
    return range(start // step, -(-stop // step))


def read_in_tiles(
    source: Any, ranges: tuple[range, ...], out: HostArray, grain: Sequence[int]
) -> None:
    """Read from an array that is indexed as NumPy's, in pieces that hold whole cells of its grid.

    Args:
        source: The array.
        ranges: The indices along each axis, rising.
        out: Where the elements go.
        grain: The extent of a cell.
    """
    if not out.size:
        return
    if any(row.step > 1 for row in ranges):
        out[...] = source[tuple(slice(row.start, row.stop, row.step) for row in ranges)]
        return
    box = _enclosing(ranges)
    for tile in grid_tiles(box, grain, PIECE_BYTES // out.dtype.itemsize):
        view(out, local_box(tile, box))[...] = source[slices(tile)]
