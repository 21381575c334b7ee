"""The choice among the strategies for device memory, on virtual ranks."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

from mpimesh.comm import cuda_ipc
from mpimesh.comm.device_communicator import DeviceCommunicator, device_communicator
from mpimesh.errors import DTypeError, GroupError, ShapeError, TransportError
from tests.devices.fake_cuda import address_range
from tests.devices.operations import (
    check_all,
    device,
    finish,
    nonsense,
    numbers,
    reduced,
    same,
)
from tests.devices.virtual import on_ranks
from tests.helpers.fake_device import FakeDeviceArray
from tests.helpers.raises import raises


class Everything:
    """A device communicator, asked by the checks like a strategy."""

    def __init__(self, dev_comm):
        self.dev_comm = dev_comm

    def __getattr__(self, name):
        return getattr(self.dev_comm, name)

    def cannot(self, operation, dtype=None, op=""):
        return None


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "address_range", address_range)


def ways(dev_comm, operation):
    return [(r.from_bytes, r.algorithm) for r in dev_comm.algorithms() if r.operation == operation]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_without_anything_else_it_is_staged(size):
    def main(comm):
        dev_comm = device_communicator(comm)
        assert device_communicator(comm) is dev_comm
        assert not dev_comm.algorithms()
        check_all(Everything(dev_comm), comm, dtypes=("f4", "c16"), sizes=(13,))
        assert ways(dev_comm, "all_reduce") == [(0, "staged")]
        (route,) = (r for r in dev_comm.algorithms() if r.operation == "all_reduce")
        assert route.memory == "device"
        assert "mpi_cuda: these ranks are threads" in route.reason
        assert "cuda_ipc: " in route.reason
        dev_comm.free()
        dev_comm.free()

    on_ranks(size, main)


@pytest.mark.usefixtures("driver")
def test_inside_a_node_memory_is_read_in_place():
    def main(comm):
        dev_comm = device_communicator(comm)
        check_all(Everything(dev_comm), comm, dtypes=("f4", "f2"), sizes=(13,))
        assert ways(dev_comm, "all_reduce") == [(0, "cuda_ipc")]
        assert ways(dev_comm, "messages") == [(0, "cuda_ipc")]

    on_ranks(3, main)


@pytest.mark.usefixtures("driver")
def test_large_arrays_go_by_nccl():
    def main(comm):
        dev_comm = device_communicator(comm)
        check_all(Everything(dev_comm), comm, dtypes=("i2", "f4"), sizes=(13,))
        assert ways(dev_comm, "all_reduce") == [(0, "cuda_ipc"), (512 << 10, "nccl")]
        assert ways(dev_comm, "all_to_all") == [(0, "nccl")]
        x = device(np.full(140_000, comm.rank + 1, "f4"))
        finish(comm, dev_comm.all_reduce(None, x, "sum"))
        same(x, np.full(140_000, 10, "f4"))

    on_ranks(4, main, devices=4)


def test_the_ways_belong_to_the_device_of_the_call_and_not_of_the_wait():
    def main(comm):
        cuda = sys.modules["cupy"].cuda
        with cuda.Device(1):
            dev_comm = device_communicator(comm)
            x, late = device(np.full(3, comm.rank + 1, "f4")), cuda.Stream(non_blocking=True)
            request = dev_comm.all_reduce(None, x, "sum")
        with cuda.Device(2):
            finish(comm, request)
        same(x, np.full(3, 6, "f4"))
        streams = [strategy.stream for strategy in dev_comm._strategies]
        assert {one.device.id for one in streams} == {1}
        assert {one.stream.device_id for one in streams} == {1} == {late.device_id}

    on_ranks(3, main, devices=3)


def test_a_way_that_is_asked_for():
    def main(comm):
        dev_comm = device_communicator(comm, prefer="staged")
        assert device_communicator(comm, prefer="staged") is dev_comm
        assert device_communicator(comm) is not dev_comm
        check_all(Everything(dev_comm), comm, dtypes=("f4",), sizes=(13,))
        assert {r.algorithm for r in dev_comm.algorithms()} == {"staged"}
        other = DeviceCommunicator(comm, prefer="nccl")
        request = other.broadcast(nonsense(3, "f4"), 0)
        with raises(GroupError, "broadcast", "float32", "'nccl'", "ranks 0 and 1"):
            finish(comm, request)
        assert {r.algorithm for r in other.algorithms() if r.operation != "messages"} == {"none"}
        mpi = device_communicator(comm, prefer="mpi")
        with raises(GroupError, "broadcast", "float32", "'mpi_cuda'", "threads"):
            finish(comm, mpi.broadcast(nonsense(3, "f4"), 0))
        comm.free()
        assert comm.device is None
        with raises(GroupError, "'gloo'", "staged, mpi_cuda, cuda_ipc, nccl"):
            DeviceCommunicator(comm, prefer="gloo")

    on_ranks(2, main)


def test_half_types_are_summed_in_float32():
    def main(comm):
        dev_comm = device_communicator(comm)
        # In float16, 2048 + 1 is 2048.
        x = device(np.full(5, 2048 if comm.rank == 0 else 1, "f2"))
        out = nonsense(5, "f2")
        finish(comm, dev_comm.all_reduce(x, out, "sum"))
        same(out, np.full(5, 2050, "f2"))
        part = nonsense(1, "f2")
        finish(
            comm,
            dev_comm.reduce_scatter(x, part, [1, 2, 2], "sum")
            if comm.rank == 0
            else dev_comm.reduce_scatter(x, part := nonsense(2, "f2"), [1, 2, 2], "sum"),
        )
        same(part, np.full(part.size, 2050, "f2"))

    on_ranks(3, main)


def test_other_device_memory_is_refused():
    def main(comm):
        dev_comm = device_communicator(comm)
        bogus = FakeDeviceArray((4,))
        calls = [
            lambda: dev_comm.all_reduce(None, bogus, "sum"),
            lambda: dev_comm.all_reduce(bogus, nonsense(4, float), "sum"),
            lambda: dev_comm.reduce(bogus, None, "sum", 0),
            lambda: dev_comm.reduce_scatter(bogus, bogus, [2, 2], "sum"),
            lambda: dev_comm.all_gather(nonsense(2, float), bogus, [2, 2]),
            lambda: dev_comm.gather(bogus, None, [4, 4], 0),
            lambda: dev_comm.scatter(None, bogus, [4, 4], 0),
            lambda: dev_comm.all_to_all(bogus, bogus, [2, 2], [2, 2]),
            lambda: dev_comm.broadcast(bogus, 0),
            lambda: dev_comm.isend(bogus, 0, 0),
            lambda: dev_comm.irecv(bogus, 0, 0),
        ]
        given = [(call, "FakeDeviceArray") for call in calls]
        for call, kind in [
            *given,
            (lambda: dev_comm.broadcast(np.zeros(3), 0), "numpy.ndarray"),
        ]:
            with raises(DTypeError, "CuPy", kind):
                call()
        for x in (device(np.zeros((2, 3))), device(np.zeros(6))[::2]):
            with raises(ShapeError, x.shape, x.strides):
                dev_comm.broadcast(x, 0)

    on_ranks(2, main)


def test_host_and_device_operations_do_not_meet():
    """Each rank is late somewhere else; host collectives go on between the device's steps."""

    def main(comm):
        dev_comm = device_communicator(comm)
        inputs = [numbers(r, 7, "f8") for r in range(comm.size)]
        requests, checks = [], []
        for turn in range(6):
            sys.modules["cupy"].cuda.get_current_stream().delay((comm.rank * 5 + turn) % 7)
            x = device(inputs[comm.rank]) + turn
            requests.append(dev_comm.all_reduce(None, x, "sum"))
            y = inputs[comm.rank] * turn
            requests.append(comm.all_reduce(None, y, "max"))
            checks.append((x, y, turn))
        finish(comm, *requests[::-1])
        for x, y, turn in checks:
            same(x, reduced([one + turn for one in inputs], "sum"))
            assert y.tolist() == reduced([one * turn for one in inputs], "max").tolist()

    on_ranks(3, main)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("prefer", ["staged", "cuda_ipc"])
def test_messages_of_one_tag_arrive_in_order(prefer):
    def main(comm):
        dev_comm = DeviceCommunicator(comm, prefer=prefer)
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        sends = [
            dev_comm.isend(device(numbers(comm.rank + k, 5 + k, "f4")), after, tag)
            for k in range(4)
            for tag in (3, 0)
        ]
        for tag in (0, 3):
            rooms = [nonsense(5 + k, "f4") for k in range(4)]
            receives = [dev_comm.irecv(room, before, tag) for room in rooms]
            finish(comm, *receives[::-1])
            for k, (room, receive) in enumerate(zip(rooms, receives, strict=True)):
                same(room, numbers(before + k, 5 + k, "f4"))
                assert receive.received_bytes() == room.nbytes
        finish(comm, *sends)
        dev_comm.free()

    on_ranks(3, main)


@pytest.mark.usefixtures("driver")
def test_an_offer_may_be_declined():
    def main(comm):
        if comm.rank == 0:
            dev_comm = DeviceCommunicator(comm, prefer="cuda_ipc")
            x = device(numbers(0, 9, "f4"))
            finish(comm, dev_comm.isend(x, 1, 1), dev_comm.isend(x, 1, 2))
            finish(comm, dev_comm.isend(x, 1, 1))
        else:
            dev_comm = DeviceCommunicator(comm, prefer="staged")
            for tag in (1, 2, 1):
                room = nonsense(9, "f4")
                finish(comm, dev_comm.irecv(room, 0, tag))
                same(room, numbers(0, 9, "f4"))

    on_ranks(2, main)


def test_a_message_larger_than_its_room():
    def main(comm):
        dev_comm = device_communicator(comm)
        if comm.rank == 0:
            requests = [dev_comm.isend(device(numbers(0, size, "f4")), 1, 4) for size in (9, 3)]
            finish(comm, *requests)
        else:
            with raises(TransportError, "rank 1", "12 bytes", "rank 0", "tag 4", "36 bytes"):
                finish(comm, dev_comm.irecv(nonsense(3, "f4"), 0, 4))
            more = nonsense(5, "f4")
            receive = dev_comm.irecv(more, 0, 4)
            finish(comm, receive)
            assert receive.received_bytes() == 12
            same(more, np.concatenate([numbers(0, 3, "f4"), np.full(2, 99, "f4")]))

    on_ranks(2, main)


def test_a_cancelled_receive_takes_no_message():
    def main(comm):
        dev_comm = device_communicator(comm)
        if comm.rank == 1:
            first, second, wanted = (nonsense(3, "f4") for _ in range(3))
            gone, queued = dev_comm.irecv(first, 0, 4), dev_comm.irecv(second, 0, 4)
            assert not gone.test()
            assert gone.cancel()
            assert queued.cancel()
            finish(comm, comm.barrier())
            receive = dev_comm.irecv(wanted, 0, 4)
            finish(comm, receive)
            same(wanted, numbers(0, 3, "f4"))
            same(first, np.full(3, 99, "f4"))
            assert not receive.cancel()
        else:
            finish(comm, comm.barrier())
            finish(comm, dev_comm.isend(device(numbers(0, 3, "f4")), 1, 4))

    on_ranks(2, main)


def test_nothing_blocks_at_the_start():
    """All operations start on a rank whose peers have not come yet."""
    here = threading.Event()

    def main(comm):
        dev_comm = device_communicator(comm)
        if comm.rank == 1:
            assert here.wait(20)
        x, y = device(numbers(comm.rank, 4, "f4")), nonsense(4, "f4")
        requests = [dev_comm.all_reduce(x, y, "sum"), dev_comm.broadcast(x, 0)]
        requests.append(dev_comm.isend(y, 1, 0) if comm.rank == 0 else dev_comm.irecv(y, 0, 0))
        here.set()
        finish(comm, *requests)

    on_ranks(2, main)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("prefer", ["staged", "cuda_ipc"])
def test_a_late_message(prefer):
    """The send is made late, the receive is taken late, and written over afterwards."""

    def main(comm):
        dev_comm = DeviceCommunicator(comm, prefer=prefer)
        stream = sys.modules["cupy"].cuda.get_current_stream()
        for turn in range(4):
            if comm.rank == 0:
                stream.delay(2000 * (turn % 2))
                x = device(numbers(turn, 6, "f4")) + 0
                finish(comm, dev_comm.isend(x, 1, 0))
                x[...] = -1
                stream.synchronize()
            else:
                room = nonsense(6, "f4")
                receive = dev_comm.irecv(room, 0, 0)
                dev_comm.messages()._stream.stream.delay(300 * (1 - turn % 2))
                finish(comm, receive)
                same(room + 0, numbers(turn, 6, "f4"))

    on_ranks(2, main)


def test_a_gpu_that_fails_is_an_error_and_no_endless_wait():
    def main(comm):
        dev_comm = device_communicator(comm)
        x = device(numbers(comm.rank, 4, "f4"))
        finish(comm, dev_comm.all_reduce(None, x, "sum"))
        runtime = sys.modules["cupy"].cuda.runtime
        finish(comm, comm.barrier())
        runtime.eventQuery = lambda event: 700
        request = dev_comm.all_reduce(None, x, "sum")
        with raises(TransportError, f"rank {comm.rank}", "CUDA error 700"):
            finish(comm, request)

    on_ranks(2, main)
