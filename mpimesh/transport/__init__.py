"""Movers of bytes: MPI on host memory, or threads of one process.

`mpimesh.transport.mpi` is not imported here, because importing it starts MPI.
"""

from mpimesh.transport.base import (
    MAX_USER_TAG,
    WHOLE_MESSAGE_BYTES,
    Communicator,
    RecvRequest,
    Request,
)
from mpimesh.transport.engine import Engine, Moved, StagedRequest, Steps, run_steps
from mpimesh.transport.virtual import VirtualCommunicator, VirtualWorld, virtual_communicators

__all__ = [
    "MAX_USER_TAG",
    "WHOLE_MESSAGE_BYTES",
    "Communicator",
    "Engine",
    "Moved",
    "RecvRequest",
    "Request",
    "StagedRequest",
    "Steps",
    "VirtualCommunicator",
    "VirtualWorld",
    "run_steps",
    "virtual_communicators",
]
