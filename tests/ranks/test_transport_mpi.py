"""MPI on host memory: the transport's contract."""

from __future__ import annotations

import pytest

from tests.contract.transports import CHECKS


@pytest.mark.parametrize("limit", [0, 7])
@pytest.mark.parametrize("name", CHECKS)
def test_contract(name, limit, comm):
    from mpimesh.transport.mpi import MPICommunicator

    communicator = MPICommunicator.duplicate(comm, limit=limit)
    CHECKS[name](communicator)
    communicator.free()
