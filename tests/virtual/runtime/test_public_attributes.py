"""Tab completion shows what users call: a new name here is a decision."""

from __future__ import annotations

import re

import numpy as np
import pytest

import mpimesh as mm

NAMES = {
    "DeviceMesh": """
        add_group all_devices barrier budget close closed comm contains_dim contains_rank
        coord coord_of coords_of copy devices_by_backend devices_in_group dim_names
        dim_size dims dims_text get_device get_group group group_index group_names
        group_rank group_ranks groups hosts ids in_group links local_device local_rank
        measure_links mesh name ndim neighbour num_groups offset_of place_in_group rank
        rank_at rank_of reshape set_comm set_rank shape shared_empty size strides
        sync_collective topology total_compute_units total_memory_mb traffic use_device
        world_size
    """,
    "ProcessGroup": """
        algorithms all_gather all_gather_init all_reduce all_reduce_init all_to_all
        all_to_all_init alone backend barrier broadcast broadcast_init close closed
        communicator empty_once gather gather_init group_rank_of name rank ranks recv
        recv_init recv_next recv_prev reduce reduce_init reduce_scatter
        reduce_scatter_init scatter scatter_init send send_init send_next send_prev shift size
        start_barrier world_rank
    """,
    "CollectiveTensor": """
        assume_resolved done map resolve wait
    """,
    "DTensor": """
        T all any argmax argmin argsort astype clip compress conj conjugate copy cumprod
        cumsum device diagonal dot dtype fill flatten from_local full full_tensor
        global_offset imag is_member item itemsize layout local mT max mean mesh min
        nbytes ndim nonzero placement plan prod ravel real redistribute redistribute_init
        repeat reshape round shape size sort squeeze start_redistribute std sum swapaxes
        take to_device to_local tolist trace transpose var
    """,
    "Layout": """
        agrees_with box global_offset holders is_replicated local_shape mesh partial_op
        placement replicated sharding_dims text tiling
    """,
    "Mesh": """
        check_world contains_dim contains_rank coord_of coords_of dim_names dim_size dims
        dims_text flatten from_ids group_index group_ranks groups ids name ndim neighbour
        num_groups offset_of place_in_group rank_at rank_of shape size strides
        submesh submesh_of unflatten
    """,
}


@pytest.fixture(scope="module")
def shown():
    """The public attributes of an object of each class."""

    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            handle = mesh.group().all_reduce(np.ones(3))
            handle.resolve()
            x = mm.zeros((4, 4), mesh, "dp=S0")
            objects = (mesh, mesh.mesh, mesh.group("dp"), handle, x, x.layout)
            return {type(each).__name__: [n for n in dir(each) if n[0] != "_"] for each in objects}

    return mm.run_virtual(2, main)[0]


@pytest.mark.parametrize("kind", NAMES)
def test_public_attributes_are_listed(kind, shown):
    assert sorted(shown[kind]) == NAMES[kind].split()


@pytest.mark.parametrize(
    ("mpi4py_name", "ours"),
    [("Allreduce", "all_reduce"), ("allgather", "all_gather"), ("Bcast", "broadcast")],
)
def test_mpi4py_s_names_are_refused_with_ours(mpi4py_name, ours):
    with mm.DeviceMesh("x=1") as mesh:
        group = mesh.group("x")
        assert not hasattr(group, mpi4py_name)
        with pytest.raises(AttributeError, match=rf"'{mpi4py_name}'; use {ours}\(\)"):
            getattr(group, mpi4py_name)
        with pytest.raises(AttributeError, match=r"use group\.rank"):
            group.Get_rank()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("all_reduce", r"mesh\.group\(dim\)\.all_reduce\(\)"),
        ("Allreduce", r"mesh\.group\(\)\.all_reduce\(\)"),
        ("get_rank", r"use mesh\.rank"),
        ("Get_size", r"use mesh\.size"),
    ],
)
def test_what_a_mesh_has_elsewhere(name, words):
    with mm.DeviceMesh("x=1") as mesh:
        assert not hasattr(mesh, name)
        with pytest.raises(AttributeError, match=f"'{name}'; .*{words}"):
            getattr(mesh, name)


def test_an_unknown_name_is_refused_with_where_to_look():
    with pytest.raises(AttributeError, match=r"no attribute 'Linear'.* mm\.nn") as caught:
        _ = mm.Linear  # type: ignore[attr-defined]
    assert (caught.value.name, caught.value.obj) == ("Linear", mm)


@pytest.mark.parametrize(
    ("room", "name", "words"),
    [
        (mm, "sum", "np.sum(x)"),
        (mm, "array", "mm.distribute(x, mesh, placements)"),
        (mm.nn, "CrossEntropyLoss", "nn.CrossEntropy"),
        (mm.nn, "Conv2d", "mpimesh.interop.torch"),
    ],
)
def test_names_of_other_libraries_are_refused_with_what_stands_for_them(room, name, words):
    assert not hasattr(room, name)
    with pytest.raises(AttributeError, match=f"{name!r}.*{re.escape(words)}"):
        getattr(room, name)
