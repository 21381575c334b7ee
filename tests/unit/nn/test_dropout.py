from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh import nn
from mpimesh.arrays.random_bits import key_of, random_words
from mpimesh.errors import ModuleError, ShapeError
from tests.helpers.depth import examples
from tests.helpers.raises import raises


def materialized(p=0.5, *, seed=3, index=2):
    layer = nn.Dropout(p)
    layer.materialize(seed=seed, index=index)
    return layer


def mask(layer, shape, **position):
    return layer(np.ones(shape), nn.Context(**position)) > 0


@settings(max_examples=examples(40))
@given(
    rows=st.integers(1, 40),
    inner=st.lists(st.integers(1, 7), max_size=2),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    first_row=st.integers(0, 2**40),
)
def test_any_cut_of_the_batch_drops_the_same_values(rows, inner, cuts, first_row):
    layer = materialized()
    x = np.random.default_rng(0).uniform(1, 2, (rows, *inner))
    whole = layer(x, nn.Context(step=4, first_row=first_row))
    bounds = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    parts = [
        layer(x[a:b], nn.Context(step=4, first_row=first_row + a)) for a, b in pairwise(bounds)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("words", [1, 3, 5000, 20_000])
def test_blocks_of_rows_do_not_show(words):
    """Large enough for several blocks: the same as row by row."""
    layer = materialized()
    whole = mask(layer, (7, 2 * words - 1))
    rows = [mask(layer, (1, 2 * words - 1), first_row=i)[0] for i in range(7)]
    np.testing.assert_array_equal(whole, rows)


def test_masks_differ_by_seed_layer_step_and_row():
    shape = (1, 4096)
    masks = [
        mask(materialized(seed=seed, index=index), shape, step=step, first_row=row)
        for seed in (0, 1, 2**64, 2**70 + 1)
        for index in (0, 1)
        for step in (0, 1)
        for row in (0, 1)
    ]
    for i, first in enumerate(masks):
        for second in masks[:i]:
            # Independent masks agree on half of the places; six deviations.
            assert abs((first == second).mean() - 0.5) < 6 * 0.5 / math.sqrt(4096)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.9])
def test_the_share_and_the_scale_are_right(p):
    shape = (100, 1000)
    layer = materialized(p)
    y = layer(np.ones(shape), nn.Context())
    kept = y > 0
    assert abs(kept.mean() - (1 - p)) < 6 * math.sqrt(p * (1 - p) / kept.size)
    np.testing.assert_allclose(y[kept], 1 / (1 - p), rtol=1e-15)
    # No row and no column stands out, nor do neighbours know of each other.
    for axis, extent in ((0, 100), (1, 1000)):
        assert np.abs(kept.mean(axis=axis) - (1 - p)).max() < 7 * math.sqrt(p * (1 - p) / extent)
    centred = kept - kept.mean()
    for product in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(product.mean()) < 6 * p * (1 - p) / math.sqrt(product.size)


def test_the_gradient_is_dropped_alike():
    layer, ctx = materialized(0.4), nn.Context()
    x = np.random.default_rng(0).normal(size=(20, 30))
    y = layer(x, ctx)
    np.testing.assert_array_equal(
        layer.backward(np.ones_like(x), ctx), np.where(y != 0, 1 / 0.6, 0)
    )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtypes_share_masks(dtype):
    layer = materialized()
    found = layer(np.ones((9, 11), dtype), nn.Context())
    assert found.dtype == dtype
    np.testing.assert_array_equal(found > 0, mask(layer, (9, 11)))


@pytest.mark.parametrize("how", ["no context", "context", "eval", "p=0"])
def test_inference_is_the_identity(how):
    layer = nn.Dropout(0.0 if how == "p=0" else 0.5)
    ctx = {"no context": None, "context": nn.Context(training=False)}.get(how, nn.Context())
    if how == "eval":
        layer.eval()
    x = np.arange(6.0).reshape(2, 3)
    assert layer(x, ctx) is x
    if ctx is not None:
        assert layer.backward(x, ctx) is x


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan])
def test_p_out_of_range_is_refused(p):
    with raises(ModuleError, "p", 0, 1):
        nn.Dropout(p)


def test_an_array_without_rows_is_refused():
    with raises(ShapeError, "x", "(rows, ...)", "()"):
        materialized()(np.array(1.0), nn.Context())


def test_words_are_those_of_splitmix64():
    """Against the scalar generator, written out from its paper."""

    def mixed(word):
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % 2**64
        return word ^ (word >> 31)

    gamma, key = 0x9E3779B97F4A7C15, key_of(1, 2, 3)
    rows = np.array([0, 1, 2**63], np.uint64)
    expected = [
        [mixed((mixed((key + row * gamma) % 2**64) + (j + 1) * gamma) % 2**64) for j in range(4)]
        for row in rows.tolist()
    ]
    assert random_words(np, key, rows, 4).tolist() == expected


def test_the_mixing_function_is_the_published_one():
    """First outputs of SplitMix64 seeded with 1234567, as its reference program prints them."""
    gamma = 0x9E3779B97F4A7C15
    undone = next_state_before(1234567)
    row = np.array([undone * pow(gamma, -1, 2**64) % 2**64], np.uint64)
    found = random_words(np, 0, row, 3)[0].tolist()
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def next_state_before(word):
    """Invert the mixing function, which is one to one."""

    def unshift(value, shift):
        result = value
        for _ in range(64 // shift + 1):
            result = value ^ (result >> shift)
        return result

    word = unshift(word, 31)
    word = word * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    word = unshift(word, 27)
    word = word * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return unshift(word, 30)


def test_keys_tell_numbers_and_their_order_apart():
    lists = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (2**64, 0, 0), (0,), (0, 0), (2**64 + 1,)]
    assert len({key_of(*numbers) for numbers in lists}) == len(lists)


def test_a_dropout_within_a_layer_that_keeps_its_values_learns_its_place():
    """As :class:`Attention` does: masks are those of the model that it stands in now."""
    blocks = [nn.GptBlock(8, 2, dropout=0.5) for _ in range(2)]
    for block, (seed, index) in zip(blocks, ((3, 2), (0, 0)), strict=True):
        block.materialize(seed=seed, dtype=np.float64, index=index)
    for own, other in zip(blocks[0].parameters(), blocks[1].parameters(), strict=True):
        other.data = own.value().copy()
    blocks[1].set_place(seed=3, index=2)
    x = np.random.default_rng(0).normal(size=(2, 5, 8))
    one, other = (block(x, nn.Context()) for block in blocks)
    np.testing.assert_array_equal(one, other)
