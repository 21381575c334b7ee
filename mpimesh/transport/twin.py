"""A second communicator of the same ranks, made without waiting.

Device memory is moved by operations of several steps, whose host messages and collectives come at
other moments on each rank. They must not meet the collectives that the ranks start meanwhile on
the communicator itself, so they have one of their own.
"""

from __future__ import annotations

from mpimesh.errors import TransportError
from mpimesh.transport.base import Communicator
from mpimesh.transport.engine import Steps
from mpimesh.transport.virtual import VirtualCommunicator

__all__ = ["twin_steps"]


def twin_steps(communicator: Communicator) -> Steps:
    """Collective: make a communicator of the same ranks; the steps' value is the communicator.

    The first step starts it, so ranks take that one in the order of their collectives.
    """
    twin: Communicator | None
    if isinstance(communicator, VirtualCommunicator):
        split, part = communicator.start_split(0, communicator.rank)
        yield split
        twin = part()
    else:
        twin = yield from _duplicate(communicator)
    if twin is not None:
        communicator.adopt(twin)
    return twin


def _duplicate(communicator: Communicator) -> Steps:
    # Importing it starts MPI, which virtual ranks do without.
    from mpimesh.transport.mpi import MPICommunicator

    if not isinstance(communicator, MPICommunicator):
        raise TransportError(f"device memory cannot be moved by a {communicator.kind} communicator")
    duplication, twin = communicator.start_twin()
    yield duplication
    return twin()
