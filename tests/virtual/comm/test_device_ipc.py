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
from tests.devices.fake_cuda import address_range, installed
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


@pytest.fixture(autouse=True)
def _driver(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "address_range", address_range)


def found(comm, *, apart=True):
    process = 1000 + comm.rank if apart else None
    request = comm.engine.stage("find", CudaIpc.find(comm, process=process))
    finish(comm, request)
    strategy, why = request.value
    return strategy and Alone(comm, strategy), why


@pytest.mark.parametrize("size", [1, 2, 3, 4])
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


def test_memory_that_was_freed_there_is_closed_before_new_memory_is_opened_at_its_place():
    """CUDA refuses to open what lies where memory of that process lies that is still open here."""

    class Cuda:
        def __init__(self):
            self.open = []

        def ipcOpenMemHandle(self, handle):
            start, stop = np.frombuffer(handle[:16], np.int64).tolist()
            if any(start < one[1] and one[0] < stop for one in self.open):
                raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorAlreadyMapped")
            self.open.append((start, stop))
            return start

        def ipcCloseMemHandle(self, base):
            self.open = [one for one in self.open if one[0] != base]

    def place(start, stop, process=7):
        found = np.zeros((), cuda_ipc.DESCRIPTOR)
        found["node"], found["process"] = cuda_ipc.node_key(), process
        found["address"], found["offset"], found["nbytes"] = start + 8, 8, 1
        found["allocated"] = stop - start
        found["handle"][:16] = np.frombuffer(np.array([start, stop]).tobytes(), np.uint8)
        return found

    with installed() as cupy:
        cuda = Cuda()
        for name in ("ipcOpenMemHandle", "ipcCloseMemHandle"):
            setattr(cupy.cuda.runtime, name, getattr(cuda, name))
        first, second = (cuda_ipc.ImportedMemory(process=1) for _ in range(2))
        assert first.open(place(100, 200)) == 108
        assert first.open(place(100, 200)) == 108
        assert second.open(place(200, 300)) == 208
        assert second.open(place(150, 200)) == 158
        assert cuda.open == [(200, 300), (150, 200)]
        assert first.open(place(120, 260)) == 128
        assert cuda.open == [(120, 260)]
        first.close()
        second.close()
        assert cuda.open == []


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
