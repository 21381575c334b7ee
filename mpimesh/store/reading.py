"""Reading boxes of arrays from the files of a checkpoint, and no other bytes.

Files are read, never mapped: where a mapped file is cut off, the process is killed.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import xxhash

from mpimesh.arrays import HostArray
from mpimesh.errors import DamagedError, StoreError
from mpimesh.layout.boxes import Box, common, extent, global_box, local_box, run_start, tiles, view
from mpimesh.store.format import ArrayEntry, Manifest, Piece, file_dtype

__all__ = ["FileReader"]

_MOST_BYTES = 1 << 20
"""Of a read through memory of the reader: what is read stays in the cache for its checksum."""
_MOST_GAP = 16 << 10
"""Bytes that are read and dropped where that is quicker than another read."""
_MOST_OPEN = 64
_NAP_S = 0.05


class FileReader:
    """The files of a checkpoint, to be used as a context manager. Local.

    A file is opened, and its size compared, when it is first read.

    Args:
        folder: The folder that the manifest's names are in.
        manifest: The manifest.
        wait_s: For so many seconds a file that is missing or short is looked at again: a network's
            file system may show on one node later what another has written.
        verify: Whether checksums are compared of pieces that are read whole.

    Attributes:
        read_bytes: Bytes that were read so far, with those of gaps between runs.

    Example:
        >>> with FileReader(*read_manifest(Path("run/step-100"))) as reader:
        ...     for piece in entry.pieces:
        ...         reader.read(piece, entry, box, out)
    """

    def __init__(
        self, folder: Path, manifest: Manifest, *, wait_s: float = 0.0, verify: bool = True
    ) -> None:
        self._folder = folder
        self._files = manifest.files
        self._wait_s = wait_s
        self._verify = verify
        self._open: dict[int, int] = {}
        self._memory = np.empty(0, np.uint8)
        self.read_bytes = 0

    def read(self, piece: Piece, entry: ArrayEntry, box: Box, out: HostArray) -> None:
        """Read what a piece has of a box of its array; nothing if they have nothing in common.

        Runs of bytes are read straight into `out` if it has the array's dtype and is contiguous
        there; else through memory of at most 1 MiB. Gaps under 16 KiB between runs are read, too.
        The checksum of a piece is compared if the box has all of it.

        Shapes:
            out: the extent of `box`.

        Args:
            piece: A piece of `entry`.
            entry: The array, of this manifest.
            box: (start, stop) along each axis of the array.
            out: Receives the values, which are cast if it has another dtype.

        Raises:
            DamagedError: If the file is missing or not as it was written. Values in `out` mean
                nothing then.
            StoreError: If it cannot be read.
        """
        part = common(box, piece.box)
        if part is None:
            return
        shape, dtype = extent(piece.box), file_dtype(entry.dtype)
        target = view(out, local_box(part, box))
        within = local_box(part, piece.box)
        digest = xxhash.xxh3_64() if self._verify and part == piece.box else None
        for span in _spans(within, shape, _MOST_BYTES // dtype.itemsize, dtype.itemsize):
            values = view(target, local_box(span, within))
            begin = piece.begin + _number(span, shape, 0) * dtype.itemsize
            is_run = run_start(span, shape) >= 0
            if is_run and values.dtype == dtype and values.flags.c_contiguous:
                data = values.reshape(-1).view(np.uint8)
                self._fill(piece.file, begin, data)
            else:
                count = _number(span, shape, 1) - _number(span, shape, 0)
                data = self._bytes(piece.file, begin, count * dtype.itemsize)
                strides = [prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))]
                values[...] = np.ndarray(extent(span), dtype, data, strides=strides)
            if digest is not None:
                digest.update(data.data)
        if digest is not None:
            self._compare(piece, entry, digest)

    def check(self, piece: Piece, entry: ArrayEntry) -> None:
        """Read all of a piece, and compare its checksum if it has one.

        Raises:
            DamagedError: If the file is missing or not as it was written.
            StoreError: If it cannot be read.
        """
        digest = xxhash.xxh3_64()
        end = piece.begin + entry.nbytes(piece)
        for begin in range(piece.begin, end, _MOST_BYTES):
            digest.update(self._bytes(piece.file, begin, min(end - begin, _MOST_BYTES)).data)
        self._compare(piece, entry, digest)

    def _compare(self, piece: Piece, entry: ArrayEntry, digest: xxhash.xxh3_64) -> None:
        if piece.digest is not None and digest.intdigest() != piece.digest:
            raise DamagedError(
                f"{self._path(piece.file)} was changed since it was written: bytes {piece.begin} "
                f"to {piece.begin + entry.nbytes(piece)} have another checksum; use another "
                "checkpoint"
            )

    def _bytes(self, file: int, begin: int, nbytes: int) -> HostArray:
        """Return bytes of a file in memory of the reader, valid until the next call."""
        if self._memory.size < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        data = self._memory[:nbytes]
        self._fill(file, begin, data)
        return data

    def _fill(self, file: int, begin: int, data: HostArray) -> None:
        """Read bytes of a file into memory."""
        rest = data.data
        try:
            number = self._descriptor(file)
            while rest:
                count = os.preadv(number, [rest], begin)
                if not count:
                    raise DamagedError(
                        f"{self._path(file)} was cut off while it was read, at byte {begin}; use "
                        "another checkpoint"
                    )
                rest, begin = rest[count:], begin + count
                self.read_bytes += count
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"cannot read {self._path(file)}: {error.strerror}") from error

    def _descriptor(self, file: int) -> int:
        """Return the descriptor of a file, which has the size that it was written with."""
        if file in self._open:
            return self._open[file]
        if len(self._open) == _MOST_OPEN:
            os.close(self._open.pop(next(iter(self._open))))
        end_s = time.monotonic() + self._wait_s
        while True:
            try:
                number = self._opened(file)
            except DamagedError:
                if time.monotonic() >= end_s:
                    raise
                time.sleep(_NAP_S)
            else:
                self._open[file] = number
                return number

    def _opened(self, file: int) -> int:
        path, nbytes = self._path(file), self._files[file][1]
        try:
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would block
        except (FileNotFoundError, NotADirectoryError):
            raise DamagedError(f"{path} is missing; use another checkpoint") from None
        facts = os.fstat(number)
        if stat.S_ISREG(facts.st_mode) and facts.st_size == nbytes:
            return number
        os.close(number)
        raise DamagedError(
            f"{path} has {facts.st_size} bytes, and was written with {nbytes}; use another "
            "checkpoint"
        )

    def _path(self, file: int) -> Path:
        return self._folder / self._files[file][0]

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Self:
        """Return the reader."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the files."""
        self.close()


def _number(box: Box, shape: tuple[int, ...], end: int) -> int:
    """Return the number of a box's first element in an array laid out flat; or its end."""
    number = 0
    for edges, size in zip(box, shape, strict=True):
        number = number * size + edges[end] - end
    return number + end


def _spans(box: Box, shape: tuple[int, ...], most: int, itemsize: int) -> Iterator[Box]:
    """Cut a box into boxes that are read at once, in memory order, of at most `most` elements.

    Each is a run in an array of `shape`, or has gaps under 16 KiB, which count.

    Example:
        >>> list(_spans(((0, 4), (1, 3)), (4, 5), 8, 8))
        [((0, 2), (1, 3)), ((2, 4), (1, 3))]
    """
    if run_start(box, shape) >= 0:
        yield from (global_box(tile, box) for tile in tiles(extent(box), most))
        return
    axis = next(axis for axis, (start, stop) in enumerate(box) if stop - start > 1)
    (first, last), inner, shape_inside = box[axis], box[axis + 1 :], shape[axis + 1 :]
    step = prod(shape_inside)
    row = _number(inner, shape_inside, 1) - _number(inner, shape_inside, 0)
    rows = 1 if (step - row) * itemsize >= _MOST_GAP else max(1, (most - row) // step + 1)
    for start in range(first, last, rows):
        part = (*box[:axis], (start, min(start + rows, last)), *inner)
        # Gaps between rows are wider than those in them: these are narrow, too.
        yield from [part] if rows > 1 else _spans(part, shape, most, itemsize)
