"""Needs of a check beside ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["needs_checks"]


def needs_checks(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Mark a function that is about what ``MPIMESH_CHECKS`` finds."""
    check.needs_checks = True  # type: ignore[attr-defined]
    return check
