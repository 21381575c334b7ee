"""MPI on host memory: the transport's contract."""

from __future__ import annotations

import numpy as np
import pytest

from mpimesh.comm.engine import poll
from mpimesh.errors import TransportError
from tests.contract.communicators import CHECKS
from tests.helpers.depth import deep


@pytest.mark.parametrize("limit", [*deep(0), 7])
@pytest.mark.parametrize("name", CHECKS)
def test_contract(name, limit, comm):
    from mpimesh.comm.mpi import MPICommunicator

    communicator = MPICommunicator.duplicate(comm, limit=limit)
    CHECKS[name](communicator)
    communicator.free()


def test_collectives_beside_duplications(comm):
    """Also where the ranks give MPI time at different moments."""
    from mpimesh.comm.mpi import MPICommunicator

    communicator = MPICommunicator.duplicate(comm)
    size = communicator.size
    for number in range(40):
        duplicates = [communicator.idup() for _ in range(2)]
        duplications = [next(steps) for steps in duplicates]
        if (communicator.rank + number) % 2:
            for _ in range(number):
                duplications[0].test()
        given = np.full(100, float(communicator.rank + number))
        total = np.array([communicator.rank + number])
        requests = [communicator.broadcast(given, 0), communicator.all_reduce(None, total, "sum")]
        for request in [requests[1], requests[0], *duplications]:
            poll(request.test)
        assert (given == number).all()
        assert total == size * number + size * (size - 1) // 2
        for steps in duplicates:
            with pytest.raises(StopIteration) as stop:
                next(steps)
            stop.value.value.free()
    communicator.free()


class Fake:
    """A request that is done when it is said to be."""

    def __init__(self, done):
        self.done = done

    def test(self):
        return self.done


def test_what_a_queued_start_raises_is_its_own(comm, monkeypatch):
    """But for what comes from a signal handler: then it is started again."""
    from mpimesh.comm import mpi

    communicator = mpi.MPICommunicator.duplicate(comm)
    alone = Fake(False)
    communicator.engine.stage(communicator._order, (request for request in [alone]))
    raised, real = [KeyboardInterrupt(), TransportError("refused")], mpi._begin

    def begin(*call):
        if raised:
            raise raised.pop(0)
        return real(*call)

    monkeypatch.setattr(mpi, "_begin", begin)
    totals = [np.array([communicator.rank + number]) for number in range(2)]
    refused, *requests = [
        communicator.barrier(),
        *(communicator.all_reduce(None, total, "sum") for total in totals),
    ]
    assert not any(request.test() for request in (refused, *requests))
    alone.done = True
    with pytest.raises(KeyboardInterrupt):
        refused.test()
    with pytest.raises(TransportError, match="refused"):
        refused.test()
    for number, (request, total) in enumerate(zip(requests, totals, strict=True)):
        poll(request.test)
        assert total == sum(range(number, comm.size + number))
    assert not communicator.engine.busy(communicator._order)
    communicator.free()
