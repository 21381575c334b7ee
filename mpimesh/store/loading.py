"""`load`: what a checkpoint has, into whatever a program has, in any layout.

One rank reads the manifest and tells all. Each then works out which boxes it needs, and reads those
bytes and no others. Nothing is changed before every rank has found that all fits.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from mpimesh.arguments import as_flag, shown
from mpimesh.arrays import Array, DType, namespace
from mpimesh.dtensor import empty
from mpimesh.errors import DTypeError, MpimeshError, StoreError
from mpimesh.layout import Layout, PlacementLike
from mpimesh.layout.boxes import Box, extent, global_box, slices, tiles
from mpimesh.runtime import DeviceMesh
from mpimesh.store.files import as_folder
from mpimesh.store.format import MANIFEST, ArrayEntry, Manifest, read_manifest
from mpimesh.store.parts import Parts, Saved
from mpimesh.store.reading import FileReader
from mpimesh.store.together import agreed, as_store_error, ranks_of_job
from mpimesh.store.trees import ARRAY, VALUE, Into, Source, mesh_of, rebuilt, take_apart

__all__ = ["load"]

Layouts: TypeAlias = "PlacementLike | Mapping[str, PlacementLike] | Callable[..., Any] | None"
Verify: TypeAlias = Literal["read", "before", "none"]
Renaming: TypeAlias = "Mapping[str, str] | Callable[[str], str | None] | None"

_CHUNK_BYTES = 8 << 20
_WAIT_S = 3.0
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
    if ranks is None and ranks_of_job() > 1 and layout is not None:
        raise StoreError("arrays are to be split, and nothing says over which ranks: give mesh=")
    if ranks is not None and not isinstance(ranks, DeviceMesh):
        raise StoreError(f"mesh must be a DeviceMesh, got {shown(ranks)}")
    together = _Together(ranks, where, verify)
    manifest, folder = together.manifest()

    def prepared() -> tuple[Into, dict[str, ArrayEntry]]:
        source, entries = _source(where, manifest, only, rename, strict=strict)
        if into is not None:
            if layout is not None:
                raise StoreError("layout= is for into=None: arrays in a tree have theirs")
            return take_apart(into, source), entries
        check_patterns(layout, source.arrays)
        made = Into()
        new = partial(_new_array, ranks, layout)
        made.result = rebuilt(source, made, structure=source.structure, new=new)
        return made, entries

    wanted, entries = together.attempt(prepared)
    if verify == "before":
        together.attempt(lambda: verify_share(folder, manifest, *together.place))
    together.attempt(
        lambda: read_into(folder, manifest, entries, wanted.arrays, verify=verify == "read")
    )

    def finished() -> Any:
        for finish in wanted.finish:
            finish()
        return wanted.result()

    return together.attempt(finished)


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


class _Together:
    """The ranks that load together, or a process alone."""

    def __init__(self, mesh: DeviceMesh | None, path: Path, verify: str) -> None:
        self._core = None if mesh is None else mesh.group()._core
        self._path = path
        self._what = f"load {path}, verify={verify}"

    @property
    def place(self) -> tuple[int, int]:
        """This rank's number, and how many there are."""
        return (0, 1) if self._core is None else (self._core.rank or 0, self._core.size)

    def manifest(self) -> tuple[Manifest, Path]:
        """Return the manifest, and the folder of its files. Collective: one rank reads it."""
        core = self._core
        if core is None:
            folder, manifest = read_manifest(self._path)
            return manifest, folder
        core.member("load")
        problem: MpimeshError | None = None
        mine: Manifest | None = None
        text, folder = b"", self._path
        if core.rank == 0:
            try:
                folder, mine = read_manifest(self._path)
                text = mine.text()
            except MpimeshError as error:
                problem = error
        rows = agreed(core, self._what, [str(folder), len(text)], problem=problem)
        buffer = np.frombuffer(bytearray(text or rows[0][1]), np.uint8)
        request = core.communicator.broadcast(buffer, 0)
        core.wait_for(request, what=self._what)
        return mine or Manifest.parse(buffer.tobytes(), str(self._path)), Path(rows[0][0])

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Return what `action` gives on this rank, if it fails on none. Collective."""
        problem: Exception | None = None
        result = None
        try:
            result = action()
        except Exception as error:  # such as of a function of rename=
            problem = as_store_error(error, f"load {self._path}")
        agreed(self._core, self._what, problem=problem)
        return result


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
