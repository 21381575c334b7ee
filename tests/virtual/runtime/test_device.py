"""CuPy arrays in groups: every operation against NumPy, without a copy on the host."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import DTypeError, ShapeError
from tests.contract.cases import values
from tests.contract.device_memory import DTYPES, LAYOUTS, operations
from tests.contract.oracle import cut, joined, reduced
from tests.devices.fake_cuda import installed
from tests.devices.on_device import MOVERS, check, given, moved_by, on_ranks
from tests.helpers.depth import deep
from tests.helpers.raises import raises

SIZE = 3


@pytest.fixture(params=["0", "1"], ids=["unchecked", "checked"])
def checks(request, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", request.param)


@pytest.fixture(params=MOVERS)
def cupy(request, monkeypatch):
    with moved_by(request.param, monkeypatch) as fake:
        yield fake


@pytest.mark.usefixtures("checks")
@pytest.mark.parametrize("size", [*deep(1), SIZE])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_copied_to_the_host(cupy, layout, size):
    copies = cupy.asnumpy

    def main(group):
        for dtype in DTYPES:
            inputs = [values(r, (2, 2 * size), dtype) for r in range(size)]
            x = LAYOUTS[layout](inputs[group.rank])
            for call, right in operations(group, inputs):
                got = call(x, None).resolve()
                if right is None:
                    assert got is None
                else:
                    check(got, right)

    cupy.asnumpy = lambda x: pytest.fail("an array was copied to the host")
    try:
        on_ranks(main, size)
    finally:
        cupy.asnumpy = copies


@pytest.mark.usefixtures("checks", "cupy")
def test_in_place_and_overlapping():
    def main(group):
        inputs = [values(r, (2 * SIZE,), "f4") for r in range(SIZE)]
        mine = inputs[group.rank]
        for op in ("sum", "mean"):
            x = given(mine)
            assert group.all_reduce(x, op, out=x).resolve() is x
            check(x, reduced(inputs, op))
        memory = given(np.concatenate([mine, np.zeros(2, "f4")]))
        out = memory[2:]
        group.all_reduce(memory[:-2], out=out).resolve()
        check(out, reduced(inputs, "sum"))
        x = given(mine)
        group.all_to_all(x, out=x).resolve()
        check(x, joined([cut(one, 0, [2] * SIZE)[group.rank] for one in inputs]))
        x = given(mine)
        group.broadcast(x, root=2, out=x).resolve()
        check(x, inputs[2])

    on_ranks(main)


@pytest.mark.usefixtures("checks")
def test_scalars_empty_arrays_and_bools(cupy):
    def main(group):
        me = group.rank
        check(group.all_reduce(given(np.float32(me))).resolve(), np.asarray(np.float32(3)))
        check(group.all_gather(given(np.asarray(me))).resolve(), np.arange(SIZE))
        check(group.all_reduce(given(np.empty((0, 2)))).resolve(), np.empty((0, 2)))
        check(group.all_gather(given(np.empty((0, 2)))).resolve(), np.empty((0, 2)))
        one = given(np.array([me == 1, True]))
        check(group.all_reduce(one, "max").resolve(), np.array([True, True]))
        check(group.all_reduce(one, "min").resolve(), np.array([False, True]))
        with raises(DTypeError, "sum", "bool"):
            group.all_reduce(one)
        with raises(ShapeError, "out", (3,), (2,)):
            group.all_reduce(one, "max", out=cupy.empty((3,), bool))

    on_ranks(main)


def test_arrays_of_another_device_than_the_current_one_are_refused():
    with installed(devices=2) as cupy:

        def main(group):
            x = cupy.asarray(np.ones(2))
            with cupy.cuda.Device(1), raises(DTypeError, "GPU 0", "GPU 1"):
                group.all_reduce(x)

        on_ranks(main, size=2)


def test_one_rank_needs_no_mover(cupy):
    def main(group):
        x = given(np.array([1.0, 2.0], "f2"))
        assert {(route.memory, route.algorithm) for route in group.algorithms()} == {
            ("host", "node"),
            ("device", "copy"),
        }
        check(group.all_reduce(x, "mean").resolve(), np.array([1.0, 2.0], "f2"))
        check(group.all_gather(x).resolve(), np.array([1.0, 2.0], "f2"))
        check(group.shift(x, wrap=True).resolve(), np.array([1.0, 2.0], "f2"))

    on_ranks(main, size=1)


@pytest.mark.parametrize("dtype", ["f4", "i8", "c16"])
def test_split_arrays_refuse_arrays_of_cupy(dtype):
    """They lie in host memory: a copy that nobody asked for would lie there, too."""
    doors = [
        lambda x, mesh: mm.DTensor.from_local(x, mesh, "p=S0"),
        lambda x, mesh: mm.DTensor.from_local(x, mesh, "p=R", shape=(2, 3)),
        lambda x, mesh: mm.distribute(x, mesh, "p=S0"),
        lambda x, mesh: mm.distribute(x, mesh, "p=S0", root=1),
        lambda x, mesh: mm.from_callback((4, 3), mesh, "p=S0", lambda index: x),
        lambda x, mesh: mm.from_callback((4, 3), mesh, "p=S0", lambda index: x, dtype=dtype),
        lambda x, mesh: mm.full((4, 3), x[0, 0], mesh, "p=S0"),
    ]

    def main():
        with mm.DeviceMesh("p=2") as mesh:
            for door in doors:
                x = sys.modules["cupy"].asarray(np.ones((2, 3), dtype))
                with raises(DTypeError, "CuPy", "cupy.asnumpy"):
                    door(x, mesh)
            x = mm.distribute(np.ones((2, 3)), mesh, "p=S0")
            assert np.array_equal(x.full(), np.ones((2, 3)))

    with installed():
        mm.run_virtual(2, main)
