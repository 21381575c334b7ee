"""``mpimesh checkpoint``: looking into checkpoints, without MPI."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from rich.console import RenderableType
from rich.progress import DownloadColumn, TransferSpeedColumn
from rich.text import Text

from mpimesh.arguments import counted, shown, size_text
from mpimesh.cli.console import print_page, progress_bar, table
from mpimesh.errors import DamagedError, DTypeError, MpimeshError, StoreError
from mpimesh.layout.boxes import extent, tiles
from mpimesh.store.files import PART, replaced, write_at
from mpimesh.store.format import (
    MANIFEST,
    ArrayEntry,
    Manifest,
    Tensor,
    file_dtype,
    read_header,
    read_manifest,
    safetensors_header,
    stored_as,
    tensor_name,
)
from mpimesh.store.loading import FileReader
from mpimesh.store.parts import from_json

__all__ = ["export", "problems_of", "run_export", "run_ls", "run_show", "run_verify"]

_TILE_BYTES = 8 << 20
_BYTES = (DownloadColumn(), TransferSpeedColumn())
_STEP = re.compile(r"step-\d+")


def run_ls(folder: Path) -> None:
    """List the checkpoints in a folder, with those that are damaged or were not finished.

    Raises:
        StoreError: If it has none.
    """
    paths = sorted(folder.iterdir(), key=lambda path: path.name.lstrip("."))
    rows = [row for path in paths if (row := _row(path))]
    if not rows:
        is_one = (folder / MANIFEST).exists()
        raise StoreError(
            f"{folder} is a checkpoint itself: mpimesh checkpoint show {folder}"
            if is_one
            else f"{folder} has no checkpoints in it"
        )
    listed = table("checkpoint", "saved", ">size", ">arrays", "state")
    for row in rows:
        listed.add_row(*row)
    print_page(listed)


def run_show(path: Path) -> None:
    """Show the arrays and the values of a checkpoint.

    Raises:
        StoreError: If it cannot be read.
    """
    _, manifest = read_manifest(path)
    arrays = table("array", "shape", "dtype", ">pieces", ">size")
    for name, entry in sorted(manifest.arrays.items()):
        size = size_text(_total([entry]))
        shape = " x ".join(map(str, entry.shape)) or "-"
        arrays.add_row(Text(name), shape, entry.dtype.name, str(len(entry.pieces)), size)
    parts: list[RenderableType] = [arrays] if manifest.arrays else []
    if manifest.values:
        values = table("value", "")
        for name, value in sorted(manifest.values.items()):
            values.add_row(Text(name), Text(shown(from_json(value))))
        parts += [Text()] * bool(parts) + [values]
    total = size_text(_total(manifest.arrays.values()))
    summary = f" of {total} in ".join(_sizes(manifest))
    print_page(*parts, *[Text()] * bool(parts), Text(summary))


def run_verify(path: Path) -> bool:
    """Read all of a checkpoint once and say whether it is whole; return that, too.

    Raises:
        StoreError: If there is none, or it cannot be read.
    """
    start_s = time.perf_counter()
    try:
        folder, manifest = read_manifest(path)
        nbytes = _total(manifest.arrays.values())
        with progress_bar("verifying", nbytes, *_BYTES) as advance:
            problems = problems_of(folder, manifest, advance)
    except DamagedError as error:
        problems = [str(error)]
    if problems:
        print_page(*map(Text, problems), Text(f"{path} is damaged", "bold red"))
        return False
    seconds = time.perf_counter() - start_s
    nbytes = sum(size for _, size in manifest.files)
    pieces = [piece for entry in manifest.arrays.values() for piece in entry.pieces]
    checked = sum(piece.digest is not None for piece in pieces)
    checksums = f"{checked} checksums" if checked else "without checksums"
    print_page(
        Text.assemble(
            (f"{path} is whole", "bold green"),
            f": {' in '.join(_sizes(manifest))}, "
            f"{size_text(nbytes)}, {checksums}; took {seconds:.1f} s",
        )
    )
    return True


def run_export(path: Path, out: Path, *, only: Sequence[str], strip: str) -> None:
    """Write arrays of a checkpoint whole into one safetensors file.

    Args:
        path: The checkpoint.
        out: The file.
        only: Patterns of the names of arrays; all arrays if there are none.
        strip: What to leave out where names begin with it.

    Raises:
        StoreError: If no array is asked for, or a file cannot be read or written.
    """
    folder, manifest = read_manifest(path)
    names = {
        name: name.removeprefix(strip)
        for name in manifest.arrays
        if not only or any(fnmatchcase(name, pattern) for pattern in only)
    }
    if not names:
        raise StoreError(f"{path} has no array whose name fits {' or '.join(only or ['*'])}")
    if out.suffix != ".safetensors":
        raise StoreError(f"{out} is to be a file of safetensors: give a name that ends so")
    if strip and not any(name.startswith(strip) for name in names):
        raise StoreError(f"no name that is exported begins with --strip {strip}")
    total = _total(manifest.arrays[name] for name in names)
    with progress_bar("exporting", total, *_BYTES) as advance:
        nbytes = export(folder, manifest, names, out, advance)
    print_page(Text(f"{out}: {counted(len(names), 'array')}, {size_text(nbytes)}"))


# -- verifying and exporting -----------------------------------------------------------------------


def problems_of(
    folder: Path, manifest: Manifest, advance: Callable[[int], None] = lambda _: None
) -> list[str]:
    """Read all of a checkpoint once, and return a sentence for each thing that is damaged.

    Checksums of pieces are compared, and the headers of the files with the manifest.

    Args:
        folder: The folder that the manifest's names are in.
        manifest: The manifest.
        advance: Called with numbers of bytes that were read.

    Raises:
        StoreError: If a file cannot be read.
    """
    problems = []
    tensors: list[dict[str, Tensor]] = [{} for _ in manifest.files]
    with FileReader(folder, manifest) as reader:
        for name, entry in manifest.arrays.items():
            for piece in entry.pieces:
                tensor = tensor_name(name, entry.shape, piece.box)
                dtype, shape = stored_as(entry.dtype, extent(piece.box))
                tensors[piece.file][tensor] = dtype, shape, piece.begin
                try:
                    reader.check(piece, entry)
                except DamagedError as error:
                    problems.append(f"{tensor}: {error}")
                advance(entry.nbytes(piece))
    for (name, _), expected in zip(manifest.files, tensors, strict=True):
        try:
            _, header = read_header(folder / name)
        except (DamagedError, DTypeError) as error:
            problems.append(str(error))
            continue
        if not expected.items() <= header.items():
            problems.append(f"{folder / name} has a header that does not fit the manifest")
    return problems


def export(
    folder: Path,
    manifest: Manifest,
    names: Mapping[str, str],
    out: Path,
    advance: Callable[[int], None] = lambda _: None,
) -> int:
    """Write arrays whole into one file of safetensors, which is there when all of it is.

    Args:
        folder: The folder that the manifest's names are in.
        manifest: The manifest.
        names: The names that arrays get, by those that they have.
        out: The file.
        advance: Called with numbers of bytes that were read.

    Returns:
        The bytes of the arrays.

    Raises:
        StoreError: If two arrays get one name, or the file cannot be written.
        DamagedError: If the checkpoint is damaged; then there is no file.

    Cost:
        Each piece is read to compare its checksum, and again to write it. 9 MiB of memory.
    """
    if out.is_symlink() or (out.exists() and not _is_safetensors(out)):
        raise StoreError(
            f"{out} is a link, or no file of safetensors, and is not replaced: give another name, "
            "or move it away"
        )
    entries = {name: manifest.arrays[name] for name in names}
    order = sorted(entries, key=lambda name: -entries[name].dtype.itemsize)
    # Hugging Face reads no file that does not tell that its tensors are in PyTorch's order of axes.
    header, begins = safetensors_header(
        [(names[name], entries[name].dtype, entries[name].shape) for name in order],
        {"format": "pt"},
    )
    with FileReader(folder, manifest) as reader, replaced(out) as path, path.open("wb") as file:
        write_at(file.fileno(), memoryview(header), 0)
        for name, begin in zip(order, begins, strict=True):
            entry = entries[name]
            for piece in entry.pieces:
                reader.check(piece, entry)
                advance(entry.nbytes(piece))
            for tile in tiles(entry.shape, _TILE_BYTES // entry.dtype.itemsize):
                values = np.empty(extent(tile), file_dtype(entry.dtype))
                for piece in entry.pieces:
                    reader.read(piece, entry, tile, values)
                write_at(file.fileno(), values.reshape(-1).view(np.uint8).data, begin)
                begin += values.nbytes
    return _total(entries.values())


def _is_safetensors(path: Path) -> bool:
    """Tell whether a file may be replaced by one of safetensors: it is one, or empty."""
    try:
        return not path.stat().st_size or bool(read_header(path))
    except DTypeError:
        return True
    except (DamagedError, OSError):
        return False


# -- rows and tables -------------------------------------------------------------------------------


def _row(path: Path) -> tuple[Text | str, ...] | None:
    """Return a checkpoint's row; None if this is none, nor what is left of one."""
    if path.name.endswith(PART) and path.name.startswith("."):
        name = path.name[1:].partition(".")[0]
        return (Text(name), _saved(path), "", "", Text("not finished", "yellow"))
    if not path.is_dir() or not (_STEP.fullmatch(path.name) or (path / MANIFEST).exists()):
        return None
    try:
        _, manifest = read_manifest(path)
    except MpimeshError as error:
        return (Text(path.name), _saved(path), "", "", Text(f"damaged: {error}", "red"))
    size = size_text(sum(nbytes for _, nbytes in manifest.files))
    arrays = str(len(manifest.arrays))
    return (Text(path.name), _saved(path / MANIFEST), size, arrays, Text("complete", "green"))


def _saved(path: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))


def _total(entries: Iterable[ArrayEntry]) -> int:
    """Return the bytes of arrays."""
    return sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries)


def _sizes(manifest: Manifest) -> tuple[str, str]:
    """Return how many arrays and files there are."""
    return counted(len(manifest.arrays), "array"), counted(len(manifest.files), "file")
