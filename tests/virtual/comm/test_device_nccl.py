"""Device memory by NCCL, on virtual ranks with a fake one."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from mpimesh.comm.nccl import Nccl
from tests.devices.alone import Alone
from tests.devices.operations import check_all, device, finish, nonsense
from tests.devices.virtual import on_ranks
from tests.helpers.raises import raises


def found(comm):
    request = comm.engine.stage("find", Nccl.find(comm))
    finish(comm, request)
    strategy, why = request.value
    return strategy and Alone(comm, strategy), why


@pytest.mark.parametrize("size", [1, 2, 3, 4])
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
