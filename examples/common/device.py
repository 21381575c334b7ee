"""The choice between NumPy and CuPy: an option of a program, and one answer for all ranks."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import numpy as np

import mpimesh as mm
from common.program import ProgramError

CHOICES = ("cpu", "gpu", "auto")


def array_library(mesh: mm.DeviceMesh, choice: str) -> tuple[ModuleType, str]:
    """Return what the ranks compute with, the same on all of them, and a line that says so.

    Args:
        mesh: The ranks.
        choice: "cpu" for NumPy, "gpu" for CuPy, "auto" for CuPy where every rank has a GPU.

    Raises:
        ProgramError: On every rank, if there is no GPU or no CuPy, and it is asked for.
    """
    missing = ""
    if any(str(device.backend) != "cuda" for device in mesh.all_devices()):
        missing = "not every rank has a GPU"
    elif find_spec("cupy") is None:
        missing = "CuPy is not installed: pip install cupy-cuda13x, or cupy-cuda12x"
    if choice == "gpu" and missing:
        raise ProgramError(f"--device gpu: {missing}")
    if choice == "cpu" or missing:
        return np, f"computing with NumPy on CPUs{f' ({missing})' if choice == 'auto' else ''}"
    xp = import_module("cupy")
    device = mesh.use_device()  # CuPy is new here: this rank's GPU becomes its current one
    return xp, f"computing with CuPy on GPUs, such as {device.name}"
