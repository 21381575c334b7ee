"""The wrong kind of mesh, communicator, group or dim gets a sentence with the cure."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpimesh as mm
from mpimesh import nn
from tests.helpers.parallel_traps import error_of


class Comm:
    """Stands for a communicator of mpi4py."""

    def Get_rank(self) -> int:
        return 0


def test_each_is_refused_with_its_cure():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            value: Any = mesh.mesh
            group: Any = mesh.group("dp")
            live: Any = mesh
            comm: Any = Comm()
            number: Any = 0
            text: Any = "dp"
            x, layer = np.ones((4, 4)), nn.Linear(2, 2)
            split = mm.distribute(x, mesh, "dp=S0")
            calls = [
                (lambda: mm.distribute(x, value, "dp=S0"), "DeviceMesh(mesh)"),
                (lambda: mm.zeros(4, value, "dp=S0"), "DeviceMesh(mesh)"),
                (lambda: mm.zeros(4, comm, "dp=S0"), "DeviceMesh('dp=-1', comm)"),
                (lambda: mm.distribute(x, group, "dp=S0"), "the mesh that the group is of"),
                (lambda: mm.DeviceMesh("dp=2", live), "mesh.comm"),
                (lambda: mm.DeviceMesh("dp=2", group), "group.communicator"),
                (lambda: mesh.group(number), "by its name"),
                (lambda: mesh.dim_size(number), "a text"),
                (lambda: mm.DataParallel(layer, value), "such as mm.DeviceMesh('dp=2')"),
                (lambda: mm.fully_shard(layer, group), "such as mm.DeviceMesh('dp=2')"),
                (lambda: mm.tensor_parallel(layer, live), "such as mesh.group('tp')"),
                (lambda: mm.tensor_parallel(layer, text), "such as mesh.group('tp')"),
                (lambda: mm.save("x", {}, mesh=value), "must be a DeviceMesh"),
                (lambda: mm.Layout(group, "dp=S0"), "a Mesh or a DeviceMesh"),
                (lambda: split.redistribute("dp=R", mesh=value), "a DeviceMesh"),
                (lambda: group.all_reduce(split), "x.local"),
                (lambda: group.broadcast(x, root=text), "0 to 1"),
            ]
            for call, cure in calls:
                assert cure in str(error_of(call)), error_of(call)

    mm.run_virtual(2, main)
