"""Properties of random blocks, against closed forms.

All keys are fixed, so that every figure here is the same in every run.
"""

from __future__ import annotations

import math
from itertools import combinations

import ml_dtypes
import numpy as np
import pytest

from mpimesh.arrays.random_bits import key_of
from mpimesh.arrays.random_numbers import (
    bernoulli_block,
    exponential_block,
    integers_block,
    normal_block,
    permutation,
    uniform_block,
)
from mpimesh.errors import ArrayValueError, DTypeError
from tests.helpers.array_makers import KEY, everything, random_block
from tests.helpers.raises import raises

SHAPE = (40, 50, 100)
SIZE = math.prod(SHAPE)
BOX = everything(SHAPE)
SIGMAS = 4.5
# A mean this many standard errors off its value has a chance of one in 150,000.
KS = 2.0
# The chance that sqrt(n) D exceeds this is 2 exp(-8), or one in 1,500 (Kolmogorov).


def ks_distance(values, distribution):
    """Return sqrt(n) times the largest distance between the two distribution functions."""
    below = distribution(np.sort(values, axis=None))
    n = values.size
    steps = np.arange(n + 1) / n
    return math.sqrt(n) * max((steps[1:] - below).max(), (below - steps[:-1]).max())


def assert_neighbours_do_not_know_each_other(values):
    scaled = (values - values.mean()) / values.std()
    for axis in range(values.ndim):
        for lag in (1, 2, 7):
            a = np.moveaxis(scaled, axis, 0)
            product = a[lag:] * a[:-lag]
            assert abs(product.mean()) < SIGMAS / math.sqrt(product.size)


def assert_all_equally_often(values, count):
    found = np.bincount(values.reshape(-1).astype(np.int64), minlength=count)
    assert found.size == count
    expected = values.size / count
    chi_square = float(((found - expected) ** 2).sum() / expected)
    freedom = count - 1
    assert abs(chi_square - freedom) < SIGMAS * math.sqrt(2 * freedom) + 6


def normal_distribution(x):
    return np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x])


# -- closed forms ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [0, 1, 2])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_uniform_values_are_spread_evenly(stream, dtype):
    values = uniform_block(key_of(2026, stream), 0, 1, SHAPE, BOX, dtype)
    assert values.dtype == dtype
    assert values.min() >= 0
    assert values.max() < 1
    wide = values.astype(np.float64)
    if dtype == np.float64:  # all of 53 digits
        assert (wide * 2.0**53 % 1 == 0).all()
        assert (wide * 2.0**52 % 1 != 0).mean() == pytest.approx(0.5, abs=0.01)
    assert abs(wide.mean() - 0.5) < SIGMAS * math.sqrt(1 / 12 / SIZE)
    assert abs(wide.var() - 1 / 12) < SIGMAS * math.sqrt((1 / 80 - 1 / 144) / SIZE)
    assert ks_distance(wide, lambda x: x) < KS
    assert_neighbours_do_not_know_each_other(wide)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (1.0, 1.0625), (-8.5, -8.0), (2.0, 2.0)])
def test_values_between_two_bounds_stay_below_the_upper_one(dtype, low, high):
    values = uniform_block(KEY, low, high, SHAPE, BOX, dtype).astype(np.float64)
    assert values.min() >= low
    assert values.max() < high or low == high
    digits = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}[np.dtype(dtype).name]
    rounding = max(abs(low), abs(high)) * 2.0**-digits
    wide = low + (high - low) * random_block(KEY, SHAPE, BOX)
    assert np.abs(values - wide).max() <= 2 * rounding


def test_no_number_between_two_bounds_is_left_out_for_the_upper_one():
    """All of float16 in [1, 1.0625), with the values that would have rounded up to 1.0625."""
    found = np.unique(uniform_block(KEY, 1.0, 1.0625, SHAPE, BOX, np.float16).astype(np.float64))
    np.testing.assert_array_equal(found, 1 + np.arange(64) / 1024)


@pytest.mark.parametrize(("loc", "scale"), [(0.0, 1.0), (-3.0, 0.25), (1e3, 0.0)])
def test_normal_values_have_the_moments_and_the_distribution(loc, scale):
    values = normal_block(key_of(2026, 7), SHAPE, BOX, loc=loc, scale=scale)
    if not scale:
        assert (values == loc).all()
        return
    z = (values - loc) / scale
    assert abs(z.mean()) < SIGMAS / math.sqrt(SIZE)
    assert abs(z.var() - 1) < SIGMAS * math.sqrt(2 / SIZE)
    assert abs((z**3).mean()) < SIGMAS * math.sqrt(15 / SIZE)
    assert abs((z**4).mean() - 3) < SIGMAS * math.sqrt(96 / SIZE)
    assert ks_distance(z, normal_distribution) < KS
    assert_neighbours_do_not_know_each_other(z)
    # Tails: some, and about as many as there should be.
    expected = SIZE * math.erfc(3 / math.sqrt(2))
    assert abs((np.abs(z) > 3).sum() - expected) < SIGMAS * math.sqrt(expected)


@pytest.mark.parametrize("scale", [1.0, 12.5])
def test_exponential_values_have_the_moments_and_the_distribution(scale):
    x = exponential_block(key_of(2026, 8), SHAPE, BOX, scale=scale) / scale
    assert x.min() > 0
    assert abs(x.mean() - 1) < SIGMAS / math.sqrt(SIZE)
    assert abs(x.var() - 1) < SIGMAS * math.sqrt(8 / SIZE)
    assert ks_distance(x, lambda x: -np.expm1(-x)) < KS
    assert_neighbours_do_not_know_each_other(x)


@pytest.mark.parametrize("make", [normal_block, exponential_block])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_narrow_types_have_the_wide_values_rounded(make, dtype):
    wide = make(KEY, SHAPE, BOX)
    np.testing.assert_array_equal(
        make(KEY, SHAPE, BOX, dtype), wide.astype(np.float32).astype(dtype)
    )


@pytest.mark.parametrize("count", [1, 2, 6, 7, 100, 1000, 1024])
@pytest.mark.parametrize("dtype", [np.int16, np.uint64])
def test_integers_are_equally_likely(count, dtype):
    values = integers_block(key_of(3, count), 5, 5 + count, SHAPE, BOX, dtype)
    assert values.dtype == dtype
    assert_all_equally_often(values - dtype(5), count)
    if count > 1:
        assert_neighbours_do_not_know_each_other(values.astype(np.float64))


@pytest.mark.parametrize("count", [3 * 2**62, 3 * 2**61, 2**63 + 1, 2**32 + 1, 2**64 - 5])
def test_integers_of_large_ranges_are_equally_likely(count):
    """With three of four words, an upper product alone would be a multiple of 3 half the time."""
    values = integers_block(key_of(4, count), 0, count, SHAPE, BOX, np.uint64)
    assert int(values.max()) < count
    assert_all_equally_often(values % np.uint64(3), 3)
    assert_all_equally_often(np.minimum((values / count * 10).astype(np.int64), 9), 10)


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
)
def test_integers_of_a_whole_type_have_every_bit(dtype):
    info = np.iinfo(dtype)
    values = integers_block(KEY, info.min, info.max, SHAPE, BOX, dtype, endpoint=True)
    np.testing.assert_array_equal(
        values, integers_block(KEY, info.min, info.max + 1, SHAPE, BOX, dtype)
    )
    for bit in range(info.bits):
        share = ((values >> dtype(bit)) & dtype(1)).astype(np.float64).mean()
        assert abs(share - 0.5) < SIGMAS * 0.5 / math.sqrt(SIZE)


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.3, 0.5, 0.999, 1.0])
def test_truth_has_its_share(p):
    values = bernoulli_block(KEY, p, SHAPE, BOX)
    assert values.dtype == bool
    assert abs(values.mean() - p) <= SIGMAS * math.sqrt(p * (1 - p) / SIZE)
    if 0.1 < p < 0.9:
        assert_neighbours_do_not_know_each_other(values.astype(np.float64))


def test_streams_and_seeds_do_not_know_each_other():
    n = 20_000
    keys = [key_of(seed, stream) for seed in (0, 1, 2**64) for stream in (0, 1, 2)]
    arrays = [random_block(key, (n,), ((0, n),)) - 0.5 for key in [*keys, 0, 1, 2]]
    for a, b in combinations(arrays, 2):
        for lag in (0, 1, 2):
            product = a[lag:] * b[: n - lag] * 12
            assert abs(product.mean()) < SIGMAS / math.sqrt(n - lag)


# -- permutations ------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 100, 50_000])
def test_a_permutation_has_each_number_once(n):
    order = permutation(KEY, n)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(n))


def test_all_orders_are_equally_likely():
    codes = [int(permutation(key_of(5, i), 4) @ [64, 16, 4, 1]) for i in range(4800)]
    orders = {code: number for number, code in enumerate(sorted(set(codes)))}
    assert len(orders) == 24
    assert_all_equally_often(np.array([orders[code] for code in codes]), 24)


# -- what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int64, np.complex128, np.longdouble, bool])
@pytest.mark.parametrize("make", [normal_block, exponential_block])
def test_random_values_of_other_types_are_refused(make, dtype):
    with raises(DTypeError, "float64", np.dtype(dtype)):
        make(KEY, (3,), ((0, 3),), dtype)


@pytest.mark.parametrize(
    ("call", "values"),
    [
        (lambda s, b: normal_block(KEY, s, b, scale=-1), ("scale", -1)),
        (lambda s, b: normal_block(KEY, s, b, loc=math.inf), ("loc", math.inf)),
        (lambda s, b: normal_block(KEY, s, b, np.float16, scale=1e5), ("scale", "float16", 1e5)),
        (lambda s, b: exponential_block(KEY, s, b, scale=math.nan), ("scale", math.nan)),
        (lambda s, b: exponential_block(KEY, s, b, scale=-0.5), ("scale", -0.5)),
        (lambda s, b: uniform_block(KEY, 1, 0, s, b), ("low", "high", 1.0, 0.0)),
        (lambda s, b: uniform_block(KEY, -1.7e308, 1.7e308, s, b), ("high - low", math.inf)),
        (lambda s, b: uniform_block(KEY, 0, 1e39, s, b, np.float32), ("high", "float32", 1e39)),
        (lambda s, b: bernoulli_block(KEY, 1.5, s, b), ("probability", 1.5)),
        (lambda s, b: bernoulli_block(KEY, math.nan, s, b), ("probability", math.nan)),
        (lambda s, b: integers_block(KEY, 3, 3, s, b), ("integer", 3)),
        (lambda s, b: integers_block(KEY, 0, 257, s, b, np.uint8), ("uint8", "0 to 256")),
        (lambda s, b: integers_block(KEY, -1, 2, s, b, np.uint8), ("uint8", "-1 to 1")),
        (lambda s, b: integers_block(KEY, 0, 2.5, s, b), ("integers", 0, 2.5)),  # type: ignore[arg-type]
        (lambda s, b: integers_block(KEY, 0, 3, s, b, bool), ("bool", "0 to 2")),
    ],
)
def test_numbers_that_break_a_rule_are_refused(call, values):
    with raises(ArrayValueError, *values):
        call((3,), ((0, 3),))


def test_integers_of_floats_are_refused():
    with raises(DTypeError, "integers", "float32"):
        integers_block(KEY, 0, 3, (3,), ((0, 3),), np.float32)
