"""Received bytes of operations, and budgets, on real ranks."""

from __future__ import annotations

import numpy as np
import pytest

from mpimesh.errors import BudgetError, MismatchError
from tests.contract.meshes import mesh_of
from tests.contract.received import OPERATIONS, check_operation
from tests.helpers.raises import raises


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_an_operation_receives(comm, name):
    check_operation(comm, name)


def test_after_a_refusal_on_all_ranks_the_mesh_works(comm):
    with mesh_of(comm) as mesh:
        group, n = mesh.group(), mesh.size
        x = mesh.shared_empty(1 << 16, "f4")
        x[...] = 1
        with mesh.budget(bytes=100 * n):
            if n > 1:
                with raises(BudgetError, f"rank {mesh.rank}", "all_reduce", f"{100 * n} bytes"):
                    group.all_reduce(x, out=x)
            assert (x == 1).all()
            assert group.all_reduce(np.ones(5)).resolve()[0] == n
        assert group.all_reduce(x).resolve()[0] == n
        with mesh.budget(bytes=16):
            if n > 1:
                with raises(
                    BudgetError, f"rank {mesh.rank}", "shift", "24 bytes in 1 message", "16 bytes"
                ):
                    group.shift(np.ones(3), wrap=True).resolve()
        assert group.all_reduce(np.ones(1)).resolve()[0] == n


def test_with_checks_a_refusal_on_one_rank_reaches_the_others(comm, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")
    with mesh_of(comm) as mesh:
        group, n = mesh.group(), mesh.size
        if n > 1:
            with mesh.budget(bytes=0 if mesh.rank == n - 1 else None):
                kind = BudgetError if mesh.rank == n - 1 else MismatchError
                with raises(kind, f"rank {n - 1}", "all_gather", "0 bytes"):
                    group.all_gather(np.ones(3)).resolve()
        assert group.all_reduce(np.ones(1)).resolve()[0] == n
