"""Random stacks of layers, split over ranks, against the same stack in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import ModuleError
from tests.pure.parallel_models import on_ranks

SEED, ROWS = 5, 3
SPLIT = {"pair", "gpt", "mlp", "bert"}

PIECE = st.one_of(
    st.tuples(
        st.just("pair"), st.integers(1, 9), st.lists(st.sampled_from(["gelu", "drop"]), max_size=3)
    ),
    st.tuples(st.just("gpt"), st.booleans(), st.booleans()),
    st.tuples(st.just("mlp"), st.integers(1, 9), st.booleans()),
    st.tuples(st.sampled_from(["norm", "rms", "drop", "silu", "bert"])),
)


def stack(
    pieces: list[Any],
    features: int,
    heads: int,
    group: mm.ProcessGroup | None = None,
    sequence: mm.SequenceSplit | None = None,
) -> nn.Sequential:
    """The layers; with a group their pairs of linear ones are split, and nothing else yet."""

    def inner(name: str) -> nn.Module:
        return nn.GELU() if name == "gelu" else nn.Dropout(0.3)

    def layer(kind: str, *given: Any) -> list[nn.Module]:
        if kind == "pair":
            hidden, between = given
            if group is None:
                ends: list[nn.Module] = [nn.Linear(features, hidden), nn.Linear(hidden, features)]
            else:
                options: Any = {"group": group, "sequence": sequence}
                ends = [
                    mm.ColumnParallelLinear(features, hidden, **options),
                    mm.RowParallelLinear(hidden, features, **options),
                ]
            return [ends[0], *map(inner, between), ends[1]]
        if kind == "gpt":
            grouped, llama = given
            return [
                nn.GptBlock(
                    features,
                    heads,
                    num_kv_heads=1 if grouped else None,
                    norm="rms" if llama else "layer",
                    mlp="swiglu" if llama else "gelu",
                    hidden=7,
                    dropout=0.2,
                    attention_dropout=0.3,
                )
            ]
        if kind == "mlp":
            hidden, dropped = given
            activation = nn.Sequential(nn.SiLU(), nn.Dropout(0.3)) if dropped else None
            return [nn.FeedForward(features, hidden, activation=activation)]
        return [
            {
                "norm": nn.LayerNorm(features),
                "rms": nn.RMSNorm(features),
                "drop": nn.Dropout(0.3),
                "silu": nn.SiLU(),
                "bert": nn.BertBlock(features, heads, hidden=5, attention_dropout=0.4),
            }[kind]
        ]

    return nn.Sequential([one for piece in pieces for one in layer(*piece)])


@settings(max_examples=15)
@given(
    pieces=st.lists(PIECE, min_size=1, max_size=4),
    size=st.integers(1, 4),
    head_dim=st.integers(1, 2),
    more_heads=st.integers(0, 1),
    length=st.integers(1, 5),
    sequence=st.booleans(),
    first_row=st.integers(0, 3),
)
def test_any_stack_is_the_unsplit_one(
    pieces, size, head_dim, more_heads, length, sequence, first_row
):
    """Outputs, loss, and the gradients of the input and of all parameters, to 1e-10."""
    kinds = {piece[0] for piece in pieces}
    heads = size + more_heads
    features = heads * head_dim
    x, target = np.random.default_rng(length).normal(size=(2, ROWS, length, features))

    def run(model: nn.Sequential, here: tuple[slice, ...]) -> tuple[float, Any, Any]:
        model.materialize(seed=SEED, dtype=np.float64)
        ctx = nn.Context(step=1, first_row=first_row)
        y = model(x[here], ctx)
        # The share of this rank's places in the mean over all.
        share = ROWS * length / max(1, x[here].shape[1])
        loss, dy = nn.mse.value_and_grad(y, target[here], denominator=share)
        dx = model.backward(dy, ctx)
        assert ctx.is_empty
        return loss, y, dx

    whole = stack(pieces, features, heads)
    loss, y, dx = run(whole, (slice(None),))
    gradients = dict(whole.named_parameters())

    def body(mesh):
        group = mesh.group("tp")
        cut = mm.SequenceSplit(group, length=length) if sequence else None
        made = stack(pieces, features, heads, group, cut)
        if gradients and cut is None and kinds.isdisjoint(SPLIT):
            with pytest.raises(ModuleError, match=r"nothing of .* can be split"):
                mm.tensor_parallel(made, group)
            return
        model = mm.tensor_parallel(made, group, sequence=cut)
        here = (slice(None),) if cut is None else cut.here(x)
        found = run(model, here)
        total = found[0]
        if cut is not None:
            total = float(group.all_reduce(np.array(total)).resolve())
        assert total == pytest.approx(loss, rel=1e-10)
        np.testing.assert_allclose(found[1], y[here], rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(found[2], dx[here], rtol=1e-10, atol=1e-10)
        mm.sum_shared_gradients(model.parameters(), group)
        assert [name for name, _ in model.named_parameters()] == list(gradients)
        for name, one in model.named_parameters():
            part: Any = gradients[name].grad
            if hasattr(one, "part_of"):
                part = one.part_of(part)
            np.testing.assert_allclose(one.grad, part, rtol=1e-10, atol=1e-10, err_msg=name)

    on_ranks(f"tp={size}", body)
