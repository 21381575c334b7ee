"""Checkpoints and arrays in files: written by those who have them, read in any layout."""

from __future__ import annotations

__all__: list[str] = []
