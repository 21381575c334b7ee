"""Steps of replicas that meet in their status only, over MPI, in nodes and between them."""

from __future__ import annotations

import pytest

import mpimesh as mm
from tests.contract.shared_memory import nodes_of
from tests.helpers.depth import deep
from tests.helpers.parallel_status import check_any_two_calls


@pytest.mark.nprocs(2, 4)
@pytest.mark.parametrize("zero", [None, *deep(1)])
@pytest.mark.parametrize("node_ranks", [0, 1])
def test_any_two_different_calls_end_alike(comm, node_ranks, zero, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "0")
    with nodes_of(node_ranks), mm.DeviceMesh("dp=-1", comm) as mesh:
        texts = check_any_two_calls(mesh, zero)
    assert comm.allgather(texts) == [texts] * comm.size
