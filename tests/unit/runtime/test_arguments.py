"""Arguments of the wrong kind get an error of mpimesh, not one of Python's insides."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.arrays import aligned_empty
from mpimesh.errors import GroupError, ScheduleError, ShapeError, UnknownNameError
from mpimesh.runtime.call import Call
from mpimesh.runtime.progress import Progress
from mpimesh.runtime.work import OpenWork
from tests.helpers.raises import raises


@pytest.mark.parametrize("shape", [2.5, "ab", None, (2, 1.5), -1])
def test_a_shape_is_whole_numbers(shape):
    with pytest.raises(ShapeError):
        aligned_empty(shape, float)


def test_any_kind_of_whole_number_is_a_shape():
    assert aligned_empty(np.int64(3), float).shape == (3,)
    assert aligned_empty((np.int8(2), 3), float).shape == (2, 3)


@pytest.mark.parametrize("name", [3, None, 2.5])
def test_a_group_has_a_name(name):
    with mm.DeviceMesh("dp=1", comm=None) as mesh, raises(UnknownNameError, "group", "name", name):
        mesh.group(name)


@pytest.mark.parametrize("timeout_s", ["a", -1, float("nan")])
def test_a_limit_is_a_time(timeout_s):
    with mm.DeviceMesh("dp=1") as mesh, raises(GroupError, "timeout_s", repr(timeout_s)):
        mesh.group().barrier(timeout_s=timeout_s)


@pytest.mark.parametrize("stages", [5, None, mm.PipelineStage(0)])
def test_stages_are_a_list(stages):
    with mm.DeviceMesh("pp=1") as mesh, raises(ScheduleError, "PipelineStage", stages):
        mm.PipelineParallel(stages, 1, mesh=mesh)


def test_a_result_that_cannot_be_made_stays_an_error():
    class Group:
        progress = Progress()
        open_work = OpenWork()

    class Done:
        def test(self):
            return True

    def finish():
        raise ValueError("no room")

    group = Group()
    call = Call("all_reduce", "world")
    handle = mm.CollectiveTensor(group, call, Done(), finish, None, np.ones(1))
    for _ in range(2):
        with raises(ValueError, "no room"):
            handle.resolve()
    assert not group.open_work


def test_a_mesh_answers_as_its_value_does():
    with mm.DeviceMesh("dp=1,tp=1") as mesh:
        assert mesh.coords_of(rank=0) == mesh.mesh.coords_of(0) == (0, 0)
        assert mesh.rank_at(dp=0, tp=0) == mesh.rank_at(0, 0) == 0
        assert mesh.neighbour(0, "tp", wrap=True) == 0
        assert mesh["tp"] == ("tp", 1)
        assert ("tp" in mesh, "pp" in mesh, [*mesh]) == (True, False, ["dp", "tp"])
        assert mm.DeviceMesh.coords_of.__doc__ == mm.Mesh.coords_of.__doc__


def test_a_handle_shows_what_users_call_and_nothing_else():
    with mm.DeviceMesh("dp=1") as mesh:
        handle = mesh.group().all_reduce(np.ones(2))
        shown = {name for name in dir(handle) if not name.startswith("_")}
        handle.resolve()
    assert shown == {"assume_resolved", "done", "map", "resolve", "wait"}
