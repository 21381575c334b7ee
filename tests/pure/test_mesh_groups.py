from __future__ import annotations

import pickle
from typing import Any

import pytest

from mpimesh.errors import GroupError, MpimeshError, RankError
from mpimesh.mesh import GroupBackend, GroupSpec, Mesh


def test_the_order_of_ranks_is_the_group_rank():
    group = GroupSpec("mine", [5, 1, 3], GroupBackend.GLOO)
    assert (group.size, group.ranks) == (3, (5, 1, 3))
    assert [group.group_rank(rank) for rank in (5, 1, 3, 0)] == [0, 1, 2, None]
    assert group.in_group(3)
    assert not group.in_group(2)
    assert group == pickle.loads(pickle.dumps(group))
    assert hash(group) == hash(GroupSpec("mine", (5, 1, 3), GroupBackend.GLOO))


def test_ranks_of_a_mesh_stay_lazy():
    ranks = Mesh("dp=1000,tp=10").group_ranks(3, "tp,dp")
    group = GroupSpec("all", ranks)
    assert group.ranks is ranks
    assert group.group_rank(4321) == 1432
    assert GroupSpec("w", range(10**9)).size == 10**9


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("g", []), GroupError, "group 'g' has no ranks"),
        (("g", range(0)), GroupError, "group 'g' has no ranks"),
        (("g", [1, 2, 1]), GroupError, r"group 'g' has rank 1 twice: \(1, 2, 1\)"),
        (("g", [0, -1]), RankError, "Rank -1 out of bounds in group 'g'"),
        (("g", range(3, -2, -1)), RankError, "Rank -1 out of bounds"),
        (("g", [0.0]), MpimeshError, "a rank of group 'g' must be a whole number, got 0.0"),
        (("", [0]), GroupError, "a group's name must be printable text"),
        ((3, [0]), GroupError, "a group's name must be printable text"),
        (("g", [0], "mpi"), GroupError, "backend of group 'g' must be a GroupBackend"),
    ],
)
def test_groups_that_break_a_rule(arguments, error, message):
    with pytest.raises(error, match=message):
        GroupSpec(*arguments)


def test_backends_are_read_in_any_case():
    for backend in GroupBackend:
        assert GroupBackend.parse(str(backend).upper()) is backend
    assert GroupBackend.parse(" Mock ") is GroupBackend.VIRTUAL
    wrongs: list[Any] = ["ucc", "", 3]
    for wrong in wrongs:
        with pytest.raises(GroupError, match="one of nccl, gloo, mpi, node_shared, virtual"):
            GroupBackend.parse(wrong)


def test_ranks_must_be_in_the_world():
    with pytest.raises(RankError, match="Rank 4 out of bounds for world size 4 in group 'b'"):
        GroupSpec("b", [4, 0]).check_in_world(4)
    with pytest.raises(RankError, match="Rank 9 out of bounds"):
        GroupSpec("b", range(3, 10, 3)).check_in_world(4)
    GroupSpec("b", [3, 0]).check_in_world(4)
