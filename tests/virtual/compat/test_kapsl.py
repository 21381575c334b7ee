"""kapsl's words."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.compat.kapsl import DistributedOps, dist_ops
from mpimesh.errors import ClosedError, DTypeError, MeshError, RankError, ShapeError
from tests.helpers.compat_programs import every_kapsl_operation
from tests.helpers.raises import raises


@pytest.mark.thin(1)
@pytest.mark.parametrize("checks", ["0", "1"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_k31_every_operation(size, checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    mm.run_virtual(size, every_kapsl_operation, None)


def test_k31_without_a_communicator():
    ops = dist_ops(mm.Mesh("dp=2"))
    assert isinstance(ops, DistributedOps)
    x = np.ones(2, "f4")
    for call in (
        lambda: ops.all_reduce_f32(x, "sum", "world"),
        lambda: ops.broadcast(x, 0),
        lambda: ops.all_gather(x, x),
        lambda: ops.scatter(x, x, 0),
        lambda: ops.gather(x, x, 0),
        lambda: ops.reduce_scatter(x, x),
        lambda: ops.barrier(),
        lambda: ops.send(x, 1),
        lambda: ops.recv(x, 1),
    ):
        with raises(MeshError, "No communication backend configured", "dp=2"):
            call()
    with raises(MeshError, "mesh", 3):
        dist_ops(3)  # type: ignore[arg-type]


def test_k31_a_group_of_some_ranks():
    """A root is a rank of the mesh; one that is not in the group is refused."""

    def main():
        with mm.DeviceMesh("a=2,b=2") as mesh:
            ops = dist_ops(mesh)
            data = np.full(2, float(mesh.rank))
            ops.broadcast(data, mesh.rank // 2 * 2 + 1, "b")
            assert data.tolist() == [mesh.rank // 2 * 2 + 1] * 2
            chunk = np.zeros(1)
            root = 2 + mesh.rank % 2
            ops.scatter(np.array([10.0, 20.0]) + mesh.rank, chunk, root, mesh.group("a"))
            assert chunk.tolist() == [10 * (1 + mesh.rank // 2) + root]
            with raises(RankError, "root_rank", 3 - mesh.rank, "'b'"):
                ops.broadcast(data, 3 - mesh.rank, "b")
        with pytest.raises(ClosedError):
            ops.barrier()

    mm.run_virtual(4, main)


def test_k31_an_output_that_does_not_fit_leaves_the_ranks_together():
    def main():
        with mm.DeviceMesh("x=2") as mesh:
            ops = dist_ops(mesh)
            for output in (np.zeros(3), np.zeros(4, "f4"), [0.0] * 4):
                if mesh.rank == 0:
                    with pytest.raises((ShapeError, DTypeError)):
                        ops.gather(np.ones(2), output, 0)
                else:
                    ops.gather(np.ones(2), None, 0)
            chunk = np.zeros(2 + mesh.rank)
            if mesh.rank == 1:
                with raises(ShapeError, (2,), (3,)):
                    ops.scatter(None, chunk, 0)
            else:
                ops.scatter(np.ones(4), chunk, 0)
            assert mesh.group().all_reduce(np.ones(1)).resolve()[0] == 2

    mm.run_virtual(2, main)
