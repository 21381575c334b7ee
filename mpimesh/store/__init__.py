"""Checkpoints and arrays in files: written by those who have them, read in any layout."""

from mpimesh.store.guard import RunGuard, run_guard

__all__ = ["RunGuard", "run_guard"]
