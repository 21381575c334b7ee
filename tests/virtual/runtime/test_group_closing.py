from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import DeadlockError, MismatchError
from mpimesh.runtime.world import current_world
from tests.contract.closing import messages_that_nobody_received
from tests.helpers.raises import names


@pytest.mark.parametrize("checks", ["0", "1"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_messages_that_nobody_received(size, checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    mm.run_virtual(size, messages_that_nobody_received, None)


def test_a_rank_that_goes_on_is_told(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            group = mesh.add_group("g", [1, 0])

            def go_on():
                group.all_reduce(np.ones(1)).resolve()

            act = group.close if mesh.rank == 0 else go_on
            with pytest.raises(MismatchError) as caught:
                act()
            names(str(caught.value), "close", "all_reduce", "rank 0", "rank 1")
            assert not group.closed
            group.close()

    mm.run_virtual(2, main)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["shares the mesh's", "its own"])
def test_ranks_that_go_on_and_that_close_are_told_so_without_checks(order, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "0")

    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            group = mesh.add_group("g", order)
            go_on = group.all_reduce_init(np.ones(1))
            act = group.close if mesh.rank == 0 else lambda: go_on.start().resolve()
            with pytest.raises(MismatchError) as caught:
                act()
            return str(caught.value)

    texts = mm.run_virtual(2, main)
    assert len(set(texts)) == 1
    names(texts[0], "the ranks of group 'g'", "close() on group 'g'", "all_reduce(shape (1,)")


def test_groups_that_share_a_communicator_are_told_alike(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            group = mesh.add_group("g", [0, 1])
            go_on = mesh.group("dp").all_reduce_init(np.ones(1))
            act = group.close if mesh.rank == 0 else lambda: go_on.start().resolve()
            with pytest.raises(MismatchError) as caught:
                act()
            return str(caught.value)

    texts = mm.run_virtual(2, main)
    assert len(set(texts)) == 1
    names(texts[0], "groups that share a communicator", "on group 'g'", "on group 'dp'")


def test_groups_closed_in_different_orders_are_told_as_a_circle():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            groups = [mesh.add_group(name, [0, 1], apart=True) for name in "gh"]
            for group in groups if mesh.rank == 0 else reversed(groups):
                group.close()

    with pytest.raises(DeadlockError) as caught:
        mm.run_virtual(2, main)
    names(
        str(caught.value),
        "rank 0 waits for rank 1, in close() on group 'g'",
        "rank 1 waits for rank 0, in close() on group 'h'",
    )


def test_nothing_is_kept_of_dropped_groups():
    def main():
        with mm.DeviceMesh("a=2,b=2") as mesh:
            world = current_world()
            kept = set(world.progress.ledgers)
            for number in range(50):
                for name, options in (
                    ("turned", {"ranks": [3, 1, 0]}),
                    ("apart", {"ranks": [0, 1, 2, 3], "apart": True}),
                    (f"lines {number}", {"dims": "b,a"}),
                ):
                    with mesh.add_group(name, **options) as group:
                        if group.rank is not None:
                            group.all_reduce(np.ones(1)).resolve()
            mesh.add_group("last", [0]).close()
            assert set(world.progress.ledgers) == kept
            assert mesh._core.groups is not None
            assert len(mesh._core.groups._custom) <= 1
            assert len(mesh._core.groups._families) <= 4

    mm.run_virtual(4, main)
