"""The run of an example on all ranks, and its refusals: once, in one line."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

import mpimesh as mm
from mpimesh.errors import LaunchError, MpimeshError, StoreError, WorldSizeError

WRONG = 2
"""The exit code where the command line asks for what cannot be done."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""

Result = TypeVar("Result")


class ProgramError(MpimeshError):
    """A request that cannot be met. Raised on every rank, with the same text."""

    agreed = True


def run_program(
    name: str, program: Callable[..., int | None], options: Namespace, *rest: Any
) -> int:
    """Run `program` on the ranks of mpiexec, or on virtual ones; return the exit code.

    Args:
        name: The name of the script.
        program: Called on each rank with `options` and `rest`; returns the exit code, None for 0.
        options: The command line; ``options.virtual`` says how many threads are ranks, if any.
        rest: More arguments.
    """
    try:
        if options.virtual:
            return mm.run_virtual(options.virtual, program, options, *rest)[0] or 0
        return program(options, *rest) or 0
    except (WorldSizeError, LaunchError, ProgramError, StoreError) as error:
        # All ranks raise it: one of them tells.
        if mm.runtime.Launch.detect().rank == 0:
            print(f"{name}: error: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        if mm.runtime.Launch.detect().size > 1:
            raise  # the other ranks are to end, too: the mesh sees to that
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def on_all_ranks(mesh: mm.DeviceMesh, action: Callable[[], Result], what: str) -> Result:
    """Collective: return what `action` gives on this rank, if it fails on none.

    Args:
        mesh: The ranks.
        action: Must not be collective: a rank on which it fails would be missed.
        what: What it does, such as "read FILE".

    Raises:
        ProgramError: On every rank, with the reason of the first on which it failed.
    """
    problem = b""
    try:
        result = action()
    except Exception as error:  # a damaged file may raise anything, and the other ranks wait
        reason = error.strerror if isinstance(error, OSError) else None
        problem = f"cannot {what}: {reason or error} (rank {mesh.rank})".encode()
    group = mesh.group()
    lengths = group.all_gather(np.array([len(problem)])).resolve()
    failed = np.flatnonzero(lengths)
    if failed.size:
        mine = np.frombuffer(problem, np.uint8) if mesh.rank == failed[0] else None
        # root=None: whoever has an array is the root, and the others need not know its shape.
        raise ProgramError(group.broadcast(mine, root=None).resolve().tobytes().decode())
    return result
