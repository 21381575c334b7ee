"""MPI on host memory: the transport's contract."""

from __future__ import annotations

import numpy as np
import pytest

from mpimesh.comm.engine import poll
from tests.contract.communicators import CHECKS


@pytest.mark.thin(2)
@pytest.mark.parametrize("limit", [0, 7])
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


def test_what_a_start_raises_is_its_own(comm):
    """But for what comes from a signal handler: then it is started again."""
    from mpimesh.comm.mpi import CollectiveOrder

    order, first, interrupts = CollectiveOrder(), Fake(False), [KeyboardInterrupt]

    def interrupted():
        if interrupts:
            raise interrupts.pop()
        return Fake(True)

    starts: list[str] = []

    def after():
        starts.append("after")
        return Fake(True)

    def handled():
        # As a signal handler that looks for something else, just before the start.
        assert not order.add(after).test()
        starts.append("handled")
        return Fake(True)

    def refused():
        raise ValueError("refused")

    alone = order.add(lambda: first, alone=True)
    requests = [order.add(start) for start in (interrupted, refused, handled)]
    assert not any(request.test() for request in (alone, *requests))
    first.done = True
    with pytest.raises(KeyboardInterrupt):
        alone.test()
    assert alone.test()
    assert requests[0].test()
    with pytest.raises(ValueError, match="refused"):
        requests[1].test()
    assert requests[2].test()
    assert starts == ["handled", "after"]
    assert not order.busy
