"""Attention in blocks against the formula with all scores at once."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh import nn
from mpimesh.errors import DTypeError, ModuleError, ShapeError
from mpimesh.nn.attention import BlockAttention
from mpimesh.nn.dropout import WeightDropout
from tests.helpers.depth import examples
from tests.helpers.raises import raises


def dense(q, k, v, causal, mask):
    """Return the softmax of all scores, and the result, in float64, head by head."""
    batch, tokens, heads, dim = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    weights = np.zeros((batch, heads, tokens, keys))
    out = np.zeros(q.shape)
    for row, head in np.ndindex(batch, heads):
        scores = q[row, :, head] @ k[row, :, head // group].T / np.sqrt(dim)
        seen = np.ones((tokens, keys), bool) if mask is None else np.tile(mask[row], (tokens, 1))
        if causal:
            seen &= np.tri(tokens, keys, keys - tokens, dtype=bool)
        scores = np.where(seen, scores, -np.inf)
        some = seen.any(axis=1)
        e = np.exp(scores[some] - scores[some].max(axis=1, keepdims=True, initial=-np.inf))
        weights[row, head, some] = e / e.sum(axis=1, keepdims=True)
        out[row, :, head] = weights[row, head] @ v[row, :, head // group]
    return weights, out


def dense_backward(dout, q, k, v, weights):
    """Return the gradients by the full matrix of the softmax's derivative."""
    group = q.shape[2] // k.shape[2]
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for row, head in np.ndindex(q.shape[0], q.shape[2]):
        p, own = weights[row, head], head // group
        dp = dout[row, :, head] @ v[row, :, own].T
        ds = p * (dp - (p * dp).sum(axis=1, keepdims=True)) / np.sqrt(q.shape[3])
        dq[row, :, head] = ds @ k[row, :, own]
        dk[row, :, own] += ds.T @ q[row, :, head]
        dv[row, :, own] += p.T @ dout[row, :, head]
    return dq, dk, dv


@settings(max_examples=examples(60))
@given(
    batch=st.integers(0, 3),
    tokens=st.integers(0, 7),
    more_keys=st.integers(0, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    causal=st.booleans(),
    masked=st.booleans(),
    block=st.sampled_from([1, 2, 3, 5, None]),
    seed=st.integers(0, 99),
)
def test_any_blocks_give_the_softmax_of_all_scores(
    batch, tokens, more_keys, kv_heads, group, causal, masked, block, seed
):
    rng = np.random.default_rng(seed)
    keys, heads = tokens + more_keys, kv_heads * group
    q, dout = rng.normal(size=(2, batch, tokens, heads, 2)) * 4
    k, v = rng.normal(size=(2, batch, keys, kv_heads, 2)) * 4
    # A row whose mask is all False reads nothing at all.
    mask = rng.random((batch, keys)) < 0.6 if masked else None
    weights, expected = dense(q, k, v, causal, mask)

    core = BlockAttention(q, k, v, causal=causal, mask=mask, block=block)
    out, sums = core.forward()
    np.testing.assert_allclose(out, expected, rtol=1e-11, atol=1e-12)
    found = core.backward(dout, out, sums)
    for one, other in zip(found, dense_backward(dout, q, k, v, weights), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-11)


def test_scores_too_large_for_an_exponential_do_no_harm():
    q = np.full((1, 3, 1, 1), 60.0, "float32")
    k = np.array([-60.0, 60.0, 59.0], "float32").reshape(1, 3, 1, 1)
    v = np.array([1.0, 2.0, 3.0], "float32").reshape(1, 3, 1, 1)
    core = BlockAttention(q, k, v, block=1)
    out, sums = core.forward()
    np.testing.assert_allclose(out.ravel(), 2.0, rtol=1e-6)
    np.testing.assert_allclose(sums.ravel(), 3600.0, rtol=1e-6)
    for gradient in core.backward(np.ones_like(out), out, sums):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("dropout", [None, WeightDropout(0.5, key=1, first_row=0, num_heads=1)])
def test_memory_is_linear_in_the_tokens(dropout):
    """Four times the tokens take about four times the memory; all scores would take sixteen."""
    peaks = []
    for tokens in (1024, 4096):
        rng = np.random.default_rng(0)
        q, k, v = rng.normal(size=(3, 1, tokens, 1, 8)).astype("float32")
        tracemalloc.start()
        try:
            core = BlockAttention(q, k, v, causal=True, dropout=dropout)
            out, sums = core.forward()
            core.backward(out, out, sums)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < 5 * peaks[0]
    assert peaks[1] < 4096 * 4096 * 4 / 8


@pytest.mark.parametrize(
    ("shapes", "options", "error", "values"),
    [
        ([(1, 2, 2), (1, 2, 2, 2), (1, 2, 2, 2)], {}, ShapeError, ((1, 2, 2), (1, 2, 2, 2))),
        ([(1, 2, 2, 2), (1, 2, 2, 2), (1, 3, 2, 2)], {}, ShapeError, ((1, 2, 2, 2), (1, 3, 2, 2))),
        ([(1, 2, 3, 2), (1, 2, 2, 2), (1, 2, 2, 2)], {}, ShapeError, ((1, 2, 3, 2), (1, 2, 2, 2))),
        ([(2, 2, 2, 2), (1, 2, 2, 2), (1, 2, 2, 2)], {}, ShapeError, ((2, 2, 2, 2), (1, 2, 2, 2))),
        (
            [(1, 3, 2, 2), (1, 2, 2, 2), (1, 2, 2, 2)],
            {"causal": True},
            ShapeError,
            ("causal=True", 3, 2),
        ),
        (
            [(1, 2, 2, 2)] * 3,
            {"mask": np.ones((1, 3), bool)},
            ShapeError,
            ("mask", (1, 2), (1, 3)),
        ),
        ([(1, 2, 2, 2)] * 3, {"mask": np.ones((1, 2))}, DTypeError, ("float64", "mask != 0")),
    ],
)
def test_what_does_not_fit_is_refused(shapes, options, error, values):
    with raises(error, *values):
        BlockAttention(*map(np.ones, shapes), **options)


NORM: Any = "batch"
ROTARY: Any = "yes"


def made(layer, dtype="float64"):
    layer.materialize(seed=1, dtype=dtype)
    return layer


def test_padding_changes_no_token():
    """A row gives the same, and gets the same gradients, alone and beside padding."""
    block = made(nn.BertBlock(8, 2, hidden=6))
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 2, 5, 8))
    mask = np.arange(5) < np.array([[5], [3]])
    ctx = nn.Context()
    y, same = block((x, mask), ctx)
    assert same is mask
    # Nothing behind reads padding, so its gradient is 0.
    dx, none = block.backward((dy * mask[..., None], None), ctx)
    assert none is None
    together = [p.grad for p in block.parameters()]
    block.zero_grad()
    for row, length in enumerate((5, 3)):
        part = (slice(row, row + 1), slice(0, length))
        ctx = nn.Context()
        np.testing.assert_allclose(block(x[part], ctx), y[part], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(block.backward(dy[part], ctx), dx[part], atol=1e-12)
    assert not dx[1, 3:].any()
    for one, other in zip(together, block.parameters(), strict=True):
        np.testing.assert_allclose(one, other.grad, rtol=1e-10, atol=1e-12)


def test_a_causal_token_does_not_see_what_follows():
    block = made(nn.GptBlock(8, 2, rotary=True))
    x = np.random.default_rng(0).normal(size=(1, 6, 8))
    np.testing.assert_allclose(block(x[:, :4]), block(x)[:, :4], rtol=1e-12, atol=1e-13)


def test_rotary_products_depend_on_the_distance_alone():
    rng = np.random.default_rng(0)
    for interleaved in (False, True):
        turn = nn.RotaryEmbedding(6, interleaved=interleaved)
        q, k = (turn(np.tile(rng.normal(size=6), (1, 9, 1, 1)))[0, :, 0] for _ in "qk")
        products = q @ k.T
        for distance in range(9):
            diagonal = np.diagonal(products, distance)
            np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-11)
        assert abs(products[0, 0] - products[0, 4]) > 1e-3


def test_rotary_is_its_formula():
    x = np.random.default_rng(0).normal(size=(1, 7, 2, 4))
    y = nn.RotaryEmbedding(4, base=100.0, interleaved=True)(x)
    for token, pair in np.ndindex(7, 2):
        z = x[0, token, :, 2 * pair] + 1j * x[0, token, :, 2 * pair + 1]
        turned = z * np.exp(1j * token * 100.0 ** (-2 * pair / 4))
        np.testing.assert_allclose(y[0, token, :, 2 * pair], turned.real, atol=1e-13)
        np.testing.assert_allclose(y[0, token, :, 2 * pair + 1], turned.imag, atol=1e-13)


def test_learned_positions_are_added_and_only_theirs_get_a_gradient():
    layer = made(nn.PositionalEmbedding(4, 2))
    x, ctx = np.ones((3, 2, 2)), nn.Context()
    np.testing.assert_array_equal(layer(x, ctx), x + layer.weight.data[:2])
    layer.backward(x, ctx)
    np.testing.assert_array_equal(layer.weight.grad, [[3, 3], [3, 3], [0, 0], [0, 0]])
    with raises(ShapeError, "PositionalEmbedding(4, 2)", 4, (1, 5, 2)):
        layer(np.ones((1, 5, 2)))


def test_layers_within_can_be_replaced_by_some_of_the_heads():
    """Heads are independent, and what they give is added: the sum over parts is the whole."""
    whole = made(nn.Attention(8, 4, bias=False))
    x = np.random.default_rng(0).normal(size=(2, 3, 8))
    total = np.zeros_like(x)
    for heads in (slice(0, 6), slice(6, 8)):  # three heads, and one
        part = nn.Attention(8, 4, bias=False)
        size = heads.stop - heads.start
        for name in ("query", "key", "value"):
            layer = made(nn.Linear(8, size, bias=False))
            layer.weight.data[...] = getattr(whole, name).weight.data[heads]
            setattr(part, name, layer)
        output = part.output = made(nn.Linear(size, 8, bias=False))
        output.weight.data[...] = whole.output.weight.data[:, heads]
        total += part(x)
    np.testing.assert_allclose(total, whole(x), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda: nn.Attention(6, 4), ("num_heads", "features", 4, 6, "head_dim")),
        (lambda: nn.Attention(8, 4, num_kv_heads=3), ("num_heads", "num_kv_heads", 4, 3)),
        (
            lambda: nn.Attention(8, 4, rotary=nn.RotaryEmbedding(4)),
            ("RotaryEmbedding(4, base=10000)", 2),
        ),
        (lambda: nn.Attention(6, 2, rotary=True), ("head_dim", 3)),
        (
            lambda: nn.GptBlock(8, 4, rotary=ROTARY),
            ("rotary", True, False, "nn.RotaryEmbedding", "'yes'"),
        ),
        (lambda: nn.RotaryEmbedding(3), ("head_dim", 3)),
        (lambda: nn.RotaryEmbedding(4, base=0), ("base", 0)),
        (lambda: nn.RMSNorm(4, eps=0), ("eps", 0)),
        (lambda: nn.GptBlock(4, 2, norm=NORM), ("norm", "'layer'", "'rms'", "'batch'")),
        (lambda: nn.BertBlock(4, 0), ("num_heads", 0)),
    ],
)
def test_what_cannot_be_made_is_refused(make, values):
    with raises(ModuleError, *values):
        make()


def test_rotary_may_be_said_by_a_flag():
    """True was taken for a layer, and has no head_dim."""
    x = np.random.default_rng(0).normal(size=(2, 3, 8))
    given = made(nn.Attention(8, 2, rotary=nn.RotaryEmbedding(4)))(x)
    np.testing.assert_array_equal(made(nn.Attention(8, 2, rotary=True))(x), given)
    assert nn.Attention(8, 2, rotary=False).rotary is None
    assert not np.allclose(made(nn.Attention(8, 2))(x), given)


def test_a_wrong_input_is_refused():
    block = made(nn.BertBlock(4, 2))
    x = np.ones((2, 3, 4))
    with raises(ShapeError, "(batch, tokens, features)", (3, 4)):
        block(x[0])
    with raises(ModuleError, "(array, mask)", 3):
        block((x, x, x))
    mask: Any = np.ones((2, 3), bool)
    for layer in (block, block.attention, nn.MeanPool(), nn.Sequential(block)):
        with raises(ModuleError, "nn.Context", "ndarray", "(x, mask)"):
            layer.forward(x, mask)
    with raises(ModuleError, "Linear(2, 2)", "nn.Context", "int"):
        nn.Linear(2, 2)(x, 3)  # type: ignore[arg-type]
    with raises(DTypeError, "mask", "float64", "mask != 0"):
        block((x, np.ones((2, 3))))
    with raises(ShapeError, "mask", (2, 3), (2, 4)):
        block((x, np.ones((2, 4), bool)))
