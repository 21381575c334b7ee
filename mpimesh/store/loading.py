"""`load`: what a checkpoint has, into whatever a program has, in any layout.

One rank reads the manifest and tells all. Each then works out which boxes it needs, and reads those
bytes and no others. Nothing is changed before every rank has found that all fits. Files are read,
never mapped: where a mapped file is cut off, the process is killed.
"""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args

import numpy as np
import xxhash

from mpimesh.arguments import as_flag, digest_text, shown
from mpimesh.arrays import Array, DType, HostArray, namespace
from mpimesh.dtensor import empty
from mpimesh.errors import DamagedError, DTypeError, StoreError
from mpimesh.layout import Layout, PlacementLike
from mpimesh.layout.boxes import (
    Box,
    common,
    extent,
    global_box,
    local_box,
    slices,
    tiles,
    view,
    volume,
)
from mpimesh.runtime import DeviceMesh
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call
from mpimesh.runtime.group_core import GroupCore
from mpimesh.store.array_formats import FlatArray
from mpimesh.store.files import agreeing, as_folder, as_store_error, check_mesh, compare_arrays
from mpimesh.store.format import (
    MANIFEST,
    ArrayEntry,
    Manifest,
    Piece,
    file_dtype,
    read_manifest,
    wrong_file,
)
from mpimesh.store.parts import Parts, Saved
from mpimesh.store.trees import ARRAY, VALUE, Into, Source, mesh_of, rebuilt, take_apart

__all__ = ["load"]

Layouts: TypeAlias = "PlacementLike | Mapping[str, PlacementLike] | Callable[..., Any] | None"
Verify: TypeAlias = Literal["read", "before", "none"]
Renaming: TypeAlias = "Mapping[str, str] | Callable[[str], str | None] | None"

_CHUNK_BYTES = 8 << 20
_MOST_BYTES = 1 << 20
"""Read at once for a checksum: what is read stays in the cache for it."""
_MOST_OPEN = 64
_WAIT_S, _NAP_S = 3.0, 0.05
"""A file system of a network may show on one node later what another one has written."""


def load(
    path: str | os.PathLike[str],
    into: Any = None,
    *,
    mesh: DeviceMesh | None = None,
    layout: Layouts = None,
    only: str | Sequence[str] | None = None,
    rename: Renaming = None,
    strict: bool = True,
    verify: Verify = "read",
) -> Any:
    """Load what :func:`save` has saved. Collective over the mesh, if there is one.

    Each rank reads the boxes that it needs, whoever has written them: on another mesh, on another
    number of ranks, at another stage of :func:`~mpimesh.fully_shard`. Without a mesh, one process
    reads it without MPI.

    Files of other makers are read, too: one ``.safetensors`` file, or a folder or index file as
    Hugging Face has it, ``model.safetensors.index.json``.

    Args:
        path: The checkpoint's folder, or a file.
        into: A tree as it was saved, or a part of one: arrays are read into, in place, in the
            layout that they have; models, optimizers and other objects take over what is theirs;
            values stand for those of the checkpoint. None makes all anew: arrays of NumPy, or split
            ones as `layout` says; objects become dicts of what they have by name.
        mesh: The ranks that load together; None for those of the arrays and models in `into`, or of
            `layout`.
        layout: Where `into` is None, how arrays are to lie: placements for all of them; or by
            patterns of names, as ``{"*.weight": "tp=S0"}``, where others are NumPy's; or a function
            of name, shape and dtype that returns placements or None.
        only: A pattern of names, or several, as ``"model.3.*"``; all else is left as it is. Names
            are those of the tree, after `rename`.
        rename: The names in the tree of what has other names in the file: a function of the name
            in the file, None to leave it out; or beginnings, as ``{"bert.": "model."}``.
        strict: Whether everything in `into` must be in the checkpoint, and of a model or optimizer
            everything in the checkpoint in it. False leaves as it is what is missing.
        verify: ``"read"`` compares the checksum of each piece that a rank reads whole; ``"before"``
            has the ranks together read all files once before, to see that none is damaged, and
            nothing is changed if one is; ``"none"`` compares none.

    Returns:
        The tree: `into` with the values of the checkpoint, and the same arrays and objects.

    Raises:
        StoreError: On every rank, if there is no checkpoint, a name is missing, or a file cannot
            be read.
        DamagedError: On every rank, if a file is damaged. Arrays may be half read then.
        ShapeError: On every rank, if an array has another shape than it was saved with.
        DTypeError: On every rank, if values cannot be rounded to the dtype of what they go into.

    Example:
        >>> state = mm.load("run/step-100", {"model": model, "optimizer": optimizer, "losses": []})
        >>> losses = state["losses"]
        >>> arrays = mm.load("run/step-100", only="model.*")  # of NumPy, without MPI
    """
    where = as_folder(path)
    where = where.parent if where.name == MANIFEST else where
    as_flag(strict, "strict", StoreError)
    _check_names(only, rename)
    if verify not in get_args(Verify):
        raise StoreError(
            f"verify must be one of {', '.join(get_args(Verify))}, got {shown(verify)}"
        )
    ranks = mesh
    if ranks is None:
        ranks = mesh_of([into, layout]) or getattr(layout, "mesh", None)
        ranks = ranks if isinstance(ranks, DeviceMesh) else None
    what, doing = f"load {where}, verify={verify}", f"load {where}"
    if ranks is not None or layout is not None:
        check_mesh(ranks, doing)
    core = None if ranks is None else ranks.group()._core
    manifest, folder = _agreed_manifest(core, what, where)
    with agreeing(core, what, doing):
        source, entries = _source(where, manifest, only, rename, strict=strict)
        if into is None:
            check_patterns(layout, source.arrays)
            wanted = Into()
            new = partial(_new_array, ranks, layout)
            wanted.result = rebuilt(source, wanted, structure=source.structure, new=new)
        elif layout is not None:
            raise StoreError("layout= is for into=None: arrays in a tree have theirs")
        else:
            wanted = take_apart(into, source)
    if core is not None and core.context.settings.checks:
        olds = {id(entry): old for old, entry in manifest.arrays.items()}
        pairs = sorted((new, olds[id(entry)]) for new, entry in entries.items())
        digest = digest_text(repr((pairs, sorted(source.values.items(), key=str))).encode())
        rule = f"{what}, only={shown(only)}, strict={strict}, names {digest[:8]}"
        rule += "" if callable(layout) else f", layout={shown(layout)}"
        agree(core, Call("load", core.name, rule=rule))
        compare_arrays(core, "load", wanted.arrays)
    if verify == "before":
        with agreeing(core, what, doing):
            place = (0, 1) if core is None else (core.rank or 0, core.size)
            verify_share(folder, manifest, *place)
    with agreeing(core, what, doing):
        read_into(folder, manifest, entries, wanted.arrays, verify=verify == "read")
    with agreeing(core, what, doing):
        for finish in wanted.finish:
            finish()
        tree = wanted.result()
    return tree


def _check_names(only: object, rename: object) -> None:
    """Refuse what are no patterns, and no other names.

    Raises:
        StoreError: If so.
    """
    patterns = () if only is None or isinstance(only, str) else only
    if not isinstance(patterns, Sequence) or not all(isinstance(one, str) for one in patterns):
        raise StoreError(f"only must be a pattern of names, or several, got {shown(only)}")
    if rename is None or callable(rename):
        return
    if not isinstance(rename, Mapping) or not all(
        isinstance(text, str) for pair in rename.items() for text in pair
    ):
        raise StoreError(
            "rename must be a function, or new beginnings of names by the old ones, got "
            f"{shown(rename)}"
        )


def _agreed_manifest(core: GroupCore | None, what: str, path: Path) -> tuple[Manifest, Path]:
    """Return the manifest, and the folder of its files. Collective: one rank reads it."""
    if core is None:
        folder, manifest = read_manifest(path)
        return manifest, folder
    core.member("load")
    mine: Manifest | None = None
    text = b""
    with agreeing(core, what, f"load {path}") as rows:
        if core.rank == 0:
            folder, mine = read_manifest(path)
            text = mine.text()
            rows.append([str(folder), len(text)])
    folder, nbytes = rows[0]
    buffer = np.frombuffer(bytearray(text or nbytes), np.uint8)
    core.wait_for(core.communicator.broadcast(buffer, 0), what=what)
    return mine or Manifest.parse(buffer.tobytes(), str(path)), Path(folder)


def _source(
    path: Path,
    manifest: Manifest,
    only: str | Sequence[str] | None,
    rename: Renaming,
    *,
    strict: bool,
) -> tuple[Source, dict[str, ArrayEntry]]:
    """Return what a checkpoint has by the names in the tree, and where its arrays lie.

    Raises:
        StoreError: If `only` fits nothing, or `rename` gives two things one name.
    """
    names = _renamed([*manifest.arrays, *manifest.values], rename)
    entries = {new: manifest.arrays[old] for old, new in names.items() if old in manifest.arrays}
    values = {new: manifest.values[old] for old, new in names.items() if old in manifest.values}
    patterns = [only] if isinstance(only, str) else None if only is None else [*only]
    if patterns is not None:
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names.values()):
                raise StoreError(
                    f"only={pattern!r} fits no name in {path}"
                    + (", as rename has made them" if rename is not None else "")
                )

    def chosen(name: str) -> bool:
        return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)

    structure = manifest.tree
    if structure is None or rename is not None:
        leaves = {**dict.fromkeys(entries, ARRAY), **dict.fromkeys(values, VALUE)}
        structure = {"dict": [[name, leaf] for name, leaf in leaves.items()]}
    arrays = {name: Saved(entry.shape, entry.dtype) for name, entry in entries.items()}
    return Source(str(path), structure, arrays, values, strict, chosen), entries


def _renamed(names: Iterable[str], rename: Renaming) -> dict[str, str]:
    """Return by each name in the file the one in the tree, but for what is left out.

    Raises:
        StoreError: If two get the same name.
    """
    if rename is None:
        return {name: name for name in names}
    found: dict[str, str] = {}
    for name in names:
        new = rename(name) if callable(rename) else _with_beginning(name, rename)
        if new is None:
            continue
        if not isinstance(new, str):
            raise StoreError(f"rename must give a text or None for {name!r}, got {shown(new)}")
        found[name] = new
    twice = sorted(new for new, count in Counter(found.values()).items() if count > 1)
    if twice:
        raise StoreError(f"rename gives several arrays the same name: {', '.join(twice[:8])}")
    return found


def _with_beginning(name: str, beginnings: Mapping[str, str]) -> str:
    fitting = [one for one in beginnings if name.startswith(one)]
    if not fitting:
        return name
    longest = max(fitting, key=len)
    return beginnings[longest] + name[len(longest) :]


def check_patterns(layout: Layouts, arrays: Mapping[str, Saved]) -> None:
    """Refuse patterns of names that fit no array.

    Raises:
        StoreError: If one does not.
    """
    for pattern in layout if isinstance(layout, Mapping) else ():
        if not isinstance(pattern, str) or not any(fnmatchcase(name, pattern) for name in arrays):
            raise StoreError(f"layout= has the pattern {pattern!r}, which fits no array there")


def _new_array(
    mesh: DeviceMesh | None, layout: Layouts, name: str, saved: Saved
) -> tuple[Any, Parts]:
    """Make an array to be read into, as `layout` says."""
    placements: Any = layout
    if isinstance(layout, Mapping) and not isinstance(layout, Layout):
        fitting = [pattern for pattern in layout if fnmatchcase(name, pattern)]
        placements = layout[max(fitting, key=len)] if fitting else None
    elif callable(layout) and not isinstance(layout, Layout):
        placements = layout(name, saved.shape, saved.dtype)
    if placements is None:
        array = np.empty(saved.shape, saved.dtype)
        return array, Parts.all_of(array)
    if mesh is None:
        raise StoreError(f"{name} is to be split, and nothing says over which ranks: give mesh=")
    made = empty(saved.shape, mesh, placements, dtype=saved.dtype)
    if made.layout.partial_op:
        raise StoreError(f"{name} is read as values, and cannot lie as summands: {made.layout}")
    box = made.layout.box(saved.shape, mesh.rank) if made.is_member else None
    return made, Parts(saved.shape, saved.dtype, () if box is None else ((box, made.local),))


# -- reading --------------------------------------------------------------------------------------


def read_into(
    folder: Path,
    manifest: Manifest,
    entries: Mapping[str, ArrayEntry],
    wanted: Mapping[str, Parts],
    *,
    verify: bool = True,
) -> int:
    """Read arrays into their memory; return the number of bytes that were read. Local.

    Raises:
        DamagedError: If a file is cut off, or what was read whole is not what was written.
        StoreError: If a file cannot be read.
        DTypeError: If values cannot be rounded to the dtype of the memory.
    """
    for name, parts in wanted.items():
        check_cast(name, entries[name].dtype, parts.dtype)
    with FileReader(folder, manifest, wait_s=_WAIT_S, verify=verify) as reader:
        for name, parts in wanted.items():
            for box, array in parts.parts:
                read_box(reader, entries[name], box, array)
        return reader.read_bytes


def check_cast(name: str, saved: DType, target: DType) -> None:
    """Refuse to read values of one dtype into an array of another one, unless both are floats.

    Raises:
        DTypeError: If so.
    """
    is_float = [each.kind == "f" or each.type.__module__ == "ml_dtypes" for each in (saved, target)]
    if saved.newbyteorder("=") != target.newbyteorder("=") and not all(is_float):
        raise DTypeError(
            f"{name} was saved as {saved}, and is to be read into {target}: only floats are "
            "rounded; load it without into=, and convert it"
        )


def read_box(reader: FileReader, entry: ArrayEntry, box: Box, array: Array) -> None:
    """Read a box of an array into memory of its extent, on the host or on a device."""
    if isinstance(array, np.ndarray):
        for piece in entry.pieces:
            reader.read(piece, entry, box, array)
        return
    for tile in tiles(extent(box), max(1, _CHUNK_BYTES // entry.dtype.itemsize)):
        values = np.empty(extent(tile), array.dtype)
        for piece in entry.pieces:
            reader.read(piece, entry, global_box(tile, box), values)
        target = array[slices(tile)] if array.shape else array
        target[...] = namespace(array).asarray(values)


def verify_share(folder: Path, manifest: Manifest, rank: int, ranks: int) -> int:
    """Read one rank's share of all pieces and check it; return the number of bytes. Local.

    Raises:
        DamagedError: If one is damaged.
    """
    pieces = [
        (entry.nbytes(piece), piece, entry, name)
        for name, entry in manifest.arrays.items()
        for piece in entry.pieces
    ]
    loads = [0] * ranks
    with FileReader(folder, manifest, wait_s=_WAIT_S) as reader:
        for nbytes, piece, entry, _ in sorted(pieces, key=lambda each: (-each[0], each[3])):
            turn = loads.index(min(loads))
            loads[turn] += nbytes
            if turn == rank:
                reader.check(piece, entry)
        return reader.read_bytes


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
        read_bytes: Bytes that were read so far, with those of gaps within pages.

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

        See :class:`FlatArray`. Of a piece that the box has all of, the checksum is compared: it is
        read in turns of at most 1 MiB, straight into `out` where that has its dtype and order.

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
        target = view(out, local_box(part, box))
        if self._verify and part == piece.box:
            self._read_whole(piece, entry, target)
            return
        with self._array(piece, entry) as array:
            array.read(tuple(range(*edges) for edges in local_box(part, piece.box)), target)

    def check(self, piece: Piece, entry: ArrayEntry) -> None:
        """Read all of a piece, and compare its checksum if it has one.

        Raises:
            DamagedError: If the file is missing or not as it was written.
            StoreError: If it cannot be read.
        """
        self._read_whole(piece, entry, None)

    def _read_whole(self, piece: Piece, entry: ArrayEntry, out: HostArray | None) -> None:
        """Read all of a piece, into `out` if there is one, and compare its checksum."""
        digest, dtype = xxhash.xxh3_64(), file_dtype(entry.dtype)
        with self._array(piece, entry) as array:
            for tile in tiles(array.shape, max(1, _MOST_BYTES // dtype.itemsize)):
                values = None if out is None else view(out, tile)
                if values is None or values.dtype != dtype or not values.flags.c_contiguous:
                    nbytes = volume(tile) * dtype.itemsize
                    if self._memory.size < nbytes:
                        self._memory = np.empty(nbytes, np.uint8)
                    data = self._memory[:nbytes].view(dtype).reshape(extent(tile))
                else:
                    data = values
                array.fill(tile, data)
                digest.update(data.reshape(-1).view(np.uint8).data)
                if values is not None and data is not values:
                    values[...] = data
        if piece.digest is not None and digest.intdigest() != piece.digest:
            raise DamagedError(
                f"{self._path(piece.file)} was changed since it was written: bytes {piece.begin} "
                f"to {piece.begin + entry.nbytes(piece)} have another checksum; use another "
                "checkpoint"
            )

    @contextmanager
    def _array(self, piece: Piece, entry: ArrayEntry) -> Iterator[FlatArray]:
        """Yield a piece as an array in its file, and count what is read of it."""
        path, shape, dtype = self._path(piece.file), extent(piece.box), file_dtype(entry.dtype)
        try:
            array = FlatArray(self._descriptor(piece.file), path, piece.begin, shape, dtype)
            yield array
        except StoreError:  # an OSError, too
            raise
        except OSError as error:
            raise as_store_error(error, f"read {path}") from error
        self.read_bytes += array.read_bytes

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
            raise wrong_file(path, nbytes, None) from None
        facts = os.fstat(number)
        if stat.S_ISREG(facts.st_mode) and facts.st_size == nbytes:
            return number
        os.close(number)
        raise wrong_file(path, nbytes, facts.st_size)

    def _path(self, file: int) -> Path:
        return self._folder / self._files[file][0]

    def __enter__(self) -> Self:
        """Return the reader."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1])
