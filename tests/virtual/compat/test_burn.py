"""burn's words."""

from __future__ import annotations

import time

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.compat.burn import DistributedParamId, DistributedSyncClient
from mpimesh.errors import CollectiveTimeoutError, GroupError
from tests.helpers.compat_programs import gradients_by_their_ids, missing_gradients_are_named
from tests.helpers.raises import raises


@pytest.mark.thin(1)
@pytest.mark.parametrize("checks", ["0", "1"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_b12_gradients_in_any_order(size, checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    mm.run_virtual(size, gradients_by_their_ids, None)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_b12_missing_gradients(size):
    mm.run_virtual(size, missing_gradients_are_named, None)


def test_b12_a_rank_that_does_not_come_is_named_and_may_come_later():
    def main():
        with mm.DeviceMesh("dp=3") as mesh:
            client = DistributedSyncClient(mesh.group(), "sum")
            gradients = {4: np.ones(2), 9: np.ones(2)}
            for _ in range(2):
                client.register_sync_parameters(gradients)
                client.submit_gradient_sync(9)
                client.submit_gradient_sync(4)
                if mesh.rank == 1:
                    time.sleep(0.6)
                    client.submit_sync_collective(0.2)
                else:
                    with raises(CollectiveTimeoutError, "ranks [1]", "submit_sync_collective"):
                        client.submit_sync_collective(0.2)
                    with raises(GroupError, "the last step"):
                        client._checked(gradients)
                    client.submit_sync_collective(20)
            return [x.tolist() for x in gradients.values()]

    assert mm.run_virtual(3, main) == [[[9.0, 9.0]] * 2] * 3


def test_b12_ids_not_reduced_are_named():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            client = DistributedSyncClient(mesh.group())
            client.register_sync_parameters({key: np.ones(2) for key in (1, 2, 3)})
            client.submit_gradient_sync(1)
            if mesh.rank == 0:
                client.submit_gradient_sync(2)
                client.submit_gradient_sync(3)
                with raises(CollectiveTimeoutError, "parameters 2, 3", "ranks [1]"):
                    client.submit_sync_collective(0.2)
            else:
                time.sleep(0.5)
                client.submit_gradient_sync(3)
                client.submit_gradient_sync(2)
            client.submit_sync_collective(20)

    mm.run_virtual(2, main)


def test_b12_reductions_start_before_the_end():
    """In the order of the ids, as far as it goes."""

    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            client = DistributedSyncClient(mesh.group())
            calls = mesh.traffic()
            client.register_sync_parameters({key: np.ones(2) for key in (1, 2, 3)})
            before = calls.snapshot()
            started = []
            for key in (3, 1, 2):
                client.submit_gradient_sync(key)
                started.append((calls.snapshot() - before).calls.get("all_reduce", 0))
            client.submit_sync_collective()
            return started

    assert mm.run_virtual(2, main) == [[0, 1, 3]] * 2


def test_b12_ids():
    assert DistributedParamId(np.int64(3)) == DistributedParamId(3)  # type: ignore[arg-type]
    assert {DistributedParamId(3): 1}[DistributedParamId(3)] == 1
    assert DistributedParamId(3) < DistributedParamId(10)
    for wrong in (-1, 1.5, "3", True, None):
        with pytest.raises(GroupError):
            DistributedParamId(wrong)  # type: ignore[arg-type]
    with pytest.raises(GroupError):
        DistributedSyncClient("dp")  # type: ignore[arg-type]

    def main():
        with mm.DeviceMesh("dp=-1") as mesh, raises(GroupError, "all_reduce_op", "'max'"):
            DistributedSyncClient(mesh.group(), "max")

    mm.run_virtual(1, main)
