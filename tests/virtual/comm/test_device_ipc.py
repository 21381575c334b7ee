"""Device memory read in place, on virtual ranks that pretend to be processes of their own."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from mpimesh.comm import cuda_ipc
from mpimesh.comm.cuda_ipc import CudaIpc, one_shot
from mpimesh.errors import TransportError
from tests.devices import fake_cuda
from tests.devices.alone import Alone
from tests.devices.fake_cuda import address_range
from tests.devices.operations import (
    check_all,
    check_all_reduce,
    device,
    finish,
    nonsense,
    numbers,
    reduced,
    same,
)
from tests.devices.virtual import on_ranks
from tests.helpers.depth import deep
from tests.helpers.raises import raises


@pytest.fixture(autouse=True)
def _driver(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "address_range", address_range)


def found(comm, *, apart=True):
    process = 1000 + comm.rank if apart else None
    request = comm.engine.stage("find", CudaIpc.find(comm, process=process))
    finish(comm, request)
    strategy, why = request.value
    return strategy and Alone(comm, strategy), why


@pytest.mark.parametrize("size", [1, *deep(2), 3, *deep(4)])
@pytest.mark.parametrize("apart", [False, True])
def test_every_operation(size, apart):
    def main(comm):
        alone, why = found(comm, apart=apart)
        assert why == ""
        check_all(alone, comm, dtypes=("f4", "i8", "c8"), sizes=(0, 13))
        alone.free()
        alone.free()

    on_ranks(size, main)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("identity", ["Memory", "MemoryAsync"])
def test_two_shots(size, identity, monkeypatch):
    monkeypatch.setattr("mpimesh.comm.cuda_ipc.one_shot", lambda nbytes, size: False)

    def main(comm):
        alone, _ = found(comm)
        finish(comm, comm.barrier())
        vars(sys.modules["cupy"])["library"].identity = identity
        check_all_reduce(alone, comm, 13, "f4")
        check_all_reduce(alone, comm, 2, "f8")
        check_all_reduce(alone, comm, 300, "i4")

    on_ranks(size, main)


def test_memory_that_has_no_handle_is_shown_as_a_copy():
    def main(comm):
        alone, _ = found(comm)
        finish(comm, comm.barrier())
        vars(sys.modules["cupy"])["library"].identity = "MemoryAsync"
        check_all(alone, comm, dtypes=("f4",), sizes=(13,))

    on_ranks(3, main)


def test_a_rank_that_cannot_makes_all_say_no():
    def main(comm):
        if comm.rank == 1:
            runtime = sys.modules["cupy"].cuda.runtime

            def refuse(handle):
                raise runtime.CUDARuntimeError("cudaErrorMapBufferObjectFailed")

            runtime.ipcOpenEventHandle = refuse
        return found(comm)

    for alone, why in on_ranks(2, main):
        assert alone is None
        assert why


def test_without_a_driver(monkeypatch):
    def main(comm):
        return found(comm, apart=False)

    monkeypatch.setattr(cuda_ipc, "address_range", _no_driver)
    for alone, why in on_ranks(2, main):
        assert alone is None
        assert "no handle" in why


def _no_driver(ptr):
    raise TransportError("the CUDA driver cannot be loaded")


def test_sums_are_the_same_to_the_last_bit():
    def main(comm):
        alone, _ = found(comm)
        x = device(np.random.default_rng(comm.rank).standard_normal(1000).astype("f4"))
        finish(comm, alone.all_reduce(None, x, "sum"))
        return sys.modules["cupy"].asnumpy(x).tobytes()

    assert len(set(on_ranks(4, main))) == 1


def test_shots():
    assert one_shot(1 << 30, 2)
    assert one_shot(500 << 10, 4)
    assert not one_shot(512 << 10, 4)
    assert one_shot(255 << 10, 8)
    assert not one_shot(256 << 10, 5)
    assert not one_shot(1, 9)


def test_a_late_rank():
    """Peers read only what is ready, and nobody writes what is still being read."""

    def main(comm):
        alone, _ = found(comm)
        inputs = [numbers(r, 9, "f4") for r in range(comm.size)]
        for turn in range(5):
            stream = sys.modules["cupy"].cuda.get_current_stream()
            if comm.rank == turn % comm.size:
                alone.strategy.stream.stream.delay(25)
                stream.delay(9)
            x = device(inputs[comm.rank]) + 0
            out = nonsense(9, "f4")
            finish(comm, alone.all_reduce(x, out, "sum"))
            x[...] = -1
            same(out, reduced(inputs, "sum"))

    on_ranks(3, main)


LARGE = cuda_ipc.COPIED_BYTES // 4 + 5


@pytest.mark.parametrize("shots", [1, 2])
def test_no_memory_is_freed_that_another_rank_has_open(shots, monkeypatch):
    """CUDA leaves undefined what happens then."""
    monkeypatch.setattr("mpimesh.comm.cuda_ipc.one_shot", lambda nbytes, size: shots == 1)

    def main(comm):
        alone, _ = found(comm)
        cupy = sys.modules["cupy"]
        for size in (5, LARGE, 6, 3 * LARGE, LARGE):
            x = device(numbers(comm.rank, size, "f4"))
            finish(comm, alone.all_reduce(None, x, "sum"))
            same(x, reduced([numbers(r, size, "f4") for r in range(comm.size)], "sum"))
            del x
            cupy.get_default_memory_pool().free_all_blocks()
        if comm.rank:  # the others may have left long before
            finish(comm, comm.barrier())
        alone.free()
        cupy.get_default_memory_pool().free_all_blocks()
        if comm.rank == 0:
            finish(comm, comm.barrier())

    on_ranks(3, main)


def test_nor_a_buffer_of_a_rank_that_leaves_first():
    def main(comm):
        alone, _ = found(comm)
        finish(comm, comm.barrier())
        vars(sys.modules["cupy"])["library"].identity = "MemoryAsync"
        for size in (9, LARGE):
            x = device(numbers(comm.rank, size, "f4"))
            finish(comm, alone.all_reduce(None, x, "sum"))
        if comm.rank == 1:
            finish(comm, comm.barrier())
        alone.free()
        # What a group gives back, the next one uses.
        before = len(sys.modules["cupy"].cuda.runtime.raw)
        if comm.rank == 0:
            finish(comm, comm.barrier())
        finish(comm, comm.barrier())
        again, _ = found(comm)
        check_all_reduce(again, comm, 50, "f4")
        finish(comm, comm.barrier())
        again.free()
        assert len(sys.modules["cupy"].cuda.runtime.raw) == before

    on_ranks(2, main)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shots", [1, 2])
def test_no_memory_on_one_rank_is_an_error_on_all_and_the_next_works(size, shots, monkeypatch):
    monkeypatch.setattr("mpimesh.comm.cuda_ipc.one_shot", lambda nbytes, size: shots == 1)

    def main(comm):
        alone, _ = found(comm)
        finish(comm, comm.barrier())
        runtime = sys.modules["cupy"].cuda.runtime
        vars(sys.modules["cupy"])["library"].identity = "MemoryAsync"
        x = device(numbers(comm.rank, LARGE, "f4"))
        exports = alone.strategy._exports
        if comm.rank == 1:

            def take(nbytes):
                raise runtime.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")

            alone.strategy._exports = type("Full", (), {"take": staticmethod(take), "sizes": {}})
            alone.strategy._buffers = {}
        why = "cudaErrorMemoryAllocation" if comm.rank == 1 else "rank 1"
        with raises(TransportError, f"rank {comm.rank}", why):
            finish(comm, alone.all_reduce(None, x, "sum"))
        alone.strategy._exports = exports
        finish(comm, alone.all_reduce(None, x, "sum"))
        same(x, reduced([numbers(r, LARGE, "f4") for r in range(comm.size)], "sum"))

    on_ranks(size, main)


def test_gpus_of_one_process_are_allowed_to_read_each_other_or_it_is_refused(monkeypatch):
    """Kernels that read another GPU's memory unallowed end all work on theirs."""

    def main(comm):
        alone, why = found(comm, apart=False)
        runtime = sys.modules["cupy"].cuda.runtime
        if alone is not None:
            assert (comm.rank, 1 - comm.rank) in runtime.peers
            check_all_reduce(alone, comm, 13, "f4")
        return why

    assert on_ranks(2, main, devices=2) == ["", ""]
    cannot = lambda self, device, peer: 0  # noqa: E731
    monkeypatch.setattr(fake_cuda.Runtime, "deviceCanAccessPeer", cannot)
    assert on_ranks(2, main, devices=2) == [
        "GPU 0 cannot read the memory of GPU 1",
        "GPU 1 cannot read the memory of GPU 0",
    ]
