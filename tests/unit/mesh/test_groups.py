from __future__ import annotations

import pickle

import pytest

from mpimesh.errors import GroupError, MpimeshError, RankError
from mpimesh.mesh import GroupSpec, Mesh
from tests.helpers.raises import raises


def test_the_order_of_ranks_is_the_group_rank():
    group = GroupSpec("mine", [5, 1, 3])
    assert (group.size, group.ranks) == (3, (5, 1, 3))
    assert [group.group_rank(rank) for rank in (5, 1, 3, 0)] == [0, 1, 2, None]
    assert group.in_group(3)
    assert not group.in_group(2)
    assert group == pickle.loads(pickle.dumps(group))
    assert hash(group) == hash(GroupSpec("mine", (5, 1, 3)))


def test_a_group_takes_the_ranks_of_a_mesh():
    mesh = Mesh("dp=1000,tp=10")
    group = GroupSpec("all", mesh.group_ranks(3, "tp,dp"))
    assert group.group_rank(4321) == 1432
    assert GroupSpec("all", mesh.groups("tp,dp")[0]) == group
    assert GroupSpec("w", range(10**9)).size == 10**9


@pytest.mark.parametrize(
    ("arguments", "error", "values"),
    [
        (("g", []), GroupError, ("'g'", "no ranks")),
        (("g", range(0)), GroupError, ("'g'", "no ranks")),
        (("g", [1, 2, 1]), GroupError, ("'g'", "rank 1", (1, 2, 1))),
        (("g", [0, -1]), RankError, ("'g'", "Rank -1")),
        (("g", range(3, -2, -1)), RankError, ("'g'", "Rank -1")),
        (("g", [0.0]), MpimeshError, ("'g'", "rank", 0.0)),
        (("", [0]), GroupError, ("name", "''")),
        ((3, [0]), GroupError, ("name", 3)),
        (("g" * 201, [0]), GroupError, ("name", "at most 200 characters", 201)),
    ],
)
def test_groups_that_break_a_rule(arguments, error, values):
    with raises(error, *values):
        GroupSpec(*arguments)


def test_ranks_must_be_in_the_world():
    with raises(RankError, "Rank 4", "world size 4", "'b'"):
        GroupSpec("b", [4, 0]).check_in_world(4)
    with raises(RankError, "Rank 9", "world size 4", "'b'"):
        GroupSpec("b", range(3, 10, 3)).check_in_world(4)
    GroupSpec("b", [3, 0]).check_in_world(4)
