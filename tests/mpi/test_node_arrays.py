"""Arrays that exist once for the ranks of a node."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import MismatchError, ShapeError
from tests.contract.shared_memory import nodes_of
from tests.helpers.raises import raises


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (300, 1000)])
def test_what_one_rank_writes_all_ranks_of_the_node_read(comm, shape):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group()
        table, writes = group.empty_once(shape, "float32")
        assert table.shape == shape
        assert table.dtype == np.float32
        assert table.flags.c_contiguous
        assert table.flags.writeable is writes
        assert writes is (mesh.rank == 0)
        if writes:
            table[...] = 7
        group.barrier()
        assert (table == 7).all()
        group.barrier()
        if writes:
            table[...] = 8
        group.barrier()
        assert (table == 8).all()


def test_once_for_each_node(comm):
    with nodes_of(2), mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group()
        table, writes = group.empty_once(10, "int64")
        alone = comm.rank % 2 == 0 and comm.rank == comm.size - 1
        shared = comm.size > 2  # two ranks and fewer are one node
        if shared and not alone:
            assert writes is (comm.rank % 2 == 0)
        if writes:
            table[...] = comm.rank // 2
        group.barrier()
        assert (table == comm.rank // 2).all()
        group.barrier()


def test_where_memory_is_not_shared_each_rank_has_its_own(comm, monkeypatch):
    monkeypatch.setenv("MPIMESH_NODE_SHARED", "never")
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        table, writes = mesh.group().empty_once(4)
        assert writes
        table[...] = mesh.rank
        mesh.group().barrier()
        assert (table == mesh.rank).all()


def test_arguments_that_differ_or_do_not_fit(comm):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        with raises(ShapeError, (2, -1)):
            mesh.group().empty_once((2, -1))
        if comm.size > 1:
            with pytest.raises(MismatchError):
                mesh.group().empty_once(3 + mesh.rank)
        table, _ = mesh.group().empty_once(3)
        assert table.shape == (3,)
