from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import ClosedError, DeadlockError, MismatchError, RankError, UnresolvedError
from mpimesh.runtime.world import current_world
from tests.contract.early_ends import WAITS, all_are_told
from tests.helpers.raises import names, raises


def test_a_mesh_moves_with_its_groups():
    def main():
        world = current_world().virtual
        assert world is not None
        with mm.DeviceMesh("dp=2,pp=2") as mesh:
            old = mesh.group("dp")
            mesh.add_group("odd", [3, 1])
            mesh.set_comm(world.split(0, world.rank))
            with pytest.raises(ClosedError):
                old.all_reduce(np.ones(1))
            assert mesh.group_names == ["world", "dp", "pp", "odd"]
            assert mesh.group("dp").all_reduce(np.ones(1)).resolve()[0] == 2
            return list(mesh.group("odd").ranks)

    assert mm.run_virtual(4, main) == [[3, 1]] * 4


@pytest.mark.parametrize(
    ("order", "theirs"),
    [
        ("reversed", [[3, 4], [2, 4], [1, 4], [0, 4]]),
        ("halved", [[0, 2], [1, 2], [0, 2], [1, 2]]),
    ],
)
def test_another_set_of_ranks_is_refused_on_every_rank(order, theirs):
    def main():
        world = current_world().virtual
        assert world is not None
        color, key = (0, -world.rank) if order == "reversed" else (world.rank // 2, world.rank)
        other = world.split(color, key)
        with mm.DeviceMesh("dp=4") as mesh:
            with raises(RankError, "0 to 3", theirs) as caught:
                mesh.set_comm(other)
            assert caught.value.agreed
            return mesh.group().all_reduce(np.ones(1)).resolve()[0]

    assert mm.run_virtual(4, main) == [4.0] * 4


def test_meshes_closed_in_different_orders_are_told_as_a_circle(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "0")

    def main():
        meshes = [mm.DeviceMesh("dp=2") for _ in range(2)]
        meshes[meshes[0].rank].close()

    with pytest.raises(DeadlockError) as caught:
        mm.run_virtual(2, main)
    _, first, second, _, *circle = str(caught.value).splitlines()
    names(first, "rank 0", "close()", "group 'world'", f"{__file__}:")
    names(second, "rank 1", "close()", "group 'world'", f"{__file__}:")
    assert len(circle) == 2
    names(circle[0], "rank 0 waits for rank 1", "close()")
    names(circle[1], "rank 1 waits for rank 0", "close()")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", WAITS)
def test_ranks_that_end_the_block_and_the_one_that_waits_for_them_are_told(name, size, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "0")
    mm.run_virtual(size, all_are_told, None, name)


def test_a_rank_that_waits_in_a_part_of_a_mesh_is_told_that_the_others_end_it(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "0")

    def main():
        with mm.DeviceMesh("dp=2,tp=2") as mesh:
            wait = mesh.group("tp").all_reduce_init(np.ones(3))
            wait.start().resolve()
            if mesh.rank == 0:
                wait.start().resolve()

    found = "operation 2: rank 0: all_reduce(shape (3,), float64, sum); rank 1: close() of the mesh"
    with raises(MismatchError, "'tp'", found):
        mm.run_virtual(4, main)


def test_a_mesh_that_was_not_closed_goes_on(monkeypatch):
    """And what it starts next has the number that its closing had."""
    monkeypatch.setenv("MPIMESH_CHECKS", "0")

    def main():
        mesh = mm.DeviceMesh("dp=2,tp=2")
        for _ in range(20):
            handles = [mesh.group(name).all_reduce(np.ones(3)) for name in mesh.group_names]
            with raises(UnresolvedError, "cannot be closed", "rank 0", "all_reduce"):
                for handle in handles[: 3 * (mesh.rank > 0)]:
                    handle.resolve()
                mesh.close()
            assert [handle.resolve()[0] for handle in handles] == [4, 2, 2]
        mesh.close()

    mm.run_virtual(4, main)


def test_a_rank_that_closes_while_others_go_on_is_told(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main():
        mesh = mm.DeviceMesh("dp=2")

        def go_on():
            mesh.group().all_reduce(np.ones(1)).resolve()

        act = mesh.close if mesh.rank == 0 else go_on
        with raises(
            MismatchError, "close()", "all_reduce(shape (1,)", "rank 0", "rank 1"
        ) as caught:
            act()
        assert not mesh.closed
        mesh.close()
        return str(caught.value)

    first, second = mm.run_virtual(2, main)
    assert first == second
