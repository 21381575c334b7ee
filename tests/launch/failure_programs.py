"""Programs in which one rank goes a way of its own while the others wait for it."""

from __future__ import annotations

import textwrap

__all__ = ["PRELUDE", "WAITS", "program"]

PRELUDE = """
import os, signal, sys, threading, time
import numpy as np
from mpi4py import MPI
import mpimesh as mm

RANK = MPI.COMM_WORLD.rank
"""


def notices_after(seconds: float) -> str:
    """Return lines of a program after which a rank says so soon that it waits."""
    return f"import mpimesh.runtime.watchdog\nmpimesh.runtime.watchdog._NOTICE_S = {seconds}\n"


WAITS = {
    "all_reduce": "mesh.group().all_reduce(np.ones(3)).resolve()",
    "recv": "mesh.group().recv(1).resolve()",
    "close": "mesh.close()",
    "new_mesh": "mm.DeviceMesh({'all': -1})",
    "raw_mpi": "MPI.COMM_WORLD.Barrier()",
    "compute": "time.sleep(100)",
}
"""The calls of the other ranks for as long as it takes."""

_PROGRAM = """
mesh = mm.DeviceMesh("dp=-1")
mesh.group().all_reduce(np.ones(3)).resolve()
if RANK == 1:
    print("rank 1 goes at", time.time(), flush=True)
    {way}
else:
    {wait}
"""

_PROGRAM_WITHIN = """
with mm.DeviceMesh("dp=-1") as mesh:
    mesh.group().all_reduce(np.ones(3)).resolve()
    if RANK == 1:
        print("rank 1 goes at", time.time(), flush=True)
        {way}
    else:
        {wait}
"""


def program(way: str, wait: str, *, within: bool = False) -> str:
    """Rank 1 takes `way`, the others wait; the mesh is a context manager if `within`."""
    text = _PROGRAM_WITHIN if within else _PROGRAM
    indent = " " * (8 if within else 4)
    wait = textwrap.indent(textwrap.dedent(WAITS.get(wait, wait)), indent).strip()
    return PRELUDE + text.format(way=way, wait=wait)
