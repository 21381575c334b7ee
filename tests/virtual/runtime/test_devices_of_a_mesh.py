"""A live mesh's knowledge of its devices, in TensorFlow's words."""

from __future__ import annotations

import mpimesh as mm
from mpimesh import dtensor


def test_a_live_mesh_knows_its_devices():
    def main():
        with mm.DeviceMesh("dp=2,tp=2", name="m") as mesh:
            names = [f"/job:worker/replica:0/task:{rank}/device:CPU:0" for rank in range(4)]
            assert mesh.local_devices() == [names[mesh.rank]] == [dtensor.device_name(mesh)]
            assert mesh.global_devices() == names
            assert mesh.device_type() == "CPU"
            assert mesh.num_local_devices() == 1
            assert mesh.to_string() == f"m|dp=2,tp=2|0,1,2,3|{mesh.rank}|{names[mesh.rank]}"
            assert mm.Mesh.from_string(mesh.to_string()) == mesh.mesh
            assert mm.Mesh.from_proto(mesh.as_proto()) == mesh.mesh
            # The value is the same on all ranks.
            assert mesh.value == mm.Mesh("dp=2,tp=2", name="m")

    mm.run_virtual(4, main)


def test_a_rank_that_the_mesh_leaves_out_has_no_local_device():
    def main():
        with mm.DeviceMesh(mm.Mesh("dp=2", [2, 0])) as mesh:
            assert len(mesh.local_devices()) == (mesh.rank != 1)
            assert [name.split("/")[3] for name in mesh.global_devices()] == ["task:2", "task:0"]
            assert mesh.device_type() == "CPU"
            assert mesh.to_string().startswith("|dp=2|2,0|")

    mm.run_virtual(3, main)


def test_names_that_were_given_stay():
    def main():
        given = [f"/job:a/replica:0/task:{rank}/device:CPU:3" for rank in range(2)]
        with mm.DeviceMesh(mm.Mesh("dp=2", global_devices=given)) as mesh:
            assert mesh.global_devices() == given
            assert mesh.local_devices() == [given[mesh.rank]]
            mesh.reshape("x=2,y=1")
            assert mesh.device_type() == "CPU"
            assert len(mesh.local_devices()) == 1

    mm.run_virtual(2, main)
