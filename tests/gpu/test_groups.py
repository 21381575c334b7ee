"""Groups and CuPy arrays on a real GPU, which the ranks share where there are not enough."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from tests.contract import device_memory
from tests.contract.oracle import reduced
from tests.devices.on_device import check, given, late
from tests.helpers.parallel_models import batch, cut


@pytest.fixture(autouse=True)
def cupy():
    import cupy

    return cupy


@pytest.mark.parametrize("name", device_memory.CHECKS)
def test_contract(name, comm):
    device_memory.CHECKS[name](comm)


def test_the_gpu_of_the_rank_is_current(comm, cupy):
    with mm.DeviceMesh("x=-1", comm) as mesh:
        device = mesh.local_device()
        assert device.backend.is_gpu
        count = cupy.cuda.runtime.getDeviceCount()
        assert cupy.cuda.runtime.getDevice() == mesh.local_rank % count == device.id
        assert mesh.use_device() == device


def test_results_are_safe_on_the_stream_that_takes_them(comm, cupy):
    makes, takes = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    size = 1 << 16
    with mm.DeviceMesh("x=-1", comm) as mesh:
        group = mesh.group()
        inputs = [np.full(size, r + 1.0, "f2") for r in range(group.size)]
        for _ in range(20):
            with makes:
                late()
                handle = group.all_reduce(given(inputs[mesh.rank]), "mean")
            with takes:
                check(handle.resolve() * 2, reduced(inputs, "mean") * 2)


def test_a_pipeline_on_the_device(comm, cupy):
    """As on the host, step by step."""
    with mm.DeviceMesh("pp=-1", comm) as mesh:
        options: dict[str, Any] = {"mesh": mesh, "seed": 3, "dtype": np.float64}
        on_host, on_device = (
            mm.PipelineParallel(cut(mesh.size), 4, xp=xp, **options) for xp in (np, cupy)
        )
        for step in range(3):
            x, target = batch(step, 13)
            expected = on_host.train_step(x, target, loss=nn.cross_entropy)
            arrays = cupy.asarray(x), cupy.asarray(target)
            loss = on_device.train_step(*arrays, loss=nn.cross_entropy)
            assert loss == pytest.approx(expected, rel=1e-9)
