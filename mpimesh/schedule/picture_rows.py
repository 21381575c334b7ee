"""One rank's row in the picture of a timetable: a box for each action, or a column for many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from mpimesh.schedule.action import Action, ActionKind
from mpimesh.trace import svg

__all__ = [
    "LABELS",
    "Bar",
    "Colour",
    "Row",
    "draw_boxes",
    "draw_columns",
    "fill",
    "text_size",
    "width_of",
]

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_FILLS = {
    ActionKind.F: (0x00, 0x72, 0xB2),
    ActionKind.B: (0xE6, 0x9F, 0x00),
    ActionKind.I: (0xD5, 0x5E, 0x00),
    ActionKind.W: (0x00, 0x9E, 0x73),
}
LABELS = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "backward, input",
    ActionKind.W: "backward, weights",
}
# How much white is in the colour of a rank's first, second, ... stage.
_WHITE = (0.0, 0.5, 0.72, 0.84)

_ORDER = tuple(_FILLS)

_TEXT_SIZES = (11.0, 9.5, 8.0)
_HAIR = 0.8  # pixels of ground between neighbours of one colour
_ALIKE = 0.12  # columns whose shares differ by no more are drawn as one


Colour = tuple[ActionKind, int]
"""A kind of action, on the first, second, ... stage of a rank: each has a colour of its own."""


def fill(kind: ActionKind, chunk: int) -> str:
    """Return the colour of an action on the `chunk`-th of its rank's stages."""
    white = _WHITE[min(chunk, len(_WHITE) - 1)]
    red, green, blue = (round(part + white * (255 - part)) for part in _FILLS[kind])
    return f"#{red:02x}{green:02x}{blue:02x}"


@dataclass(frozen=True, slots=True)
class Bar:
    """A computation of a rank.

    Attributes:
        action: What is computed.
        chunk: On which of the rank's stages, counted from 0.
        start_s: When it starts.
        end_s: When it ends.
    """

    action: Action
    chunk: int
    start_s: float
    end_s: float

    @property
    def colour(self) -> Colour:
        """The key of its colour."""
        return self.action.kind, self.chunk


@dataclass(frozen=True, slots=True)
class Row:
    """Where a rank's bars go.

    Attributes:
        x: The pixel of a time.
        y: The upper edge.
        height: In pixels.
        text: Size of the numbers in boxes of a colour; none in others.
    """

    x: Callable[[float], float]
    y: float
    height: float
    text: Mapping[Colour, float] = field(default_factory=dict)


def width_of(number: str, size: float) -> float:
    """Return how wide a box must be for the number in it."""
    return svg.text_width(number, size) + 1.0


def text_size(number: str, width: float, height: float) -> float:
    """Return the largest size of text with which `number` fits a box; 0 if none does."""
    fits = (size for size in _TEXT_SIZES if width_of(number, size) <= width and size + 2 <= height)
    return next(fits, 0.0)


def draw_boxes(bars: Iterable[Bar], row: Row, *, tips: bool) -> list[str]:
    """Draw a box for each bar, with the number of its microbatch where it fits.

    Args:
        bars: What to draw, each once.
        row: Where.
        tips: Whether pointing at a box shows its action and times, which takes ten times the bytes.
    """
    parts: list[str] = []
    strokes: dict[str, list[str]] = {}
    numbers: list[str] = []
    for bar in bars:
        x, width = row.x(bar.start_s), row.x(bar.end_s) - row.x(bar.start_s)
        shown = width - min(_HAIR, 0.2 * width)
        if tips:
            parts.append(_box(bar, row, x, shown))
        else:
            stroke = f"M{x:.1f} 0h{shown:.1f}"
            strokes.setdefault(fill(*bar.colour), []).append(stroke)
        number = str(bar.action.microbatch)
        size = row.text.get(bar.colour, 0.0)
        if size and width_of(number, size) <= width:
            middle, baseline = x + shown / 2, row.y + row.height / 2 + 0.36 * size
            ink = svg.INK if bar.chunk > 0 or bar.action.kind is ActionKind.B else "#ffffff"
            numbers.append(svg.text(middle, baseline, number, size=size, anchor="middle", fill=ink))
    for colour, one in strokes.items():
        parts.append(
            f'<path transform="translate(0 {svg.number(row.y + row.height / 2)})" '
            f'stroke="{colour}" stroke-width="{svg.number(row.height)}" d="{"".join(one)}"/>'
        )
    return parts + numbers


def _box(bar: Bar, row: Row, x: float, width: float) -> str:
    took, start = svg.duration(bar.end_s - bar.start_s), svg.duration(bar.start_s)
    return (
        f'<rect class="{bar.action.kind}" x="{svg.number(x)}" y="{svg.number(row.y)}" '
        f'width="{svg.number(width)}" height="{svg.number(row.height)}" rx="1.5" '
        f'fill="{fill(*bar.colour)}">'
        f"<title>{bar.action}: {took} from {start}</title></rect>"
    )


def draw_columns(bars: Iterable[Bar], row: Row, *, column_s: float, num_columns: int) -> list[str]:
    """Draw columns of time, filled up to the share of it in which the rank computes.

    Within a column, the colours have the shares of their kinds of computations. Neighbours that
    are alike are drawn as one, with their mean.

    Args:
        bars: What to draw.
        row: Where.
        column_s: How much time a column stands for.
        num_columns: How many there are.
    """
    shares: dict[Colour, list[float]] = {}
    for bar in bars:
        mine = shares.setdefault(bar.colour, [0.0] * num_columns)
        column, start_s = int(bar.start_s / column_s), bar.start_s
        while start_s < bar.end_s and column < num_columns:
            end_s = min(bar.end_s, (column + 1) * column_s)
            mine[column] += (end_s - start_s) / column_s
            start_s, column = end_s, column + 1
    keys = sorted(shares, key=lambda key: (_ORDER.index(key[0]), key[1]))
    runs = _runs(list(zip(*(shares[key] for key in keys), strict=True)))
    # Areas from the bottom up to a sum of shares: the highest first, to lie below the others.
    areas: list[str] = []
    for number, key in enumerate(keys, start=1):
        roofs = [(column, sum(means[:number])) for column, means in runs]
        colour = fill(*key)
        areas.append(f'<path fill="{colour}" d="{_area(roofs, row, column_s, num_columns)}"/>')
    return areas[::-1]


def _runs(columns: list[tuple[float, ...]]) -> list[tuple[int, list[float]]]:
    """Join neighbours that are alike: the first column of each run, and the run's mean shares.

    Means keep the areas as they are. What is empty joins only what is empty.
    """
    runs: list[tuple[int, list[float]]] = []
    length = 0
    for number, shares in enumerate(columns):
        if runs:
            means = runs[-1][1]
            alike = all(abs(a - b) <= _ALIKE for a, b in zip(shares, means, strict=True))
            if alike and any(shares) == any(means):
                length += 1
                for place, share in enumerate(shares):
                    means[place] += (share - means[place]) / length
                continue
        runs.append((number, list(shares)))
        length = 1
    return runs


def _area(roofs: list[tuple[int, float]], row: Row, column_s: float, num_columns: int) -> str:
    """Outline an area with a flat roof from each given column on."""
    bottom = row.y + row.height
    path = [f"M{svg.number(row.x(0.0))} {svg.number(bottom)}"]
    for column, share in roofs:
        height = svg.number(bottom - row.height * min(share, 1.0))
        path.append(f"H{svg.number(row.x(column * column_s))}V{height}")
    end = svg.number(row.x(num_columns * column_s))
    return "".join([*path, f"H{end}V{svg.number(bottom)}z"])
