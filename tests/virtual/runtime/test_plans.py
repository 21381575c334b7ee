"""Planned collectives when their mesh is left, or another operation has their arrays."""

from __future__ import annotations

import gc
import inspect
import typing
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.core.call import Route
from mpimesh.errors import ShapeError, UnresolvedError, UnresolvedWarning
from mpimesh.runtime import plan
from mpimesh.runtime.operands import AgreedSizes
from mpimesh.runtime.persistent import PersistentCollective
from tests.helpers.raises import raises


class Stop(Exception):
    """Raised by a program to leave its mesh."""


@pytest.mark.filterwarnings("ignore")
def test_what_has_waited_for_others_does_not_start_once_the_mesh_is_left():
    def main():
        x = np.ones(3)
        other = mm.DeviceMesh("dp=2")
        try:
            with mm.DeviceMesh("dp=2") as mesh:
                if mesh.rank == 1:
                    other.barrier()  # rank 0 has left by then, and nothing of its has started
                group = mesh.group("dp")
                mine = np.ones(3) if mesh.rank else None  # a broadcast by steps: the next one waits
                handles = [group.broadcast(mine, root=None), group.all_reduce(x, out=x)]
                raise Stop
        except Stop:
            del handles
        if other.rank == 0:
            other.barrier()
        x[...] = 5.0
        for _ in range(3):
            other.barrier()
        other.close()
        return x.tolist()

    assert mm.run_virtual(2, main) == [[5.0] * 3] * 2


def test_an_output_that_another_operation_uses_is_refused_at_each_start(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            group = mesh.group("dp")
            peer = 1 - mesh.rank
            y = np.zeros(3)
            planned = group.all_reduce_init(np.ones(3), out=y)
            sent = group.send(y, peer)
            with raises(ShapeError, "send"):
                planned.start()
            np.testing.assert_array_equal(group.recv(peer).resolve(), np.zeros(3))
            sent.resolve()
            np.testing.assert_array_equal(planned.start().resolve(), np.full(3, 2.0))

    mm.run_virtual(2, main)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_planned_redistribution_refuses_an_array_that_is_read_only_by_now(ranks):
    def main():
        with mm.DeviceMesh("dp=-1") as mesh:
            whole = np.arange(12.0).reshape(6, 2)
            x = mm.distribute(whole, mesh, "dp=S0")
            out = mm.empty((6, 2), mesh, "dp=S1")
            plan = x.redistribute_init("dp=S1", out=out)
            plan.start().resolve()
            out.local.flags.writeable = False
            with raises(ShapeError, "read-only"):
                plan.start()
            # Nothing has started, and nothing that follows fails.
            assert np.array_equal(x.full(), whole)
            out.local.flags.writeable = True
            x.local[...] += 1
            assert np.array_equal(plan.start().resolve().full(), whole + 1)

    mm.run_virtual(ranks, main)


def test_a_halo_refuses_a_field_that_is_read_only_by_now():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            x = mm.distribute(np.arange(8.0), mesh, "dp=S0")
            halo = mm.Halo(x, width=1)
            field = halo.field(x)
            halo.exchange(field)
            field.padded.flags.writeable = False
            with raises(ShapeError, "read-only"):
                halo.exchange(field)
            field.padded.flags.writeable = True
            return halo.exchange(field).tolist()

    assert mm.run_virtual(2, main) == [[7, 0, 1, 2, 3, 4], [3, 4, 5, 6, 7, 0]]


@pytest.mark.parametrize("checks", ["0", "1"])
def test_a_start_that_nobody_resolves_is_told_by_the_line_of_its_plan(checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)

    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            group = mesh.add_group("g", [1, 0])
            planned = group.all_reduce_init(np.ones(3))
            planned.start().resolve()
            handle = planned.start()
            with raises(UnresolvedError, "on group 'g', planned at", "test_plans.py:"):
                group.close()
            del handle

    with (
        pytest.warns(UnresolvedWarning, match=r"planned at this line.* was dropped"),
        pytest.raises(UnresolvedError, match=r"on group 'g', planned at"),
    ):
        mm.run_virtual(2, main)


PLANNED = sorted(name for name in vars(mm.ProcessGroup) if name.endswith("_init"))


@pytest.mark.parametrize("name", [n for n in PLANNED if n not in ("send_init", "recv_init")])
def test_a_planned_method_says_what_it_returns_and_names_itself_in_its_example(name):
    method, plain = (getattr(mm.ProcessGroup, one) for one in (name, name.removesuffix("_init")))
    planned = inspect.signature(method)
    assert planned.return_annotation == "PersistentCollective"
    assert planned.parameters == inspect.signature(plain).parameters
    assert typing.get_type_hints(method)["return"] is PersistentCollective
    assert typing.get_origin(typing.get_type_hints(plain)["return"]) is mm.CollectiveTensor
    assert f"group.{name}(" in method.__doc__


def test_a_plan_that_is_not_started_says_so():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            group, x = mesh.group("dp"), np.ones(3)
            peer = 1 - mesh.rank
            for planned in (group.all_reduce_init(x), group.send_init(x, peer)):
                assert not hasattr(planned, "done")
                with raises(AttributeError, "'resolve'", "start() it first", "start().resolve()"):
                    planned.resolve()  # type: ignore[union-attr]

    mm.run_virtual(2, main)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_a_result_may_go_into_an_array_that_overlaps_the_input_or_not(op):
    """Of what is packed, converted or divided, which is bound and not found by its address."""

    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            group, x = mesh.group("dp"), np.arange(6.0)
            out = np.empty(4)
            group.all_reduce(x[::2][:2].repeat(2), op, out=out).resolve()
            group.all_reduce(x[:4], op, out=x[2:]).resolve()
            return out.tolist(), x.tolist()

    factor = 2.0 if op == "sum" else 1.0
    expected = (
        [factor * n for n in (0.0, 0.0, 2.0, 2.0)],
        [0.0, 1.0, *(factor * n for n in range(4))],
    )
    assert mm.run_virtual(2, main) == [expected] * 2


def test_sizes_that_all_ranks_have_worked_out_are_not_compared():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            core, x = mesh.group()._core, np.ones(4)
            alike = AgreedSizes([2, 2])
            assert plan.plan_all_to_all(core, x, 0, None, alike, alike).also is None
            assert plan.plan_all_to_all(core, x, 0, None, [2, 2], alike).also is not None
            sent = mesh.group().all_to_all(x, sizes=alike, recv_sizes=alike)
            assert sent.resolve().tolist() == [1.0] * 4

    mm.run_virtual(2, main)


def test_sizes_in_a_list_are_planned_once_until_the_list_changes(monkeypatch):
    planned: list[Any] = []
    as_before = plan.plan_all_gather

    def counted(*arguments):
        planned.append(arguments[-1])
        return as_before(*arguments)

    monkeypatch.setattr(plan, "plan_all_gather", counted)

    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            group, sizes = mesh.group("dp"), [1, 3]
            for _ in range(4):
                for _ in range(3):
                    x = np.full(sizes[mesh.rank], 10.0 * mesh.rank)
                    joined = group.all_gather(x, sizes=sizes).resolve()
                    assert joined.tolist() == [0.0] * sizes[0] + [10.0] * sizes[1]
                    assert group.scatter(joined, sizes=sizes).resolve().tolist() == x.tolist()
                sizes[:] = sizes[::-1]
            with raises(ShapeError, "sizes must hold one size"):
                group.all_gather(np.ones(1), sizes=[1, 2, 3])
            group.barrier()

    mm.run_virtual(2, main)
    assert len(planned) == 2 * 2 + 2  # on two ranks: two ways to cut, and one that is refused


def test_what_is_kept_of_shifts_is_forgotten():
    """A list that grew by each new shape was looked through at each shift."""

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            group = mesh.group()
            for number in range(200):
                x = np.full((number, 2), float(number))
                got = group.shift(x, 1, wrap=True).resolve()
                assert got.tobytes() == x.tobytes()
            group.barrier()
            assert sum(isinstance(one, Route) for one in gc.get_objects()) <= 2 * 32
            group.barrier()

    gc.collect()
    mm.run_virtual(2, main)


def test_a_call_that_finds_no_route_makes_none_again():
    """With a tag of NumPy's, or an array that is not contiguous, beside calls that go by one."""
    int64: Any = np.int64

    def routes():
        return [one for one in gc.get_objects() if isinstance(one, Route)]

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            group, peer = mesh.group(), 1 - mesh.rank
            x, tag, offset = np.arange(12.0).reshape(3, 4), int64(7), int64(1)
            x.flags.writeable = False
            for _ in range(5):
                for array in (x, np.asfortranarray(x)):
                    sent = group.send(array, peer, tag=tag), group.send(array, peer, tag=7)
                    got = group.recv(peer, out=np.empty_like(x), tag=tag), group.recv(peer, tag=tag)
                    for handle in got:
                        assert handle.resolve().tolist() == x.tolist()
                    for handle in sent:
                        handle.resolve()
                    assert group.shift(array, offset, wrap=True).resolve().tolist() == x.tolist()
            group.barrier()
            assert sum(one not in before for one in routes()) == 2 * 4
            group.barrier()

    gc.collect()
    before = routes()  # a job that failed may have left some
    mm.run_virtual(2, main)


def test_fields_that_were_renamed_in_place():
    """The plan of the old names was used, as the dtype was still the same object."""

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            group, rank = mesh.group(), mesh.rank
            x = np.zeros(2, [("a", "i4"), ("b", "i4")])
            for names in (("a", "b"), ("c", "d"), ("a", "b")):
                x.dtype.names = names
                for _ in range(2):
                    block = group.scatter(x if rank == 0 else None).resolve()
                    assert block.dtype.names == names
                    y = x if rank == 0 else np.zeros(2, [(name, "i4") for name in names])
                    assert group.all_gather(y).resolve().dtype.names == names
                    assert group.shift(y, 1, wrap=True).resolve().dtype.names == names

    mm.run_virtual(2, main)
