"""The bits of random blocks: a slow model in plain Python, and values pinned for good."""

from __future__ import annotations

import hashlib
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh.arrays.random_bits import WordStream, key_of, natural_log, normal_quantile
from mpimesh.arrays.random_numbers import (
    bernoulli_block,
    exponential_block,
    integers_block,
    normal_block,
    permutation,
    uniform_block,
)
from tests.helpers.array_makers import KEY, random_block
from tests.helpers.depth import examples

WORD = (1 << 64) - 1

# -- a slow model in plain Python --------------------------------------------------------


def mixed(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def step_of(key):
    gamma = mixed((key + 0x9E3779B97F4A7C15) & WORD) | 1
    changes = bin(gamma ^ (gamma >> 1)).count("1")
    return gamma ^ 0xAAAAAAAAAAAAAAAA if changes < 24 else gamma


def word(key, number):
    return mixed((key + (number + 1) * step_of(key)) & WORD)


@settings(max_examples=examples(200))
@given(key=st.integers(0, WORD), numbers=st.lists(st.integers(0, WORD), min_size=1, max_size=4))
def test_words_are_those_of_the_model(key, numbers):
    found = WordStream.of(key).words(np.array(numbers, np.uint64))
    assert found.tolist() == [word(key, number) for number in numbers]


def test_a_step_with_few_changes_is_mended():
    """Only some steps are: a few draws of the test above might not have met one."""
    steps = [WordStream.of(key).gamma for key in range(2000)]
    assert steps == [step_of(key) for key in range(2000)]
    drawn = [mixed((key + 0x9E3779B97F4A7C15) & WORD) | 1 for key in range(2000)]
    assert 0 < sum(a != b for a, b in zip(drawn, steps, strict=True)) < 200
    assert all((step ^ (step >> 1)).bit_count() >= 24 and step % 2 for step in steps)


@settings(max_examples=examples(100))
@given(key=st.integers(0, WORD), count=st.integers(1, 1 << 64), number=st.integers(0, 2**62))
def test_integers_are_those_of_the_model(key, count, number):
    found = integers_block(key, 0, count, (2**62 + 3,), ((number, number + 3),), np.uint64).tolist()
    expected = []
    for i in range(number, number + 3):
        attempt, product = 0, word(key, i) * count
        while product & WORD < (1 << 64) % count:
            attempt += 1
            product = word(key_of(key, attempt), i) * count
        expected.append(product >> 64)
    assert found == expected


def test_logarithms_are_right_to_a_unit_in_the_last_place():
    x = np.concatenate(
        [
            random_block(KEY, (20_000,), ((0, 20_000),)) + 2.0**-60,
            2.0 ** np.arange(-1000, 1000),
            1 - 2.0 ** -np.arange(2, 54),
            1 + 2.0 ** -np.arange(2, 53),
            [0.5**0.5, np.nextafter(0.5**0.5, 0), 2**0.5],
        ]
    )
    expected = np.array([math.log(v) for v in x])
    assert (np.abs(natural_log(x) - expected) <= np.spacing(np.abs(expected))).all()


def test_quantiles_are_those_of_the_standard_library():
    q = random_block(KEY, (20_000,), ((0, 20_000),)) - 0.5
    q = np.concatenate([q, [0.425, -0.425, 0.4250001, 0.5 - 1e-11, 1e-12 - 0.5, 2.0**-53 - 0.5]])
    normal = statistics.NormalDist()
    # The library takes p itself, which has lost digits of q where it is close to 1.
    expected = np.array([-math.copysign(1, v) * normal.inv_cdf(0.5 - abs(v)) for v in q])
    np.testing.assert_allclose(normal_quantile(q), expected, rtol=2e-15, atol=1e-17)


def test_the_largest_word_is_one_like_all_others():
    """Chance would not find it: the number was computed back from the word."""
    number = 2114105577896304191
    where = (2**63 - 1,), ((number, number + 1),)
    assert WordStream.of(0).words(np.array([number], np.uint64)).tolist() == [WORD]
    assert bernoulli_block(0, 1.0, *where).tolist() == [True]
    assert bernoulli_block(0, 1 - 2.0**-53, *where).tolist() == [False]
    for dtype in (np.float64, np.float32, np.float16):
        assert uniform_block(0, 0, 1, *where, dtype)[0] == 1 - np.finfo(dtype).epsneg
    assert normal_block(0, *where)[0] == pytest.approx(8.2095361516)
    assert integers_block(0, 0, 10, *where).tolist() == [9]


# -- values that never change ------------------------------------------------------------


PINNED = key_of(2026, 11, 22)
WHERE = ((1000, 1200), ((130, 131), (77, 80)))


def test_keys_are_those_of_every_version():
    assert PINNED == 8405227177687386595
    assert key_of(0, 0) == 10511167430171045421
    assert key_of(2**64, 1) == 11518390943425388264


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            random_block,
            ["0x1.18e57710434a0p-2", "0x1.382368509133fp-1", "0x1.a554aee78a3f0p-3"],
        ),
        (
            lambda key, s, b: uniform_block(key, -1, 2, s, b),
            ["-0x1.6a9f359e6c440p-3", "0x1.a86a38f1b39bcp-1", "-0x1.8800f9a4b0a18p-2"],
        ),
        (
            normal_block,
            ["-0x1.331bb5bcc33c4p-1", "0x1.1d136294747ffp-2", "-0x1.a485ef36e78acp-1"],
        ),
        (
            exponential_block,
            ["0x1.4b21e73b9847ap+0", "0x1.fac15c0381e86p-2", "0x1.94c99224c4ee2p+0"],
        ),
        (lambda key, s, b: integers_block(key, 1, 6, s, b, endpoint=True), [2, 4, 2]),
        (lambda key, s, b: bernoulli_block(key, 0.5, s, b), [True, False, True]),
        (lambda key, s, b: permutation(key, 10)[None], [2, 8, 1, 0, 3, 5, 6, 7, 9, 4]),
    ],
)
def test_values_are_those_of_every_version(make, expected):
    """A seed stands for the same numbers for good: mend the code, not these."""
    (found,) = make(PINNED, *WHERE).tolist()
    assert [v.hex() if isinstance(v, float) else v for v in found] == expected


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (random_block, "72e9a46270e8a148"),
        (normal_block, "8d73fa248ee6526d"),
        (exponential_block, "a82e4666422ff02d"),
        (lambda key, s, b: integers_block(key, 0, 3 * 2**62, s, b, np.uint64), "dd395a915f8fc894"),
        (lambda key, s, b: permutation(key, 1000), "69c25dead4ec2d9d"),
    ],
)
def test_arrays_are_those_of_every_version(make, expected):
    """On every machine, too: NumPy's own logarithm depends on the processor in its last bits."""
    found = make(PINNED, (100, 1000), ((0, 100), (0, 1000)))
    little_endian = found.astype(found.dtype.newbyteorder("<"))
    assert hashlib.sha256(little_endian.tobytes()).hexdigest()[:16] == expected
