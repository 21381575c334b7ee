from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import ClosedError, DeadlockError, MismatchError, RankError
from mpimesh.runtime.world import current_world


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


@pytest.mark.parametrize("order", ["reversed", "halved"])
def test_another_set_of_ranks_is_refused_on_every_rank(order):
    def main():
        world = current_world().virtual
        assert world is not None
        color, key = (0, -world.rank) if order == "reversed" else (world.rank // 2, world.rank)
        other = world.split(color, key)
        with mm.DeviceMesh("dp=4") as mesh:
            with pytest.raises(RankError, match="must be the same in the new") as caught:
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
    _, first, second = str(caught.value).splitlines()
    assert first.startswith("  rank 0 waits in all_reduce(shape (1,), float64, sum) on group 'dp'")
    assert second.startswith("  rank 1 waits in close() on group 'world' at ")
    assert Path(second.rpartition(":")[0].rpartition(" at ")[2]) == Path(__file__)


def test_a_rank_that_closes_while_others_go_on_is_told():
    def main():
        mesh = mm.DeviceMesh("dp=2")

        def go_on():
            mesh.group().all_reduce(np.ones(1)).resolve()

        act = mesh.close if mesh.rank == 0 else go_on
        with pytest.raises(
            MismatchError, match=r"(?s)close\(\) on group 'world' at .*all_reduce"
        ) as caught:
            act()
        assert not mesh.closed
        mesh.close()
        return str(caught.value)

    first, second = mm.run_virtual(2, main)
    assert first == second
