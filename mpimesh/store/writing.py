"""One rank's part of a checkpoint on the disk, and the rename that makes all parts visible.

Files are written in a hidden folder beside the path. A new path gets that folder by one rename. Of
a path with a checkpoint the folder of the data is brought there first, and then the manifest's name
changes hands; so there is one whole checkpoint at each moment.

    PATH/manifest.json
    PATH/data-0123456789ab/00000-000.safetensors      the first file of rank 0
    .PATH.0123456789ab.part/                          while it is written
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import xxhash

from mpimesh.arrays import Array, DType, to_numpy
from mpimesh.errors import StoreError
from mpimesh.layout.boxes import Box, extent, slices, tiles, volume
from mpimesh.store.files import PART, TOKEN_DIGITS, replaced, sync, write_at
from mpimesh.store.format import (
    MANIFEST,
    ArrayEntry,
    Manifest,
    Piece,
    safetensors_header,
    tensor_name,
)
from mpimesh.store.parts import Value

__all__ = [
    "Commit",
    "DataFile",
    "Kinds",
    "Share",
    "Writer",
    "check_target",
    "data_folder",
    "discard",
    "manifest_of",
    "num_pieces",
]

Kinds: TypeAlias = Mapping[str, tuple[tuple[int, ...], DType]]
"""Shape and dtype of arrays by name."""

_CHUNK_BYTES = 1 << 20
"""Written at once: what was hashed is in the cache still."""
_DATA = "data-"
_SEEN_S, _NAP_S = 60.0, 0.05
"""A file system of a network may show on one node later what another one has written."""


def data_folder(token: str) -> str:
    """Return the name of the folder with the files of a checkpoint."""
    return f"{_DATA}{token}"


def check_target(path: Path) -> None:
    """Refuse a path at which there is something else than a checkpoint, or that is no place.

    Raises:
        StoreError: If so.
    """
    if path.is_dir():
        names = [each.name for each in path.iterdir()]
        if MANIFEST not in names and not all(name.startswith(_DATA) for name in names):
            raise StoreError(
                f"{path} is a folder with other things in it, and no checkpoint: give another "
                "path, or remove it"
            )
    elif path.exists() or path.is_symlink():
        raise StoreError(f"{path} is a file; a checkpoint is a folder: give another path")


def leftovers(path: Path) -> list[Path]:
    """Return the unfinished folders beside a path that saves to it have left behind."""
    with suppress(OSError):
        # The token keeps out what is written now for a longer name, as RUN.ema is beside RUN.
        return [*path.parent.glob(f".{glob_safe(path.name)}.{'[0-9a-f]' * TOKEN_DIGITS}{PART}")]
    return []


def glob_safe(name: str) -> str:
    """Return a name as a pattern that fits only it."""
    return "".join(f"[{each}]" if each in "*?[" else each for each in name)


def discard(path: Path) -> None:
    """Remove what saves to a path have left behind that did not end."""
    for folder in leftovers(path):
        shutil.rmtree(folder, ignore_errors=True)


# -- one rank writes ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file with boxes of arrays, as planned.

    Attributes:
        name: Its name.
        header: Its first bytes.
        pieces: The boxes, each with the array's name and the offset of its bytes.
        nbytes: Its size.
    """

    name: str
    header: bytes
    pieces: tuple[tuple[str, Box, int], ...]
    nbytes: int

    @classmethod
    def of(cls, name: str, boxes: Sequence[tuple[str, Box]], kinds: Kinds) -> DataFile:
        """Plan a file of boxes, each with its array's name.

        Raises:
            DTypeError: If the format does not have a dtype.
        """
        entries = [
            (tensor_name(array, kinds[array][0], box), kinds[array][1], extent(box))
            for array, box in boxes
        ]
        header, begins = safetensors_header(entries, {"format": "mpimesh"})
        pieces = [(*each, begin) for each, begin in zip(boxes, begins, strict=True)]
        ends = [begin + volume(box) * kinds[array][1].itemsize for array, box, begin in pieces]
        return cls(name, header, tuple(pieces), max(len(header), *ends, 0))


Share: TypeAlias = tuple[DataFile, ...]
"""The files that one rank writes."""


def num_pieces(share: Share) -> int:
    """Return the number of boxes that a rank writes."""
    return sum(len(file.pieces) for file in share)


class Writer(threading.Thread):
    """The thread that writes what a rank has to write, and has it on the disk.

    Args:
        folder: Where to.
        share: The files.
        values: Gives the values of a box.

    Attributes:
        share: The files.
        digests: Of the pieces, in their order.
        problem: Why it could not write; "" if it could, or has not ended.
        nbytes: Bytes written so far.
        done: Whether it has ended.
    """

    def __init__(
        self,
        folder: Path,
        share: Share,
        values: Callable[[str, Box], Array],
    ) -> None:
        super().__init__(name="mpimesh-save", daemon=True)
        self._folder = folder
        self.share = share
        self._values = values
        self.digests: list[int] = []
        self.problem = ""
        self.nbytes = 0
        self.done = False

    def run(self) -> None:
        """Write."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for file in self.share:
                self._write(file)
            sync(self._folder)
        except Exception as error:  # a full disk, memory that is gone: all ranks are to know
            self.problem = f"{getattr(error, 'strerror', None) or error}"
            self.problem = self.problem or type(error).__name__
        finally:
            self.done = True

    def _write(self, file: DataFile) -> None:
        path = self._folder / file.name
        number = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            write_at(number, memoryview(file.header), 0)
            for name, box, begin in file.pieces:
                digest = xxhash.xxh3_64()
                for chunk in _chunks(self._values(name, box)):
                    digest.update(chunk)
                    write_at(number, chunk, begin)
                    begin += len(chunk)
                    self.nbytes += len(chunk)
                self.digests.append(digest.intdigest())
            os.ftruncate(number, file.nbytes)
            os.fsync(number)
        finally:
            os.close(number)


def _chunks(array: Array) -> Iterator[memoryview]:
    """Yield the bytes of an array in C order, little endian, some at a time."""
    if isinstance(array, np.ndarray) and array.flags.c_contiguous and array.dtype.isnative:
        flat = array.reshape(-1).view(np.uint8).data
        for at in range(0, len(flat), _CHUNK_BYTES):
            yield flat[at : at + _CHUNK_BYTES]
        return
    for tile in tiles(array.shape, max(1, _CHUNK_BYTES // array.dtype.itemsize)):
        part = np.ascontiguousarray(to_numpy(array[slices(tile)]))
        part = part.astype(part.dtype.newbyteorder("="), copy=False)
        yield part.reshape(-1).view(np.uint8).data


# -- the first rank makes it visible --------------------------------------------------------------


def manifest_of(
    shares: Sequence[Share],
    kinds: Kinds,
    folder: str,
    digests: Sequence[Sequence[int]],
    tree: Value,
    values: Mapping[str, Value],
) -> Manifest:
    """Return the manifest of what all ranks have written.

    Args:
        shares: The files of each.
        kinds: Of all arrays.
        folder: The name of the folder of the files.
        digests: For each rank those of its pieces.
        tree: How the tree is built.
        values: Its values.
    """
    pieces: dict[str, list[Piece]] = {name: [] for name in kinds}
    files: list[tuple[str, int]] = []
    for share, row in zip(shares, digests, strict=True):
        rest = iter(row)
        for file in share:
            for name, box, begin in file.pieces:
                pieces[name].append(Piece(len(files), box, begin, next(rest)))
            files.append((f"{folder}/{file.name}", file.nbytes))
    arrays = {
        name: ArrayEntry(*kinds[name], tuple(sorted(row, key=lambda each: each.box)))
        for name, row in sorted(pieces.items())
    }
    return Manifest(arrays, values, tree, tuple(files))


class Commit(threading.Thread):
    """The thread that makes visible what all ranks have written.

    Args:
        manifest: The manifest.
        fresh: The folder that was written.
        path: The checkpoint's folder.
        token: Ends the name of the folder of its data.

    Attributes:
        problem: Why it could not; "" if it could.
        nbytes: Bytes written so far, of the manifest none.
        done: Whether it has ended.
    """

    nbytes = 0

    def __init__(self, manifest: Manifest, fresh: Path, path: Path, token: str) -> None:
        super().__init__(name="mpimesh-commit", daemon=True)
        self._manifest = manifest
        self._fresh = fresh
        self._path = path
        self._token = token
        self.problem = ""
        self.done = False

    def run(self) -> None:
        """Commit; on an error nothing is seen, and what was written is removed."""
        try:
            self._commit(self._manifest.text())
        except Exception as error:
            self.problem = f"{getattr(error, 'strerror', None) or error}" or type(error).__name__
        finally:
            shutil.rmtree(self._fresh, ignore_errors=True)
            self.done = True

    def _check_seen(self) -> None:
        """Return once all files that the ranks have written are seen here.

        Raises:
            StoreError: If some are not after a while, as where nodes have folders of their own.
        """
        end_s = time.monotonic() + _SEEN_S
        for name, nbytes in self._manifest.files:
            path = self._fresh / name
            while not path.is_file() or path.stat().st_size != nbytes:
                if time.monotonic() > end_s:
                    raise StoreError(
                        f"{name}, which another rank has written, is not seen by the first one: "
                        "save to a folder that all nodes share"
                    )
                time.sleep(_NAP_S)

    def _commit(self, text: bytes) -> None:
        self._check_seen()
        fresh, path, data = self._fresh, self._path, data_folder(self._token)
        if not path.is_dir() or not any(path.iterdir()):
            with replaced(fresh / MANIFEST) as file:
                file.write_bytes(text)
            fresh.rename(path)
            sync(path.parent)
            return
        # One file's name changes hands, so that there is a whole checkpoint at each moment.
        old = [each for each in path.glob(f"{_DATA}*") if each.is_dir()]
        (fresh / data).rename(path / data)
        try:
            sync(path)
            with replaced(path / MANIFEST) as file:
                file.write_bytes(text)
        except BaseException:
            shutil.rmtree(path / data, ignore_errors=True)
            raise
        for each in old:
            shutil.rmtree(each, ignore_errors=True)
