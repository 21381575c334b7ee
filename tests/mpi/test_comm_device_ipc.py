"""Device memory read in place by other processes: a fake GPU whose memory is a file."""

from __future__ import annotations

import sys
import time
from collections import deque

import numpy as np
import pytest

from mpimesh.comm import ProgressEngine, cuda_ipc
from mpimesh.comm.cuda_ipc import CudaIpc
from mpimesh.comm.device_communicator import device_communicator
from tests.devices.alone import Alone
from tests.devices.fake_cuda import address_range
from tests.devices.fake_shared import SharedCupy
from tests.devices.operations import (
    check_all,
    check_all_reduce,
    device,
    finish,
    nonsense,
    numbers,
    same,
)


@pytest.fixture
def communicator(comm, monkeypatch):
    from mpimesh.comm.mpi import MPICommunicator

    cupy = SharedCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cuda_ipc, "address_range", address_range)
    communicator = MPICommunicator.duplicate(comm)
    communicator.engine = ProgressEngine()
    yield communicator
    finish(communicator, communicator.barrier())  # others may still read
    communicator.free()
    cupy.stop()


@pytest.mark.parametrize("shots", [1, 2])
def test_every_operation(communicator, monkeypatch, shots):
    monkeypatch.setattr("mpimesh.comm.cuda_ipc.one_shot", lambda nbytes, size: shots == 1)
    request = communicator.engine.stage("find", CudaIpc.find(communicator))
    finish(communicator, request)
    found, why = request.value
    assert why == ""
    strategy = Alone(communicator, found)
    if shots == 1:
        check_all(strategy, communicator, dtypes=("f4", "c16"), sizes=(0, 50))
    else:
        check_all_reduce(strategy, communicator, 500, "f4")
    opened = sys.modules["cupy"].cuda.runtime.opened
    assert (len(opened) > 0) == (communicator.size > 1)
    strategy.free()


def test_messages_are_handed_over(communicator):
    dev_comm = device_communicator(communicator)
    n, me = communicator.size, communicator.rank
    if n > 1:
        after, before = (me + 1) % n, (me - 1) % n
        for turn in range(3):
            room = nonsense(40, "f8")
            x = device(numbers(me + turn, 40, "f8")) + 0
            finish(communicator, dev_comm.irecv(room, before, 3), dev_comm.isend(x, after, 3))
            same(room, numbers(before + turn, 40, "f8"))
        assert sys.modules["cupy"].cuda.runtime.opened


def test_it_is_the_choice_inside_a_node(communicator):
    dev_comm = device_communicator(communicator)
    x = device(np.full(9, communicator.rank + 1.0))
    finish(communicator, dev_comm.all_reduce(None, x, "sum"))
    same(x, np.full(9, float(sum(range(1, communicator.size + 1)))))
    if communicator.size > 1:
        (route,) = (r for r in dev_comm.algorithms() if r.operation == "all_reduce")
        assert (route.from_bytes, route.algorithm) == (0, "cuda_ipc")


@pytest.mark.nprocs(2)
def test_where_all_streams_share_a_queue_none_is_held_up_by_another_process(
    communicator, monkeypatch
):
    """What rank 1 gives waits, on its device, for what rank 0 computes beside the all-reduce."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cupy, note = sys.modules["cupy"], np.zeros(1)
    dev_comm = device_communicator(communicator)
    finish(communicator, dev_comm.prepare())
    cupy.cuda.clock.one_queue = deque()
    x = device(np.ones(5))
    computed: list[np.ndarray] = []
    if communicator.rank == 0:
        request = dev_comm.all_reduce(None, x, "sum")
        end_s = time.monotonic() + 0.3
        while time.monotonic() < end_s:  # the hosts have met by then
            communicator.engine.advance()
        with cupy.cuda.Stream(non_blocking=True):
            note[:] = (device(np.ones(1)) + 1).get()
        finish(communicator, communicator.isend(note, 1, 0))
    else:
        cupy.cuda.get_current_stream().put(lambda: bool(computed))
        request = dev_comm.all_reduce(None, x, "sum")
        finish(communicator, communicator.irecv(note, 0, 0))
        computed.append(note)
    finish(communicator, request)
    same(x, np.full(5, 2.0))
    assert note == 2


def test_a_group_has_few_streams(communicator):
    """For collectives, messages, and NCCL if it is there, beside the program's own."""
    streams = sys.modules["cupy"].cuda.clock.streams
    before = len(streams)
    dev_comm = device_communicator(communicator)
    finish(communicator, dev_comm.prepare())
    dev_comm.messages()
    assert len(streams) - before <= 3 + (communicator.size == 1)
