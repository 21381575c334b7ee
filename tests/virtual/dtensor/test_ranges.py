"""Ranges, which each rank makes its own block of, against those of NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh.errors import ArrayValueError, DTypeError
from tests.helpers.depth import examples
from tests.helpers.dtensor_check import on
from tests.helpers.raises import raises

NUMBERS = ["float16", "float32", "float64", "longdouble", "int8", "uint8", "int64", "uint64"]
DTYPES = st.sampled_from([np.dtype(t) for t in [*NUMBERS, ">f8", ">i4", ml_dtypes.bfloat16]])


def check(cases):
    """See that arrays have the bits of NumPy's; each case is one, and how to make it."""

    def main(mesh):
        for expected, make in cases:
            for cut in (0, 1, len(expected) // 2, len(expected)):
                cut = min(cut, len(expected))
                row = f"S0({cut},{len(expected) - cut})"
                found = make(mesh=mesh, placements=row)
                box = slice(0, cut) if mesh.rank == 0 else slice(cut, None)
                assert found.shape == expected.shape
                assert found.local.dtype == expected.dtype
                np.testing.assert_array_equal(found.local, expected[box])
                np.testing.assert_array_equal(np.signbit(found.local), np.signbit(expected[box]))

    on("a=2", main)


def a_range(start, step, n, dtype):
    """A case; None if the length that NumPy finds, which is rounded, is another."""
    if np.dtype(dtype).kind in "iu":
        start, step = abs(int(start)), 1
    stop = start + step * (n - 0.5) if n else start
    expected = np.arange(start, stop, step, dtype=dtype)
    if len(expected) != n:
        return None
    return expected, lambda **how: mm.arange(start, stop, step, dtype=dtype, **how)


@settings(max_examples=examples(10))
@given(
    st.lists(
        st.builds(
            a_range,
            st.floats(-100, 100),
            st.floats(-10, 10).filter(lambda x: abs(x) > 1e-3),
            st.integers(0, 90),
            DTYPES,
        ),
        min_size=1,
        max_size=30,
    )
)
def test_ranges_are_those_of_numpy(cases):
    check([case for case in cases if case is not None])


@pytest.mark.parametrize(
    ("start", "step", "dtype"),
    [
        (2**62, 3, np.int64),
        (2**63, 2**40, np.uint64),
        (-5, -7, np.int64),
        (0.1, 0.1, np.float32),
        (-0.0, 1.0, np.float64),
        (1e16, 1.5, np.float64),
    ],
)
def test_long_ranges_are_those_of_numpy(start, step, dtype):
    n = 150_000
    stop = start + step * n if isinstance(start, int) else start + step * (n - 0.5)
    expected = np.arange(start, stop, step, dtype=dtype)
    assert expected.size == n
    check([(expected, lambda **how: mm.arange(start, stop, step, dtype=dtype, **how))])


def a_spread(start, stop, n, endpoint, dtype):
    if dtype.kind == "u":
        start, stop = abs(start), abs(stop)
    start = 0.0 if stop == 5e-324 else start
    expected = np.linspace(start, stop, n, endpoint=endpoint, dtype=dtype)
    options = {"endpoint": endpoint, "dtype": dtype}
    return expected, lambda **how: mm.linspace(start, stop, n, **options, **how)


@settings(max_examples=examples(10))
@given(
    st.lists(
        st.builds(
            a_spread,
            st.floats(-100, 100),
            st.one_of(st.floats(-100, 100), st.just(5e-324)),
            st.integers(0, 90),
            st.booleans(),
            DTYPES,
        ),
        min_size=1,
        max_size=30,
    )
)
def test_spreads_are_those_of_numpy(cases):
    check(cases)


def test_a_long_spread_is_that_of_numpy():
    check([(np.linspace(-1, 3, 200_001), lambda **how: mm.linspace(-1, 3, 200_001, **how))])


@pytest.mark.parametrize("k", [-10, -3, -1, 0, 2, 8])
def test_diagonals_are_those_of_numpy(k):
    def main(mesh):
        for place in ("S0", "S1", "S0(1,8)"):
            found = mm.eye(9, 7, k=k, mesh=mesh, placements=place, dtype=np.int8)
            np.testing.assert_array_equal(found.full(), np.eye(9, 7, k, np.int8))

    on("a=2", main)


@pytest.mark.parametrize("dtype", [bool, complex, "M8[s]", object])
def test_ranges_of_what_is_no_real_number_are_refused(dtype):
    def main(mesh):
        with raises(DTypeError, "range", np.dtype(dtype)):
            mm.arange(3, mesh=mesh, placements="R", dtype=dtype)
        with raises(DTypeError, "range", np.dtype(dtype)):
            mm.linspace(0, 1, 3, mesh=mesh, placements="R", dtype=dtype)

    on("a=1", main)


def test_numbers_that_a_dtype_cannot_hold_are_refused():
    def main(mesh):
        with raises(ArrayValueError, "int8", 127):
            mm.arange(127, 129, mesh=mesh, placements="R", dtype=np.int8)
        found = mm.arange(127, 128, mesh=mesh, placements="R", dtype=np.int8)
        assert found.local.tolist() == [127]

    on("a=1", main)


ENDS = [0, 1, 5, 7.5, True, *(np.dtype(kind).type(3) for kind in ("f2", "f4", "i1", "u1", "g"))]


def test_dtypes_of_ranges_are_those_of_their_ends():
    def main():
        with mm.DeviceMesh("a=2") as mesh, np.errstate(all="ignore"):
            for start in ENDS:
                for stop in ENDS:
                    found = mm.linspace(start, stop, 4, mesh=mesh, placements="S0").full()
                    expected = np.linspace(start, stop, 4)
                    assert found.dtype == expected.dtype, (start, stop)
                    np.testing.assert_array_equal(found, expected)
                    found = mm.arange(start, stop, mesh=mesh, placements="S0").full()
                    expected = np.arange(start, stop)
                    assert found.dtype == expected.dtype, (start, stop)
                    np.testing.assert_array_equal(found, expected)

    mm.run_virtual(2, main)
