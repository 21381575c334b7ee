"""Device memory by NCCL, on virtual ranks with a fake one."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

from mpimesh.comm import nccl
from mpimesh.comm.nccl import Nccl, generate_id, nccl_communicator, share_id
from mpimesh.errors import TransportError
from tests.devices.alone import Alone
from tests.devices.fake_cuda import installed
from tests.devices.operations import check_all, device, finish, nonsense
from tests.devices.virtual import on_ranks
from tests.helpers.depth import deep
from tests.helpers.raises import raises


def found(comm):
    request = comm.engine.stage("find", Nccl.find(comm))
    finish(comm, request)
    strategy, why = request.value
    return strategy and Alone(comm, strategy), why


@pytest.mark.parametrize("size", [1, *deep(2), 3, *deep(4)])
def test_every_operation(size):
    def main(comm):
        alone, why = found(comm)
        assert why == ""
        check_all(alone, comm, dtypes=("f4", "i8", "c8", "u1"), sizes=(0, 13))
        alone.free()
        alone.free()

    on_ranks(size, main, devices=size)


def test_a_shared_gpu_is_refused_on_all_ranks():
    def main(comm):
        return found(comm)

    for alone, why in on_ranks(3, main, devices=2):
        assert alone is None
        assert why == "ranks 0 and 2 share one GPU, which NCCL refuses"


def test_what_nccl_has_not():
    def main(comm):
        alone, _ = found(comm)
        assert alone.cannot("all_reduce", np.dtype("i2"), "sum") == "NCCL has no int16"
        assert "only sums" in alone.cannot("reduce", np.dtype("c16"), "prod")
        assert "NaN" in alone.cannot("all_reduce", np.dtype("f4"), "max")
        assert alone.cannot("all_reduce", np.dtype("f4"), "sum") is None
        assert alone.cannot("all_reduce", np.dtype("i4"), "max") is None
        assert alone.cannot("all_gather", np.dtype("i2")) is None
        assert "by their order alone" in alone.cannot("messages")

    on_ranks(2, main, devices=2)


def test_no_nccl():
    def main(comm):
        del sys.modules["cupy"].cuda.nccl
        return found(comm)

    assert on_ranks(1, main) == [(None, "CuPy finds no NCCL on ranks [0]")]


def test_an_error_of_nccl_leaves_no_group_open(monkeypatch):
    """Calls in an open group wait for its end, for ever."""

    def main(comm):
        alone, _ = found(comm)
        nccl = sys.modules["cupy"].cuda.nccl
        send = device(np.ones(2, "f4"))

        def refuse(*_):
            raise nccl.NcclError("NCCL_ERROR_INVALID_USAGE")

        with monkeypatch.context() as patch:
            patch.setattr(alone.strategy._comm, "send", refuse, raising=False)
            with raises(RuntimeError, "NCCL_ERROR_INVALID_USAGE"):
                finish(comm, alone.all_to_all(send, nonsense(2, "f4"), [1, 1], [1, 1]))
        assert getattr(nccl.group, "parts", None) is None

    on_ranks(2, main, devices=2)


# -- communicators of a program's own ---------------------------------------------------------


def test_a_communicator_of_the_id_that_one_rank_has_made():
    def main(comm):
        unique_id = share_id(comm)
        own = nccl_communicator(unique_id, comm.size, comm.rank)
        x, cupy = device(np.full(4, comm.rank + 1, "f4")), sys.modules["cupy"]
        library, stream = cupy.cuda.nccl, cupy.cuda.get_current_stream()
        kind, op = library.NCCL_FLOAT32, library.NCCL_SUM
        own.allReduce(x.data.ptr, x.data.ptr, x.size, kind, op, stream.ptr)
        assert x.tolist() == [6.0] * 4
        return unique_id

    ids = on_ranks(3, main, devices=3)
    assert len(set(ids)) == 1
    assert len(ids[0]) == 128


def test_each_id_is_a_new_one():
    with installed():
        assert len({generate_id() for _ in range(3)}) == 3


@pytest.mark.parametrize("without", [0, 1])
def test_a_rank_without_nccl_is_an_error_on_all(without, monkeypatch):
    real, absent = nccl.nccl_library, threading.local()
    monkeypatch.setattr(nccl, "nccl_library", lambda: None if hasattr(absent, "here") else real())

    def main(comm):
        if comm.rank == without:
            absent.here = True
        why = "CuPy finds no NCCL" if comm.rank == without else f"rank {without} has no NCCL"
        with raises(TransportError, why):
            share_id(comm)

    on_ranks(2, main, devices=2)


def test_without_cupy_it_is_said_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    for call in (generate_id, lambda: nccl_communicator(bytes(128), 1, 0)):
        with raises(TransportError, "CuPy", "import cupy", "pip install cupy-cuda13x"):
            call()


@pytest.mark.parametrize(
    ("unique_id", "size", "rank"), [(bytes(5), 2, 0), (bytes(128), 2, 2), (bytes(128), 2, -1)]
)
def test_ids_and_ranks_that_cannot_be(unique_id, size, rank):
    with installed(), raises(TransportError, f"{len(unique_id)} bytes", f"rank {rank} of {size}"):
        nccl_communicator(unique_id, size, rank)


def test_what_nccl_refuses_is_an_error_of_the_transport(monkeypatch):
    def refuse(*_):
        raise sys.modules["cupy"].cuda.nccl.NcclError("NCCL_ERROR_INVALID_USAGE")

    with installed() as cupy:
        monkeypatch.setattr(cupy.cuda.nccl, "NcclCommunicator", refuse, raising=False)
        with raises(TransportError, "rank 1 of 2", "NCCL_ERROR_INVALID_USAGE"):
            nccl_communicator(bytes(128), 2, 1)
