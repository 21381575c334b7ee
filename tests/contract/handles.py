"""Results to come: resolved, dropped, timed out, mutated, left open."""

from __future__ import annotations

import gc
import random
import time

import numpy as np
import pytest

from mpimesh.errors import (
    ClosedError,
    CollectiveTimeoutError,
    GroupError,
    UnresolvedError,
    UnresolvedWarning,
)
from tests.contract.cases import same
from tests.contract.marks import needs_checks
from tests.contract.meshes import groups_of, mesh_of
from tests.helpers import warned
from tests.helpers.raises import raises


def _line():
    """The line of the caller."""
    import inspect

    return inspect.currentframe().f_back.f_lineno  # type: ignore[union-attr]


def check_many_under_way_resolved_in_any_order(comm):
    """Groups overlap, and each rank starts the groups' operations in an order of its own."""
    with groups_of(comm, many=True) as groups:
        chance = random.Random(groups[0].world_rank)
        handles = []
        left = {group.name: 12 for group in groups}
        while any(left.values()):
            group = chance.choice([group for group in groups if left[group.name]])
            number = left[group.name]
            left[group.name] -= 1
            x = np.full(5, float(group.rank + number))
            total = sum(rank + number for rank in range(group.size))
            if number % 3 == 0:
                handles.append((group.all_gather(x[:1]), np.arange(group.size) + float(number)))
            elif number % 3 == 1:
                handles.append((group.all_reduce(x), np.full(5, float(total))))
            else:
                whom = x if group.rank == number % group.size else None
                expected = np.full(5, float(number % group.size + number))
                handles.append((group.broadcast(whom, root=None), expected))
        chance.shuffle(handles)
        for handle, expected in handles:
            same(handle.resolve(), expected)


def check_resolve_gives_the_same_object_or_error_again(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        handle = group.all_reduce(np.ones(3))
        assert handle.resolve() is handle.resolve()
        assert handle.assume_resolved() is handle.resolve()
        assert handle.wait() is handle.resolve()
        failing = group.scatter(np.ones((2, 2)) if group.rank == 0 else None, axis=7)
        with raises(Exception, "axis 7") as first:
            failing.resolve()
        with raises(Exception, "axis 7") as second:
            failing.resolve()
        assert first.value is second.value
        assert failing.done()
        assert "failed" in repr(failing)


def check_repr_never_waits(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        if group.size > 1 and group.rank == 0:
            # Nobody else has started it yet: whoever waits here waits for ever.
            handle = group.all_reduce(np.ones(3, "f4"), label="late")
            text = repr(handle)
            assert "all_reduce(shape (3,), float32, sum, label 'late')" in text
            assert "started" in text
            assert "'world'" in text
            group.send(np.ones(1), 1).resolve()
        else:
            if group.rank == 1:
                group.recv(0).resolve()
            handle = group.all_reduce(np.ones(3, "f4"), label="late")
        handle.resolve()
        assert "resolved" in repr(handle)


def check_a_wait_may_time_out_and_go_on(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        if group.size == 1:
            return
        for size in (3, 5000):
            x = np.full(size, 1.0)
            if group.rank == 0:
                handle = group.all_reduce(x)
                assert not handle.done()
                start_s = time.monotonic()
                with raises(
                    CollectiveTimeoutError, "rank 0", "0.02 s", f"all_reduce(shape ({size},)"
                ):
                    handle.resolve(timeout_s=0.02)
                assert time.monotonic() - start_s < 5
                with raises(CollectiveTimeoutError, "0.01 s"):
                    handle.wait(0.01)
                with raises(UnresolvedError, f"all_reduce(shape ({size},)", "resolve()"):
                    handle.assume_resolved()
                assert "started" in repr(handle)
                sends = [group.send(np.ones(1), peer) for peer in range(1, group.size)]
                same(handle.resolve(timeout_s=30), x * group.size)
                for send in sends:
                    send.resolve()
            else:
                group.recv(0).resolve()
                same(group.all_reduce(x).resolve(), x * group.size)


class Interrupted:
    """A request in the test of which somebody's signal handler raises."""

    def test(self):
        raise LookupError("of a signal handler")


def check_a_wait_that_an_exception_ends_can_be_taken_up_again(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        if group.size == 1:
            return
        x = np.ones(5000)
        if group.rank == 0:
            handle = group.all_reduce(x)
            with pytest.raises(GroupError):
                handle.resolve(timeout_s="soon")
            under_way, handle._request = handle._request, Interrupted()
            for _ in range(2):
                with pytest.raises(LookupError):
                    handle.resolve()
                assert "started" in repr(handle)
            handle._request = under_way
            sends = [group.send(np.ones(1), peer) for peer in range(1, group.size)]
            same(handle.resolve(), x * group.size)
            for send in sends:
                send.resolve()
        else:
            group.recv(0).resolve()
            same(group.all_reduce(x).resolve(), x * group.size)


def check_done_moves_the_operation_along(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        handle = group.broadcast(np.ones(2) if group.rank == 0 else None, root=None)
        end_s = time.monotonic() + 30
        while not handle.done():
            assert time.monotonic() < end_s
            time.sleep(0.001)
        same(handle.assume_resolved(), np.ones(2))
        group.barrier()


def check_a_dropped_handle_warns_with_its_line(comm):
    mesh = mesh_of(comm)
    group = mesh.group()
    with warned.recorded as seen:
        handle = group.all_reduce(np.ones(3), label="lost")
        line = _line() - 1
        del handle
        gc.collect()
        # Virtual ranks share this list.
        found = [w for w in seen if w.category is UnresolvedWarning]
        assert found
        assert {w.lineno for w in found} == {line}
        assert {w.filename for w in found} == {__file__}
        assert any(f"on rank {mesh.rank} " in str(w.message) for w in found)
        assert all("label 'lost'" in str(w.message) for w in found)
        mesh.group().barrier()
    with raises(UnresolvedError, f"rank {mesh.rank}: all_reduce", "'lost'"):
        mesh.close()
    mesh.sync_collective()
    mesh.close()


def check_close_names_what_is_open_and_can_be_tried_again(comm):
    mesh = mesh_of(comm)
    group = mesh.group()
    last = group.size - 1
    handle = group.all_gather(np.arange(2), label="kept")
    line = _line() - 1
    if group.rank != last:
        handle.resolve()
    with pytest.raises(UnresolvedError) as caught:
        mesh.close()
    text = str(caught.value)
    assert caught.value.agreed
    assert text.count("\n") == 1, text
    assert f"  rank {last}: all_gather(" in text
    assert "label 'kept'" in text
    assert f"{__file__}:{line}" in text
    assert not mesh.closed
    with raises(UnresolvedError, "reshaped", f"rank {last}: all_gather"):
        mesh.reshape("all=-1")
    same(handle.resolve(), np.tile(np.arange(2), group.size))
    mesh.close()
    mesh.close()
    assert mesh.closed
    same(handle.resolve(), np.tile(np.arange(2), group.size))


def check_a_closed_mesh_refuses_everything(comm):
    mesh = mesh_of(comm)
    group = mesh.group()
    mesh.close()
    x = np.ones(group.size)
    for call in (
        lambda: group.all_reduce(x),
        lambda: group.reduce(x),
        lambda: group.reduce_scatter(x),
        lambda: group.all_gather(x),
        lambda: group.gather(x),
        lambda: group.scatter(x),
        lambda: group.all_to_all(x),
        lambda: group.broadcast(x),
        lambda: group.broadcast(x, root=None),
        lambda: group.shift(x),
        lambda: group.send(x, 0),
        lambda: group.recv(0),
        lambda: group.send_next(x),
        lambda: group.recv_prev(),
        lambda: group.barrier(),
        lambda: group.barrier(timeout_s=1),
        lambda: group.start_barrier(),
        lambda: mesh.group("world"),
        lambda: mesh.add_group("more", [0]),
        lambda: mesh.reshape("all=-1"),
        lambda: mesh.barrier(),
        lambda: mesh.copy(),
        lambda: mesh.shared_empty(3),
    ):
        with raises(ClosedError, f"rank {mesh.rank}", "closed"):
            call()
    assert "closed" in repr(mesh)
    assert "world" in repr(group)


@needs_checks
def check_writing_an_input_under_way_raises(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        n = group.size
        calls = [
            lambda x: group.all_reduce(x),
            lambda x: group.reduce(x),
            lambda x: group.reduce_scatter(x),
            lambda x: group.all_gather(x),
            lambda x: group.gather(x),
            lambda x: group.scatter(x),
            lambda x: group.all_to_all(x),
            lambda x: group.broadcast(x),
            lambda x: group.broadcast(x if group.rank == 0 else None, root=None),
            lambda x: group.shift(x, wrap=True),
        ]
        if n > 1:
            after, before = (group.rank + 1) % n, (group.rank - 1) % n
            calls.append(lambda x: group.send(x, after))
        for place, call in enumerate(calls):
            x = np.ones(1000 * n)
            handle = call(x)
            gives = place not in (5, 8) or group.rank == 0
            if gives:
                with raises(ValueError, "read-only"):
                    x[0] = 2
            incoming = group.recv(before) if place == 10 else None
            handle.resolve()
            if incoming is not None:
                incoming.resolve()
            x[0] = 3


@needs_checks
def check_inputs_that_overlap_become_writable_again(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        for seed in range(6):
            base = np.ones(40)
            part, inner = base[10:30], base[12:20]
            xs = [base, part, inner, base, part]
            handles = [group.all_reduce(x) for x in xs]
            handles.append(group.all_gather(part))
            random.Random(seed + group.rank).shuffle(handles)
            for place, handle in enumerate(handles):
                handle.resolve()
                if place == 0:
                    assert not (base.flags.writeable and part.flags.writeable)
            for x in (base, part, inner):
                assert x.flags.writeable
                x[...] = 0
        fixed = np.ones(4)
        fixed.flags.writeable = False
        group.all_reduce(fixed).resolve()
        assert not fixed.flags.writeable


def check_several_meshes_at_once(comm):
    with mesh_of(comm) as outer, mesh_of(comm) as inner:
        n = outer.world_size
        first = outer.group().all_reduce(np.full(2, 1))
        with mesh_of(comm) as third:
            second = inner.group().all_reduce(np.full(2, 10))
            third_handle = third.group().all_reduce(np.full(2, 100))
            if outer.rank % 2:
                same(first.resolve(), np.full(2, n))
                same(third_handle.resolve(), np.full(2, 100 * n))
            else:
                same(third_handle.resolve(), np.full(2, 100 * n))
        same(second.resolve(), np.full(2, 10 * n))
        same(first.resolve(), np.full(2, n))


def check_making_a_mesh_while_others_resolve(comm):
    """Some ranks resolve before they make the next mesh, some after: nobody may wait for ever."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        if group.size == 1:
            return
        whole = np.ones(2 * group.size) if group.rank == 0 else None
        for make in (lambda: mesh_of(comm), mesh.copy):
            handles = [group.all_reduce(np.ones(2)), group.scatter(whole)]
            if group.rank == group.size - 1:
                for handle in handles:
                    handle.resolve()
            with make() as other:
                same(other.group().all_reduce(1).resolve(), np.asarray(group.size))
            for handle in handles:
                handle.resolve()


def check_an_error_of_all_ranks_leaves_by_the_with_block(comm):
    """The mesh closes, and handles that it leaves open do not warn about themselves."""
    left = {}

    def leave():
        with mesh_of(comm) as mesh:
            left["mesh"], left["handle"] = mesh, mesh.group().all_reduce(np.ones(3))
            mesh.group().broadcast(None, root=None).resolve()

    with warned.errors:
        with raises(GroupError, "broadcast", "group 'world'", "ranks []"):
            leave()
        assert left["mesh"].closed
        with raises(ClosedError, "all_reduce(shape (3,)", "error"):
            left["handle"].resolve()
        left.clear()
        gc.collect()
    with mesh_of(comm) as again:
        same(again.group().all_reduce(1).resolve(), np.asarray(again.world_size))
