"""Meshes whose ranks stand in another order, or that leave ranks out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import RankError
from tests.helpers import warned
from tests.helpers.depth import is_deep
from tests.helpers.dtensor_check import numbers, split
from tests.helpers.rule_cases import draw_cases
from tests.helpers.rule_fuzz import Case, evaluated, values

CALLS: list[Any] = [
    np.transpose,
    np.ravel,
    lambda x: np.reshape(x, (3, 4, 2)),
    lambda x: np.expand_dims(x, 1),
    lambda x: np.squeeze(x[:, :1]),
    lambda x: np.broadcast_to(x[:1], (3, 4)),
    lambda x: np.concatenate([x, x], 1),
    lambda x: np.flip(x),
    lambda x: np.pad(x, 2),
    lambda x: np.tril(x),
    lambda x: np.diag(x[0]),
    lambda x: np.diagonal(x),
    lambda x: x[::-2, 1:],
    lambda x: x[2, 3],
    lambda x: x[[5, 0, 2], [1, 3, 3]],
    lambda x: x.astype("c16").real,
    lambda x: np.cumsum(x, 0),
    lambda x: np.diff(x, axis=0),
    lambda x: np.sort(x, 0),
    lambda x: np.sort(x[:, :1], 0),
    lambda x: np.argsort(x, None, kind="stable"),
    lambda x: np.take_along_axis(x, np.argsort(x, 0, kind="stable"), 0),
    lambda x: np.searchsorted(np.arange(-9, 9, 2), x),
]
FOUND: list[Any] = [np.nonzero, np.unique, np.argwhere]


@pytest.mark.parametrize("dims", [[("a", 4)], [("a", 2), ("b", 2)]])
def test_ranks_in_another_order(dims):
    x = numbers((6, 4))
    places = ["S0", "S1"] if len(dims) == 1 else ["S0, S1", "S1, P", "S0, S0"]

    def main():
        with mm.DeviceMesh(mm.Mesh(dims, [3, 0, 4, 1])) as mesh:
            for place in places:
                for number, function in enumerate(CALLS):
                    y = mm.distribute(x, mesh, place)
                    found, expected = function(y), function(x)
                    assert found.shape == expected.shape, (number, place)
                    assert found.dtype == expected.dtype, (number, place)
                    whole = found.full()
                    assert (whole is None) == (mesh.rank == 2)
                    if whole is not None:
                        np.testing.assert_array_equal(whole, expected, f"{number} {place}")
                for function in FOUND:
                    y = mm.distribute(x, mesh, "R" + ", R" * (len(dims) - 1))
                    if not y.is_member:
                        with pytest.raises(RankError):
                            function(y)
                y = mm.distribute(x, mesh, place)
                y[1:3] = 7
                y[[0, 5], [3, 0]] = [70, 80]
                y[:, 1] = y[:, 2]
                z = x.copy()
                z[1:3] = 7
                z[[0, 5], [3, 0]] = [70, 80]
                z[:, 1] = z[:, 2]
                whole = y.full()
                if whole is not None:
                    np.testing.assert_array_equal(whole, z, place)

    mm.run_virtual(5, main)


def outcome(mesh: mm.DeviceMesh, case: Case) -> Any:
    """Return what a call gives on this rank, without values, or the error that it raises."""
    arrays = []
    for one in case.operands:
        layout, kind = mm.Layout(mesh, one.placement), np.dtype(one.dtype)
        if mesh.contains_rank(mesh.rank):
            arrays.append(split(values(one), mesh, one.placement))
        else:
            arrays.append(mm.DTensor(mesh, layout, one.shape, kind, None))
    try:
        return described(evaluated(case, arrays))
    except Exception as error:
        return error


def described(found: Any) -> Any:
    if isinstance(found, mm.DTensor):
        return found.shape, found.dtype, found.layout.text
    return [described(one) for one in found] if isinstance(found, list | tuple) else type(found)


def test_a_rank_outside_the_mesh_gets_the_same_array_or_a_clear_error():
    """Without values it cannot know what depends on them; all else it knows as the others do."""
    cases = draw_cases(3, 4_000 if is_deep() else 160, "a=2")

    def main():
        with mm.DeviceMesh("w=-1") as world:
            found = []
            with mm.DeviceMesh(mm.Mesh([("a", 2)], [2, 0], world_size=3)) as mesh, warned.ignored:
                for case in cases:
                    found.append(outcome(mesh, case))
                    world.group().barrier()
            return found

    inside, outside, _ = mm.run_virtual(3, main)
    for case, of_member, of_other in zip(cases, inside, outside, strict=True):
        assert not isinstance(of_member, RankError), case
        if isinstance(of_other, RankError):
            assert "is not in the mesh" in str(of_other), case
        elif isinstance(of_other, Exception):  # as the others, which may see other faults first
            assert isinstance(of_member, type(of_other).__mro__[1]), (case, of_other)
        elif ".tolist()" not in case.text:  # what values refuse, it cannot
            assert isinstance(of_member, Exception) or of_member == of_other, case
