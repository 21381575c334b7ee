"""Stretches of flat memory, and what two of them share."""

from __future__ import annotations

__all__ = ["Span", "overlap"]

Span = tuple[int, int]
"""Elements: the first, and the one after the last."""


def overlap(one: Span, other: Span) -> Span:
    """Return the elements of `one` that are in `other`, too; an empty span in `one` if none is."""
    start = min(max(one[0], other[0]), one[1])
    return start, max(start, min(one[1], other[1]))
