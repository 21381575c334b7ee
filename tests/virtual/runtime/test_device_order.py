"""CuPy arrays in groups: messages, mixtures of kinds, streams, routes."""

from __future__ import annotations

import sys
import time
from functools import partial

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import ClosedError, DTypeError, MismatchError, RankError, ShapeError
from tests.contract.cases import same, values
from tests.contract.oracle import joined, reduced
from tests.devices.on_device import MOVERS, check, given, late, moved_by, on_ranks
from tests.devices.stand_in import stand_in
from tests.helpers.raises import names, raises

SIZE = 3


@pytest.fixture(params=["0", "1"], ids=["unchecked", "checked"])
def checks(request, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", request.param)


@pytest.fixture(params=MOVERS)
def cupy(request, monkeypatch):
    with moved_by(request.param, monkeypatch) as fake:
        yield fake


@pytest.mark.usefixtures("checks", "cupy")
@pytest.mark.parametrize("shape", [(3,), (64, 64)])
def test_a_message_of_another_dtype_or_shape_is_taken_in_and_refused(shape):
    def main(group):
        me = group.rank
        after, before = (me + 1) % SIZE, (me - 1) % SIZE
        sends = [group.send(given(values(me, shape, "f4")), after) for _ in range(3)]
        with raises(DTypeError, f"rank {me}", "float64", "float32", f"rank {before}"):
            group.recv(before, dtype="f8").resolve()
        with raises(ShapeError, f"rank {me}", (5,), shape, f"rank {before}"):
            group.recv(before, shape=5).resolve()
        check(group.recv(before).resolve(), values(before, shape, "f4"))
        for send in sends:
            send.resolve()

    on_ranks(main)


@pytest.mark.usefixtures("checks", "cupy")
def test_kinds_may_differ_where_no_rank_needs_to_know():
    """An array that one rank only sends goes from its memory, whatever the others have."""

    def main(group):
        me = group.rank
        x = values(me, (SIZE,), "f8")
        shifted = group.shift(given(x) if me == 0 else x, wrap=True).resolve()
        expected = values((me - 1) % SIZE, (SIZE,), "f8")
        if me == 0:
            check(shifted, expected)
        else:
            same(shifted, expected)

    on_ranks(main)


def test_kinds_that_must_agree_are_refused_on_all_ranks(cupy, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main(group):
        x = np.ones((SIZE, 2))
        mine = x if group.rank == 1 else cupy.asarray(x)
        for call in (
            group.all_reduce,
            group.reduce,
            group.reduce_scatter,
            group.all_gather,
            group.gather,
            group.all_to_all,
            group.broadcast,
        ):
            with pytest.raises(MismatchError) as caught:
                call(mine).resolve()
            text = str(caught.value)
            assert caught.value.agreed
            _, on_device, on_host = text.splitlines()
            names(on_device, "ranks 0, 2", "float64 on a device")
            names(on_host, "rank 1", "float64")
            assert "on a device" not in on_host

    on_ranks(main)


@pytest.mark.usefixtures("checks")
def test_results_are_safe_on_whatever_stream_they_are_taken(cupy):
    def main(group):
        inputs = [values(r, (2, SIZE), "f2") for r in range(SIZE)]
        expected = reduced(inputs, "mean")
        makes, takes = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        with makes:
            makes.delay(200)
            handle = group.all_reduce(given(inputs[group.rank]), "mean")
            gathered = group.all_gather(given(inputs[group.rank]))
        with takes:
            check(handle.resolve(), expected)
            check(gathered.resolve() * 2, joined(inputs) * 2)
        check(handle.resolve(), expected)  # once more, on a third one
        with makes:
            received = group.recv((group.rank - 1) % SIZE)
        group.barrier()
        sent = group.send(given(inputs[group.rank]), (group.rank + 1) % SIZE)
        sent.resolve()
        while not received.done():  # moved along on a stream that neither asked nor takes
            time.sleep(0)
        with takes:
            check(received.resolve(), inputs[group.rank - 1])

    on_ranks(main)


def test_inputs_may_be_written_again_on_whatever_stream(monkeypatch):
    def main(group):
        me = group.rank
        makes = fake.cuda.Stream(non_blocking=True)
        x = given(values(me, (4,), "f4"))
        for call in (
            group.all_reduce,
            partial(group.reduce, root=0),
            partial(group.gather, root=0),
            partial(group.send, dest=(me + 1) % SIZE),
        ):
            fake.cuda.get_current_stream().synchronize()
            with makes:
                handle = call(x)
            handle.resolve()
            x += 1
        group.recv((me - 1) % SIZE).resolve()
        makes.synchronize()
        side = stand_in(group.communicator)
        assert side.calls == ["all_reduce", "reduce", "gather", "isend", "irecv"]
        return side.torn

    with moved_by("stand-in", monkeypatch) as fake:
        assert on_ranks(main) == [0] * SIZE


@pytest.mark.usefixtures("cupy")
def test_sync_collective_makes_results_that_any_stream_may_take():
    fake = sys.modules["cupy"]

    def body():
        with mm.DeviceMesh("x=-1") as mesh:
            x = values(mesh.rank, (4,), "f2")
            out = fake.empty((4,), "f2")
            one = mesh.group().all_reduce(given(x), "mean")
            other = mesh.group().all_reduce(x, "mean", out=out)
            late()
            mesh.sync_collective()
            right = reduced([values(r, (4,), "f2") for r in range(2)], "mean")
            for handle in (other, one):
                with fake.cuda.Stream(non_blocking=True):
                    check(handle.resolve(), right)

    mm.run_virtual(2, body)


def test_algorithms_tell_of_host_and_device(cupy):
    def main(group):
        assert {route.memory for route in group.algorithms()} >= {"host"}
        group.all_reduce(cupy.asarray(np.ones(2))).resolve()
        table = group.algorithms()
        assert {row.memory for row in table} >= {"host", "device"}
        return table

    found = on_ranks(main)
    assert found == found[:1] * SIZE  # all know the same
    assert all(route.algorithm and route.reason for route in found[0])


def test_algorithms_of_a_group_that_others_are_in():
    def body():
        with mm.DeviceMesh("x=-1") as mesh:
            group = mesh.add_group("first", [0])
            if mesh.rank == 0:
                assert {route.memory for route in group.algorithms()} == {"host"}
            else:
                with raises(RankError, "rank 1", "'first'", [0]):
                    group.algorithms()
        with pytest.raises(ClosedError):
            group.algorithms()

    mm.run_virtual(2, body)


@pytest.mark.usefixtures("cupy")
def test_the_stream_that_a_program_uses_stays_current():
    """Also one that is current by `use`, which CuPy forgets at the end of any ``with stream:``."""

    def main(group):
        cuda = sys.modules["cupy"].cuda
        chosen = cuda.Stream(non_blocking=True)
        chosen.use()
        for _ in range(2):
            handle = group.all_reduce(given(values(group.rank, (4,), "f2")))
            assert cuda.get_current_stream() == chosen
            handle.resolve()
            assert cuda.get_current_stream() == chosen
            group.shift(given(values(group.rank, (4,), "f4")), wrap=True).resolve()
            assert cuda.get_current_stream() == chosen

    on_ranks(main)
