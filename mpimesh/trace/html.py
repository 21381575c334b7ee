"""Pictures for notebooks: ranks in a grid, and the blocks of an array with those that have them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from mpimesh.trace import svg

__all__ = ["blocks_svg", "paragraph", "preformatted", "rank_grid"]

_CELLS = '<{0} style="border:1px solid #8884;padding:2px 10px;text-align:center">{1}</{0}>'
_FILLS = ("#8ecae6", "#ffd6a5", "#caffbf", "#ffadad", "#d0bdf4", "#fdffb6", "#9bf6ff", "#f1c0e8")
_WIDTH = 320.0
_MOST_BOXES = 64
_MOST_RANKS = 512


def paragraph(text: str) -> str:
    """Return a line of text."""
    return f"<div>{svg.plain(text)}</div>"


def preformatted(text: str) -> str:
    """Return lines of text as they are."""
    return f"<pre>{svg.plain(text)}</pre>"


def rank_grid(dims: Sequence[tuple[str, int]], ranks: Sequence[int]) -> str:
    """Return the ranks of a mesh as a table: the last dim from left to right.

    Args:
        dims: (name, size) of each dim, slowest first.
        ranks: The ranks in row-major order.
    """
    if not dims or not 0 < len(ranks) <= _MOST_RANKS:
        return ""
    *outer, (last, length) = dims
    names = "".join(_CELLS.format("th", svg.plain(f"{last}={n}")) for n in range(length))
    rows = []
    for number, coords in enumerate(product(*[range(size) for _, size in outer])):
        title = ", ".join(f"{dim}={at}" for (dim, _), at in zip(outer, coords, strict=True))
        line = ranks[number * length : (number + 1) * length]
        cells = "".join(_CELLS.format("td", rank) for rank in line)
        rows.append(f"<tr>{_CELLS.format('th', svg.plain(title or 'rank'))}{cells}</tr>")
    head = f"<tr>{_CELLS.format('th', '')}{names}</tr>"
    return f'<table style="border-collapse:collapse">{head}{"".join(rows)}</table>'


def blocks_svg(
    shape: Sequence[int], boxes: Sequence[tuple[Sequence[tuple[int, int]], str]]
) -> str | None:
    """Draw the blocks of an array of one axis or two, axis 1 from left to right.

    Args:
        shape: Its shape.
        boxes: (start, stop) along each axis of each block, and what to write into it.

    Returns:
        The text of an SVG; None where it would show nothing: more axes, too many blocks, no
        elements.
    """
    if len(shape) not in (1, 2) or not all(shape) or not 0 < len(boxes) <= _MOST_BOXES:
        return None
    rows, columns = shape if len(shape) == 2 else (1, shape[0])
    height = 36.0 if len(shape) == 1 else min(max(_WIDTH * rows / columns, 90.0), 320.0)
    width = _WIDTH if len(shape) == 1 else min(max(_WIDTH, height * columns / rows), 480.0)
    parts = []
    for place, (box, label) in enumerate(boxes):
        (top, bottom), (left, right) = box if len(box) == 2 else ((0, 1), box[0])
        x, y = 1 + left / columns * width, 1 + top / rows * height
        w, h = (right - left) / columns * width, (bottom - top) / rows * height
        fill = _FILLS[place % len(_FILLS)]
        parts.append(svg.rect(x, y, w, h, fill, stroke=svg.INK))
        if svg.text_width(label, 12) < w and h >= 14:
            parts.append(svg.text(x + w / 2, y + h / 2 + 4, label, anchor="middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 2:g}" height="{height + 2:g}" '
        f'font-family="sans-serif">{"".join(parts)}</svg>'
    )
