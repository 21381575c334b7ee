from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh.errors import ModuleError
from mpimesh.nn.initializers import Constant, Normal, Uniform, first_values
from tests.helpers.depth import examples
from tests.helpers.raises import raises

UNIT = Uniform(1.0)


def values(initializer=UNIT, shape=(4, 5), dtype="float64", *, seed=0, index=0, name="weight"):
    return first_values(initializer, shape, np.dtype(dtype), seed=seed, index=index, name=name)


def test_every_part_of_the_address_matters():
    addresses = [
        (0, 0, "weight"),
        (1, 0, "weight"),
        (0, 1, "weight"),
        (0, 0, "bias"),
        (2**80, 0, "w"),
    ]
    found = [values(seed=seed, index=index, name=name) for seed, index, name in addresses]
    assert len({array.tobytes() for array in found}) == len(addresses)
    assert values(seed=1).tobytes() == found[1].tobytes()


@pytest.mark.parametrize("initializer", [Uniform(0.3), Normal(2.0), Constant(0.5)], ids=repr)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes_agree_up_to_rounding(initializer, dtype):
    np.testing.assert_array_equal(
        values(initializer, dtype=dtype), values(initializer).astype(dtype)
    )


@settings(max_examples=examples(20))
@given(size=st.integers(0, 9), beyond=st.integers(0, 3))
def test_a_longer_parameter_begins_alike(size, beyond):
    """The stream is one: neither the length nor the chunks it is drawn in show."""
    for initializer in (Uniform(1.0), Normal(1.0)):
        long = values(initializer, (size + beyond,))
        np.testing.assert_array_equal(values(initializer, (size,)), long[:size])
    chunked = values(Normal(1.0), (2**16 + beyond,))
    np.testing.assert_array_equal(values(Normal(1.0), (size,)), chunked[:size])


def test_chunks_continue_the_stream():
    sequence = np.random.SeedSequence(5, spawn_key=(2, *b"weight"))
    raw = np.random.Philox(sequence).random_raw(2**16 + 7)
    expected = ((raw >> np.uint64(12)) + 0.5) * 2.0**-52 * 2 - 1
    np.testing.assert_allclose(
        values(shape=(2**16 + 7,), seed=5, index=2), expected, rtol=0, atol=1e-15
    )


def test_normal_values_are_those_of_box_and_muller_across_chunks():
    """Two numbers of the stream give two values, in all of a parameter alike."""
    count = 2**16 + 8
    sequence = np.random.SeedSequence(5, spawn_key=(2, *b"weight"))
    raw = np.random.Philox(sequence).random_raw(count).tolist()
    found = values(Normal(3.0), (count,), seed=5, index=2)
    for i in (0, 2, 2**15 - 2, 2**15, 2**16 - 2, 2**16, 2**16 + 6):
        first, second = (((word >> 12) + 0.5) * 2.0**-52 for word in raw[i : i + 2])
        radius = 3.0 * math.sqrt(-2 * math.log(first))
        angle = 2 * math.pi * second
        expected = [radius * math.cos(angle), radius * math.sin(angle)]
        np.testing.assert_allclose(found[i : i + 2], expected, rtol=1e-12, atol=1e-14)


def test_values_are_those_of_every_release():
    """Written down once: a change would give everybody other weights for the same seed."""
    np.testing.assert_allclose(values(shape=(3,), seed=1, index=2), FIRST_UNIFORM, rtol=1e-15)
    np.testing.assert_allclose(values(Normal(1.0), (3,), seed=1, index=2), FIRST_NORMAL, rtol=1e-14)


FIRST_UNIFORM = [-0.30812179248320937, -0.49770325945442795, -0.4853236250704185]
FIRST_NORMAL = [-0.010513117262590707, 1.457008755838718, -0.38058905519238245]


def test_normal_values_follow_the_distribution():
    found = np.sort(values(Normal(2.0), (40_000,)) / 2.0)
    exact = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in found.tolist()])
    # Kolmogorov's distance; 1.95 / sqrt(n) is passed once in a thousand seeds.
    assert np.abs(exact - (np.arange(found.size) + 0.5) / found.size).max() < 1.95 / 200


@pytest.mark.parametrize("address", [{"seed": -1}, {"index": -2}], ids=repr)
def test_negative_addresses_are_refused(address):
    with raises(ModuleError, *address, *address.values()):
        values(**address)
