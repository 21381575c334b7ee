"""Arrays on devices under MPI, without a device: a pointer that MPI got to see would crash it."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import numpy as np
import pytest

import mpimesh as mm
from tests.contract import device_memory, devices
from tests.contract.cases import same
from tests.devices.fake_cuda import installed
from tests.devices.on_device import check, given


@pytest.mark.parametrize("name", devices.CHECKS)
def test_contract(name, comm, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", devices.CupyWithoutDevice())
    devices.CHECKS[name](comm)


def test_ranks_without_cupy_get_what_one_rank_has_on_its_device(comm, monkeypatch):
    """Where the others need not know what comes, it goes through the host, and all get it."""
    monkeypatch.setenv("MPIMESH_CUDA_AWARE", "no")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    root = comm.size - 1
    with installed() if comm.rank == root else nullcontext(), mm.DeviceMesh("x=-1", comm) as mesh:
        group, right = mesh.group(), np.arange(3.0 * comm.size)
        x = given(right) if comm.rank == root else None
        whole = group.broadcast(x, root=None).resolve()
        part = group.scatter(x, root=root).resolve()
        mine = right[3 * comm.rank : 3 * comm.rank + 3]
        (check if comm.rank == root else same)(whole, right)
        (check if comm.rank == root else same)(part, mine)


@pytest.mark.parametrize("name", device_memory.CHECKS)
def test_device_memory(name, comm, monkeypatch):
    monkeypatch.setenv("MPIMESH_CUDA_AWARE", "no")
    with installed():
        device_memory.CHECKS[name](comm)
