"""Checkpoints and arrays in files: written by those who have them, read in any layout."""

from __future__ import annotations

from mpimesh.store.checkpoints import Checkpoints, DamagedCheckpointWarning
from mpimesh.store.loading import load
from mpimesh.store.parts import Parts, Saved, Storable
from mpimesh.store.saving import save

__all__ = ["Checkpoints", "DamagedCheckpointWarning", "Parts", "Saved", "Storable", "load", "save"]
