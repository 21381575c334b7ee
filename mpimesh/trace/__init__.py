"""Events and their times: the ring that keeps them, and the pictures made of them."""

from __future__ import annotations

from mpimesh.trace.svg import curve_svg
from mpimesh.trace.timeline import chrome_trace, timeline_svg, write_chrome_trace
from mpimesh.trace.tracer import (
    CATEGORIES,
    NULL_TRACER,
    Category,
    Event,
    Span,
    Tracer,
    events_from_json,
    events_to_json,
)

__all__ = [
    "CATEGORIES",
    "NULL_TRACER",
    "Category",
    "Event",
    "Span",
    "Tracer",
    "chrome_trace",
    "curve_svg",
    "events_from_json",
    "events_to_json",
    "timeline_svg",
    "write_chrome_trace",
]
