"""Time of `import mpimesh`, and of its first use, beside `import numpy`, in fresh interpreters."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.measure import FULL, Effort

_PROGRAM = """
import sys, time
start = time.perf_counter()
import {module}
print(time.perf_counter() - start, "mpi4py.MPI" in sys.modules)
"""


def run(effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return a row for each module. Local."""
    programs = ("numpy", "mpimesh", "mpimesh; mpimesh.DeviceMesh")
    seconds: dict[str, list[float]] = {program: [] for program in programs}
    started_mpi = False
    # As installed: with compiled modules, whatever this shell says about writing them.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    for number in range(effort.rounds + 1):
        for module, times in seconds.items():
            command = [sys.executable, "-c", _PROGRAM.format(module=module)]
            printed = subprocess.run(
                command, check=True, capture_output=True, text=True, env=environment
            ).stdout
            spent, mpi = printed.split()
            started_mpi |= mpi == "True"
            if number:  # the first round compiles
                times.append(float(spent))
    first = seconds["numpy"]
    return [
        {
            "what": f"import {module}" + (", starts MPI" if started_mpi else ", without MPI"),
            "us": statistics.median(times) * 1e6,
            "ratio": statistics.median(a / b for a, b in zip(times, first, strict=True)),
            "over_us": statistics.median(a - b for a, b in zip(times, first, strict=True)) * 1e6,
        }
        for module, times in seconds.items()
    ]
