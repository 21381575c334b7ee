"""Checkpoints and arrays in files: written by those who have them, read in any layout."""

from __future__ import annotations

from mpimesh.store.arrays import OpenedArray, open_array, save_array
from mpimesh.store.checkpoints import (
    Checkpoints,
    DamagedCheckpointWarning,
    LeftCheckpointWarning,
)
from mpimesh.store.guard import RunGuard, run_guard
from mpimesh.store.loading import load
from mpimesh.store.parts import Parts, Saved, Storable
from mpimesh.store.saving import save

__all__ = [
    "Checkpoints",
    "DamagedCheckpointWarning",
    "LeftCheckpointWarning",
    "OpenedArray",
    "Parts",
    "RunGuard",
    "Saved",
    "Storable",
    "load",
    "open_array",
    "run_guard",
    "save",
    "save_array",
]
