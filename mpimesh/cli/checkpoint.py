"""``python -m mpimesh checkpoint``: looking into checkpoints, without MPI."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from mpimesh.arguments import shown, size_text
from mpimesh.errors import DamagedError, DTypeError, MpimeshError, StoreError
from mpimesh.layout.boxes import extent, tiles
from mpimesh.store.files import PART, replaced, write_at
from mpimesh.store.format import (
    MANIFEST,
    Entry,
    Manifest,
    Tensor,
    file_dtype,
    read_header,
    read_manifest,
    safetensors_header,
    stored_as,
    tensor_name,
)
from mpimesh.store.reading import FileReader
from mpimesh.store.values import from_json

__all__ = ["app", "export", "problems_of"]

app = typer.Typer(
    name="checkpoint",
    help="Look into checkpoints: what is in them, and whether they are whole. Starts no MPI.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_PIPED_WIDTH = 10_000  # lines of a file are not folded
_TILE_BYTES = 8 << 20
_STEP = re.compile(r"step-\d+")

PathArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="Folder of a checkpoint, or a .safetensors file.")
]


@app.command("ls")
def list_folder(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The checkpoints' folder.")],
) -> None:
    """List the checkpoints in a folder, with those that are damaged or were not finished.

    A checkpoint is complete if its manifest is whole, and each of its files is there with its size;
    `verify` reads the files, too.
    """
    with _errors():
        paths = sorted(folder.iterdir(), key=lambda path: path.name.lstrip("."))
        rows = [row for path in paths if (row := _row(path))]
        if not rows:
            is_one = (folder / MANIFEST).exists()
            raise StoreError(
                f"{folder} is a checkpoint itself: show it"
                if is_one
                else f"{folder} has no checkpoints in it"
            )
        table = _table("checkpoint", "saved", ">size", ">arrays", "state")
        for row in rows:
            table.add_row(*row)
        _print(table)


@app.command()
def show(path: PathArgument) -> None:
    """Show the arrays and the values of a checkpoint."""
    with _errors():
        _, manifest = read_manifest(path)
        table = _table("array", "shape", "dtype", ">pieces", ">size")
        for name, entry in sorted(manifest.arrays.items()):
            size = size_text(_total([entry]))
            shape = " x ".join(map(str, entry.shape)) or "-"
            table.add_row(Text(name), shape, entry.dtype.name, str(len(entry.pieces)), size)
        parts: list[RenderableType] = [table] if manifest.arrays else []
        if manifest.values:
            values = _table("value", "")
            for name, value in sorted(manifest.values.items()):
                values.add_row(Text(name), Text(shown(from_json(value))))
            parts += [Text()] * bool(parts) + [values]
        total = size_text(_total(manifest.arrays.values()))
        summary = (
            f"{_count(manifest.arrays, 'array')} of {total} in {_count(manifest.files, 'file')}"
        )
        _print(*parts, *[Text()] * bool(parts), Text(summary))


@app.command()
def verify(path: PathArgument) -> None:
    """Read all of a checkpoint once and say whether it is whole; it exits with 1 if it is not."""
    with _errors():
        start_s = time.perf_counter()
        try:
            folder, manifest = read_manifest(path)
            with _progress("verifying", _total(manifest.arrays.values())) as advance:
                problems = problems_of(folder, manifest, advance)
        except DamagedError as error:
            problems = [str(error)]
        if problems:
            _print(*map(Text, problems), Text(f"{path} is damaged", "bold red"))
            raise typer.Exit(1)
        seconds = time.perf_counter() - start_s
        nbytes = sum(size for _, size in manifest.files)
        pieces = [piece for entry in manifest.arrays.values() for piece in entry.pieces]
        checked = sum(piece.digest is not None for piece in pieces)
        checksums = f"{checked} checksums" if checked else "without checksums"
        _print(
            Text.assemble(
                (f"{path} is whole", "bold green"),
                f": {_count(manifest.arrays, 'array')} in {_count(manifest.files, 'file')}, "
                f"{size_text(nbytes)}, {checksums}; took {seconds:.1f} s",
            )
        )


@app.command("export")
def export_file(
    path: PathArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="The file to write.")],
    *,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Take arrays whose name fits a pattern such as 'model.*'; repeatable."),
    ] = None,
    strip: Annotated[
        str, typer.Option(help="What to leave out where names begin with it, such as 'model.'.")
    ] = "",
) -> None:
    """Write arrays of a checkpoint whole into one safetensors file, for other programs.

    `--only 'model.*' --strip model.` gives the names that a model of PyTorch or Hugging Face has.
    """
    with _errors():
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
        with _progress("exporting", _total(manifest.arrays[name] for name in names)) as advance:
            nbytes = export(folder, manifest, names, out, advance)
        _print(Text(f"{out}: {_count(names, 'array')}, {size_text(nbytes)}"))


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


def _total(entries: Iterable[Entry]) -> int:
    """Return the bytes of arrays."""
    return sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries)


def _count(things: Sized, name: str) -> str:
    return f"{len(things):,} {name}{'s' * (len(things) != 1)}"


def _table(*columns: str) -> Table:
    """Return a table without lines; columns that begin with > have numbers."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        justify: Literal["right", "left"] = "right" if column.startswith(">") else "left"
        table.add_column(column.removeprefix(">"), justify=justify, overflow="fold")
    return table


def _print(*parts: RenderableType) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    with console.capture() as page:
        for part in parts:
            console.print(part)
    # Tables are padded to their width, which is of no use in a file.
    sys.stdout.write("".join(line.rstrip() + "\n" for line in page.get().splitlines()))


@contextmanager
def _progress(what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """Yield what takes numbers of bytes that are done, for a bar where a person sees it."""
    console = Console(stderr=True)
    columns = TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task(what, total=nbytes)
        yield lambda count: bar.advance(task, count)


@contextmanager
def _errors() -> Iterator[None]:
    """End with exit code 2 and a line if something cannot be done."""
    try:
        yield
    except (OSError, MpimeshError) as error:
        text = error if isinstance(error, MpimeshError) else f"{error.filename}: {error.strerror}"
        typer.echo(f"error: {text}", err=True)
        raise typer.Exit(2) from None
