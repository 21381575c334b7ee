"""SVG by hand: the parts that pictures share, ticks at round values, and curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from mpimesh.arguments import size_text
from mpimesh.errors import TraceError

__all__ = [
    "BACKGROUND",
    "FRAME",
    "GRID",
    "INK",
    "MUTED",
    "curve_svg",
    "curves_svg",
    "document",
    "duration",
    "line",
    "nice_ticks",
    "number",
    "plain",
    "rect",
    "smooth",
    "text",
    "text_width",
    "tick_labels",
    "time_axis",
    "time_unit",
]

# A picture brings its own light background, so it reads the same on a dark page.
BACKGROUND = "#ffffff"
FRAME = "#d0d7de"
GRID = "#dde2e8"
INK = "#1f2328"
MUTED = "#59636e"

# Below are those that XML 1.0 cannot hold, not even escaped.
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})
_ESCAPES |= dict.fromkeys([*range(9), 11, 12, *range(14, 32)], "\ufffd")
_ESCAPES |= dict.fromkeys([*range(0xD800, 0xE000), 0xFFFE, 0xFFFF], "\ufffd")


def plain(value: str) -> str:
    """Escape `value` for use inside an element or an attribute."""
    return value.translate(_ESCAPES)


def number(value: float) -> str:
    """Write a coordinate: hundredths of a pixel, no more digits than needed."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def text(
    x: float,
    y: float,
    content: str,
    *,
    size: float = 12,
    anchor: str = "start",
    fill: str = INK,
    weight: str = "normal",
) -> str:
    """Return a text element whose baseline is at `y`."""
    bold = "" if weight == "normal" else f' font-weight="{weight}"'
    aligned = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return (
        f'<text x="{number(x)}" y="{number(y)}" font-size="{number(size)}" fill="{fill}"'
        f"{aligned}{bold}>{plain(content)}</text>"
    )


def text_width(content: str, size: float) -> float:
    """Estimate the width of `content` in pixels; a little wide, so that text stays inside."""
    return 0.62 * size * len(content)


def line(x1: float, y1: float, x2: float, y2: float, *, stroke: str = GRID) -> str:
    """Return a thin line."""
    return (
        f'<line x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}" '
        f'stroke="{stroke}"/>'
    )


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    *,
    kind: str = "",
    stroke: str = "",
    radius: float = 0.0,
    tip: str = "",
) -> str:
    """Return a box of the class `kind`, which shows `tip` where one points at it."""
    described = f' class="{kind}"' if kind else ""
    rounded = f' rx="{number(radius)}"' if radius else ""
    framed = f' stroke="{stroke}"' if stroke else ""
    inside = f"><title>{plain(tip)}</title></rect>" if tip else "/>"
    return (
        f'<rect{described} x="{number(x)}" y="{number(y)}" width="{number(width)}" '
        f'height="{number(height)}"{rounded} fill="{fill}"{framed}{inside}'
    )


def document(width: float, height: float, title: str, body: list[str]) -> str:
    """Return a whole SVG file with a background."""
    size = f'width="{number(width)}" height="{number(height)}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'viewBox="0 0 {number(width)} {number(height)}" role="img" '
            'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, '
            'DejaVu Sans, sans-serif">',
            f"<title>{plain(title)}</title>",
            f'<rect x="0.5" y="0.5" width="{number(width - 1)}" height="{number(height - 1)}" '
            f'rx="6" fill="{BACKGROUND}" stroke="{FRAME}"/>',
            *body,
            "</svg>\n",
        ]
    )


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """Return round values in [`low`, `high`]: multiples of 1, 2 or 5 times a power of ten.

    Args:
        low: Smallest value.
        high: Largest value, greater than `low`.
        most: Most ticks, at least 2.
    """
    raw = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def tick_labels(ticks: list[float]) -> list[str]:
    """Write ticks with as many decimals as their distance needs, or with an exponent."""
    largest = max(map(abs, ticks), default=0.0)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else largest or 1.0
    decimals = max(0, -math.floor(math.log10(abs(step)) + 1e-9))
    if largest >= 1e6 or decimals > 5:
        return [f"{tick:.6g}" for tick in ticks]
    return [f"{tick:,.{decimals}f}" if tick else "0" for tick in ticks]


def time_unit(span_s: float) -> tuple[float, str]:
    """Return how many units make a second, and the unit's name, for times up to `span_s`."""
    if span_s >= 10:
        return 1.0, "s"
    return (1e3, "ms") if span_s >= 1e-3 else (1e6, "µs")


def time_axis(left: float, right: float, top: float, bottom: float, span_s: float) -> list[str]:
    """Draw an axis of `span_s` seconds from 0, with a line at each tick from `top` to `bottom`."""
    factor, unit = time_unit(span_s)
    ticks = nice_ticks(0.0, span_s * factor, max(2, int((right - left) / 90)))
    parts: list[str] = []
    for tick, label in zip(ticks, tick_labels(ticks), strict=True):
        x = left + tick / (factor * span_s) * (right - left)
        parts.append(line(x, top - 4, x, bottom + 5))
        parts.append(text(x, bottom + 20, label, size=11, anchor="middle", fill=MUTED))
    middle, name = (left + right) / 2, f"time in {unit}"
    parts.append(text(middle, bottom + 38, name, size=11, anchor="middle", fill=MUTED))
    return parts


def duration(seconds: float) -> str:
    """Write a time with four digits and its unit."""
    factor, unit = time_unit(seconds)
    return f"{seconds * factor:.4g} {unit}"


# -- curves ---------------------------------------------------------------------------------------

_RAW = "#9cc4e4"
_SMOOTH = "#0072b2"
_Point = tuple[float, float]


def curve_svg(
    values: Sequence[float],
    *,
    title: str,
    x_label: str = "step",
    y_label: str = "loss",
    width: int = 760,
    height: int = 400,
) -> str:
    """Draw `values` over their place: a thin line, and a bold one of running means.

    The bold line is left out for fewer than 20 values. A value that is not finite leaves a gap.

    Args:
        values: The numbers, any count of them.
        title: Stands above the picture.
        x_label: Stands below the x axis, which counts from 1.
        y_label: Stands at the y axis.
        width: Width in pixels, at least 200.
        height: Height in pixels, at least 150.

    Returns:
        The text of an SVG file that needs no other file.

    Raises:
        TraceError: If the picture would be too small.
    """
    if width < 200 or height < 150:
        raise TraceError(f"a curve is at least 200 x 150 pixels, got {width} x {height}")
    finite = [value for value in values if math.isfinite(value)]
    low, high = _range(finite)
    y_ticks = nice_ticks(low, high, max(2, (height - 120) // 36))
    y_names = tick_labels(y_ticks)
    left = 46 + max(text_width(name, 11) for name in y_names)
    right, top, bottom = width - 30.0, 74.0, height - 58.0
    last = max(2, len(values))

    def to_x(step: float) -> float:
        return left + (step - 1) / (last - 1) * (right - left)

    def to_y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - top)

    body = [
        text(24, 34, title, size=17, weight="600"),
        text(24, 54, _summary(values, finite), size=12.5, fill=MUTED),
    ]
    for tick, name in zip(y_ticks, y_names, strict=True):
        body.append(line(left, to_y(tick), right, to_y(tick)))
        body.append(text(left - 8, to_y(tick) + 4, name, size=11, anchor="end", fill=MUTED))
    body += _x_axis(last, to_x, right - left, bottom)
    middle = (left + right) / 2
    body.append(text(middle, height - 18, x_label, size=12, anchor="middle", fill=MUTED))
    body.append(
        f'<g transform="translate(22 {number((top + bottom) / 2)}) rotate(-90)">'
        + text(0, 0, y_label, size=12, anchor="middle", fill=MUTED)
        + "</g>"
    )
    body += _lines(values, to_x, to_y, right - left)
    if not finite:
        body.append(text(middle, (top + bottom) / 2, "no values", anchor="middle", fill=MUTED))
    return document(width, height, title, body)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return running means over `window` neighbours, centred, so that nothing is shifted.

    At the ends the window is cut to what there is on both sides alike. Values that are not
    finite are left out of the means, and stay as they are in their own place.

    Args:
        values: The numbers.
        window: Odd count of values in one mean, at least 1.
    """
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    means = []
    for place, value in enumerate(values):
        reach = min(window // 2, place, len(values) - 1 - place)
        first, end = place - reach, place + reach + 1
        mean = (sums[end] - sums[first]) / max(1, counts[end] - counts[first])
        means.append(mean if math.isfinite(value) else value)
    return means


def _range(finite: list[float]) -> tuple[float, float]:
    """The values at the bottom and the top: all of them, and 0 where it is near."""
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if low == high:
        margin = abs(low) / 2 or 1.0
        return low - margin, high + margin
    if 0 <= low < 0.4 * high:
        low = 0.0
    margin = 0.04 * (high - low)
    return (0.0 if low == 0 else low - margin), high + margin


def _summary(values: Sequence[float], finite: list[float]) -> str:
    if not finite:
        return "nothing was recorded"
    count = "1 value" if len(values) == 1 else f"{len(values):,} values"
    return f"{count} · first {finite[0]:.4g} · lowest {min(finite):.4g} · last {finite[-1]:.4g}"


def _x_axis(last: int, to_x: Callable[[float], float], width: float, bottom: float) -> list[str]:
    ticks = [round(tick) for tick in nice_ticks(0, last, max(2, int(width / 80)))]
    # Counting starts at 1, which is no round number, so it takes the place of 0.
    ticks = list(dict.fromkeys(max(1, tick) for tick in ticks))
    parts = [line(to_x(1), bottom, to_x(last), bottom, stroke=MUTED)]
    for tick in ticks:
        parts.append(line(to_x(tick), bottom, to_x(tick), bottom + 4, stroke=MUTED))
        parts.append(
            text(to_x(tick), bottom + 18, f"{tick:,}", size=11, anchor="middle", fill=MUTED)
        )
    return parts


def _lines(
    values: Sequence[float],
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
    width: float,
) -> list[str]:
    smoothed = len(values) >= 20
    parts = [
        _polylines(
            values, to_x, to_y, width, stroke=_RAW if smoothed else _SMOOTH, bold=not smoothed
        )
    ]
    if smoothed:
        window = max(3, len(values) // 30) | 1
        parts.append(
            _polylines(smooth(values, window), to_x, to_y, width, stroke=_SMOOTH, bold=True)
        )
    return parts


def _polylines(
    values: Sequence[float],
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
    width: float,
    *,
    stroke: str,
    bold: bool,
) -> str:
    """One path with a piece for each stretch of finite values; a lone value is a dot."""
    pieces: list[str] = []
    stretch: list[_Point] = []
    for step, value in enumerate([*values, math.nan], start=1):
        if math.isfinite(value):
            stretch.append((step, value))
        elif stretch:
            thin = _thin_out(stretch, max(1, math.ceil(len(values) / width)))
            points = [f"{number(to_x(x))} {number(to_y(y))}" for x, y in thin]
            # A line back to its own start is a dot, with round ends.
            pieces.append("M" + "L".join(points if len(points) > 1 else points * 2))
            stretch = []
    return (
        f'<path class="{"bold" if bold else "raw"}" d="{"".join(pieces)}" fill="none" '
        f'stroke="{stroke}" stroke-width="{2.2 if bold else 1}" stroke-linecap="round" '
        'stroke-linejoin="round"/>'
    )


def _thin_out(points: list[_Point], per_column: int) -> list[_Point]:
    """Keep the lowest and the highest of each pixel column: what the line would show."""
    if per_column == 1:
        return points
    kept: list[_Point] = []
    for first in range(0, len(points), per_column):
        column = points[first : first + per_column]
        low = min(column, key=lambda point: point[1])
        high = max(column, key=lambda point: point[1])
        kept += sorted({low, high})
    return kept


# -- several curves over sizes --------------------------------------------------------------------

# Okabe and Ito's palette, which colour-blind readers can tell apart; the first is for comparison.
_COLOURS = ("#1f2328", "#d55e00", "#e69f00", "#56b4e9", "#0072b2", "#009e73", "#cc79a7")
_PANEL_WIDTH, _PANEL_HEIGHT, _COLUMNS = 380.0, 290.0, 3


def curves_svg(
    panels: Mapping[str, Mapping[str, Sequence[_Point]]], *, title: str, subtitle: str
) -> str:
    """Draw seconds over bytes, both by powers: a panel for each collective, a curve for each way.

    Args:
        panels: By the title of the panel, the curves by name: bytes and seconds, all above 0.
        title: Stands above the picture.
        subtitle: Stands below the title.

    Returns:
        The text of an SVG file that needs no other file.
    """
    columns = min(_COLUMNS, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    points = [point for curves in panels.values() for curve in curves.values() for point in curve]
    width, height = columns * _PANEL_WIDTH + 24, rows * _PANEL_HEIGHT + 110
    body = [
        text(24, 34, title, size=17, weight="600"),
        text(24, 54, subtitle, size=12.5, fill=MUTED),
        *_curve_names(names),
    ]
    if not points:
        body.append(text(width / 2, height / 2, "no values", anchor="middle", fill=MUTED))
        return document(width, height, title, body)
    xs, ys = zip(*points, strict=True)
    low_x, high_x = math.log2(min(xs)), max(math.log2(max(xs)), math.log2(min(xs)) + 1)
    low_y = math.floor(math.log10(min(ys)))
    high_y = max(math.ceil(math.log10(max(ys))), low_y + 1)
    for place, (name, curves) in enumerate(panels.items()):
        left = place % columns * _PANEL_WIDTH + 76
        top = place // columns * _PANEL_HEIGHT + 128
        right, bottom = left + _PANEL_WIDTH - 84, top + _PANEL_HEIGHT - 74

        def to_x(nbytes: float, left: float = left, right: float = right) -> float:
            return left + (math.log2(nbytes) - low_x) / (high_x - low_x) * (right - left)

        def to_y(seconds: float, top: float = top, bottom: float = bottom) -> float:
            return bottom - (math.log10(seconds) - low_y) / (high_y - low_y) * (bottom - top)

        body.append(text(left, top - 12, name, size=13, weight="600"))
        for power in range(low_y, high_y + 1):
            y = to_y(10.0**power)
            body.append(line(left, y, right, y))
            label = duration(10.0**power)
            body.append(text(left - 8, y + 4, label, size=11, anchor="end", fill=MUTED))
        for power in range(math.ceil(low_x), math.floor(high_x) + 1, 6):
            x = to_x(2.0**power)
            body.append(line(x, top, x, bottom + 4))
            label = size_text(2**power)
            body.append(text(x, bottom + 18, label, size=11, anchor="middle", fill=MUTED))
        for curve_name, curve in curves.items():
            colour = _COLOURS[names.index(curve_name) % len(_COLOURS)]
            path = "L".join(f"{number(to_x(x))} {number(to_y(y))}" for x, y in curve)
            dashes = ' stroke-dasharray="5 4"' if curve_name == names[0] else ""
            body.append(
                f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.8"'
                f'{dashes} stroke-linejoin="round"><title>{plain(curve_name)}</title></path>'
            )
    return document(width, height, title, body)


def _curve_names(names: Sequence[str]) -> list[str]:
    parts, x = [], 24.0
    for place, name in enumerate(names):
        colour = _COLOURS[place % len(_COLOURS)]
        dashes = ' stroke-dasharray="5 4"' if place == 0 else ""
        parts.append(
            f'<line x1="{number(x)}" y1="80" x2="{number(x + 22)}" y2="80" stroke="{colour}" '
            f'stroke-width="2.2"{dashes}/>'
        )
        parts.append(text(x + 28, 84, name, size=12))
        x += 28 + text_width(name, 12) + 20
    return parts
