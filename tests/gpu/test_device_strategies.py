"""Every way to move device memory, on a real GPU: 1, 2 or 4 ranks may share one."""

from __future__ import annotations

import numpy as np
import pytest

from mpimesh.comm.cuda_ipc import CudaIpc
from mpimesh.comm.cuda_probe import PROCESS_PROBE
from mpimesh.comm.device_communicator import DeviceCommunicator, device_communicator
from mpimesh.comm.host_strategies import Staged
from mpimesh.comm.nccl import Nccl
from mpimesh.errors import GroupError
from tests.devices.alone import Alone
from tests.devices.operations import (
    check_all,
    check_all_reduce,
    check_broadcast,
    device,
    finish,
    host,
    nonsense,
    numbers,
    same,
)

DTYPES = ("f4", "f8", "i8", "c16", "u1")
SIZES = (0, 1, 1001)
LARGE = 300_001


def value(communicator, steps):
    request = communicator.engine.stage("find", steps)
    finish(communicator, request, limit_s=240)  # child processes start CUDA, or NCCL does
    return request.value


def alone(communicator, steps):
    strategy, why = value(communicator, steps)
    return strategy and Alone(communicator, strategy), why


def test_staged(communicator):
    strategy = Alone(communicator, Staged(communicator, stage_bytes=1 << 16))
    check_all(strategy, communicator, dtypes=DTYPES, sizes=SIZES)
    check_all_reduce(strategy, communicator, LARGE, "f4")
    check_broadcast(strategy, communicator, LARGE, "f2")


def test_cuda_ipc(communicator):
    strategy, why = alone(communicator, CudaIpc.find(communicator))
    if strategy is None:
        pytest.skip(why)
    check_all(strategy, communicator, dtypes=DTYPES, sizes=SIZES)
    check_all_reduce(strategy, communicator, LARGE, "f4")
    check_broadcast(strategy, communicator, LARGE, "f2")
    strategy.free()


def test_cuda_ipc_from_the_asynchronous_pool(communicator):
    import cupy

    strategy, why = alone(communicator, CudaIpc.find(communicator))
    if strategy is None:
        pytest.skip(why)
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    try:
        check_all(strategy, communicator, dtypes=("f4",), sizes=(1001,))
        check_all_reduce(strategy, communicator, LARGE, "f4")
    finally:
        cupy.cuda.set_allocator(before)
    strategy.free()


def test_nccl(communicator):
    strategy, why = alone(communicator, Nccl.find(communicator))
    if strategy is None:
        assert communicator.size > 1 or "CuPy finds no NCCL" in why
        pytest.skip(why)
    check_all(strategy, communicator, dtypes=DTYPES, sizes=SIZES)
    check_all_reduce(strategy, communicator, LARGE, "f4")
    strategy.free()


def test_cuda_aware_mpi(communicator):
    from mpimesh.comm.host_strategies import MPICuda

    results = value(communicator, PROCESS_PROBE.steps(communicator))
    strategy = Alone(communicator, MPICuda(communicator, results))
    no = [f"{operation}: {result}" for operation, result in results.items() if not result.usable]
    if no:
        pytest.skip("; ".join(no))
    check_all(strategy, communicator, dtypes=DTYPES, sizes=SIZES)
    check_all_reduce(strategy, communicator, LARGE, "f4")


def test_the_choice(communicator):
    dev_comm = device_communicator(communicator)
    finish(communicator, dev_comm.prepare(), limit_s=240)
    for size in (100, LARGE):
        x = device(numbers(communicator.rank, size, "f4"))
        finish(communicator, dev_comm.all_reduce(None, x, "sum"))
        same(x, np.sum([numbers(r, size, "f4") for r in range(communicator.size)], 0))
    assert {route.memory for route in dev_comm.algorithms()} == {"device"}
    if communicator.rank == 0:
        for route in dev_comm.algorithms():
            print(route)


@pytest.mark.parametrize("prefer", ["staged", "cuda_ipc"])
def test_messages(communicator, prefer):
    dev_comm = DeviceCommunicator(communicator, prefer=prefer)
    n, me = communicator.size, communicator.rank
    if n > 1:
        after, before = (me + 1) % n, (me - 1) % n
        for size in (1, LARGE):
            room = nonsense(size, "f4")
            receive = dev_comm.irecv(room, before, 3)
            send = dev_comm.isend(device(numbers(me, size, "f4")) + 0, after, 3)
            finish(communicator, receive, send)
            same(room, numbers(before, size, "f4"))
    dev_comm.free()


def test_a_way_that_cannot_is_refused(communicator):
    import cupy

    if communicator.size <= cupy.cuda.runtime.getDeviceCount():
        pytest.skip("needs ranks that share a GPU")
    dev_comm = DeviceCommunicator(communicator, prefer="nccl")
    finish(communicator, dev_comm.prepare(), limit_s=240)
    with pytest.raises(GroupError, match=r"share one GPU, which NCCL refuses|CuPy finds no NCCL"):
        finish(communicator, dev_comm.broadcast(nonsense(3, "f4"), 0))
    dev_comm.free()


def test_sums_are_the_same_to_the_last_bit(communicator):
    dev_comm = device_communicator(communicator)
    finish(communicator, dev_comm.prepare(), limit_s=240)
    for size in (1000, LARGE):
        values = np.random.default_rng(communicator.rank).standard_normal(size)
        x = device(values.astype("f4"))
        finish(communicator, dev_comm.all_reduce(None, x, "sum"))
        mine = np.frombuffer(host(x).tobytes(), np.uint8).astype(np.int64)
        least, most = mine.copy(), mine.copy()
        finish(communicator, communicator.all_reduce(None, least, "min"))
        finish(communicator, communicator.all_reduce(None, most, "max"))
        assert (least == most).all()


def test_a_mesh(comm):
    """A user's view: arrays of CuPy go in and come out."""
    import cupy

    import mpimesh as mm

    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group("dp")
        x = cupy.full((3, 5), comm.rank + 1, cupy.float32)
        total = group.all_reduce(x).resolve()
        assert isinstance(total, cupy.ndarray)
        same(total, np.full((3, 5), sum(range(1, comm.size + 1)), np.float32))
        whole = group.all_gather(x).resolve()
        assert whole.shape == (3 * comm.size, 5)
        same(
            group.shift(x, 1, wrap=True).resolve(),
            np.full((3, 5), (comm.rank - 1) % comm.size + 1, "f4"),
        )
