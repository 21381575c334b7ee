"""Checkpoints and arrays in files: written by those who have them, read in any layout."""

from __future__ import annotations

from mpimesh.store.arrays import OpenedArray, open_array, save_array

__all__ = ["OpenedArray", "open_array", "save_array"]
