"""Stop on a signal, all ranks after the same step.

A batch system warns a job before its time is up, by SIGUSR1, or ends it by SIGTERM. It may
tell one rank, or all of them at different moments. The handler only takes note; before each step
the ranks ask each other whether anyone was told.
"""

from __future__ import annotations

import signal
from types import FrameType

import numpy as np

import mpimesh as mm

STOPPED = 85
"""Says: saved, start me again. See slurm/job.sbatch."""


class StopSignal:
    """Remembers that this process was told to stop.

    Args:
        listen: Whether to handle the signals, which only the main thread can ask for. If not,
            they end the process as ever.
    """

    def __init__(self, *, listen: bool) -> None:
        self._told = False
        if listen:
            for number in (signal.SIGUSR1, signal.SIGTERM):
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._told = True

    def ask(self, mesh: mm.DeviceMesh) -> mm.CollectiveTensor:
        """Collective: start to ask all ranks; the result is above 0 if any was told to stop."""
        return mesh.group().all_reduce(np.array(int(self._told)), op="max", label="stop?")
