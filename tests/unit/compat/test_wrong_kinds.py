"""Arguments of the wrong kind are refused by a sentence, and touch nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import (
    DTypeError,
    GroupError,
    LayoutError,
    MeshError,
    ModuleError,
    MpimeshError,
    RankError,
    ShapeError,
)

WORDS: Any = mm.compat  # type checkers are not asked about wrong kinds
burn, kapsl, shrew, tensorflow, tvm = (
    getattr(WORDS, name) for name in ("burn", "kapsl", "shrew", "tensorflow", "tvm")
)

VALUES = tensorflow.create_mesh({"x": 2})
AFFINE = kapsl.MeshRouter(mm.Mesh("tp=2,pp=3"), kapsl.RoutingStrategy.SessionAffinity)


def dataset(mesh, **options):
    """A data set of TensorFlow's."""
    layout = tensorflow.Layout(["dp"], mesh)
    given = {"layouts": layout, "global_batch_size": 2, "batch_dim": "dp", **options}
    return tensorflow.DTensorDataset(np.ones(4), mesh=mesh, **given)


def pack(mesh, value, **options):
    """A packed array of which each rank has a copy."""
    return tensorflow.pack([np.full(2, value)], tensorflow.Layout(["unsharded"], mesh), **options)


WITHOUT_RANKS = {
    "dim_names": (MeshError, lambda: tensorflow.Mesh(None, np.arange(1), [0], ["CPU:0"])),
    "ids": (MeshError, lambda: tensorflow.Mesh(["x"], np.array([np.nan]), [0], ["CPU:0"])),
    "local ids": (MeshError, lambda: tensorflow.Mesh(["x"], np.arange(1), [None], ["CPU:0"])),
    "devices": (MeshError, lambda: tensorflow.create_mesh({"x": 1}, devices=5)),
    "device_type": (MeshError, lambda: tensorflow.create_mesh({"x": 1}, device_type=5)),
    "xla": (MeshError, lambda: tensorflow.create_mesh({"x": 1}, use_xla_spmd=True)),
    "an xla": (MeshError, lambda: tensorflow.create_mesh({"x": 1}, use_xla_spmd="no")),
    "specs": (LayoutError, lambda: tensorflow.Layout(None, VALUES)),
    "a text of specs": (LayoutError, lambda: tensorflow.Layout("xx", VALUES)),
    "layout": (LayoutError, lambda: tensorflow.Layout.of(None, 2)),
    "rank": (LayoutError, lambda: tensorflow.Layout.replicated(VALUES, "2")),
    "axis": (LayoutError, lambda: tensorflow.Layout.batch_sharded(VALUES, "x", 2, None)),
    "single device": (LayoutError, lambda: tensorflow.Layout.from_single_device_mesh(None)),
    "text": (LayoutError, lambda: tensorflow.Layout.from_string(None)),
    "unpacked": (LayoutError, lambda: tensorflow.unpacked(np.ones(2), "x")),
    "unpacked_to_numpy": (LayoutError, lambda: tensorflow.unpacked_to_numpy([1, 2], "x")),
    "fn": (LayoutError, lambda: tensorflow.call_with_layout(None, None)),
    "workers": (GroupError, lambda: tvm.ThreadedSession("4")),
    "groups": (GroupError, lambda: tvm.ThreadedSession(4, None)),
    "sinfo": (LayoutError, lambda: tvm.DTensorStructInfo(5, mm.Mesh("x=2"), "R")),
    "short sinfo": (LayoutError, lambda: tvm.DTensorStructInfo(((2,),), mm.Mesh("x=2"), "R")),
    "record": (LayoutError, lambda: tvm.DTensorStructInfo.from_record(None)),
    "model": (ModuleError, lambda: shrew.MixedPrecisionTrainer(None, None)),
    "compute_dtype": (DTypeError, lambda: shrew.MixedPrecisionTrainer(None, None, "f99")),
    "shrew's mesh": (ModuleError, lambda: shrew.DataParallel(mm.nn.Linear(2, 2), 2, mesh=None)),
    "burn's mesh": (GroupError, lambda: burn.register(None)),
    "a session": (MeshError, lambda: AFFINE.route("abc")),
    "a hint": (MeshError, lambda: AFFINE.route(tp_group_hint=1.5)),
    "a tp group": (MeshError, lambda: AFFINE.get_tp_group_workers(-1)),
    "kapsl's devices": (MeshError, lambda: kapsl.DeviceMesh.new(5)),
    "sharded_save": (MeshError, lambda: tensorflow.sharded_save(None, "x", [], None, [])),
}

WITH_A_MESH = {
    "allreduce": (GroupError, lambda mesh: tvm.allreduce(np.ones(2), group=mesh)),
    "broadcast": (GroupError, lambda mesh: tvm.broadcast_from_worker0(np.ones(2), group=None)),
    "gather": (GroupError, lambda mesh: tvm.gather_to_worker0(np.ones(2), group="dp")),
    "send": (GroupError, lambda mesh: tvm.send_to_worker(np.ones(2), 0, group="dp")),
    "recv": (GroupError, lambda mesh: tvm.recv_from_worker(0, group="dp")),
    "next group": (GroupError, lambda mesh: tvm.send_to_next_group(np.ones(2), mesh=None)),
    "all_reduce": (GroupError, lambda mesh: burn.all_reduce(np.ones(2), "sum", mesh)),
    "reduce": (GroupError, lambda mesh: burn.reduce(np.ones(2), "sum", 0, mesh)),
    "burn's broadcast": (GroupError, lambda mesh: burn.broadcast(np.ones(2), mesh)),
    "a mesh to finish": (GroupError, burn.finish_collective),
    "config": (GroupError, lambda mesh: burn.DistributedContext(mesh.group("dp"), 5)),
    "store": (ModuleError, lambda mesh: shrew.reduce_gradients(3, ["a"], group=mesh.group())),
    "params": (ModuleError, lambda mesh: shrew.reduce_gradients({}, "a", group=mesh.group())),
    "names": (ModuleError, lambda mesh: shrew.reduce_gradients({}, [[]], group=mesh.group())),
    "op": (ModuleError, lambda mesh: shrew.reduce_gradients({}, ["a"], "x", group=mesh.group())),
    "shrew's group": (ModuleError, lambda mesh: shrew.reduce_gradients({}, ["a"], group=mesh)),
    "allgather": (GroupError, lambda mesh: tvm.allgather(np.ones(2), "2", group=mesh.group())),
    "scatter": (GroupError, lambda mesh: tvm.scatter_from_worker0(np.ones(2), 2, group=mesh)),
    "batched": (ModuleError, lambda mesh: dataset(mesh, dataset_already_batched=np.array([]))),
    "root": (RankError, lambda mesh: tensorflow.to_numpy(mm.ones(2, mesh, "R"), root=2)),
    "replicas": (ShapeError, lambda mesh: pack(mesh, 0, check_replicas="no")),
    "timeout": (MeshError, lambda mesh: tensorflow.barrier(mesh, timeout_in_ms="5")),
    "pack": (LayoutError, lambda mesh: tensorflow.pack([np.ones(2)], "dp=S0", mesh=mesh)),
}


@pytest.mark.parametrize("name", WITHOUT_RANKS)
def test_it_is_refused(name):
    error, call = WITHOUT_RANKS[name]
    with pytest.raises(error):
        call()


def test_it_is_refused_and_the_mesh_goes_on():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            for error, call in WITH_A_MESH.values():
                with pytest.raises(error):
                    call(mesh)
            return mesh.group("dp").all_reduce(np.ones(1)).resolve().item()

    assert mm.run_virtual(2, main) == [2.0, 2.0]


def test_what_one_rank_alone_has_wrong_is_raised_on_both():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            is_wrong = mesh.rank == 1
            with pytest.raises(MpimeshError, match="has one device for each, got 3"):
                kapsl.DeviceMesh.new([None] * 3 if is_wrong else None)
            with pytest.raises(MpimeshError, match=r"num_devices must be .* at least 1"):
                burn.register(mesh, burn.CollectiveConfig(0 if is_wrong else None))
            with pytest.raises(MpimeshError, match="the ranks have CPU"):
                tensorflow.initialize_accelerator_system("GPU" if is_wrong else None)
            with pytest.raises(MeshError, match="not initialized"):
                tensorflow.client_id()
            assert tensorflow.initialize_accelerator_system("CPU") == "CPU"
            for options, text in (
                ({"mesh_dims": {"x": 3}}, r"must be equal to total size"),
                ({"mesh_dims": {"x": "3"}}, r"x.*'3'"),
                ({"local_devices": ["CPU:1"]}, "local_devices"),
                ({"use_xla_spmd": True}, "XLA"),
                ({"device_type": "TPU"}, "TPU"),
            ):
                with pytest.raises(MpimeshError, match=text):
                    tensorflow.create_distributed_mesh(**(options if is_wrong else {}))
            tensorflow.shutdown_accelerator_system()
            group = mesh.group("dp")
            with pytest.raises(MpimeshError, match="num_workers is 3"):
                tvm.allgather(np.ones(2), 3 if is_wrong else 2, group=group)
            with pytest.raises(MpimeshError, match="num_workers must"):
                tvm.scatter_from_worker0(None, "2" if is_wrong else 2, group=group)
            with pytest.raises(MpimeshError, match="params must"):
                shrew.reduce_gradients({}, 5 if is_wrong else ["a"], group=group)
            with pytest.raises(MpimeshError, match="op must be"):
                shrew.reduce_gradients({}, ["a"], "mul" if is_wrong else "sum", group=group)
            with pytest.raises(MpimeshError, match="Average"):
                shrew.reduce_gradients({}, ["a"], "average" if is_wrong else "sum", group=group)
            with pytest.raises(MpimeshError, match="multiple of the 2 ranks"):
                dataset(mesh, global_batch_size=3 if is_wrong else 2)
            with pytest.raises(MpimeshError, match="ranks 0 and 1 give different"):
                pack(mesh, is_wrong, check_replicas=True)
            with pytest.raises(MpimeshError, match="check_replicas"):
                pack(mesh, 0, check_replicas=is_wrong)
            return mesh.group("dp").all_reduce(np.ones(1)).resolve().item()

    assert mm.run_virtual(2, main) == [2.0, 2.0]


@pytest.mark.parametrize("system", ["tvm", "shrew", "tensorflow", "burn"])
def test_the_words_of_a_system_are_its_own(system):
    """A live mesh is mpimesh's own, and none of these has it."""
    assert not hasattr(getattr(WORDS, system), "DeviceMesh")
