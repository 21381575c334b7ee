"""Ways to move device memory with the real CuPy, between virtual ranks, and MPI's own way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.cli.examine import measure_device
from mpimesh.comm.cuda_ipc import CudaIpc
from mpimesh.comm.device_communicator import DeviceCommunicator, device_communicator
from mpimesh.comm.device_strategy import is_plain, plain_empty
from mpimesh.comm.host_strategies import Staged
from mpimesh.comm.nccl import generate_id, nccl_library
from mpimesh.errors import TransportError
from mpimesh.mesh.probe import probe_devices
from tests.devices.alone import Alone
from tests.devices.operations import check_all, check_all_reduce, device, finish, numbers, same


def on_ranks(size: int, check: Any) -> None:
    def main() -> None:
        with mm.DeviceMesh("x=-1") as mesh:
            check(mesh.group().communicator)

    mm.run_virtual(size, main)


@pytest.mark.parametrize("size", [1, 3])
def test_staged(size):
    def check(comm):
        strategy = Alone(comm, Staged(comm, stage_bytes=1 << 8))
        check_all(strategy, comm, dtypes=("f4", "i8", "c16"), sizes=(0, 13))
        strategy.free()

    on_ranks(size, check)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shots", [1, 2])
def test_cuda_ipc(size, shots, monkeypatch):
    monkeypatch.setattr("mpimesh.comm.cuda_ipc.one_shot", lambda nbytes, size: shots == 1)

    def check(comm):
        request = comm.engine.stage("find", CudaIpc.find(comm))
        finish(comm, request)
        found, why = request.value
        assert why == ""
        strategy = Alone(comm, found)
        check_all(strategy, comm, dtypes=("f4", "c16"), sizes=(0, 13))
        check_all_reduce(strategy, comm, 300, "i4")
        strategy.free()

    on_ranks(size, check)


def test_the_choice_and_messages():
    def check(comm):
        dev_comm = device_communicator(comm)
        for dtype in ("f4", "f2"):
            x = device(numbers(comm.rank, 100, dtype))
            finish(comm, dev_comm.all_reduce(None, x, "sum"))
            same(x, np.sum([numbers(r, 100, dtype) for r in range(3)], 0, dtype=dtype))
        assert {one.algorithm for one in dev_comm.algorithms()} == {"cuda_ipc"}
        for prefer in ("staged", "cuda_ipc"):
            other = DeviceCommunicator(comm, prefer=prefer)
            room = device(np.zeros(7, "f4"))
            receive = other.irecv(room, (comm.rank - 1) % 3, 3)
            send = other.isend(device(numbers(comm.rank, 7, "f4")), (comm.rank + 1) % 3, 3)
            finish(comm, receive, send)
            same(room, numbers((comm.rank - 1) % 3, 7, "f4"))
            finish(comm, comm.barrier())
            other.free()

    on_ranks(3, check)


def test_the_gpu_as_cupy_describes_it():
    (gpu,) = probe_devices()
    assert gpu.backend.is_gpu
    assert gpu.partition_id == "GPU-01020304-0506-0708-090a-0b0c0d0e0f10"


def test_copies_that_doctor_measures(monkeypatch):
    monkeypatch.setattr("mpimesh.cli.examine._LARGE_BYTES", 1 << 12)
    assert [one.level for one in measure_device()] == [
        *("to the GPU", "from the GPU", "within the GPU"),
    ]


def test_an_id_of_nccl_or_what_to_install():
    if nccl_library() is None:
        with pytest.raises(TransportError, match=r"no NCCL.*pip install nvidia-nccl-cu13"):
            generate_id()
    else:
        assert generate_id() != generate_id()


def test_the_names_of_nccl():
    nccl = nccl_library()
    if nccl is None:
        pytest.skip("needs NCCL, as of nvidia-nccl-cu13")
    assert len(generate_id()) == 128
    assert {"check_async_error", "abort", "destroy"} <= {*dir(nccl.NcclCommunicator)}
    calls = {
        "allReduce": ("sendbuf", "recvbuf", "count", "datatype", "op", "stream"),
        "reduce": ("sendbuf", "recvbuf", "count", "datatype", "op", "root", "stream"),
        "reduceScatter": ("sendbuf", "recvbuf", "recvcount", "datatype", "op", "stream"),
        "allGather": ("sendbuf", "recvbuf", "count", "datatype", "stream"),
        "broadcast": ("sendbuff", "recvbuff", "count", "datatype", "root", "stream"),
        "send": ("sendbuf", "count", "datatype", "peer", "stream"),
        "recv": ("recvbuf", "count", "datatype", "peer", "stream"),
    }
    for name, parameters in calls.items():
        text = getattr(nccl.NcclCommunicator, name).__doc__.partition("\n")[0]
        given = text[text.index("(") + 1 : -1].split(", ")[1:]
        assert tuple(one.split(" ")[-1] for one in given) == parameters


def test_kinds_of_memory():
    """Those that CuPy can allocate from, beside its default pool."""
    import cupy

    assert is_plain(cupy.ones(3))
    assert is_plain(cupy.empty(0))
    assert is_plain(plain_empty(cupy.ones(3)))
    for pool in (cupy.cuda.MemoryAsyncPool(), cupy.cuda.MemoryPool(cupy.cuda.malloc_managed)):
        with cupy.cuda.using_allocator(pool.malloc):
            x = cupy.ones(3)
            assert not is_plain(x)
            assert is_plain(plain_empty(x))
    owner = cupy.ones(3)
    memory = cupy.cuda.UnownedMemory(owner.data.ptr, 24, owner)
    assert not is_plain(cupy.ndarray(3, float, cupy.cuda.MemoryPointer(memory, 0)))
