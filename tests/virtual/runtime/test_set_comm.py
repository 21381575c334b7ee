from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import ClosedError, DeadlockError, MismatchError, RankError
from mpimesh.runtime.world import current_world
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


def test_a_deadlock_with_a_rank_at_the_end_says_so(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "0")

    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            if mesh.rank == 0:
                mesh.group("dp").all_reduce(np.ones(1)).resolve()

    with pytest.raises(DeadlockError) as caught:
        mm.run_virtual(2, main)
    _, first, second, _, *circle = str(caught.value).splitlines()
    names(first, "rank 0", "all_reduce(shape (1,), float64, sum)", "group 'dp'")
    names(second, "rank 1", "close()", "group 'world'", f"{__file__}:")
    assert len(circle) == 2
    names(circle[0], "rank 0 waits for rank 1", "all_reduce")
    names(circle[1], "rank 1 waits for rank 0", "close()")


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
