"""Grids of chunks in files: their extent, and boxes that are cut at their edges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import gcd, prod

from mpimesh.layout.boxes import Box, tiles, volume

__all__ = ["chunks_of", "cut", "grid_tiles"]

_MOST_CHUNK_BYTES = 16 << 20
_FEWEST_CHUNK_BYTES = 64 << 10
"""Chunks of Zarr are no smaller, but where the array is."""


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
    if prod(fitting) * itemsize < min(_FEWEST_CHUNK_BYTES, prod(shape) * itemsize // 8):
        inner, fitting = [set() for _ in shape], [max(1, length) for length in shape]
    for axis, edges in enumerate(inner):
        ratio = -(-prod(fitting) * itemsize // _MOST_CHUNK_BYTES)
        if ratio <= 1:
            break
        wanted = max(1, fitting[axis] // ratio)
        fitting[axis] = _divisor(fitting[axis], wanted) if edges else wanted
    return tuple(fitting)


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is not above `most`."""
    return next(one for one in range(most, 0, -1) if not number % one)


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
