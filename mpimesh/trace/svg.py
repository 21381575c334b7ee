"""The parts that the pictures share: text and numbers for SVG, ticks at round values."""

from __future__ import annotations

import math
import re

__all__ = [
    "BACKGROUND",
    "FRAME",
    "GRID",
    "INK",
    "MUTED",
    "document",
    "duration",
    "line",
    "nice_ticks",
    "number",
    "plain",
    "text",
    "text_width",
    "tick_labels",
    "time_unit",
]

# A picture brings its own light background, so it reads the same on a dark page.
BACKGROUND = "#ffffff"
FRAME = "#d0d7de"
GRID = "#dde2e8"
INK = "#1f2328"
MUTED = "#59636e"

_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})

# What XML 1.0 cannot hold, not even escaped.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def plain(value: str) -> str:
    """Escape `value` for use inside an element or an attribute."""
    return _NOT_XML.sub("\ufffd", value).translate(_ESCAPES)


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


def duration(seconds: float) -> str:
    """Write a time with four digits and its unit."""
    factor, unit = time_unit(seconds)
    return f"{seconds * factor:.4g} {unit}"
