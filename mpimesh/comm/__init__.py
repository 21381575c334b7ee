"""Movers of bytes: MPI on host memory, or threads of one process.

`mpimesh.comm.mpi` is not imported here, because importing it starts MPI.
"""

from mpimesh.comm.base import Communicator
from mpimesh.comm.engine import Moved, ProgressEngine, StagedRequest, Steps, run_steps
from mpimesh.comm.requests import MAX_USER_TAG, WHOLE_MESSAGE_BYTES, RecvRequest, Request
from mpimesh.comm.virtual import VirtualCommunicator, VirtualWorld, virtual_communicators

__all__ = [
    "MAX_USER_TAG",
    "WHOLE_MESSAGE_BYTES",
    "Communicator",
    "Moved",
    "ProgressEngine",
    "RecvRequest",
    "Request",
    "StagedRequest",
    "Steps",
    "VirtualCommunicator",
    "VirtualWorld",
    "run_steps",
    "virtual_communicators",
]
