"""A clean end of the whole job with an exit code that survives."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

from mpimesh.runtime.abort import flush
from mpimesh.runtime.world import current_world

__all__ = ["exit_all"]


def exit_all(exit_code: int) -> NoReturn:
    """End all ranks with `exit_code`, for example to ask the batch system for a requeue.

    Collective over all ranks of the job. An aborted job loses its exit code under some
    launchers (137 under `srun` with MPICH): here the ranks wait for each other, finalize MPI,
    and end with the code that was asked for. Exit functions (:mod:`atexit`) run and the
    standard streams are written out, but nothing is unwound: close meshes and files before.

    On virtual ranks it raises SystemExit.
    """
    if current_world().virtual is not None:
        raise SystemExit(exit_code)
    # Among them the one that waits for the other ranks.
    atexit._run_exitfuncs()
    mpi = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    flush()
    _exit_by_c(exit_code)


def _exit_by_c(exit_code: int) -> NoReturn:
    """End the process by C's ``exit``: after what MPI left to do there, and nothing of Python's.

    `os._exit` would leave that out. MPICH says goodbye to mpiexec in an exit function of C, not
    in `MPI_Finalize`; with one rank gone without it, mpiexec may kill the others and end with
    code 9. `sys.exit` would give the signals back their default actions while it tidies up, and
    `srun -K` sends SIGTERM as soon as the first rank has left.
    """
    import ctypes  # late: nobody else needs it

    # PyDLL keeps the interpreter's lock: no other thread may run Python any more.
    ctypes.PyDLL(None).exit(exit_code)
    os._exit(exit_code)  # not reached; C's exit does not return
