"""Refusals of groups and meshes, and the names in their messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import mpimesh as mm
from mpimesh.arguments import shown
from mpimesh.errors import (
    DTypeError,
    GroupError,
    LayoutError,
    MeshError,
    MismatchError,
    ShapeError,
    UnresolvedError,
    WorldSizeError,
)
from tests.helpers.raises import raises


def overlapping() -> np.ndarray:
    return as_strided(np.zeros(3), (4, 3), (0, 8), writeable=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda group, out: group.all_reduce(np.ones((4, 3)), out=out),
        lambda group, out: group.all_reduce(out, out=out),
        lambda group, out: group.reduce(np.ones((4, 3)), out=out),
        lambda group, out: group.all_gather(np.ones((2, 3)), out=out),
        lambda group, out: group.gather(np.ones((2, 3)), out=out),
        lambda group, out: group.reduce_scatter(np.ones((8, 3)), out=out),
        lambda group, out: group.all_to_all(np.ones((4, 3)), out=out),
        lambda group, out: group.broadcast(np.ones((4, 3)), out=out),
        lambda group, out: group.broadcast(
            np.ones((4, 3)) if group.rank == 0 else None, root=None, out=out
        ),
        lambda group, out: group.scatter(np.ones((8, 3)), out=out).resolve(),
    ],
)
def test_an_output_whose_elements_share_memory_is_refused(call):
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            with raises(ShapeError, "out", (0, 8), (4, 3)):
                call(mesh.group("dp"), overlapping())
            # And the ranks are still together.
            return mesh.group("dp").all_reduce(np.ones(1)).resolve().item()

    assert mm.run_virtual(2, main) == [2.0, 2.0]


def test_an_output_with_steps_between_its_elements_is_taken():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            base = np.zeros((8, 6))
            for out in (base[::2, ::-2], base.T[:3, :4].T, base[::-1][:4, :3]):
                mesh.group("dp").all_reduce(np.ones((4, 3)), out=out).resolve()
                assert (out == 2).all()

    mm.run_virtual(2, main)


def test_a_read_only_output_names_the_operation_that_reads_it(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main():
        with mm.DeviceMesh("dp=1") as mesh:
            x = np.ones(4)
            handle = mesh.group("dp").all_reduce(x, label="first")
            for out in (x, x[:2]):
                with raises(ShapeError, "out", "all_reduce", "'first'", "group 'dp'"):
                    mesh.group("dp").all_reduce(np.ones(out.size), out=out)
            handle.resolve()
            frozen = np.ones(4)
            frozen.flags.writeable = False
            with raises(ShapeError, "out", "read-only"):
                mesh.group("dp").all_reduce(x, out=frozen)

    mm.run_virtual(1, main)


def test_wrong_ranks_of_a_group_on_one_rank_raise_on_all():
    def main():
        wrong: Any = 5
        with mm.DeviceMesh("dp=2") as mesh:
            with raises(MismatchError, "rank 1", "'g'", 5):
                mesh.add_group("g", wrong if mesh.rank else [0, 1])
            with raises(GroupError, "'g'", "list", "tuple", 5):
                mesh.add_group("g", wrong)
            return mesh.add_group("g", [0, 1]).size

    assert mm.run_virtual(2, main) == [2, 2]


MASKED = np.ma.masked_greater(np.arange(4.0), 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda group: group.all_reduce(MASKED),
        lambda group: group.all_reduce(np.ones(4), out=MASKED.copy()),
        lambda group: group.all_reduce_init(MASKED),
        lambda group: group.all_gather(MASKED),
        lambda group: group.broadcast(MASKED),
        lambda group: group.broadcast(MASKED, root=None),
        lambda group: group.send(MASKED, 1 - group.rank),
        lambda group: group.all_reduce(np.ma.masked),
    ],
)
def test_a_masked_array_is_refused_and_the_cure_is_said(call):
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            with raises(DTypeError, "masked", "x.filled(value)", "numpy.ma.getmaskarray(x)"):
                call(mesh.group("dp"))
            parts = (MASKED.filled(0), np.ma.getmaskarray(MASKED))
            return [mesh.group("dp").all_reduce(part, "max").resolve().sum() for part in parts]

    assert mm.run_virtual(2, main) == [[3.0, 1], [3.0, 1]]


@pytest.mark.parametrize("name", ["g" * 5000, "", "a\nb", 3])
@pytest.mark.parametrize("members", [{"ranks": [0, 1]}, {"dims": "a"}])
def test_a_name_that_no_group_can_have_is_refused_on_all_ranks(name, members):
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            with raises(GroupError, "a group's name must"):
                mesh.add_group(name, **members)
            group = mesh.add_group("\N{WAVING HAND SIGN}" * 200, **members)
            sent = group.send(np.ones(2), 1 - mesh.rank)
            came = group.recv(1 - mesh.rank).resolve()
            sent.resolve()
            return came.sum()

    assert mm.run_virtual(2, main) == [2.0, 2.0]


def test_an_error_that_shows_an_object_is_the_same_on_all_ranks():
    """The object has another address on each rank."""

    def main():
        wrong: Any = object()
        with mm.DeviceMesh("dp=2") as mesh, raises(GroupError, "'g'", "object"):
            mesh.add_group("g", wrong)

    mm.run_virtual(2, main)


@pytest.mark.parametrize("size", [1 << 62, 2**70, (1 << 40, 1 << 40)])
def test_what_no_address_can_count_to_is_refused_before_memory_is_taken(size):
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            for make in (
                lambda: mesh.shared_empty(size),
                lambda: mesh.group().empty_once(size),
                lambda: mm.zeros(size, mesh, "dp=R"),
                lambda: mm.Random(1).normal(size, mesh, "dp=S0"),
            ):
                with pytest.raises(ShapeError):
                    make()

    mm.run_virtual(2, main)


def test_a_mesh_that_is_only_a_value_is_told_from_a_live_one():
    def main():
        value: Any = mm.Mesh("dp=2")
        with mm.DeviceMesh("dp=2") as mesh:
            for make in (
                lambda: mm.distribute(np.ones(4), value, "dp=S0"),
                lambda: mm.zeros(4, value, "dp=S0"),
            ):
                with raises(LayoutError, value, "DeviceMesh(mesh)"):
                    make()
            return mesh.size

    mm.run_virtual(2, main)


@pytest.mark.parametrize(
    ("dims", "cure"),
    [
        (["dp", "pp"], "'dp=2,pp=2'"),
        (mm.MeshTopology.data_parallel(1), "to_mesh"),
    ],
)
def test_dims_that_are_none_tell_the_cure(dims, cure):
    def main():
        with pytest.raises(MeshError) as caught:
            mm.DeviceMesh(dims)
        assert cure in str(caught.value)

    mm.run_virtual(2, main)


def test_a_communicator_in_the_place_of_the_dims_tells_the_order():
    class Intracomm:
        def Get_rank(self) -> int:
            return 0

    def main():
        comm: Any = Intracomm()
        with raises(MeshError, "Intracomm", 'DeviceMesh("dp=-1", comm)'):
            mm.DeviceMesh(comm)
        with raises(MeshError, "comm", "mpi4py", None, "'world'"):
            mm.DeviceMesh("dp=2", comm="world")

    mm.run_virtual(2, main)


def test_a_callback_that_gives_another_shape_on_one_rank_raises_on_all():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            with raises(ShapeError, "rank 1", (2,), (1,)):
                mm.from_callback((3,), mesh, "dp=S0", lambda index: np.zeros(2))
            return mesh.group().all_reduce(np.ones(1)).resolve().item()

    assert mm.run_virtual(2, main) == [2.0, 2.0]


def test_a_resolved_handle_names_the_array_that_resolve_returned():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            handle = mesh.group().all_reduce(np.ones(1))
            handle.resolve()
            with raises(UnresolvedError, "handle.resolve()", "all_reduce", "group 'world'"):
                handle + 1

    mm.run_virtual(2, main)


@pytest.mark.parametrize(
    ("dims", "ranks"), [("dp=2,tp=3", 6), ("dp=-1,tp=3", 6), ({"dp": 2}, 2), (mm.Mesh("x=5"), 5)]
)
def test_a_mesh_on_one_rank_names_a_number_of_ranks_that_it_fits(dims, ranks):
    def main():
        with raises(WorldSizeError, f"mpiexec -n {ranks} "):
            mm.DeviceMesh(dims)

    mm.run_virtual(1, main)


@pytest.mark.parametrize("name", [30, float("nan"), -1, b"x", ("a",), True])
def test_a_name_is_text_and_no_limit(name: Any):
    def main():
        with mm.DeviceMesh("dp=-1") as mesh:
            group, x = mesh.group(), np.ones(2)
            with raises(GroupError, shown(name), "timeout_s=30"):
                mesh.barrier(name)
            calls = [
                lambda: group.barrier(label=name),
                lambda: group.barrier(label=name, timeout_s=5),
                lambda: group.all_reduce(x, label=name),
                lambda: group.all_reduce_init(x, label=name),
                lambda: group.broadcast(x, label=name),
                lambda: group.recv(1 - mesh.rank, label=name),
                lambda: group.send(x, 1 - mesh.rank, label=name),
            ]
            for call in calls:
                with raises(GroupError, "label", shown(name)):
                    call()
            mesh.barrier("the end")
            return group.all_reduce(x, label="sum").resolve()[0]

    assert mm.run_virtual(2, main) == [2, 2]


def test_an_array_that_refuses_to_be_one_keeps_its_words():
    """PyTorch's tensors that require gradients raise a RuntimeError that says what to do."""

    class Tensor:
        def __array__(self, *_, **__):
            raise RuntimeError("use tensor.detach().numpy() instead")

    def main():
        with mm.DeviceMesh("dp=-1") as mesh:
            array: Any = Tensor()
            with raises(ShapeError, "Tensor", "tensor.detach().numpy()"):
                mesh.group().all_reduce(array)
            with raises(ShapeError, "Tensor", "tensor.detach().numpy()"):
                mm.distribute(array, mesh, "dp=R")

    mm.run_virtual(2, main)
