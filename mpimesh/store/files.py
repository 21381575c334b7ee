"""Files that ranks write together, and that are seen only when all of them is on the disk.

Files of a checkpoint are written in a hidden folder beside the path. A new path gets that folder by
one rename. Of a path with a checkpoint the folder of the data is brought there first, and then the
manifest's name changes hands; so there is one whole checkpoint at each moment. Only files are
removed that a manifest lists.

    PATH/manifest.json
    PATH/data-0123456789ab/00000-000.safetensors      the first file of rank 0
    .PATH.0123456789ab.part/manifest.json             while it is written: a list of its files
    .PATH.0123456789ab.part/data-0123456789ab/...
"""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import numpy as np
import xxhash

from mpimesh.arguments import check_kind, shown
from mpimesh.arrays import Array, DType, to_numpy
from mpimesh.dtensor.consistency import origin_place
from mpimesh.errors import (
    DamagedError,
    MismatchError,
    MissingPackageError,
    MpimeshError,
    StoreError,
)
from mpimesh.layout.boxes import Box, extent, slices, tiles, volume
from mpimesh.runtime import DeviceMesh, Launch
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call
from mpimesh.runtime.group_core import GroupCore
from mpimesh.runtime.world import current_world
from mpimesh.store.format import (
    ArrayEntry,
    Manifest,
    Piece,
    safetensors_header,
    tensor_name,
)
from mpimesh.store.parts import Parts, Value

__all__ = [
    "DATA",
    "PART",
    "TOKEN_DIGITS",
    "Background",
    "DataFile",
    "Kinds",
    "Share",
    "Writer",
    "agreeing",
    "as_folder",
    "as_store_error",
    "check_mesh",
    "compare_arrays",
    "data_folder",
    "is_seen",
    "manifest_of",
    "new_token",
    "publish",
    "remove",
    "replaced",
    "sync",
    "temporary_beside",
    "write_at",
]

PART = ".part"
"""The end of the names of files and folders that are being written."""

TOKEN_DIGITS = 12
"""Digits before that end, by which those of one name are told from those of a longer one."""

_MOST_BYTES = 1 << 30  # a write of Linux ends at 2 GiB
_CHUNK_BYTES = 1 << 20
"""Written at once: what was hashed is in the cache still."""
DATA = "data-"
_SEEN_S, _NAP_S = 60.0, 0.05
"""A file system of a network may show on one node later what another one has written."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux

Kinds: TypeAlias = Mapping[str, tuple[tuple[int, ...], DType]]
"""Shape and dtype of arrays by name."""


# -- ranks together, and errors -------------------------------------------------------------------


def check_mesh(mesh: object, doing: str) -> None:
    """Refuse what is no mesh; and None, without starting MPI, if several ranks run the program.

    Raises:
        StoreError: If it is no mesh, or is missing.
    """
    if mesh is not None:
        check_kind(mesh, DeviceMesh, "mesh", StoreError, wanted="a DeviceMesh")
        return
    virtual = current_world().virtual
    count = Launch.detect().size if virtual is None else virtual.size
    if count > 1:
        raise StoreError(
            f"cannot {doing}: nothing says which of the {count} ranks of this job take part; give "
            "mesh="
        )


@contextmanager
def agreeing(
    core: GroupCore | None, what: Call | str, doing: str, *, reading: bool = False
) -> Iterator[list[Any]]:
    """Raise on every rank what goes wrong in the block on any. Collective.

    Yields a list, to which this rank may add a value, as JSON can say it; after the block it has
    those of all ranks, None of a rank that has added none.

    Args:
        core: The ranks; None for this process alone.
        what: The call, or in words what they do, the same on all.
        doing: See :func:`as_store_error`.
        reading: Likewise.
    """
    rows: list[Any] = []
    problem: Exception | None = None
    try:
        yield rows
    except Exception as error:
        problem = as_store_error(error, doing, reading=reading)
    value = rows[0] if rows else None
    if core is not None:
        rows[:] = agree(core, what, value, problem=problem)
    elif problem is not None:
        raise problem
    else:
        rows[:] = [value]


def compare_arrays(core: GroupCore | None, what: str, arrays: Mapping[str, Parts]) -> None:
    """Compare which split arrays of the same looks the ranks give. Collective, with checks on.

    Raises:
        MismatchError: On every rank, naming the array, two ranks and where theirs were made.
    """
    if core is None or not core.context.settings.checks:
        return
    own = {
        name: [str(parts.origin), origin_place(parts.origin)]
        for name, parts in arrays.items()
        if parts.origin is not None
    }
    first: dict[str, tuple[int, str, str]] = {}
    for rank, row in enumerate(agree(core, Call(what, core.name), own)):
        for name, (text, place) in row.items():
            other, theirs, there = first.setdefault(name, (rank, text, place))
            if text != theirs:
                raise MismatchError.everywhere(
                    f"{what}: all ranks must give the same split array as {name}, but rank {other} "
                    f"gives {theirs}{there}, and rank {rank} gives {text}{place}: only shape, "
                    "dtype and layout are alike. Make and write arrays in the same order on all "
                    "ranks, and give the same one"
                )


def as_store_error(error: Exception, doing: str, *, reading: bool = False) -> MpimeshError:
    """Return an error as one of mpimesh's, which other ranks can be told.

    Args:
        error: An error, such as of the file system, or of a program's own function.
        doing: What it has prevented, as in "save to PATH".
        reading: Whether errors of a parser mean that the file is damaged.
    """
    if isinstance(error, MpimeshError):
        return error
    kind: type[MpimeshError] = StoreError
    reason = shown(error)
    package = getattr(error, "name", None)
    if isinstance(error, ImportError) and package in ("h5py", "zarr"):
        kind, reason = MissingPackageError, f"{error}; pip install {package}"
    elif isinstance(error, MemoryError):
        reason = "there is not enough memory"
    elif isinstance(error, OSError) and (error.errno or not reading):
        reason = error.strerror or reason
    elif reading:
        kind, reason = DamagedError, f"it is damaged, or of another format: {reason}"
    return kind(f"cannot {doing}: {reason}").with_traceback(error.__traceback__)


# -- names, and what is seen under them -----------------------------------------------------------


def as_folder(path: object) -> Path:
    """Return the absolute path of a checkpoint; of a link to a folder, where it leads. Local.

    Raises:
        StoreError: If it is no path.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        raise StoreError(f"the path of a checkpoint is a text or a Path, got {shown(path)}")
    try:
        folder = Path(path).absolute()
        return folder.resolve() if folder.is_symlink() and folder.is_dir() else folder
    except OSError as error:  # such as of a working directory that is no more
        raise StoreError(f"cannot tell where {path} is: {error.strerror}") from error


def new_token() -> str:
    """Return hexadecimal digits that no other save has. Local."""
    return uuid4().hex[:TOKEN_DIGITS]


def temporary_beside(path: Path, token: str = "") -> Path:
    """Return a hidden name beside `path` that ends with a token, a new one if empty, and `PART`."""
    return path.with_name(f".{path.name}.{token or new_token()}{PART}")


def data_folder(token: str) -> str:
    """Return the name of the folder with the files of a checkpoint."""
    return f"{DATA}{token}"


def is_seen(test: Callable[[], bool]) -> bool:
    """Tell whether what another rank has written is seen here, once it is, or after a while."""
    end_s = time.monotonic() + _SEEN_S
    while not test():
        if time.monotonic() > end_s:
            return False
        time.sleep(_NAP_S)
    return True


def sync(path: Path) -> None:
    """Have a file or a folder on the disk. A folder's names are there only after its own sync."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_at(number: int, data: memoryview, offset: int) -> None:
    """Write all of `data`, which is contiguous bytes, at `offset` of an open file."""
    while data:
        written = os.pwrite(number, data[:_MOST_BYTES], offset)
        data, offset = data[written:], offset + written


def publish(part: Path, path: Path) -> None:
    """Give a file or folder that is written its name, in place of the one before."""
    sync(part)
    if part.is_dir() and path.exists():
        _exchange(part, path)
    else:
        part.replace(path)
    sync(path.parent)


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


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there and goes."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield the name to write a file under, which becomes `path` once it is on the disk. Local.

    Whoever reads `path` finds all of it, or the file before. An error leaves the file before, and
    nothing else.

    Raises:
        StoreError: If it cannot be written.
    """
    fresh = temporary_beside(path)
    try:
        yield fresh
        publish(fresh, path)
    except StoreError:  # an OSError, too
        raise
    except OSError as error:
        raise as_store_error(error, f"write {path}") from error
    finally:
        remove(fresh)


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


class Background(threading.Thread):
    """A thread that does something with files.

    Args:
        action: Called in it.

    Attributes:
        problem: Why it failed; "" if it did not, or has not ended.
        nbytes: Bytes written so far.
        done: Whether it has ended.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__(name="mpimesh-save", daemon=True)
        self._action = action
        self.problem = ""
        self.nbytes = 0
        self.done = False

    def run(self) -> None:
        """Do it."""
        try:
            self._action()
        except Exception as error:  # a full disk, memory that is gone: all ranks are to know
            reason = getattr(error, "strerror", None) or str(error)
            self.problem = reason or type(error).__name__
        finally:
            self.done = True


class Writer(Background):
    """The thread that writes what a rank has to write, and has it on the disk.

    Args:
        folder: Where to.
        share: The files.
        values: Gives the values of a box.

    Attributes:
        digests: Of the pieces of all files, in their order.
    """

    def __init__(self, folder: Path, share: Share, values: Callable[[str, Box], Array]) -> None:
        super().__init__(self._write_all)
        self._folder = folder
        self._share = share
        self._values = values
        self.digests: list[int] = []

    def _write_all(self) -> None:
        if self._share and not is_seen(self._folder.is_dir):
            raise StoreError(
                f"{self._folder.parent.name}, which the first rank has made, is not there: save "
                "to a folder that all nodes share, and no two jobs to the same"
            )
        for file in self._share:
            self._write(file)
        if self._share:
            sync(self._folder)

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
