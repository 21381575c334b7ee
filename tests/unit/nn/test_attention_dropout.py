"""Dropout of attention's weights: in blocks, and the same for any cut of the work."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh import nn
from mpimesh.errors import ModuleError, ModuleStateError
from mpimesh.nn.attention import BlockAttention
from mpimesh.nn.dropout import WeightDropout
from tests.helpers.depth import examples
from tests.helpers.raises import raises
from tests.unit.nn.test_attention import dense


def all_kept(dropout: WeightDropout, batch: int, tokens: int, keys: int) -> np.ndarray:
    """Return which weights stay, at once: (batch, heads, tokens, keys)."""
    shape = (batch, 1, dropout.num_heads, tokens, keys)
    found: np.ndarray = dropout.kept(np, shape, row=0, query=0, key=0, tokens=tokens)[:, 0]
    return found


@settings(max_examples=examples(50))
@given(
    batch=st.integers(0, 3),
    tokens=st.integers(0, 7),
    more_keys=st.integers(0, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    causal=st.booleans(),
    masked=st.booleans(),
    block=st.sampled_from([1, 2, 3, 5, None]),
    p=st.sampled_from([0.25, 0.5, 0.9]),
    seed=st.integers(0, 99),
)
def test_any_blocks_give_the_softmax_with_its_mask(
    batch, tokens, more_keys, kv_heads, group, causal, masked, block, p, seed
):
    rng = np.random.default_rng(seed)
    keys, heads = tokens + more_keys, kv_heads * group
    q, dout = rng.normal(size=(2, batch, tokens, heads, 2))
    k, v = rng.normal(size=(2, batch, keys, kv_heads, 2))
    mask = rng.random((batch, keys)) < 0.6 if masked else None
    dropout = WeightDropout(p, key=seed, first_row=7, num_heads=heads)
    weights, _ = dense(q, k, v, causal, mask)
    factor = all_kept(dropout, batch, tokens, keys) / (1 - p)
    read = weights * factor
    spread = [np.repeat(one, group, axis=2) for one in (k, v)]
    expected = np.einsum("bhqk,bkhd->bqhd", read, spread[1])

    core = BlockAttention(q, k, v, causal=causal, mask=mask, dropout=dropout, block=block)
    out, sums = core.forward()
    np.testing.assert_allclose(out, expected, rtol=1e-11, atol=1e-12)

    dp = np.einsum("bqhd,bkhd->bhqk", dout, spread[1]) * factor
    ds = weights * (dp - (weights * dp).sum(axis=-1, keepdims=True)) / math.sqrt(2)
    dk, dv = np.einsum("bhqk,bqhd->bkhd", ds, q), np.einsum("bhqk,bqhd->bkhd", read, dout)
    summed = [one.reshape(batch, keys, kv_heads, group, 2).sum(axis=3) for one in (dk, dv)]
    found = core.backward(dout, out, sums)
    for one, other in zip(
        found, [np.einsum("bhqk,bkhd->bqhd", ds, spread[0]), *summed], strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-11)


def made(p: float = 0.4, **options: Any) -> nn.Attention:
    layer = nn.Attention(8, 4, dropout=p, **options)
    layer.materialize(seed=3, dtype=np.float64, index=options.pop("index", 0))
    return layer


def test_any_cut_of_the_batch_drops_the_same_weights():
    layer = made(causal=True)
    x, dy = np.random.default_rng(0).normal(size=(2, 7, 5, 8))

    def run(part: slice) -> tuple[Any, Any]:
        ctx = nn.Context(step=2, first_row=100 + part.start)
        return layer(x[part], ctx), layer.backward(dy[part], ctx)

    whole = run(slice(0, 7))
    parts = [run(slice(a, b)) for a, b in pairwise([0, 1, 4, 7])]
    for one, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        np.testing.assert_allclose(np.concatenate(pieces), one, rtol=1e-12, atol=1e-14)


def test_masks_differ_by_layer_step_row_head_and_query():
    shape = (2, 1, 4, 8, 4096)
    dropouts = [WeightDropout(0.5, key, first, 4) for key in (0, 1) for first in (0, 2)]
    masks = [one.kept(np, shape, row=0, query=0, key=0, tokens=8) for one in dropouts]
    lines = np.concatenate(masks).reshape(-1, 4096)
    for number, line in enumerate(lines):
        # Independent masks agree on half of the places; seven deviations.
        alike = (lines[:number] == line).mean(axis=1)
        assert (np.abs(alike - 0.5) < 7 * 0.5 / math.sqrt(4096)).all()


def test_the_place_and_the_step_count():
    x = np.random.default_rng(0).normal(size=(2, 5, 8))
    found = []
    for index, step in ((0, 0), (0, 1), (5, 0)):
        layer = nn.Attention(8, 4, dropout=0.4)
        layer.materialize(seed=3, dtype=np.float64)
        layer.set_place(seed=3, index=index)
        found.append(layer(x, nn.Context(step=step)))
    assert not any(np.allclose(found[0], other) for other in found[1:])


@pytest.mark.parametrize("how", ["no context", "context", "eval"])
def test_nothing_is_dropped_in_inference(how):
    layer, plain = made(), made(0.0)
    ctx = {"no context": None, "context": nn.Context(training=False)}.get(how, nn.Context())
    if how == "eval":
        layer.eval()
    x = np.random.default_rng(0).normal(size=(2, 5, 8))
    np.testing.assert_array_equal(layer(x, ctx), plain(x, nn.Context()))


def test_blocks_pass_it_on():
    x = np.random.default_rng(0).normal(size=(2, 5, 8))
    blocks: list[Any] = [
        make(8, 4, attention_dropout=p) for make in (nn.GptBlock, nn.BertBlock) for p in (0.0, 0.4)
    ]
    for block in blocks:
        block.materialize(seed=0, dtype=np.float64)
    results = [block(x, nn.Context()) for block in blocks]
    assert not np.allclose(results[0], results[1])
    assert not np.allclose(results[2], results[3])
    assert "dropout=0.4" in repr(blocks[1].attention)


def test_what_is_refused():
    for p in (-0.1, 1.0, math.nan):
        with raises(ModuleError, "dropout", 0, 1):
            nn.Attention(8, 4, dropout=p)
    q = np.ones((1, 2, 1, 4))
    for block in (0, -1, 2.5):
        with raises(ModuleError, "block", 1):
            BlockAttention(q, q, q, block=block)  # type: ignore[arg-type]
    layer = nn.Attention(4, 1, dropout=0.5)
    for one in layer.parameters():
        one.data = np.ones(one.shape)
    with raises(ModuleStateError, layer, "materialize(seed=...)"):
        layer(np.ones((1, 2, 4)), nn.Context())
