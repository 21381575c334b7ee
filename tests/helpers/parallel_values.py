"""Stages that take and give several arrays, and the same model in one process: the oracle."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from mpimesh import nn
from mpimesh.parallel import PipelineParallel, PipelineStage
from mpimesh.parallel.microbatch import flatten, microbatch_rows, tree_map

SEED = 5

# What a tree is to be like: in the place of each array the shape of a row, and whether floating.
Spec = Any


def leaves_of(spec: Spec) -> list[tuple[tuple[int, ...], bool]]:
    if isinstance(spec, Rows):
        return [(spec.shape, spec.floating)]
    parts = spec if isinstance(spec, tuple) else [spec[key] for key in sorted(spec)]
    return [leaf for part in parts for leaf in leaves_of(part)]


class Rows:
    """A leaf of a spec."""

    def __init__(self, *shape: int, floating: bool = True) -> None:
        self.shape = shape
        self.floating = floating

    def __repr__(self) -> str:
        return f"Rows{self.shape}{'' if self.floating else ' of integers'}"


def fill(spec: Spec, leaves: list[Any]) -> Any:
    """Put arrays into the places of a spec; dicts keep the order in which they were written."""
    order = iter(leaves)

    def put(part: Spec) -> Any:
        if isinstance(part, Rows):
            return next(order)
        if isinstance(part, tuple):
            return tuple(put(one) for one in part)
        made = {key: put(part[key]) for key in sorted(part)}
        return {key: made[key] for key in part}

    return put(spec)


def random_tree(spec: Spec, rows: int, seed: int = 0) -> Any:
    rng = np.random.default_rng([seed, rows])
    return fill(
        spec,
        [
            rng.normal(size=(rows, *shape)) if floating else rng.integers(0, 5, (rows, *shape))
            for shape, floating in leaves_of(spec)
        ],
    )


class Mixed(nn.Module):
    """Every array of the output depends on every one of the input; integers have no gradient."""

    def __init__(self, inputs: Spec, outputs: Spec) -> None:
        self.outputs = outputs
        self.leaves = leaves_of(outputs)
        sizes = [int(np.prod(shape)) for shape, _ in self.leaves]
        self.ends = np.cumsum(sizes)
        shape = (len(leaves_of(inputs)), int(sum(sizes)))
        self.weight = nn.Parameter("weight", shape, nn.Normal(0.5))

    def forward(self, x, ctx=None):
        given, structure = flatten(x)
        rows = given[0].shape[0]
        sums = np.stack([np.sin(one).sum(axis=tuple(range(1, one.ndim))) for one in given], axis=1)
        y = np.tanh(sums @ self.weight.value())
        if ctx is not None:
            ctx.save(self, given, structure, sums, y)
        parts = np.split(y, self.ends[:-1], axis=1)
        return fill(
            self.outputs,
            [
                (part if floating else np.rint(9 * part).astype(int)).reshape(rows, *shape)
                for part, (shape, floating) in zip(parts, self.leaves, strict=True)
            ],
        )

    def backward_input(self, dy, ctx):
        given, structure, sums, y = ctx.take(self)
        gradients = [
            np.zeros((len(y), int(np.prod(shape)))) if one is None else one.reshape(len(y), -1)
            for one, (shape, _) in zip(flatten_any(dy), self.leaves, strict=True)
        ]
        inner = np.concatenate(gradients, axis=1) * (1 - y * y)
        ctx.defer(self, sums, inner)
        outer = inner @ self.weight.value().T
        return structure.unflatten(
            [
                np.cos(one) * outer[:, place].reshape(-1, *[1] * (one.ndim - 1))
                if one.dtype.kind == "f"
                else None
                for place, one in enumerate(given)
            ]
        )

    def backward_weight(self, ctx):
        sums, inner = ctx.take_deferred(self)
        self.weight.accumulate(sums.T @ inner)


def flatten_any(tree: Any) -> list[Any]:
    """Return the leaves of a tree that may hold None."""
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in flatten_any(part)]
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in flatten_any(tree[key])]
    return [tree]


class TreeLoss:
    """Half the squared differences of all floating arrays, added up over trees."""

    def __call__(self, y, target):
        return self.value_and_grad(y, target, denominator=len(flatten_any(target)[0]))[0]

    def value_and_grad(self, y, target, *, denominator):
        leaves, structure = flatten(y)
        goals, as_given = flatten(target)
        assert structure == as_given
        value = 0.0
        gradients: list[Any] = []
        for one, goal in zip(leaves, goals, strict=True):
            if one.dtype.kind != "f":
                gradients.append(None)
                continue
            difference = (one - goal) / denominator
            value += float((difference * (one - goal)).sum()) / 2
            gradients.append(difference)
        return value, structure.unflatten(gradients)


def mixed_stages(specs: list[Spec]) -> list[PipelineStage]:
    """A stage from each spec to the next."""
    return [
        PipelineStage(number).add_layer(Mixed(one, other))
        for number, (one, other) in enumerate(pairwise(specs))
    ]


def alone(specs: list[Spec], x: Any, target: Any, rows: int, count: int):
    """Loss, gradients and outputs of one process, one microbatch after another."""
    model = nn.Sequential([layer for stage in mixed_stages(specs) for layer in stage.layers])
    model.materialize(seed=SEED, dtype=np.float64)
    loss, outputs = 0.0, []
    for part in microbatch_rows(rows, count):
        context = nn.Context(first_row=part.start)
        y = model.forward(of_rows(x, part), context)
        value, dy = TreeLoss().value_and_grad(y, of_rows(target, part), denominator=rows)
        loss += float(value)
        model.backward(dy, context)
        outputs.append(y)
    leaves = zip(*(flatten(y)[0] for y in outputs), strict=True)
    joined = flatten(outputs[0])[1].unflatten([np.concatenate(one) for one in leaves])
    return loss, {name: p.grad for name, p in model.named_parameters()}, joined


def of_rows(tree: Any, rows: slice) -> Any:
    return tree_map(lambda leaf, _: leaf[rows], tree)


def make(mesh, stages, count=4, **options) -> PipelineParallel:
    options = {"seed": SEED, "dtype": np.float64, **options}
    return PipelineParallel(stages, count, mesh=mesh, **options)


def assert_same_tree(got: Any, expected: Any, *, exact: bool = True) -> None:
    """Compare values, structures and, in dicts, the order of keys."""
    leaves, structure = flatten(got)
    others, expected_structure = flatten(expected)
    assert structure == expected_structure
    for one, other in zip(leaves, others, strict=True):
        if exact:
            np.testing.assert_array_equal(one, other, strict=True)
        else:
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-13)
