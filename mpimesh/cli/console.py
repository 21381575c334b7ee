"""Errors of input, tables, progress and pictures, which all commands share."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table

__all__ = [
    "InputError",
    "check_file",
    "check_picture",
    "print_page",
    "progress_bar",
    "rate_text",
    "seconds_text",
    "table",
    "write_picture",
]

PIPED_WIDTH = 10_000
"""Columns where no person looks on: lines of a file are not folded."""


class InputError(ValueError):
    """An input of the command line that cannot be used; the text is for the one who wrote it."""


# -- numbers --------------------------------------------------------------------------------------


def rate_text(bytes_per_s: float) -> str:
    """Write ``12.3 GB/s``, as network and memory vendors do; "" for 0."""
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s else ""


def seconds_text(seconds: float) -> str:
    """Write ``1.2 us``; "" for 0."""
    if not seconds:
        return ""
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


# -- pages ----------------------------------------------------------------------------------------


def table(*columns: str, no_wrap: bool = False) -> Table:
    """Return a table without lines; columns that begin with > have numbers.

    Args:
        columns: Their headers.
        no_wrap: Whether a row is one line, however narrow the terminal.
    """
    made = Table(box=None, header_style="dim", padding=(0, 1 if no_wrap else 2, 0, 0))
    for column in columns:
        justify: Literal["right", "left"] = "right" if column.startswith(">") else "left"
        made.add_column(column.removeprefix(">"), justify=justify, overflow="fold", no_wrap=no_wrap)
    return made


def print_page(
    *parts: RenderableType, console: Console | None = None, piped_width: int = PIPED_WIDTH
) -> None:
    """Print tables and texts, without the blanks that fill tables up to their width.

    Args:
        parts: Tables and texts.
        console: Where to; standard output if None.
        piped_width: Columns of standard output where it is no terminal.
    """
    if console is None:
        width = None if sys.stdout.isatty() else piped_width
        console = Console(highlight=False, width=width)
    # Where a table has no room, its lines may be folded by the terminal, but nothing is cut off.
    wide = console.options.update(width=PIPED_WIDTH)
    needed = max(console.measure(part, options=wide).minimum for part in parts)
    with console.capture() as page:
        for part in parts:
            console.print(part, width=max(console.width, needed), soft_wrap=False)
    console.file.write("".join(line.rstrip() + "\n" for line in page.get().splitlines()))


@contextmanager
def progress_bar(
    what: str, total: float, *columns: ProgressColumn
) -> Iterator[Callable[[float], None]]:
    """Yield what takes amounts that are done, for a bar on stderr where a person sees it.

    Args:
        what: What is under way.
        total: The sum of all amounts.
        columns: Shown behind the bar.
    """
    console = Console(stderr=True)
    with Progress(
        TextColumn(what),
        BarColumn(),
        *columns,
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)


# -- pictures -------------------------------------------------------------------------------------


def check_file(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written, before the work is done.

    Raises:
        InputError: If it is a folder, or would be in one that is not there.
    """
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{option}: {path} is a folder: give the name of a file")
    if not path.parent.is_dir():
        raise InputError(f"{option}: {path} cannot be written: there is no folder {path.parent}")


def check_picture(option: str, path: Path | None) -> None:
    """Refuse a picture that could not be written, before the work is done.

    Raises:
        InputError: If the name ends neither in .svg nor in .png, or nothing can draw a PNG.
    """
    if path is None:
        return
    if path.suffix.lower() not in (".svg", ".png"):
        raise InputError(f"{option}: {path} must end in .svg or .png")
    if path.suffix.lower() == ".png":
        _png_renderer(option, path)


def write_picture(option: str, path: Path, svg: str) -> None:
    """Write a picture: SVG as it is, PNG drawn by resvg.

    Raises:
        InputError: As for :func:`check_picture`, or if the file cannot be written.
    """
    check_picture(option, path)
    try:
        if path.suffix.lower() == ".svg":
            path.write_text(svg, encoding="utf-8")
        else:
            path.write_bytes(bytes(_png_renderer(option, path).svg_to_bytes(svg, zoom=2)))
    except OSError as error:
        raise InputError(f"{option}: {path} cannot be written: {error.strerror}") from None


def _png_renderer(option: str, path: Path) -> Any:
    try:
        return importlib.import_module("resvg_py")
    except ImportError:
        raise InputError(
            f"{option}: {path} needs resvg to draw a PNG: pip install resvg-py, or name it "
            f"{path.with_suffix('.svg').name}"
        ) from None
